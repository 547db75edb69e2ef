"""When everything happens, greedily (paper, section 4.3 and Listing 3).

Differences to the listing:
- a rank for which no block fits leaves a division, and the others go on; and what one rank may send to another in a
  division is never below the need of any one block. So no division stays empty for want of budget;
- data crosses the boundary of a node once, both ways: while one rank takes an input across, the others of its node wait
  for the next division and have it from there; and partial results are merged on a node before they leave it;
- so that all ranks of a node have a part in that, what enters by way of one rank has a budget, too: an even share of
  all that enters the node in all divisions and, in each, never less than the need of any one block.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.schedule import Schedule, Transfers
from dyncp.ir.shape import AttentionShape
from dyncp.planner.scheduling.fill import NONE, State, choose_ways, fill
from dyncp.planner.scheduling.moves import input_moves, output_moves, transfers_of
from dyncp.planner.scheduling.needs import Needs, largest, needs_of, piece_bytes_of, totals
from dyncp.planner.sorting import pointers


class Divisions(Protocol):
    """The options that the schedule reads, see `strategies.api.Options`."""

    @property
    def divisions(self) -> int | Literal["auto"]: ...
    @property
    def keep(self) -> str: ...
    @property
    def wire(self) -> str: ...


PAPERS = 4  # divisions


def divisions_of(options: Divisions) -> int:
    """How many divisions the greedy schedule makes."""
    return PAPERS if options.divisions == "auto" else options.divisions


def greedy_schedule(
    blocks: Blocks, placement: Placement, shape: AttentionShape, cluster: Cluster, options: Divisions
) -> Schedule:
    """Steps of all computation blocks, and all transfers.

    Division t of the listing is step t. Division 0 needs nothing from other ranks; the last one, `divisions - 1`, takes
    what is left. It is at least 1, and at least 2 where an input is to be passed on inside a node. An input moves at
    the step of its first use, or a step earlier if it is passed on in the last. Partial results set out two steps after
    the last computation.

    Between nodes this moves each input and each partial result once for each node that has to do with it, its owner's
    aside: bytes x (nodes - 1).
    """
    comp_step = np.empty((blocks.groups, len(blocks)), "int32")
    piece_bytes = piece_bytes_of(blocks, shape, options.keep, options.wire)
    moves: list[Transfers] = []
    for mask in range(len(blocks.mask_names)):
        part = blocks.of_mask(mask)
        needs = needs_of(blocks, placement, part, piece_bytes, cluster)
        step, rows = divided(needs, piece_bytes, cluster, divisions_of(options))
        moves.append(transfers_of(rows, mask, blocks))
        of_mask = np.empty_like(step)
        of_mask[needs.order] = step
        comp_step[:, part] = of_mask.reshape(blocks.groups, -1)
    return Schedule(comp_step, Transfers.concatenate(moves))


def divided(needs: Needs, piece_bytes: Ints, cluster: Cluster, divisions: int) -> tuple[Ints, Ints]:
    """Of one mask: the steps, int32[C] by place, and the rows of moves (see `moves.py`)."""
    step, arrival, way_in = divide(needs, cluster, divisions)
    first = np.full(len(needs.piece), int(step.max(initial=0)) + 2)
    outputs = output_moves(needs, piece_bytes, first, cluster)
    return step, np.concatenate([input_moves(needs, arrival, way_in), outputs], axis=1)


def divide(needs: Needs, cluster: Cluster, divisions: int) -> tuple[Ints, Ints, Ints]:
    """The divisions of one mask.

    Returns:
        int32[C], the step of the computation block at each place; int32[M], the step at which each need is met; and
        int32[E], the need of each entry that is met first, from the owner. The others are met at later steps, from it.
    """
    several = np.diff(needs.entry_ptr) > 1  # entries that are passed on
    waiting = np.flatnonzero((needs.pair >= 0)[needs.ends].any(axis=1)).astype("int32")
    last = max(1, min(divisions - 1, len(waiting)))  # each division has at least one of them
    last = max(last, 2) if several.any() else last
    state = begin(needs, waiting, last, cluster)
    budget, least = pair_budgets(needs, divisions), most_entering(needs, cluster)
    for step in range(1, last):
        state.pair_left[:] = budget
        np.maximum(state.way_left, least, out=state.way_left)
        if fill(needs, state, cluster.ranks_per_node, step) == 0:
            break
    # what is still missing arrives for the last division; what several ranks of a node miss, at one of them before that
    late = state.way_in == NONE
    crossed = totals(needs.rank[state.way_in[~late]], needs.size_bytes[state.way_in[~late]], cluster.ranks)
    choose_ways(needs, needs.size_bytes, state.way_in, crossed)
    state.arrival[state.arrival == NONE] = last
    state.arrival[state.way_in[late & several]] = last - 1
    return state.step, state.arrival, state.way_in


def begin(needs: Needs, waiting: Ints, last: int, cluster: Cluster) -> State:
    """Division 0: all that needs nothing from other ranks. The others, `waiting`, are left for division `last`."""
    step = np.zeros(len(needs.order), "int32")
    step[waiting] = last
    rank = np.repeat(np.arange(cluster.ranks), np.diff(needs.ptr))
    bounds = pointers(rank[waiting], cluster.ranks)
    return State(
        step=step,
        arrival=np.where(needs.pair >= 0, np.int32(NONE), np.int32(0)),
        way_in=np.full(len(needs.entry_ptr) - 1, NONE, "int32"),
        load=totals(rank[step == 0], needs.work[step == 0], cluster.ranks),
        waiting=waiting,
        first=bounds[:-1].copy(),
        stop=bounds[1:].copy(),
        pair_left=np.empty(int(needs.pair.max(initial=NONE)) + 1),
        way_left=even_share(needs, cluster),
    )


def pair_budgets(needs: Needs, divisions: int) -> Ints:
    """float64[pairs], the bytes that a rank may have of an owner in a division: its part of all that the rank needs of
    the owner, but at least what one computation block does."""
    away = needs.pair >= 0
    total = totals(needs.pair[away], needs.size_bytes[away], int(needs.pair.max(initial=NONE)) + 1)
    pair, size_bytes = needs.pair[needs.ends], needs.size_bytes[needs.ends]
    both = np.where(pair[:, :1] == pair[:, 1:], size_bytes.sum(axis=1, keepdims=True), size_bytes)
    return np.maximum(total / divisions, largest(pair.ravel(), both.ravel(), len(total)))


def even_share(needs: Needs, cluster: Cluster) -> Ints:
    """float64[R], the bytes that enter its node by way of a rank, if all ranks of the node to which anything comes from
    other nodes have an equal part in that."""
    shape = cluster.nodes, cluster.ranks_per_node
    enters = needs.by_entry[needs.entry_ptr[:-1]]
    total = totals(needs.rank[enters], needs.size_bytes[enters], cluster.ranks).reshape(shape).sum(axis=1)
    ranks = (np.bincount(needs.rank[needs.by_entry], minlength=cluster.ranks) > 0).reshape(shape).sum(axis=1)
    return np.repeat(total / np.maximum(ranks, 1), cluster.ranks_per_node)


def most_entering(needs: Needs, cluster: Cluster) -> Ints:
    """int64[R], the most that one computation block of a rank needs of other nodes, in bytes."""
    size_bytes = np.where(needs.entry >= 0, needs.size_bytes, 0)[needs.ends].sum(axis=1)
    return largest(needs.rank[needs.ends[:, 0]], size_bytes, cluster.ranks)
