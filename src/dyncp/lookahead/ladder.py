"""From what was asked of the planner down to what always works: the next rung where one fails or takes too long."""

from __future__ import annotations

import time
import traceback
from dataclasses import replace

from dyncp.ir.batch import Batch
from dyncp.ir.codec import decode_batch, encode_rank
from dyncp.lookahead.config import Planning
from dyncp.lookahead.messages import Answer, Task
from dyncp.strategies import make_plan

# As asked; the tiling without a search, scheduled greedily; then schemes that look at no more than the lengths.
RUNGS = ("asked", "tiling", "zigzag", "data_parallel")
LITTLE_EFFORT = 0.02  # of the search: as good as none


def on_rung(planning: Planning, rung: int) -> Planning:
    """The settings of a rung of the ladder."""
    match RUNGS[rung]:
        case "asked":
            return planning
        case "tiling":
            options = replace(
                planning.options,
                partitioner="tiling",
                schedule="greedy",
                block_tokens="auto",
                effort=LITTLE_EFFORT,
                tries=1,
                portfolio=False,
            )
            return replace(planning, strategy="dynamic", options=options)
        case static:
            return replace(planning, strategy=static)


def plan_parts(batch: Batch, planning: Planning) -> tuple[list[bytes], str, float]:
    """Plan a batch: the encoded part of every rank, the plan's digest, and the seconds it took."""
    started = time.perf_counter()
    plan = make_plan(batch, planning.shape, planning.cluster, planning.strategy, planning.options)
    parts = [encode_rank(plan.rank(rank)) for rank in range(planning.cluster.ranks)]
    return parts, plan.digest, time.perf_counter() - started


def carry_out(task: Task) -> Answer:
    """What a planner process does with a task."""
    try:
        parts, digest, seconds = plan_parts(decode_batch(task.batch), on_rung(task.planning, task.rung))
    except Exception as error:  # noqa: BLE001 whatever it is, the owner has to know, and goes on with the next rung
        return Answer(error=f"{type(error).__name__}: {error}", details=traceback.format_exc())
    return Answer(parts, digest, seconds)
