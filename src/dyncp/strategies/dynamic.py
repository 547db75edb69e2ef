"""The strategy that all this is for: place the blocks of every batch anew, then schedule them (paper, 4.1 to 4.3)."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

from dyncp.cost.roofline import Roofline
from dyncp.ir.batch import Batch
from dyncp.ir.cluster import Cluster
from dyncp.ir.shape import AttentionShape
from dyncp.planner.partition import hypergraph
from dyncp.planner.partition.balance import TOLERANCES, balanced_work, chosen_epsilon, unmet
from dyncp.planner.partition.nets import even_weights
from dyncp.planner.partition.place import Found, Search, finished, place
from dyncp.planner.partition.refine import Limits
from dyncp.planner.partition.size import cut_batch
from dyncp.planner.scheduling.greedy import greedy_schedule
from dyncp.planner.scheduling.timeline import timeline_schedule
from dyncp.strategies.api import Layout, Options
from dyncp.strategies.portfolio import faster_rival


def dynamic(batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options) -> Layout:
    """Blocks cut along masks, placed by tiling and local search (or by a hypergraph partitioner), scheduled by the
    clock (or greedily); or the layout of another strategy, where that ends earlier by the clock."""
    marks = [time.perf_counter()]
    block_tokens = None if options.block_tokens == "auto" else options.block_tokens
    fine = TOLERANCES[0] if options.epsilon == "auto" else options.epsilon
    blocks = even_weights(cut_batch(batch, shape.groups, cluster.ranks, block_tokens, fine))
    epsilon = chosen_epsilon(batch, shape, cluster, options)
    options = replace(options, epsilon=epsilon)
    weights = tuple((batch.weights or {})[name] for name in batch.mask_names)
    marks.append(time.perf_counter())
    notes: tuple[str, ...] = ()
    search = Search(shape, cluster, options)
    if options.partitioner == "hypergraph":
        placement, notes = hypergraph.place(blocks, shape, cluster, options)
        found = finished(batch, Found(blocks, placement), search)
    else:
        found = place(batch, blocks, shape, cluster, options)
    marks.append(time.perf_counter())
    found = found._replace(blocks=replace(found.blocks, mask_weights=weights))
    cost = Roofline.of(cluster)
    if options.schedule == "greedy":
        schedule = greedy_schedule(found.blocks, found.placement, shape, cluster, options)
    else:
        schedule = timeline_schedule(found.blocks, found.placement, shape, cluster, cost, options)
    limits = Limits(min(epsilon, cluster.ranks), min(options.token_epsilon, cluster.ranks))

    def broken(layout: Layout) -> tuple[str, ...]:
        work = balanced_work(layout.blocks, shape, cluster, options)
        return unmet(layout.blocks, layout.placement, cluster, limits, work)

    layout = Layout(found.blocks, found.placement, schedule)
    layout = replace(layout, notes=broken(layout) + notes)
    if options.portfolio and options.objective == "time" and not search.too_large(found.blocks):
        rival = faster_rival(layout, batch, shape, cluster, options, cost)
        if rival is not None:  # no smaller blocks would help here
            above = (note.split(":")[0] for note in broken(rival))
            layout = replace(rival, notes=(*(f"{note}: so it is in the layout below" for note in above), *rival.notes))
    marks.append(time.perf_counter())
    seconds = {name: b - a for name, (a, b) in zip(("blocks", "place", "schedule"), pairwise(marks), strict=True)}
    return replace(layout, seconds=seconds)
