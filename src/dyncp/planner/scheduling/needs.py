"""Who needs what: the computation blocks of one mask, sorted by rank, and the data that they touch, as numbers.

A *piece* is one side (query or KV) of one (token block, head group). A *need* is a piece and a rank whose computation
touches it. An *entry* is a piece and a node, not its owner's, on which there are needs of it. A *pair* is a rank
and another one that owns something it needs. Needs and pairs are numbered rank by rank, entries node by node.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.plan import both_passes_bytes
from dyncp.ir.shape import AttentionShape
from dyncp.jit import jit
from dyncp.planner.sorting import counting_sort, pointers


class Needs(NamedTuple):
    """Computation block n of head group g has the number `g * N + n`, one of `C = G * N`; its *place* is where it is
    when they are sorted by rank. Piece `(side * B + block) * G + group` is of side 0 (query) or 1 (KV)."""

    order: Ints  # int32[C], computation block at each place
    ptr: Ints  # int64[R + 1], bounds of the places of each rank
    work: Ints  # int64[C], pairs of the block at each place
    ends: Ints  # int32[C, 2], the two needs of the block at each place
    piece: Ints  # int32[M], of each need
    rank: Ints  # int32[M], ascending
    owner: Ints  # int32[M], rank
    size_bytes: Ints  # int64[M], what moves of it to the rank, in both passes
    pair: Ints  # int32[M], -1 where the rank is the owner
    entry: Ints  # int32[M], -1 where the rank is on its owner's node
    by_entry: Ints  # int32[m], needs that have an entry, by entry and then by rank
    entry_ptr: Ints  # int64[E + 1], bounds of those of each entry


def piece_bytes_of(blocks: Blocks, shape: AttentionShape, keep: str, wire: str) -> Ints:
    """int64[sides * B * G]: what a transfer of each side of each (token block, head group) carries, in both passes."""
    return np.repeat(both_passes_bytes(shape, keep, wire)[:, None] * blocks.tokens.tokens, blocks.groups)


def needs_of(blocks: Blocks, placement: Placement, part: slice, piece_bytes: Ints, cluster: Cluster) -> Needs:
    """The needs of the computation blocks of one mask, which are `part` of all; `piece_bytes` is int64[pieces]."""
    groups, count, per_node = blocks.groups, len(blocks.tokens), cluster.ranks_per_node
    comp_rank = placement.comp_rank[:, part].flatten()
    order = counting_sort(np.arange(len(comp_rank), dtype="int32"), comp_rank, cluster.ranks)
    at_place = comp_rank[order]
    group = np.arange(groups, dtype="int32")[:, None]
    q_piece, kv_piece = (end * groups + group for end in (blocks.q_block[part], count + blocks.kv_block[part]))
    touched = np.stack([q_piece.ravel()[order], kv_piece.ravel()[order]], axis=1).ravel()
    need, found = number(np.repeat(at_place, 2), touched, 2 * count * groups)
    piece, rank = touched[found], at_place[found // 2]
    owner = np.tile(np.repeat(placement.block_rank, groups), 2)[piece]
    pair, entry = np.full((2, len(piece)), -1, "int32")
    away = np.flatnonzero(owner != rank)
    pair[away], _ = number(rank[away], owner[away], cluster.ranks)
    far = np.flatnonzero(owner // per_node != rank // per_node).astype("int32")
    entry[far], entries = number(rank[far] // per_node, piece[far], 2 * count * groups)
    return Needs(
        order=order,
        ptr=pointers(comp_rank, cluster.ranks),
        work=np.tile(blocks.pairs[part], groups)[order],
        ends=need.reshape(-1, 2),
        piece=piece,
        rank=rank,
        owner=owner,
        size_bytes=piece_bytes[piece],
        pair=pair,
        entry=entry,
        by_entry=counting_sort(far, entry, len(entries)),
        entry_ptr=pointers(entry[far], len(entries)),
    )


def totals(key: Ints, value: Ints, keys: int) -> Ints:
    """float64[keys]: the sum of the values with each key."""
    return np.bincount(key, value, keys).astype("float64")  # of nothing, numpy makes integers


@jit
def number(run: Ints, key: Ints, keys: int) -> tuple[Ints, Ints]:
    """Number the distinct (run, key) in the order in which they come; `run` ascends, keys lie in [0, keys).

    Returns:
        int32[n], the numbers, and int32[m], where each of them comes first.
    """
    numbers, firsts = np.empty(len(run), np.int32), np.empty(len(run), np.int32)
    latest = np.full(keys, -1)  # below `earlier`: not in this run
    count = earlier = 0
    for i in range(len(run)):
        if i > 0 and run[i] != run[i - 1]:
            earlier = count
        if latest[key[i]] < earlier:
            latest[key[i]] = count
            firsts[count] = i
            count += 1
        numbers[i] = latest[key[i]]
    return numbers, firsts[:count]


@jit
def largest(key: Ints, value: Ints, keys: int) -> Ints:
    """int64[keys]: the largest value with each key, 0 without any; negative keys count for none."""
    result = np.zeros(keys, np.int64)
    for i in range(len(key)):
        if key[i] >= 0:
            result[key[i]] = max(result[key[i]], value[i])
    return result
