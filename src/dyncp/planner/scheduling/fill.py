"""One division: which computation blocks run in it, and what moves for them (paper, Listing 3)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.jit import jit, lean_jit
from dyncp.planner.scheduling.needs import Needs

NONE = -1


class State(NamedTuple):
    """What the divisions so far have decided. Computation blocks go by their places, see `Needs`."""

    step: Ints  # int32[C], division of each computation block; the last one for those that wait
    arrival: Ints  # int32[M], step at which each need is met: 0 for what the rank owns, NONE if not yet
    way_in: Ints  # int32[E], the need of each entry that is met first, NONE if not yet
    load: Ints  # float64[R], pairs computed
    waiting: Ints  # int32[W], computation blocks: those of rank r are waiting[first[r]:stop[r]], in order
    first: Ints  # int64[R]
    stop: Ints  # int64[R]
    pair_left: Ints  # float64[pairs], bytes that each rank may still have of each owner in this division
    way_left: Ints  # float64[R], bytes that may still enter its node by way of each rank, in all divisions to come


@jit
def fill(needs: Needs, state: State, per_node: int, step: int) -> int:
    """On every node, the rank with the least computation so far takes its next block that fits, until none does.

    A block that is passed over does not fit later in the division either: what another one brings of its inputs takes
    as much from the budgets as from its need. Ranks of different nodes have no influence on each other.

    Returns:
        The number of blocks that still wait.
    """
    left = 0
    turns = np.empty(per_node, np.int64)  # ranks, a heap by load
    at, kept = state.first.copy(), state.first.copy()  # ends of what a rank has looked at, and of what it passed over
    for node in range(0, len(state.load), per_node):
        count = 0
        for rank in range(node, node + per_node):
            if state.first[rank] < state.stop[rank]:
                turns[count] = rank
                count += 1
        for place in range(count // 2 - 1, -1, -1):
            sink(turns, place, count, state.load)
        while count > 0:
            rank = turns[0]
            if not take_next(needs, state, at, kept, rank, step):
                state.stop[rank] = kept[rank]
                left += kept[rank] - state.first[rank]
                count -= 1
                turns[0] = turns[count]
            sink(turns, 0, count, state.load)
    return left


@lean_jit
def sink(turns: Ints, place: int, count: int, load: Ints) -> None:
    """Restore the heap `turns[:count]`, in which only the rank at `place` may stand too high: on top is the rank with
    the least load, of equal ones the least rank."""
    rank = turns[place]
    while 2 * place + 1 < count:
        child = 2 * place + 1
        if child + 1 < count and before(turns[child + 1], turns[child], load):
            child += 1
        if not before(turns[child], rank, load):
            break
        turns[place] = turns[child]
        place = child
    turns[place] = rank


@lean_jit
def before(a: int, b: int, load: Ints) -> bool:
    """Whether rank a comes before rank b."""
    return bool(load[a] < load[b] or (load[a] == load[b] and a < b))


@lean_jit
def take_next(needs: Needs, state: State, at: Ints, kept: Ints, rank: int, step: int) -> bool:
    """Let a rank take its next block that fits, and what it needs for that; false if there is none."""
    while at[rank] < state.stop[rank]:
        block = state.waiting[at[rank]]
        at[rank] += 1
        if fits(needs, state, rank, block, step):
            for need in needs.ends[block]:
                if state.arrival[need] == NONE:
                    state.arrival[need] = step
                    state.pair_left[needs.pair[need]] -= needs.size_bytes[need]
                    if needs.entry[need] >= 0 and state.way_in[needs.entry[need]] == NONE:
                        state.way_in[needs.entry[need]] = need
                        state.way_left[rank] -= needs.size_bytes[need]
            state.step[block] = step
            state.load[rank] += needs.work[block]
            return True
        state.waiting[kept[rank]] = block
        kept[rank] += 1
    return False


@lean_jit
def fits(needs: Needs, state: State, rank: int, block: int, step: int) -> bool:
    """Whether a rank may fetch what a block needs in this division: within the budgets, and not across the boundary of
    a node that another rank takes it across in the same division, because in the next it can have it from there."""
    asked, entering, of_pair = 0, 0, NONE
    for need in needs.ends[block]:
        if state.arrival[need] != NONE:
            continue
        if needs.pair[need] != of_pair:
            asked, of_pair = 0, needs.pair[need]
        asked += needs.size_bytes[need]
        if asked > state.pair_left[of_pair]:
            return False
        entry = needs.entry[need]
        if entry < 0:
            continue
        if state.way_in[entry] == NONE:
            entering += needs.size_bytes[need]
            if entering > state.way_left[rank]:
                return False
        elif state.arrival[state.way_in[entry]] == step:
            return False
    return True


@jit
def choose_ways(needs: Needs, size_bytes: Ints, way: Ints, crossed: Ints) -> None:
    """Choose one of its needs for each entry whose `way` is NONE, so that the bytes that cross the boundary of a node
    are spread over its ranks. Fills in `way` (int32[E]) and adds to `crossed` (float64[R]).

    Each entry goes to the rank with the fewest bytes, first of those chosen so far, then of all.
    """
    open_ = np.flatnonzero(way == NONE)
    for _ in range(2):
        for entry in open_:
            if way[entry] != NONE:
                crossed[needs.rank[way[entry]]] -= size_bytes[way[entry]]
            start, stop = needs.entry_ptr[entry], needs.entry_ptr[entry + 1]
            best = needs.by_entry[start]
            for need in needs.by_entry[start + 1 : stop]:
                if crossed[needs.rank[need]] < crossed[needs.rank[best]]:
                    best = need
            way[entry] = best
            crossed[needs.rank[best]] += size_bytes[best]
