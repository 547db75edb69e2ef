"""Batches of a stream: samples in the order in which they come, kept from when they are read until they are used."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch
from dyncp.lookahead.config import Batching, check_whole
from dyncp.lookahead.draw import Draw, global_batch, numbered
from dyncp.lookahead.lengths import sample_tokens
from dyncp.lookahead.sampler import Passes


class Read(NamedTuple):
    """A sample that was read: its tokens after the cut, and itself where masks are made of it."""

    tokens: Ints  # int64[length]
    sample: Any


class StreamSource:
    """A `Source` of a dataset that can only be iterated, in the same order on every rank.

    No more is read than the draws that are asked for need: the samples of their steps, and one that did not fit. A pass
    that begins later than at its start reads what it skips, but keeps none of it. There is one pass at a time; a new
    one drops what is left of the one before.

    Args:
        dataset: the samples; `set_epoch(epoch)` is called on it before a pass, where it has that.
        batching: budget, cut and masks.

    Raises:
        ValueError: no token budget, or lengths, which only a map-style dataset needs.
    """

    def __init__(self, dataset: Iterable[Any], batching: Batching) -> None:
        if batching.tokens is None:
            raise ValueError("a stream is cut into batches by a token budget; give Batching(tokens=...)")
        for name in ("lengths", "length_cache"):
            if getattr(batching, name) is not None:
                raise ValueError(
                    f"the dataset is a stream, whose samples are measured as they are read: leave out {name}"
                )
        self.batching = batching
        self._budget: int = batching.tokens
        self._passes = Passes("dataset", dataset)
        self._lock = threading.Lock()
        self._pass = 0
        self._drawn: dict[int, Draw] = {}  # by id, which no other has as long as they are here
        self._kept: dict[int, Read] = {}  # by place in the stream

    def draws(self, epoch: int, start: int = 0) -> Iterator[Draw]:
        check_whole("epoch", epoch, 0)
        check_whole("start", start, 0)
        stream = self._passes.begin(epoch)
        with self._lock:
            self._pass += 1
            self._drawn.clear()
            self._kept.clear()
        return self._draws(self._pass, epoch, stream, start)

    def batches(self, epoch: int) -> int | None:
        return None

    def tokens(self, sample: int) -> Ints:
        return self._get(sample).tokens

    def global_batch(self, draw: Draw) -> Batch:
        if id(draw) not in self._drawn:  # another pass may have other samples at the same places
            raise ValueError(f"iteration {draw.iteration} was released, or another pass over the stream has begun")
        return global_batch(draw, self.batching, lambda sample: self._get(sample).sample)

    def release(self, draw: Draw) -> None:
        with self._lock:
            if self._drawn.pop(id(draw), None):
                for place in draw.samples.tolist():
                    del self._kept[place]

    def _get(self, place: int) -> Read:
        found = self._kept.get(place)
        if found is None:
            raise ValueError(
                f"sample {place} of the stream is not kept: its batch was released, or another pass has begun"
            )
        return found

    def _draws(self, number: int, epoch: int, stream: Iterator[Any], start: int) -> Iterator[Draw]:
        self._check_current(number)
        for draw, contents in numbered(self._batches(epoch, stream), self.batching, epoch, start):
            with self._lock:
                self._check_current(number)
                self._drawn[id(draw)] = draw
                self._kept.update(zip(draw.samples.tolist(), contents, strict=True))
            yield draw
            self._check_current(number)  # before it reads on: passes may share what they read from

    def _check_current(self, number: int) -> None:
        if number != self._pass:
            raise ValueError("another pass over the stream has begun; a stream has one pass at a time")

    def _batches(self, epoch: int, stream: Iterator[Any]) -> Iterator[tuple[Ints, Ints, list[Read]]]:
        """Samples, lengths and contents of the batches."""
        batch: list[Read] = []
        used, after = 0, 0  # tokens in the batch, and the place after its last sample
        for place, sample in enumerate(stream):
            read = self._cut(sample, place)
            if used + len(read.tokens) > self._budget:
                yield _closed(batch, after)
                batch, used = [], 0
            batch.append(read)
            used, after = used + len(read.tokens), place + 1
            if used == self._budget:  # without reading another to see that it does not fit
                yield _closed(batch, after)
                batch, used = [], 0
        if not after:
            raise ValueError(f"the stream gave no samples in epoch {epoch}; a batch needs at least one")
        if batch and not self.batching.drop_last:
            yield _closed(batch, after)

    def _cut(self, sample: Any, place: int) -> Read:
        tokens = sample_tokens(sample, place)
        if len(tokens) > self.batching.longest:
            tokens = tokens[: self.batching.longest].copy()  # or all of them would be kept
        return Read(tokens, sample if self.batching.sample_mask else None)


def _closed(batch: list[Read], after: int) -> tuple[Ints, Ints, list[Read]]:
    lengths = np.array([len(read.tokens) for read in batch], np.int64)
    return np.arange(after - len(batch), after, dtype=np.int64), lengths, batch
