"""Which samples make which batch: shuffled, under a token budget, or as a user's batch sampler says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np

from dyncp.ir.arrays import Ints, frozen


class TokenBudgetSampler:
    """Batches of whole samples with at most `tokens` tokens; every sample is in one batch of an epoch.

    Args:
        lengths: length of every sample, before the cut.
        tokens: most tokens of a batch.
        max_length: samples are cut to this many tokens.
        seed: of the shuffle, together with the epoch.
        shuffle: whether samples are taken in another order in every epoch, or always in that of the dataset.
        drop_last: leave out the last batch, unless it has `tokens` tokens.

    Raises:
        ValueError: no samples, or a sample without tokens.
    """

    def __init__(
        self, lengths: Any, tokens: int, max_length: int, seed: int, *, shuffle: bool = True, drop_last: bool = False
    ) -> None:
        self.lengths: Ints = cut_lengths(lengths, max_length)  # int64[samples], after the cut
        self.tokens = tokens
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last

    def batches(self, epoch: int) -> list[Ints]:
        """The batches of an epoch, each int64[n] indices of samples: the samples in their order, filled up.

        Raises:
            ValueError: `drop_last` leaves none.
        """
        samples = len(self.lengths)
        order = np.random.default_rng((self.seed, epoch)).permutation(samples) if self.shuffle else np.arange(samples)
        ends = np.cumsum(self.lengths[order])
        cuts = [0]
        while cuts[-1] < samples:
            cuts.append(int(np.searchsorted(ends, self._used(ends, cuts[-1]) + self.tokens, "right")))
        batches = np.split(order, cuts[1:-1])
        if self.drop_last and ends[-1] - self._used(ends, cuts[-2]) < self.tokens:
            batches.pop()
            if not batches:
                raise ValueError(
                    f"all {samples} samples fit into one batch of {ends[-1]} tokens, below the budget of "
                    f"{self.tokens}, and drop_last leaves it out: lower tokens, or set drop_last=False"
                )
        return batches

    def _used(self, ends: Ints, cut: int) -> int:
        """Tokens of the first `cut` samples."""
        return int(ends[cut - 1]) if cut else 0


def cut_lengths(lengths: Any, max_length: int) -> Ints:
    """Lengths after the cut, read-only int64[samples].

    Raises:
        ValueError: no samples, lengths that are no integers, or a sample without tokens.
    """
    lengths = np.asarray(lengths)
    if not lengths.size:
        raise ValueError("the dataset has no samples; a batch needs at least one")
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
        raise ValueError(f"lengths are {lengths.dtype}{list(lengths.shape)}; expected integers, one per sample")
    if lengths.min() < 1:
        index = int(np.argmin(lengths))
        raise ValueError(f"sample {index} has length {lengths[index]}; leave empty samples out of the dataset")
    return frozen(np.minimum(lengths.astype(np.int64), max_length), "int64")


class Passes:
    """Passes over something that is iterated anew for every epoch.

    Args:
        name: what it is, for messages.
        iterable: `set_epoch(epoch)` is called on it, and on its `sampler`, where they have one.

    Raises:
        ValueError: it cannot be iterated.
    """

    def __init__(self, name: str, iterable: Any) -> None:
        if not hasattr(iterable, "__iter__"):
            raise ValueError(f"the {name} is {iterable!r:.80}; it must be an iterable, with a method __iter__")
        self.name = name
        self.iterable = iterable
        self._begun = False

    def begin(self, epoch: int) -> Iterator[Any]:
        """A pass from the start.

        Raises:
            ValueError: an iterator, which gives a single pass, for the second time.
        """
        parts: tuple[Any, ...] = (self.iterable, getattr(self.iterable, "sampler", None))
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        iterator = iter(self.iterable)
        if iterator is self.iterable and self._begun:
            # Where the last pass left it early it would go on in the middle, without a word.
            raise ValueError(
                f"the {self.name} is an iterator ({type(iterator).__name__}), which gives one pass, and epoch {epoch} "
                "begins another: give an iterable whose __iter__ returns a new iterator, such as a list or an object "
                "with a generator method __iter__"
            )
        self._begun = True
        return iterator


class GivenBatches:
    """The batches of a user's batch sampler.

    Args:
        batch_sampler: an iterable of lists of sample indices, such as torch's `BatchSampler`. It must give all ranks
            the same batches.

    Raises:
        ValueError: it cannot be iterated.
    """

    def __init__(self, batch_sampler: Iterable[Any]) -> None:
        self._passes = Passes("batch_sampler", batch_sampler)

    def count(self) -> int | None:
        """Batches of an epoch, where the batch sampler has a length."""
        return length_of(self._passes.iterable)

    def batches(self, epoch: int, samples: int) -> Iterator[Ints]:
        """The batches of an epoch, each int64[n], checked one by one as they are asked for.

        Args:
            epoch: is set on the batch sampler, and on its `sampler`, where they have `set_epoch`.
            samples: of the dataset.

        Raises:
            ValueError: no batches, an empty one, or something else than integers in `[0, samples)`.
        """
        given = self._passes.begin(epoch)
        # At once: generators, which most batch samplers are, look at the epoch when the first batch is asked for.
        first = list(islice(given, 1))
        if not first:
            raise ValueError(f"the batch_sampler gave no batches in epoch {epoch}; it must give at least one")
        return (_indices(batch, number, samples) for number, batch in enumerate(chain(first, given)))


def length_of(container: Any) -> int | None:
    """What `len` says; None for what has no length."""
    try:
        return len(container)
    except (TypeError, NotImplementedError):  # how classes say that they have none, though they have `__len__`
        return None


def _indices(batch: Any, number: int, samples: int) -> Ints:
    """A batch of a batch sampler as int64[n]."""
    try:
        indices = np.asarray(batch)
    except ValueError:  # lists of different lengths
        indices = np.asarray(None)
    if indices.ndim == 1 and not indices.size:
        raise ValueError(f"batch {number} of the batch_sampler is empty; leave it out")
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise ValueError(
            f"batch {number} of the batch_sampler is {batch!r:.80}; expected a list of sample indices (a sampler that "
            "gives one index after the other makes batches inside torch.utils.data.BatchSampler)"
        )
    wrong = indices[(indices < 0) | (indices >= samples)]
    if len(wrong):
        raise ValueError(f"batch {number} of the batch_sampler has sample {wrong[0]}; they lie in [0, {samples})")
    return indices.astype(np.int64)
