"""What a source of batches is, and how the batches of an epoch are numbered and grouped into optimiser steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, TypeVar

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch, Sequence
from dyncp.lookahead.config import Batching

Contents = TypeVar("Contents")


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """One batch as metadata; no tokens.

    Args:
        iteration: number of the batch within the epoch, from 0.
        step: optimiser step that it belongs to, from 0.
        ends_step: whether it is the last batch of its step.
        samples: dataset indices, or places in the epoch's stream, from 0.
        lengths: their tokens, after the cut.
        num_label_tokens: labels of the whole step, over all its batches: a sequence has one less than tokens.
        digest: SHA-256 of all this and the epoch, in hexadecimal. Ranks compare it.
    """

    iteration: int
    step: int
    ends_step: bool
    samples: Ints  # int64[n]
    lengths: Ints  # int64[n]
    num_label_tokens: int
    digest: str


class Source(Protocol):
    """Where batches come from. Each iterator of draws is used by one thread at a time, all else by any."""

    def draws(self, epoch: int, start: int = 0) -> Iterator[Draw]:
        """The batches of an epoch from iteration `start` on, made as they are asked for: exactly those of a pass that
        was never interrupted.

        Raises:
            ValueError: an epoch without batches, or with fewer than `start`; what else can be wrong with a dataset.
        """
        ...

    def batches(self, epoch: int) -> int | None:
        """Batches of an epoch; None where nobody can know."""
        ...

    def tokens(self, sample: int) -> Ints:
        """The tokens of a sample, int64[length], after the cut.

        Raises:
            ValueError: it is not as long as was promised, or not there any more.
        """
        ...

    def global_batch(self, draw: Draw) -> Batch:
        """The batch as planners see it. Calls the user's mask function."""
        ...

    def release(self, draw: Draw) -> None:
        """The batch's tokens are not needed any more."""
        ...


def numbered(
    batches: Iterable[tuple[Ints, Ints, Contents]], batching: Batching, epoch: int, start: int
) -> Iterator[tuple[Draw, Contents]]:
    """The batches of an epoch as `Draw`s.

    Args:
        batches: all of the epoch, from the first: samples and lengths, int64[n] each, and what is handed on with them.
        batching: how many make a step, and whether a smaller last step is left out.
        epoch: of the batches.
        start: the first that is returned.

    Raises:
        ValueError: no batches, or fewer than `start`.
    """
    batches = iter(batches)
    iteration = step = left_out = 0
    while group := list(islice(batches, batching.accumulate)):
        if batching.drop_last and len(group) < batching.accumulate:
            left_out = len(group)
            break
        if iteration + len(group) > start:
            num_label_tokens = sum(int(lengths.sum()) - len(lengths) for _, lengths, _ in group)
            for place, (samples, lengths, contents) in enumerate(group):
                number, ends_step = iteration + place, place + 1 == len(group)
                if number >= start:
                    about = (epoch, number, step, ends_step, num_label_tokens)
                    digest = _digest(about, samples, lengths)
                    yield Draw(number, step, ends_step, samples, lengths, num_label_tokens, digest), contents
        iteration += len(group)
        step += 1
    check_some_left(iteration, left_out, batching, epoch)
    if start > iteration:
        raise ValueError(
            f"iteration {start} of epoch {epoch} was asked for, but it has {iteration} batches: resume with the "
            "dataset and the Batching that the state was saved with"
        )


def check_some_left(kept: int, left_out: int, batching: Batching, epoch: int) -> None:
    """ValueError where an epoch has no batches.

    Args:
        kept: its batches.
        left_out: batches of its last step, which `drop_last` left out.
        batching: names what to change.
        epoch: for the message.
    """
    if not kept:
        found = f"{left_out} batches for steps of {batching.accumulate}" if left_out else "no full batch"
        raise ValueError(
            f"epoch {epoch} has {found}, and drop_last leaves out what is smaller: lower tokens or accumulate, or set "
            "drop_last=False"
        )


def global_batch(draw: Draw, batching: Batching, sample_of: Callable[[int], Any]) -> Batch:
    """A batch as planners see it.

    Args:
        draw: its samples and their lengths.
        batching: its masks and weights.
        sample_of: a sample as the dataset returns it; called only for `Batching.sample_mask`.

    Raises:
        ValueError: a mask of another size than its sample, or samples with masks of different names.
    """
    sequences = []
    for sample, length in zip(draw.samples.tolist(), draw.lengths.tolist(), strict=True):
        if batching.sample_mask is None:
            masks = batching.mask(sample, length)
        else:
            masks = batching.sample_mask(sample_of(sample), length)
        sequences.append(Sequence(length, masks))
    return Batch(tuple(sequences), batching.weights)


def _digest(about: tuple[int, ...], samples: Ints, lengths: Ints) -> str:
    content = np.concatenate([about, samples, lengths]).astype("<i8")
    return hashlib.sha256(content.tobytes()).hexdigest()
