"""What the fixed schemes share: heads exchanged among neighbouring ranks, and KV that travels in rings.

Each sequence has a *team* of `ring * heads` ranks in a row, which come in `ring` *contexts* of `heads` neighbours:

    rank of (context, lane) = first + context * heads + lane

A context owns one part of the sequence (with `zigzag` two, one from each end), its ranks a slice of that each. Head
groups are divided over the lanes: the rank of (context, lane) computes the lane's head groups for all queries of the
context. So with more than one lane Q and KV move to the lanes at step 1 and results move home at the end (Ulysses), and
with more than one context KV travels from context to context (a ring); with both, the ring is made of lanes.

Contexts come in inner rings of `inner` neighbours. KV goes around in one, one hop a step, and at the same time crosses
to the same place in the next inner ring; one inner ring of all contexts is the plain ring. KV of context (o, i), inner
ring o and place i, is used at hop `t * inner + j` by the context (o + t, i + j):

    hop 0                   hop 1            ...   hop inner            hop inner + 1
    (o, i) -- inner hop --> (o, i + 1) ...
       `----- outer hop, spread over all steps in between --> (o + 1, i) --> (o + 1, i + 1) ...

Its gradient goes on in the directions of KV: in each inner ring from (o + t, i + 1) around to (o + t, i), which passes
what has come from inner ring to inner ring and its own on to the next, and the last one to (o, i).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints, ragged_ranges
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import HAS_KV, HAS_Q, Blocks
from dyncp.ir.placement import Placement
from dyncp.ir.schedule import Schedule, Side, Transfers
from dyncp.planner.blockgen import blocks_of_bounds, equal_cut
from dyncp.planner.partition.coarsen import place_in_sequence
from dyncp.strategies.api import Layout


class Teams(NamedTuple):
    """The ranks of each sequence, see above."""

    first: Ints  # int64[S], rank
    ring: Ints  # int64[S], contexts
    inner: Ints  # int64[S], contexts of an inner ring; divides `ring`
    heads: int = 1  # lanes; divides the head groups
    zigzag: bool = True

    @classmethod
    def of_all_ranks(cls, batch: Batch, ranks: int, heads: int = 1, inner: int = 0, zigzag: bool = True) -> Teams:
        """One team of all ranks for all sequences; `inner` is 0 for one inner ring."""
        values = 0, ranks // heads, inner or ranks // heads
        first, ring, width = (np.full(len(batch.sequences), value) for value in values)
        return cls(first, ring, width, heads, zigzag)


class Seats(NamedTuple):
    """Where each token block belongs, and where it is computed on."""

    first: Ints  # int64[B], as in Teams
    ring: Ints  # int64[B]
    inner: Ints  # int64[B]
    context: Ints  # int64[B], of the block's owner
    owner: Ints  # int64[B], rank
    lane: Ints  # int64[G], of each head group
    heads: int

    def rank(self, block: Ints, group: Ints, outer: Ints | int = 0, inner: Ints | int = 0) -> Ints:
        """The rank that computes a head group in the context so many inner rings, and so many places in its inner ring,
        behind a block's own."""
        width = self.inner[block]
        ring, place = np.divmod(self.context[block], width)
        context = (ring + outer) * width % self.ring[block] + (place + inner) % width
        rank: Ints = self.first[block] + context * self.heads + self.lane[group]
        return rank


def spread(batch: Batch, groups: int, teams: Teams) -> Layout:
    """Blocks, placement and schedule of a batch in teams. Everything moves in full, whatever the masks; masked
    computation is skipped."""
    blocks, seats = seat(batch, groups, teams)
    query, key, group = blocks.q_block, blocks.kv_block, np.arange(groups)[:, None]
    (q_ring, q_place), (kv_ring, kv_place) = (np.divmod(seats.context[end], seats.inner[end]) for end in (query, key))
    width = seats.inner[query]
    begin = int(teams.heads > 1)  # what goes to the lanes arrives for step 1
    step = begin + (q_ring - kv_ring) * width % seats.ring[query] + (q_place - kv_place) % width
    last = begin + seats.ring - 1  # of each block's computation
    # the gradient of KV is home a step after its last hop
    both = (seats.inner > 1) & (seats.inner < seats.ring)
    rows = [
        lane_moves(blocks, seats, HAS_Q, (Side.Q_IN, Side.Q_OUT), last + 2),
        lane_moves(blocks, seats, HAS_KV, (Side.KV_IN, Side.KV_OUT), last + 2 + (seats.ring > 1) + both * seats.inner),
        ring_moves(blocks, seats, begin),
    ]
    placement = Placement(seats.owner, seats.rank(query, group))
    comp_step = np.broadcast_to(step, placement.comp_rank.shape)
    return Layout(blocks, placement, Schedule(comp_step, for_all_masks(np.concatenate(rows, axis=1), blocks)))


def seat(batch: Batch, groups: int, teams: Teams) -> tuple[Blocks, Seats]:
    """Cut each sequence into a block for each rank of its team (with zigzag two), and say where they belong. Sequences
    of fewer tokens have fewer blocks, at the first ranks."""
    runs = 1 + ((teams.ring > 1) & teams.zigzag)
    cuts = [equal_cut(int(parts)) for parts in teams.ring * teams.heads * runs]
    bounds = [(cut(s.length), cut(s.keys)) for s, cut in zip(batch.sequences, cuts, strict=True)]
    blocks = blocks_of_bounds(batch, groups, bounds)
    sequence = blocks.tokens.sequence
    first, ring, inner = (column[sequence] for column in teams[:3])
    run, lane = np.divmod(place_in_sequence(blocks.tokens), teams.heads)
    context = np.where(run < ring, run, 2 * ring - 1 - run)
    of_group = np.arange(groups) // (groups // teams.heads)
    return blocks, Seats(first, ring, inner, context, first + context * teams.heads + lane, of_group, teams.heads)


# Rows (side, block, head group, src, dst, step) are int64[6, n].


def lane_moves(blocks: Blocks, seats: Seats, role: int, sides: tuple[Side, Side], home_step: Ints) -> Ints:
    """Rows of what goes from its owner to the lane that computes on it, and of the results that come home."""
    block, group = pieces(blocks, role)
    owner, lane = seats.owner[block], seats.rank(block, group)
    away = owner != lane
    block, group, owner, lane = block[away], group[away], owner[away], lane[away]
    there, home = np.full(len(block), sides[0]), np.full(len(block), sides[1])
    return np.concatenate(
        [
            np.stack([there, block, group, owner, lane, np.ones_like(block)]),
            np.stack([home, block, group, lane, owner, home_step[block]]),
        ],
        axis=1,
    )


def ring_moves(blocks: Blocks, seats: Seats, begin: int) -> Ints:
    """Rows of KV and of its gradient from context to context; the first computation is that of step `begin`."""
    block, group = pieces(blocks, HAS_KV)
    late = turns(seats.rank(block, group), blocks.tokens.tokens[block], seats.inner[block])
    hops = seats.ring[block] - 1
    hop = ragged_ranges(hops) + 1
    block, group, late = (np.repeat(column, hops) for column in (block, group, late))
    width = seats.inner[block]
    outer, inner = np.divmod(hop, width)
    within = inner > 0
    here = seats.rank(block, group, outer, inner)
    before = seats.rank(block, group, outer - ~within, inner - within)
    after = seats.rank(block, group, outer + ~within, inner + within)
    in_step = begin + hop + np.where(within, 0, 1 - width + late)
    out_step = begin + hop + 1 + np.where(within, 1, width + (width > 1) + late)
    into, out = np.full(len(hop), Side.KV_IN), np.full(len(hop), Side.KV_OUT)
    return np.concatenate(
        [np.stack([into, block, group, before, here, in_step]), np.stack([out, block, group, here, after, out_step])],
        axis=1,
    )


def turns(rank: Ints, size: Ints, count: Ints) -> Ints:
    """int64[n]: which of `count` turns each piece takes, so that a rank sends about as much in each."""
    order = np.argsort(rank, kind="stable")
    total = np.bincount(rank, size).astype("int64")
    middle = 2 * np.cumsum(size[order]) - size[order] - 2 * (np.cumsum(total) - total)[rank[order]]
    turn = np.empty(len(rank), "int64")
    turn[order] = middle * count[order] // (2 * total[rank[order]])
    return turn


def pieces(blocks: Blocks, role: int) -> tuple[Ints, Ints]:
    """int64[n] each: all (token block, head group) of a role."""
    block = np.flatnonzero(blocks.tokens.role & role)
    return np.repeat(block, blocks.groups), np.tile(np.arange(blocks.groups), len(block))


def for_all_masks(rows: Ints, blocks: Blocks) -> Transfers:
    """Rows as the transfers of every mask."""
    masks = len(blocks.mask_names)
    return Transfers(np.repeat(np.arange(masks), rows.shape[1]), *np.tile(rows, masks))
