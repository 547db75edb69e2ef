"""Ways to spread a batch over ranks, and the one way from there to a plan."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from dyncp.ir.batch import Batch
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import Plan, PlanHeader
from dyncp.ir.shape import AttentionShape
from dyncp.planner.lower import lower
from dyncp.strategies.api import Layout, Options, Strategy

# name -> (module, function); imported on first use
STRATEGIES = {
    "dynamic": ("dyncp.strategies.dynamic", "dynamic"),
    "ring": ("dyncp.strategies.ring", "ring"),
    "zigzag": ("dyncp.strategies.ring", "zigzag"),
    "double_ring": ("dyncp.strategies.double_ring", "double_ring"),
    "head_ring": ("dyncp.strategies.head_ring", "head_ring"),
    "ulysses": ("dyncp.strategies.ulysses", "ulysses"),
    "usp": ("dyncp.strategies.usp", "usp"),
    "allgather": ("dyncp.strategies.allgather", "allgather"),
    "sequence_level": ("dyncp.strategies.sequence_level", "sequence_level"),
    "balanced_qo_home": ("dyncp.strategies.balanced_qo_home", "balanced_qo_home"),
    "data_parallel": ("dyncp.strategies.data_parallel", "data_parallel"),
}


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, what it was made from, and how long each stage took."""

    plan: Plan
    batch: Batch
    cluster: Cluster
    layout: Layout
    options: Options
    seconds: dict[str, float]


def get_strategy(name: str) -> Strategy:
    """A strategy by name.

    Raises:
        ValueError: an unknown name.
    """
    if name not in STRATEGIES:
        raise ValueError(f"unknown strategy {name!r}; choose one of {', '.join(STRATEGIES)}")
    module, function = STRATEGIES[name]
    strategy: Strategy = getattr(importlib.import_module(module), function)
    return strategy


def build(
    batch: Batch,
    shape: AttentionShape,
    cluster: Cluster,
    strategy: str = "dynamic",
    options: Options | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Planned:
    """Plan a batch and keep what the planner found out on the way (`make_plan` returns the plan alone).

    Raises:
        ValueError: an unknown strategy, or anything the strategy cannot plan.
    """
    options = options or Options()
    place = get_strategy(strategy)
    started = clock()
    layout = place(batch, shape, cluster, options)
    placed = clock()
    plan = lower_layout(layout, batch, shape, cluster, strategy, options)
    seconds = {**(layout.seconds or {"layout": placed - started}), "lower": clock() - placed}
    return Planned(plan, batch, cluster, layout, options, seconds)


def lower_layout(
    layout: Layout, batch: Batch, shape: AttentionShape, cluster: Cluster, name: str, options: Options
) -> Plan:
    """The plan that carries out a layout; `name` is what the plan says of its strategy.

    Raises:
        ValueError: a schedule that reads or sends what a rank does not have by then.
    """
    blocks = layout.blocks
    header = PlanHeader(
        name,
        shape,
        cluster.nodes,
        cluster.ranks_per_node,
        options.keep,
        options.wire,
        blocks.mask_names,
        blocks.mask_weights,
        blocks.tokens,
        layout.placement.block_rank,
    )
    return lower(header, batch, blocks, layout.placement, layout.schedule)


def make_plan(
    batch: Batch,
    shape: AttentionShape,
    cluster: Cluster,
    strategy: str = "dynamic",
    options: Options | None = None,
) -> Plan:
    """The plan of one batch: what every rank of `cluster` does in attention, forward and backward.

    Args:
        batch: lengths and masks.
        shape: heads, dimensions and dtype of the attention layers.
        cluster: how many ranks, and how they are connected.
        strategy: a key of `STRATEGIES`.
        options: block size, tolerances, what to keep for the backward; `Options()` when left out.

    Raises:
        ValueError: an unknown strategy, or anything the strategy cannot plan.
    """
    return build(batch, shape, cluster, strategy, options).plan
