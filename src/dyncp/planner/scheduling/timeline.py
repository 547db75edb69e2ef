"""When everything happens, by the clock: divisions, their number and their order chosen to end early.

The greedy schedule (paper, Listing 3) splits bytes evenly over divisions and does not know how long anything takes.
Here a rank fetches in the order in which data makes most computation possible, in waves, and computes what has arrived
while the next wave travels. Then it finishes one partial result after the other. Blocks that need nothing from others
are for the start, before anything has arrived, and for the end, when the last results travel home. How many waves, and
how they grow, is tried out: the clock (`clock.py`) times each schedule, and the one that ends first is taken.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from dyncp.cost.model import CostModel, block_seconds
from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.schedule import Schedule, Transfers
from dyncp.ir.shape import AttentionShape
from dyncp.planner.scheduling.clock import Clock
from dyncp.planner.scheduling.greedy import PAPERS, Divisions, divided
from dyncp.planner.scheduling.moves import input_moves, output_moves, transfers_of
from dyncp.planner.scheduling.needs import Needs, needs_of, piece_bytes_of
from dyncp.planner.scheduling.order import enter, fetch_order, fill_steps, last_steps

NEAR = 0.25  # of a wave between nodes: how long one inside nodes is


class Recipe(NamedTuple):
    """One way to make a schedule."""

    waves: int  # in which data comes in
    growth: float  # of a wave over the one before, and of a division of the tail over the one behind it
    early: float  # the part of the work that is done before the last of them has come
    tail: int  # further divisions behind
    near: bool = False  # whether what comes from the rank's own node comes first, in a wave of its own


# Of 512 recipes on batches as those of `make bench-planner`, those of which the best is within 1% of the best of all on
# average, and 4% at most. The first is for large computations, the others are in the order in which another one helps.
RECIPES = (
    Recipe(3, 1.7, 0.7, 2, near=True),
    Recipe(2, 1.3, 0.55, 1),
    Recipe(1, 1.0, 0.85, 0),
    Recipe(3, 1.0, 0.85, 0),
    Recipe(2, 1.3, 0.55, 2, near=True),
    Recipe(1, 2.5, 0.55, 1, near=True),
    Recipe(1, 1.0, 0.0, 0),  # all computation in one launch
    Recipe(3, 1.3, 0.7, 1),
    Recipe(2, 2.5, 0.55, 2),
    Recipe(4, 1.7, 0.55, 3),
)
# (needs that are fetched, how many recipes are tried up to there): the more there are, the longer playing one takes
TRIALS = ((5_000, 10), (12_000, 3), (30_000, 2))


class Facts(NamedTuple):
    """What all recipes start from, in one mask."""

    needs: Needs
    away: Ints  # bool[M], needs that are fetched
    piece_bytes: Ints  # int64[pieces], of all sides, both passes
    when: tuple[Ints, Ints]  # float64[M], the order of fetching, all alike and with near ones first
    leave: tuple[Ints, Ints]  # float64[M], of the way back, backwards
    work_s: Ints  # float64[C], of the block at each place, both passes


def timeline_schedule(
    blocks: Blocks, placement: Placement, shape: AttentionShape, cluster: Cluster, cost: CostModel, options: Divisions
) -> Schedule:
    """Steps of all computation blocks, and all transfers.

    Data and partial results cross the boundary of a node as in `greedy_schedule`: once.
    """
    comp_step = np.empty((blocks.groups, len(blocks)), "int32")
    moves: list[Transfers] = []
    block_s = block_seconds(blocks, shape, cost)
    for mask in range(len(blocks.mask_names)):
        clock = Clock(blocks, placement, mask, shape, cluster, cost, (options.keep, options.wire))
        facts = gather(blocks, placement, block_s, clock)
        tried = recipes(int(facts.away.sum()), options.divisions)
        step, transfers = first_to_end(facts, tried, blocks, clock)
        comp_step[:, blocks.of_mask(mask)] = step.reshape(blocks.groups, -1)
        moves.append(transfers)
    return Schedule(comp_step, Transfers.concatenate(moves))


def gather(blocks: Blocks, placement: Placement, block_s: Ints, clock: Clock) -> Facts:
    """The facts of one mask; `block_s` as `block_seconds` has it."""
    cluster, part = clock.cluster, blocks.of_mask(clock.mask)
    piece_bytes = piece_bytes_of(blocks, clock.shape, *clock.moved)
    needs = needs_of(blocks, placement, part, piece_bytes, cluster)
    away = needs.pair >= 0
    # what enters a node does so by one rank of those that need it
    sharing = np.append(np.diff(needs.entry_ptr), 1)[needs.entry]
    per_rank = cluster.between_bytes_per_s / cluster.ranks_per_node
    between_s = np.where(needs.entry >= 0, needs.size_bytes / sharing / per_rank, 0.0)
    fetch_s = needs.size_bytes / cluster.intra_bytes_per_s + between_s
    work_s = np.tile(block_s[part], blocks.groups)[needs.order]
    out_bytes = piece_bytes[needs.piece + len(piece_bytes) // 2]
    out_s = fetch_s * out_bytes / np.maximum(needs.size_bytes, 1)
    near = away & (needs.entry < 0)

    def orders(seconds: Ints) -> tuple[Ints, Ints]:
        alike, near_first = (
            fetch_order(needs.ptr, needs.ends, away, first, work_s, seconds + 1e-12)
            for first in (np.zeros_like(near), near)
        )
        return alike, near_first

    return Facts(needs, away, piece_bytes, orders(fetch_s), orders(out_s), work_s)


def recipes(fetched: int, divisions: int | Literal["auto"]) -> list[Recipe]:
    """What is tried: only the first recipe where nothing moves, or where there is too much to play. With a number of
    divisions, recipes of that many."""
    count = next((count for most, count in TRIALS if 0 < fetched <= most), 1)
    chosen = list(RECIPES[:count])
    if divisions == "auto":
        return chosen
    most = max(fetched, 1)  # there is nothing for more waves to bring
    waves = (min(max(divisions - 1 - recipe.tail, 1), most) for recipe in chosen)
    return list(dict.fromkeys(recipe._replace(waves=count) for recipe, count in zip(chosen, waves, strict=True)))


def first_to_end(facts: Facts, tried: list[Recipe], blocks: Blocks, clock: Clock) -> tuple[Ints, Transfers]:
    """int32[C], the steps of the computation blocks, head group by head group, and the transfers: of the recipe that
    ends first or, where all of them are tried, of the greedy schedule if that ends earlier."""
    made = [follow(facts, recipe, clock.cluster) for recipe in tried]
    if len(tried) == len(RECIPES):
        made.append(divided(facts.needs, facts.piece_bytes, clock.cluster, PAPERS))
    best, least = None, np.inf
    for at_place, rows in made:
        step = np.empty_like(at_place)
        step[facts.needs.order] = at_place
        found = step, transfers_of(rows, clock.mask, blocks)
        seconds = sum(clock.seconds(*found)) if len(made) > 1 else 0.0
        if best is None or seconds < least:
            best, least = found, seconds
    assert best is not None
    return best


def follow(facts: Facts, recipe: Recipe, cluster: Cluster) -> tuple[Ints, Ints]:
    """The steps, int32[C] by place, and the rows of moves (see `moves.py`) of a recipe."""
    needs, away = facts.needs, facts.away
    several = bool((np.diff(needs.entry_ptr) > 1).any())  # what is passed on inside a node comes a wave later
    near = recipe.near and bool((needs.entry >= 0).any())
    when, leave = facts.when[near], facts.leave[near]
    waves = recipe.waves + near
    waves = 0 if not away.any() else max(waves, 2) if several else waves
    parts = np.cumsum(recipe.growth ** np.arange(1.0 - recipe.waves, 1.0))
    wanted = np.where(away, 1 + near + np.searchsorted(parts / parts[-1] + 1e-9, when - 1), 0)
    wanted[away & (when <= 1)] = 1
    way, wave = enter(needs.entry_ptr, needs.by_entry, needs.rank, needs.size_bytes, wanted, waves, cluster.ranks)
    last = int(wave.max(initial=0))
    sizes = recipe.growth ** np.arange(1.0 - last, 1.0)
    if near:
        sizes[0] *= NEAR
    early = recipe.early * sizes / sizes.sum()  # division s covers wave s + 1
    late = recipe.growth ** -np.arange(recipe.tail + 1.0)
    late *= (1 - recipe.early) / late.sum()
    share = np.cumsum(np.concatenate([early, late]))
    if not away.any():
        share = np.ones(1)
    step = fill_steps(needs.ptr, needs.ends, away, when, leave, wave, facts.work_s, share)
    first = last_steps(needs.ends, step, len(away)) + 2
    outputs = output_moves(needs, facts.piece_bytes, first, cluster)
    return step, np.concatenate([input_moves(needs, wave, way), outputs], axis=1)
