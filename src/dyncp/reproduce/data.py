"""Batches for the published figures: lengths from seeded distributions, packed as published.

The data sets of the paper cannot be had; these log-normal distributions have about their shape: `longdatacollections`
a long tail of mostly short sequences, `longalign` longer ones on average. Real lengths from a file can replace them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from dyncp import masks
from dyncp.bench.corpus import MASKS
from dyncp.ir import batch as ir
from dyncp.ir.batch import DEFAULT_MASK, Batch
from dyncp.ir.mask import Mask

BATCH_TOKENS = 131_072  # of a batch and, so, of a sequence
FULL = 0.75  # of a batch: emptier ones are discarded
SINK = 64  # of lambda
POOL = 4096  # lengths that are drawn at once
MOST = 1 << 17  # lengths that are looked at
MASK_NAMES = ("causal", "lambda", "causal_blockwise", "shared_question")
Lengths = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths whose logarithm is normally distributed; those outside the limits are drawn again."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, random: Random) -> int:
        """One length."""
        while True:
            length = round(self.median * random.lognormvariate(0.0, self.sigma))
            if self.least <= length <= self.most:
                return length


DATASETS = {
    "longdatacollections": LogNormal(2000, 1.5, 1, 10**9),
    "longalign": LogNormal(13_000, 0.8, 1000, 65_536),
}


def batches_of(
    dataset: str,
    scale: float,
    count: int,
    seed: int = 0,
    tokens: int = BATCH_TOKENS,
    own: Sequence[int] | None = None,
) -> list[Lengths]:
    """The lengths of the first `count` batches of a data set.

    Args:
        dataset: a key of `DATASETS`.
        scale: what every length is multiplied by (0.5, 1, 2 and 4 in the paper).
        count: how many batches.
        seed: of the lengths and of their order.
        tokens: of a batch, at most; sequences of more are dropped.
        own: real lengths to draw from, shuffled again when they are used up, in place of the distribution.

    Raises:
        ValueError: an unknown data set, or lengths of which no batch can be made.
    """
    if dataset not in DATASETS:
        raise ValueError(f"unknown data set {dataset!r}; choose one of {', '.join(DATASETS)}")
    stream = lengths_of(dataset, Random(f"{dataset}/{seed}"), own)
    scaled = (max(1, round(length * scale)) for length in islice(stream, MOST))
    found = list(islice(pack((length for length in scaled if length <= tokens), tokens), count))
    if len(found) < count:
        raise ValueError(
            f"the lengths make {len(found)} batches of {tokens} tokens at scale {scale:g}, and {count} are needed; "
            "give other lengths, or ask for fewer batches"
        )
    return found


def lengths_of(dataset: str, random: Random, own: Sequence[int] | None) -> Iterator[int]:
    """Lengths without end: shuffled pools of what is drawn, or of one's own."""
    while True:
        pool = list(own) if own is not None else [DATASETS[dataset].draw(random) for _ in range(POOL)]
        random.shuffle(pool)
        yield from pool


def pack(lengths: Iterable[int], tokens: int, full: float = FULL) -> Iterator[Lengths]:
    """Batches of at most `tokens` tokens, in the order of the lengths: a sequence that does not fit begins the next
    batch. Batches that are less than `full` are discarded, and so is the last."""
    batch: list[int] = []
    held = 0
    for length in lengths:
        if held + length > tokens:
            if held >= full * tokens:
                yield tuple(batch)
            batch, held = [], 0
        batch.append(length)
        held += length


def read_lengths(path: Path) -> list[int]:
    """Lengths from a file: a JSON list, or one number on each line.

    Raises:
        ValueError: something else is in it, or nothing.
    """
    text = path.read_text(encoding="utf-8")
    try:
        values = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except ValueError as error:
        raise ValueError(f"{path} is neither a JSON list nor one length a line: {error}") from None
    if not values or not all(type(value) is int and value > 0 for value in values):
        raise ValueError(f"{path} must have whole numbers above 0, the lengths of sequences, and at least one")
    return list(values)


def batch_of(lengths: Lengths, mask: str) -> Batch:
    """Sequences under a mask.

    Args:
        lengths: of the sequences.
        mask: one of `MASK_NAMES`; `mixed`, these four in turns; or `window:N`, lambda with a window of N tokens.
    """
    sequences = []
    for i, length in enumerate(lengths):
        name, _, window = (MASK_NAMES[i % len(MASK_NAMES)] if mask == "mixed" else mask).partition(":")
        sequences.append(ir.Sequence(length, mask_of(length, name, window)))
    return Batch(sequences)


def mask_of(length: int, name: str, window: str) -> Mask:
    """A mask by name; with a window, lambda with that."""
    if window:
        return masks.lambda_(length, SINK, int(window))
    return MASKS[name][DEFAULT_MASK](length, Random(0))  # none of these has chance in it
