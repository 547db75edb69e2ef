"""Compiling the planner ahead of its first use."""

from __future__ import annotations

import time

import numpy as np

from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.ir.shape import AttentionShape
from dyncp.masks import causal
from dyncp.planner.partition.nets import Nets
from dyncp.planner.partition.refine import Costs, Limits, make_problem, relieve
from dyncp.strategies import build
from dyncp.strategies.api import SCHEDULES, Options


def warm_up() -> float:
    """Compile, or load from disk, all that planning compiles; returns how many seconds it took: some ten the first time
    on a machine, a fraction of one in later processes."""
    started = time.perf_counter()
    batch = Batch((Sequence(600, causal(600)), Sequence(40, causal(40))))
    shape = AttentionShape(2, 2, 16)
    for schedule in SCHEDULES:
        options = Options(block_tokens=32, effort=0.01, portfolio=False, schedule=schedule)
        planned = build(batch, shape, Cluster(2, 2), options=options)
    blocks = planned.layout.blocks
    problem = make_problem(Nets.of_batch(blocks, shape, "none", "model"), 4, 2, Costs(), Limits(0.0, 0.0))
    everything = np.zeros(len(blocks) * shape.groups, "int32")  # at rank 0, which must be relieved of it
    relieve(problem, planned.layout.placement.block_rank, everything, 0)
    return time.perf_counter() - started
