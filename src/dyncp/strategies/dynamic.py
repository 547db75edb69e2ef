"""The strategy that all this is for: place the blocks of every batch anew, then schedule them (paper, 4.1 to 4.3)."""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf

from dyncp.cost.model import CostModel
from dyncp.cost.roofline import Roofline
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.shape import AttentionShape
from dyncp.planner.partition import hypergraph
from dyncp.planner.partition.balance import TOLERANCES, asked_epsilon, balanced_work, chosen_epsilon, unmet
from dyncp.planner.partition.nets import even_weights
from dyncp.planner.partition.place import Found, Search, finished, place
from dyncp.planner.partition.refine import Limits
from dyncp.planner.partition.size import cut_batch
from dyncp.planner.scheduling.clock import schedule_seconds
from dyncp.planner.scheduling.greedy import greedy_schedule
from dyncp.planner.scheduling.timeline import timeline_schedule
from dyncp.strategies.api import Layout, Options
from dyncp.strategies.portfolio import faster_rival


def dynamic(batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options) -> Layout:
    """Blocks cut along masks, placed by tiling and local search (or by a hypergraph partitioner), scheduled by the
    clock (or greedily); or the layout of another strategy, where that ends earlier by the clock."""
    spent = dict.fromkeys(("blocks", "place", "schedule"), 0.0)
    begun = time.perf_counter()
    block_tokens = None if options.block_tokens == "auto" else options.block_tokens
    fine = TOLERANCES[0] if options.epsilon == "auto" else options.epsilon
    blocks = even_weights(cut_batch(batch, shape.groups, cluster.ranks, block_tokens, fine))
    options = replace(options, epsilon=chosen_epsilon(batch, shape, cluster, options))
    spent["blocks"] = time.perf_counter() - begun
    cost = Roofline.of(cluster)
    best, least = None, inf
    for seed in range(options.seed, options.seed + options.tries):
        begun = time.perf_counter()
        found, notes = placed(batch, blocks, shape, cluster, replace(options, seed=seed))
        spent["place"] += time.perf_counter() - begun
        begun = time.perf_counter()
        tried = scheduled(found, notes, shape, cluster, cost, options)
        parts = tried.blocks, tried.placement, tried.schedule
        moved = options.keep, options.wire
        seconds = schedule_seconds(*parts, shape, cluster, cost, moved) if options.tries > 1 else 0.0
        if seconds < least:
            best, least = tried, seconds
        spent["schedule"] += time.perf_counter() - begun
    assert best is not None
    begun = time.perf_counter()
    best = replace(best, notes=broken(best, shape, cluster, options) + best.notes)
    if options.portfolio and options.objective == "time" and not Search(shape, cluster, options).too_large(best.blocks):
        rival = faster_rival(best, batch, shape, cluster, options, cost)
        if rival is not None:  # no smaller blocks would help here
            above = (note.split(":")[0] for note in broken(rival, shape, cluster, options))
            best = replace(rival, notes=(*(f"{note}: so it is in the layout below" for note in above), *rival.notes))
    spent["schedule"] += time.perf_counter() - begun
    return replace(best, seconds=spent)


def placed(
    batch: Batch, blocks: Blocks, shape: AttentionShape, cluster: Cluster, options: Options
) -> tuple[Found, tuple[str, ...]]:
    """A placement, with notes; the weights of masks are the batch's again."""
    notes: tuple[str, ...] = ()
    if options.partitioner == "hypergraph":
        placement, notes = hypergraph.place(blocks, shape, cluster, options)
        found = finished(batch, Found(blocks, placement), Search(shape, cluster, options))
    else:
        found = place(batch, blocks, shape, cluster, options)
    weights = tuple((batch.weights or {})[name] for name in batch.mask_names)
    return found._replace(blocks=replace(found.blocks, mask_weights=weights)), notes


def scheduled(
    found: Found, notes: tuple[str, ...], shape: AttentionShape, cluster: Cluster, cost: CostModel, options: Options
) -> Layout:
    """The layout of a placement."""
    parts = *found, shape, cluster
    schedule = (
        greedy_schedule(*parts, options) if options.schedule == "greedy" else timeline_schedule(*parts, cost, options)
    )
    return Layout(*found, schedule, notes)


def broken(layout: Layout, shape: AttentionShape, cluster: Cluster, options: Options) -> tuple[str, ...]:
    """Notes on the limits that a layout does not keep."""
    limits = Limits(min(asked_epsilon(options), cluster.ranks), min(options.token_epsilon, cluster.ranks))
    work = balanced_work(layout.blocks, shape, cluster, options)
    return unmet(layout.blocks, layout.placement, cluster, limits, work)
