"""The hypergraph of a batch: which data every computation block touches, and what that costs to move."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import Blocks
from dyncp.ir.plan import BACKWARD, FORWARD, side_token_bytes
from dyncp.ir.schedule import Side
from dyncp.ir.shape import AttentionShape

INWARD = (Side.Q_IN, Side.KV_IN)  # of the query side and of the KV side
OUTWARD = (Side.Q_OUT, Side.KV_OUT)
LEAST_WEIGHT = 2.0**-30  # of a mask next to the largest; integers of a solver cannot tell less from nothing


@dataclass(frozen=True, slots=True, eq=False)
class Nets:
    """Hyperedges (paper, section 4.2), one for each (mask, head group, token block, side) that is used: the query side
    of a token block (what is read of it and the partial results added to it), or its KV side.

    Every computation block is a pin of exactly two of them; the token block is a further pin of its own. Each part that
    an edge touches, but for the one that owns the token block, costs the edge's bytes once.
    """

    tokens: Ints  # int64[B], tokens of each token block
    q_edge: Ints  # int64[C], edge of a computation block's query side
    kv_edge: Ints  # int64[C]
    work: Ints  # float64[C], what is to be balanced of each computation block
    mask: Ints  # int64[C]
    edge_token: Ints  # int64[E], token block; -1 where its owner is no part of this hypergraph
    edge_mask: Ints  # int64[E]
    in_bytes: Ints  # float64[E], what moves from the owner to each other part
    out_bytes: Ints  # float64[E], what moves back

    def __len__(self) -> int:
        return len(self.work)

    @property
    def edge_bytes(self) -> Ints:
        """float64[E]: bytes of both ways."""
        return self.in_bytes + self.out_bytes

    @classmethod
    def of_batch(
        cls,
        blocks: Blocks,
        shape: AttentionShape,
        keep: str,
        wire: str,
        weights: tuple[float, float] = (1.0, 1.0),
        work: Ints | None = None,
    ) -> Nets:
        """The hypergraph of a whole batch. Computation block `g * N + n` is block n of head group g; the edges of query
        sides come before those of KV sides. An edge has the bytes of the forward and of the backward pass, times their
        `weights` and the layers that use the mask. The work of blocks, float64[N], is `Blocks.work` when left out."""
        groups, masks, count = blocks.groups, len(blocks.mask_names), len(blocks.tokens)
        mask = np.tile(blocks.mask.astype("int64"), groups)
        sheet = mask * groups + np.repeat(np.arange(groups), len(blocks))
        keys = np.concatenate(
            [
                (side * masks * groups + sheet) * count + np.tile(end, groups)
                for side, end in enumerate((blocks.q_block, blocks.kv_block))
            ]
        )
        present = np.zeros(2 * masks * groups * count, bool)
        present[keys] = True
        used = np.flatnonzero(present)
        q_edge, kv_edge = np.split((np.cumsum(present) - 1)[keys], 2)
        token, edge_mask, side = used % count, used // (count * groups) % masks, used // (count * groups * masks)
        per_token = np.dot(weights, [side_token_bytes(shape, pass_, keep, wire) for pass_ in (FORWARD, BACKWARD)])
        scale = blocks.tokens.tokens[token] * np.asarray(blocks.mask_weights)[edge_mask]
        in_bytes, out_bytes = (per_token[list(sides)][side] * scale for sides in (INWARD, OUTWARD))
        work = np.tile(blocks.work if work is None else work, groups)
        return cls(blocks.tokens.tokens, q_edge, kv_edge, work, mask, token, edge_mask, in_bytes, out_bytes)

    def restrict(self, tokens: Ints, comps: Ints) -> Nets:
        """The hypergraph of some token blocks and computation blocks (index arrays), renumbered in their order. Edges
        whose token block is left out keep their other pins: the first part that they touch costs nothing more here."""
        used, edges = np.unique(np.concatenate([self.q_edge[comps], self.kv_edge[comps]]), return_inverse=True)
        renumbered = np.full(len(self.tokens) + 1, -1)  # the last entry is for edges without a token block
        renumbered[tokens] = np.arange(len(tokens))
        q_edge, kv_edge = np.split(edges, [len(comps)])
        return Nets(
            self.tokens[tokens],
            q_edge,
            kv_edge,
            self.work[comps],
            self.mask[comps],
            renumbered[self.edge_token[used]],
            self.edge_mask[used],
            self.in_bytes[used],
            self.out_bytes[used],
        )

    def of_mask(self, mask: int) -> tuple[Nets, Ints]:
        """The hypergraph of one mask's computation blocks, with all token blocks, and their indices."""
        comps = np.flatnonzero(self.mask == mask)
        return self.restrict(np.arange(len(self.tokens)), comps), comps

    def pin_counts(self, comp_part: Ints, parts: int) -> Ints:
        """int64[E, parts]: computation blocks of each edge in each part."""
        flat = np.concatenate([self.q_edge * parts + comp_part, self.kv_edge * parts + comp_part])
        return np.bincount(flat, minlength=len(self.edge_token) * parts).reshape(-1, parts)

    def owner(self, block_part: Ints) -> Ints:
        """int64[E]: the part that owns each edge's token block, -1 where it is no part of this hypergraph."""
        return np.append(block_part, -1)[self.edge_token]

    def touched(self, block_part: Ints, comp_part: Ints, parts: int) -> Ints:
        """bool[E, parts]: the parts that each edge touches, its owner's among them."""
        found = self.pin_counts(comp_part, parts) > 0
        owner = self.owner(block_part)
        owned = np.flatnonzero(owner >= 0)
        found[owned, owner[owned]] = True
        return found

    def cut_bytes(self, block_part: Ints, comp_part: Ints, parts: int) -> float:
        """The objective: the sum over edges of bytes x (parts touched - 1)."""
        extra = self.touched(block_part, comp_part, parts).sum(axis=1) - 1
        return float(self.edge_bytes @ extra)


def loads(weights: Ints, part: Ints, parts: int) -> Ints:
    """float64[parts]: sum of the weights in each part."""
    return np.bincount(part, weights, parts)


def even_weights(blocks: Blocks) -> Blocks:
    """The blocks with mask weights of at most 2, and none lost next to another. Scaled by a power of two, which rounds
    nothing."""
    weights = np.asarray(blocks.mask_weights)
    scaled = np.ldexp(weights, 1 - int(np.frexp(weights.max())[1]))
    return replace(blocks, mask_weights=tuple(np.maximum(scaled, LEAST_WEIGHT).tolist()))
