"""A planner that takes as long as it is told, whatever the batch: named in `DynamicLoader(planner=...)`."""

from __future__ import annotations

import os
import time

from msgspec.structs import replace

from dyncp.lookahead.ladder import carry_out
from dyncp.lookahead.messages import Answer, Task

PLAN_S = "BENCH_PLAN_S"  # environment variable: planner processes are told nothing else
SLEEPER = "benchmarks.lookahead.planners:sleeper"


def sleeper(task: Task) -> Answer:
    """A plan that takes BENCH_PLAN_S seconds in all, most of them asleep, so that any number have room on one core."""
    began_s = time.monotonic()
    answer = carry_out(task)
    wanted_s = float(os.environ[PLAN_S])
    time.sleep(max(0.0, began_s + wanted_s - time.monotonic()))
    return replace(answer, seconds=wanted_s)
