"""Where a plan is computed: a planner process that is replaced when it ends, or this process where none can be had."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from dyncp.lookahead.config import LookAhead
from dyncp.lookahead.health import Health
from dyncp.lookahead.messages import Answer, Task
from dyncp.lookahead.workers import PLANNER, Worker, WorkerLost, WorkerSlow, load_planner

MOST_FAILURES = 3  # processes in a row that end without a plan, before this process plans
RETRY_S = 30.0  # after which it tries again to start one
log = logging.getLogger("dyncp")
_planning_here = threading.Lock()  # plans of one process side by side would only hold each other up


class Slot:
    """One planner, for one thread at a time.

    Args:
        lookahead: its limits of time and memory.
        health: counts what happens.
        process: whether it has a process of its own; without one, this process plans.
        planner: see `Worker`.
        clock: seconds that only go up.
    """

    def __init__(
        self,
        lookahead: LookAhead,
        health: Health,
        process: bool,
        planner: str = PLANNER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker: Worker | None = None
        self._lookahead = lookahead
        self._health = health
        self._process = process
        self._planner = planner
        self._clock = clock
        self._failures = 0
        self._retry_at_s = 0.0
        self._closed = False

    def start(self) -> None:
        """Start the process, if there is to be one; it gets ready while this goes on."""
        if not self._process or self._closed or self.worker:
            return
        if self._failures >= MOST_FAILURES and self._clock() < self._retry_at_s:
            return
        try:
            self.worker = Worker(self._planner)
        except OSError as error:
            self._fail(f"{type(error).__name__}: {error}")
        self._close_late()

    def get_ready(self) -> None:
        """Wait until the process, if there is one, can plan."""
        while self.worker and not self._closed:
            try:
                self.worker.get_ready()
                return
            except WorkerLost as error:
                self._lose(str(error))

    def plan(self, task: Task) -> Answer:
        """Carry out a task.

        Raises:
            WorkerLost: the process ended in the middle of it; a new one has been started.
            WorkerSlow: it took too long; a new process has been started.
        """
        if self.worker and not self.worker.alive:  # it ended while there was nothing to do
            self._lose("it ended while it was idle")
        self.start()
        if self.worker is None:
            return self._plan_here(task)
        try:
            answer = self.worker.plan(task, self._lookahead.plan_limit_s)
        except WorkerSlow:
            self._health.count("slow")
            self._replace()
            raise
        except WorkerLost as error:
            self._lose(str(error))
            raise
        self._failures = 0
        if answer.memory_bytes > self._lookahead.worker_bytes:
            self._health.count("replaced")
            self._replace()
        return answer

    def close(self) -> None:
        """End the process. May be called from any thread, in the middle of a plan."""
        self._closed = True
        worker = self.worker  # another thread may replace it
        if worker:
            worker.close()

    def _close_late(self) -> None:
        """Another thread may have closed this while the process was started."""
        if self._closed and self.worker:
            self.worker.close()

    def _plan_here(self, task: Task) -> Answer:
        if self._process:
            self._health.count("in_process")
        with _planning_here:
            return load_planner(self._planner)(task)

    def _replace(self) -> None:
        if self.worker:
            self.worker.close()
        self.worker = None
        self.start()

    def _lose(self, cause: str) -> None:
        worker, self.worker = self.worker, None
        if worker:
            worker.close()
        if self._closed:
            return
        self._health.count("lost")
        self._fail(cause)
        self.start()

    def _fail(self, cause: str) -> None:
        self._failures += 1
        if self._failures < MOST_FAILURES:
            return
        self._retry_at_s = self._clock() + RETRY_S
        log.warning(
            "no planner process can be had (%s in a row: %s); this process plans itself, which slows training down. "
            "It tries again in %g s",
            self._failures,
            cause,
            RETRY_S,
        )
