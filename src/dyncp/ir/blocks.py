"""What is placed: token blocks, and the computation blocks between them (paper, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dyncp.ir.arrays import Ints, freeze_fields

HAS_Q = 1  # a token block with queries (and so outputs)
HAS_KV = 2  # a token block with keys and values


@dataclass(frozen=True, slots=True, eq=False)
class TokenBlocks:
    """Runs of tokens, each owned whole by one rank. In self-attention a block carries Q, KV and O of its tokens;
    in cross-attention queries and keys are different tokens, and a block carries one side.
    """

    sequence: Ints  # int32[B], index into Batch.sequences
    start: Ints  # int64[B], first token within the sequence (of its queries, or of its keys)
    stop: Ints  # int64[B]
    role: Ints  # uint8[B], HAS_Q | HAS_KV

    def __post_init__(self) -> None:
        freeze_fields(self, sequence="int32", start="int64", stop="int64", role="uint8")

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def tokens(self) -> Ints:
        """int64[B]: tokens of each block."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Token blocks and computation blocks of one batch, for `groups` head groups.

    A computation block is the attention of one query block to one KV block under one of the batch's masks; it
    exists only where the mask has pairs, and exists once for every head group. Computation blocks are sorted by mask.
    """

    tokens: TokenBlocks
    groups: int
    mask_names: tuple[str, ...]  # M names
    mask_weights: tuple[float, ...]  # M, how many layers use each
    q_block: Ints  # int32[N], index of the query side's token block
    kv_block: Ints  # int32[N]
    mask: Ints  # int32[N], index into mask_names, ascending
    pairs: Ints  # int64[N], unmasked (query, key) pairs, at least 1

    def __post_init__(self) -> None:
        freeze_fields(self, q_block="int32", kv_block="int32", mask="int32", pairs="int64")

    def __len__(self) -> int:
        return len(self.q_block)

    def of_mask(self, mask: int) -> slice:
        """The computation blocks of one mask, as a slice of the arrays."""
        first, last = np.searchsorted(self.mask, [mask, mask + 1])
        return slice(int(first), int(last))

    @property
    def work(self) -> Ints:
        """float64[N]: pairs of one head group, weighted by how many layers use the mask."""
        work: Ints = self.pairs * np.asarray(self.mask_weights)[self.mask]
        return work
