"""Batches that the benchmarks plan, as data sets and as what planners see."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

from dyncp.bench.corpus import MASKS, lengths_of
from dyncp.bench.targets import LONGTAIL
from dyncp.ir.batch import DEFAULT_MASK, Batch
from dyncp.ir.batch import Sequence as OneSequence
from dyncp.ir.cluster import Cluster
from dyncp.ir.shape import AttentionShape
from dyncp.lookahead import Batching, Planning
from dyncp.strategies.api import Options

SHAPE = AttentionShape(8, 2, 128)  # bfloat16
TOKENS, RANKS = 131_072, 32
RANKS_PER_NODE = 8


def planning(ranks: int, options: Options | None = None) -> Planning:
    """Strategy `dynamic` on nodes of 8 ranks."""
    cluster = Cluster.preset("p4de", max(1, ranks // RANKS_PER_NODE), min(ranks, RANKS_PER_NODE))
    return Planning(SHAPE, cluster, options=options or Options())


def batch_of(lengths: Sequence[int], mask: str = "causal") -> Batch:
    """Sequences with a mask of the planner's corpus."""
    random = Random(mask)
    return Batch([OneSequence(length, MASKS[mask][DEFAULT_MASK](length, random)) for length in lengths])


def long_tailed(tokens: int, number: int) -> tuple[int, ...]:
    """Lengths of the batch of a number, of exactly so many tokens; the first of 131,072 is the planner's usual one."""
    if tokens == TOKENS and number == 0:
        return LONGTAIL
    return lengths_of("longtail", tokens, Random(f"ahead-{tokens}-{number}"))


class LongTail:
    """A dataset whose samples fall into batches of exactly `tokens` tokens: `sampler` has their indices.

    Args:
        tokens: of a batch.
        batches: how many there are.
    """

    def __init__(self, tokens: int, batches: int) -> None:
        self.lengths: list[int] = []
        self.sampler: list[list[int]] = []
        for number in range(batches):
            lengths = long_tailed(tokens, number)
            self.sampler.append(list(range(len(self.lengths), len(self.lengths) + len(lengths))))
            self.lengths.extend(lengths)
        self._tokens = np.arange(tokens)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return self._tokens[: self.lengths[index]]

    @property
    def batching(self) -> Batching:
        """The batches as they are."""
        return Batching(lengths=self.lengths)
