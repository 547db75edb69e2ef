"""Batches of a map-style dataset: chosen from the lengths of its samples, which are read only when needed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch
from dyncp.lookahead.config import Batching, check_whole
from dyncp.lookahead.draw import Draw, check_some_left, global_batch, numbered
from dyncp.lookahead.lengths import MapDataset, sample_lengths, sample_tokens
from dyncp.lookahead.sampler import GivenBatches, TokenBudgetSampler, cut_lengths

log = logging.getLogger("dyncp")


class IndexedSource:
    """A `Source` of a dataset with `__len__` and `__getitem__`.

    The number of its samples is looked at when an epoch begins; where it is another, lengths are told or measured anew.
    Samples are read by one thread at a time, so that the dataset need not be safe for several.

    Args:
        dataset: the samples.
        batching: budget, cut, shuffle, masks and lengths.
        given: a user's batches, in place of those of a `TokenBudgetSampler`.

    Raises:
        ValueError: no samples, lengths that do not fit them, or neither a token budget nor batches.
    """

    def __init__(self, dataset: MapDataset, batching: Batching, given: GivenBatches | None = None) -> None:
        if given is None and batching.tokens is None:
            raise ValueError("nothing says what is in a batch; give Batching(tokens=...) or a batch_sampler")
        self.dataset = dataset
        self.batching = batching
        self._given = given
        self._reading = threading.Lock()
        self._indexing = threading.Lock()
        self._index()

    def draws(self, epoch: int, start: int = 0) -> Iterator[Draw]:
        check_whole("epoch", epoch, 0)
        check_whole("start", start, 0)
        with self._indexing:
            self._follow()
            lengths = self.lengths  # of this pass for good, whatever becomes of the dataset
            chosen = self._given.batches(epoch, len(lengths)) if self._given else iter(self._sampled(epoch))
        batches = ((samples, self._checked(lengths[samples], i), None) for i, samples in enumerate(chosen))
        return (draw for draw, _ in numbered(batches, self.batching, epoch, start))

    def batches(self, epoch: int) -> int | None:
        with self._indexing:
            self._follow()
            if self._given:
                count = self._given.count()
            else:
                count = self._count[1] if self._count and self._count[0] == epoch else len(self._sampled(epoch))
        if count is None:
            return None
        left_out = count % self.batching.accumulate if self.batching.drop_last else 0
        check_some_left(count - left_out, left_out, self.batching, epoch)
        return count - left_out

    def tokens(self, sample: int) -> Ints:
        return self._read(sample)[1]

    def global_batch(self, draw: Draw) -> Batch:
        return global_batch(draw, self.batching, lambda sample: self._read(sample)[0])

    def release(self, draw: Draw) -> None:
        """Nothing is kept."""

    def _read(self, sample: int) -> tuple[Any, Ints]:
        """A sample, and its tokens after the cut."""
        with self._reading:
            found = self.dataset[sample]
        tokens = sample_tokens(found, sample)[: self.batching.longest]
        lengths = self.lengths
        if sample < len(lengths) and len(tokens) != lengths[sample]:
            raise ValueError(
                f"sample {sample} has {len(tokens)} tokens, but its length was given as {lengths[sample]} (after the "
                "cut): give the lengths that the dataset returns"
            )
        return found, tokens

    def _index(self) -> None:
        """Take stock of the dataset."""
        batching = self.batching
        found = sample_lengths(self.dataset, batching)
        self._sampler: TokenBudgetSampler | None = None
        if self._given is None:
            assert batching.tokens is not None
            self._sampler = TokenBudgetSampler(
                found,
                batching.tokens,
                batching.longest,
                batching.seed,
                shuffle=batching.shuffle,
                drop_last=batching.drop_last,
            )
        # int64[samples], after the cut
        self.lengths: Ints = self._sampler.lengths if self._sampler else cut_lengths(found, batching.longest)
        cut = int((np.asarray(found) > batching.longest).sum())
        if cut and batching.longest == batching.tokens:  # as when nobody said where to cut
            log.warning(
                "%d of %d samples are longer than the %d tokens of a batch and are cut: raise tokens or set max_length",
                cut,
                len(self.lengths),
                batching.longest,
            )
        self._count: tuple[int, int] | None = None  # an epoch, and its batches before steps are cut

    def _follow(self) -> None:
        """Take stock anew where the dataset has another number of samples."""
        samples = len(self.dataset)
        if samples == len(self.lengths):
            return
        if self.batching.lengths is not None:
            raise ValueError(
                f"the dataset has {samples} samples now, but Batching.lengths has {len(self.batching.lengths)}: make a "
                "loader with the new lengths, or leave them out to have them measured"
            )
        log.info("the dataset has %d samples, it had %d: their lengths are found out anew", samples, len(self.lengths))
        self._index()

    def _sampled(self, epoch: int) -> list[Ints]:
        assert self._sampler is not None
        chosen = self._sampler.batches(epoch)
        self._count = (epoch, len(chosen))  # trainers ask for the length in every step
        return chosen

    def _checked(self, lengths: Ints, iteration: int) -> Ints:
        """Lengths of a batch; a user's batches may be too large."""
        tokens, budget = int(lengths.sum()), self.batching.tokens
        if budget is not None and tokens > budget:
            raise ValueError(
                f"batch {iteration} of the batch_sampler has {tokens} tokens, but the budget is {budget}: put fewer "
                "samples into it, raise tokens, or leave tokens out"
            )
        return lengths
