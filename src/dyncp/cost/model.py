"""What a cost model is: how long the instructions of one rank take. Links are in `Cluster`."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import Blocks
from dyncp.ir.plan import PASSES, Pass
from dyncp.ir.shape import AttentionShape

FULL, CAUSAL, MASKED = range(3)  # forms of a block's mask
FORMS = ("full", "causal", "masked")


class Work(NamedTuple):
    """The items of some launches: an item is one computation block of one head group."""

    launch: Ints  # int64[n], ascending
    comp: Ints  # int64[n], which computation block it is; items of several head groups share one
    q_tokens: Ints  # int64[n]
    kv_tokens: Ints  # int64[n]
    pairs: Ints  # int64[n], unmasked

    @property
    def form(self) -> Ints:
        """int64[n]: FULL, CAUSAL (as many pairs as the lower triangle of a square has) or MASKED."""
        triangle = (self.q_tokens == self.kv_tokens) & (2 * self.pairs == self.q_tokens * (self.q_tokens + 1))
        return np.where(self.pairs == self.q_tokens * self.kv_tokens, FULL, np.where(triangle, CAUSAL, MASKED))


class CostModel(Protocol):
    """How long instructions take on one rank, without what they wait for."""

    @property
    def cores(self) -> float:
        """How many ranks of the whole cluster can compute at once at full speed; infinite where each has a device of
        its own."""
        ...

    @property
    def launch_s(self) -> float:
        """Fixed cost of an attention instruction."""
        ...

    @property
    def instruction_s(self) -> float:
        """Fixed cost of every other instruction."""
        ...

    def attention_s(self, pass_: Pass, shape: AttentionShape, work: Work, launches: int) -> Ints:
        """float64[launches]: seconds of each launch (0 for one without items)."""
        ...

    def move_s(self, size_bytes: Ints) -> Ints:
        """float64[n]: seconds of copies or reductions that read and write so many bytes."""
        ...


def block_seconds(blocks: Blocks, shape: AttentionShape, cost: CostModel) -> Ints:
    """float64[N]: seconds of each computation block of one head group in both passes, without the fixed cost of a
    launch."""
    count, tokens = len(blocks), blocks.tokens.tokens
    number = np.arange(count)
    alone = Work(number, number, tokens[blocks.q_block], tokens[blocks.kv_block], blocks.pairs)
    times = np.array([cost.attention_s(pass_, shape, alone, count) - cost.launch_s for pass_ in PASSES])
    seconds: Ints = times.sum(axis=0)
    return seconds
