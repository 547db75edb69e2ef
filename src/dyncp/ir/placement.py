"""Where everything lives: the answer of a partitioner."""

from __future__ import annotations

from dataclasses import dataclass

from dyncp.ir.arrays import Ints, freeze_fields


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """Ranks of token blocks and of computation blocks.

    The owner of a token block holds its Q, KV and O for all head groups. The computation of each head group may run
    anywhere.
    """

    block_rank: Ints  # int32[B]
    comp_rank: Ints  # int32[G, N]

    def __post_init__(self) -> None:
        freeze_fields(self, block_rank="int32", comp_rank="int32")
