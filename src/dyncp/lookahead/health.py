"""What planning ahead did and how it is doing: counted while it happens, and reported."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

COUNTED = (
    "cached",
    "remote",
    "in_process",
    "lost",
    "slow",
    "failed",
    "replaced",
    "fallbacks",
)  # as `LoaderReport` says


class Health:
    """Counts of one rank's planning, from many threads."""

    def __init__(self) -> None:
        self.made = 0  # plans
        self.planning_s = 0.0  # that they took
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def count(self, what: str) -> None:
        """Count one of `COUNTED`."""
        assert what in COUNTED, what
        with self._lock:
            self.counts[what] += 1

    def count_plan(self, seconds: float) -> None:
        """Count a plan that was made, and the seconds that it took a planner."""
        with self._lock:
            self.made += 1
            self.planning_s += seconds


@dataclass(frozen=True, slots=True)
class LoaderReport:
    """What one rank's loader did so far, and how it is doing; as text it is one line.

    Args:
        steps: batches given to the trainer.
        plans_made: plans made by this rank's planners, for all ranks.
        planning_s: the planners' seconds for these, summed over them.
        waited_s: seconds that the trainer waited for plans.
        first_wait_s: those of the first step of each pass, when nothing can be ready yet.
        plans_ready: plans of the batches to come that are here, one after the other.
        ahead_s: how long training can go on with these, at the pace of its last steps.
        cached: plans that were taken from the cache, for a batch of the same lengths and masks.
        remote: plans for which this rank was responsible, made by planners elsewhere.
        in_process: plans that this process had to make itself.
        lost: planners that ended in the middle of a plan, which was then made elsewhere.
        slow: plans that took longer than `LookAhead.plan_limit_s`.
        failed: times that the planner raised an error.
        replaced: planner processes that were replaced because they held too much memory.
        fallbacks: plans that were made by simpler means than asked, because of one of these.
        outages: times that the plan store was away, and came back.
    """

    steps: int
    plans_made: int
    planning_s: float
    waited_s: float
    first_wait_s: float
    plans_ready: int = 0
    ahead_s: float = 0.0
    cached: int = 0
    remote: int = 0
    in_process: int = 0
    lost: int = 0
    slow: int = 0
    failed: int = 0
    replaced: int = 0
    fallbacks: int = 0
    outages: int = 0

    def __str__(self) -> str:
        more = {name: getattr(self, name) for name in (*COUNTED, "outages") if getattr(self, name)}
        return (
            f"batch {self.steps}: {self.plans_ready} plans ready, {self.ahead_s:.1f} s ahead; waited "
            f"{self.waited_s:.2f} s, {self.first_wait_s:.2f} s of it at starts; {self.plans_made} plans made here in "
            f"{self.planning_s:.2f} s" + "".join(f", {count} {name}" for name, count in more.items())
        )


@dataclass(slots=True)
class Pace:
    """How long training waits and how long its steps take.

    `step_s` is a mean of the last steps, from one request for a batch to the next, without the wait.
    """

    steps: int = 0
    waited_s: float = 0.0
    first_wait_s: float = 0.0
    step_s: float = 0.0
    _began: float | None = field(default=None)

    def ask(self, now_s: float) -> None:
        """The trainer asks for a batch."""
        if self._began is not None:
            step_s = now_s - self._began
            self.step_s = step_s if self.step_s == 0 else 0.8 * self.step_s + 0.2 * step_s

    def got(self, asked_s: float, now_s: float, first: bool) -> None:
        """The plan is there."""
        self.steps += 1
        self.waited_s += now_s - asked_s
        if first:
            self.first_wait_s += now_s - asked_s
        self._began = now_s

    def pause(self) -> None:
        """What comes now is no step."""
        self._began = None
