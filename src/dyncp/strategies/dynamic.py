"""The paper's strategy: place the blocks of every batch anew, then schedule them in divisions (sections 4.1 to 4.3)."""

from __future__ import annotations

import time
from itertools import pairwise

from dyncp.ir.batch import Batch
from dyncp.ir.cluster import Cluster
from dyncp.ir.shape import AttentionShape
from dyncp.planner.blockgen import make_blocks, uniform_cut
from dyncp.planner.partition.hypergraph import place
from dyncp.planner.scheduling.greedy import greedy_schedule
from dyncp.strategies.api import Layout, Options


def dynamic(batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options) -> Layout:
    """Blocks of `options.block_tokens`, placed by hypergraph partitioning and scheduled greedily."""
    marks = [time.perf_counter()]
    blocks = make_blocks(batch, shape.groups, uniform_cut(options.block_tokens))
    marks.append(time.perf_counter())
    placement, notes = place(blocks, shape, cluster, options)
    marks.append(time.perf_counter())
    schedule = greedy_schedule(blocks, placement, shape, cluster, options)
    marks.append(time.perf_counter())
    seconds = {name: b - a for name, (a, b) in zip(("blocks", "place", "schedule"), pairwise(marks), strict=True)}
    return Layout(blocks, placement, schedule, notes, seconds)
