"""Plans the batches dealt to one rank, on background threads, and publishes their plans; the next one due first."""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from dyncp.lookahead.cache import PlanCache, cache_key
from dyncp.lookahead.config import LookAhead, Planning
from dyncp.lookahead.exchange import Exchange, Run
from dyncp.lookahead.health import Health
from dyncp.lookahead.ladder import RUNGS, on_rung
from dyncp.lookahead.messages import Answer, Pointer, Task
from dyncp.lookahead.slots import Slot
from dyncp.lookahead.workers import PLANNER, WorkerLost, WorkerSlow

STOP_TIMEOUT_S = 5.0
MOST_DEATHS = 3  # of planners in the middle of one plan, before it is made by simpler means
MOST_MESSAGE_BYTES, MOST_DETAILS_BYTES = 4 << 10, 24 << 10  # of an error, and of a traceback, that travel
log = logging.getLogger("dyncp")


class PlanningError(RuntimeError):
    """A batch could not be planned, or its plan not be fetched; names the iteration, the rank and the cause."""


class Elsewhere(Protocol):
    """Planners in other processes on the same store."""

    def plan(self, job: Job) -> bool:
        """Wait until one of them has published the plan of a job's encoded batch; False where none will."""
        ...


@dataclass(slots=True, eq=False)
class Job:
    """One batch to plan, and how far that went. `draw` is the digest of its samples."""

    run: Run
    iteration: int
    draw: str
    encode: Callable[[], bytes]  # the batch; calls the user's mask function
    batch: bytes = b""  # encoded, once it is
    rung: int = 0
    deaths: int = 0
    errors: list[Answer] = field(default_factory=list)

    def next_rung(self, planning: Planning) -> None:
        """Give way, past rungs that are what was tried already."""
        self.deaths = 0
        tried = [on_rung(planning, rung) for rung in range(self.rung + 1)]
        self.rung += 1
        while self.rung < len(RUNGS) and on_rung(planning, self.rung) in tried:
            self.rung += 1


class Jobs:
    """Jobs that wait for a planner; the one that training needs next comes first."""

    def __init__(self) -> None:
        self._waiting: list[Job] = []
        # Its lock is reentrant: the collector may close this while the very thread is inside.
        self._changed = threading.Condition()
        self._closed = False

    def put(self, job: Job) -> None:
        """Add a job."""
        with self._changed:
            self._waiting.append(job)
            self._changed.notify()

    def take(self) -> Job | None:
        """Wait for a job; None when there will be no more."""
        with self._changed:
            while not self._closed:
                self._waiting = [job for job in self._waiting if not job.run.ended]
                if self._waiting:
                    due = min(self._waiting, key=lambda job: job.iteration - job.run.reached)
                    self._waiting.remove(due)
                    return due
                self._changed.wait()
            return None

    def close(self) -> None:
        """Nothing more is wanted."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class PlanProducer:
    """The planner of one rank: a thread for each planner process, which feeds it and publishes its plans.

    Args:
        planning: how to plan.
        lookahead: limits, and sizes.
        exchange: where the plans go.
        name: of this planner, in messages.
        workers: planner processes; with 0 one thread plans by itself.
        health: counts what happens.
        elsewhere: planners that are asked first.
        planner: see `Worker`.
        planned: digest of the settings, which ranks compare.
    """

    def __init__(
        self,
        planning: Planning,
        lookahead: LookAhead,
        exchange: Exchange,
        name: str,
        workers: int,
        health: Health,
        elsewhere: Elsewhere | None = None,
        planner: str = PLANNER,
        *,
        planned: str,
    ) -> None:
        self.planning = planning
        self.broken: Exception | None = None  # why this rank cannot reach the store any more
        self._name = name
        self.planned = planned
        self.pending = 0  # jobs that are neither published nor given up
        self._exchange = exchange
        self._health = health
        self._elsewhere = elsewhere
        self._counting = threading.Lock()
        self._cache = PlanCache(lookahead.cache_bytes)
        self._jobs = Jobs()
        self._slots = [Slot(lookahead, health, workers > 0, planner) for _ in range(max(1, workers))]
        # Daemons: a trainer that ends without closing its loader must not hang on a plan nobody wants.
        self._threads = [
            threading.Thread(target=self._work, args=(slot,), name="dyncp-planner", daemon=True) for slot in self._slots
        ]
        for slot, thread in zip(self._slots, self._threads, strict=True):
            if elsewhere is None:
                slot.start()
            thread.start()

    @property
    def pids(self) -> list[int]:
        """Numbers of the planner processes."""
        return [worker.pid for worker in [slot.worker for slot in self._slots] if worker]

    def submit(self, job: Job) -> None:
        """Plan a batch in the background."""
        with self._counting:
            self.pending += 1
        self._jobs.put(job)

    def stop(self) -> None:
        """End the worker processes and the threads, without a word to the store."""
        self._jobs.close()
        for slot in self._slots:
            slot.close()
        for thread in self._threads:
            if thread is not threading.current_thread():  # the collector may run on any
                thread.join(STOP_TIMEOUT_S)

    def _work(self, slot: Slot) -> None:
        while (job := self._next(slot)) is not None:
            try:
                again = self._advance(job, slot)
            except Exception as error:  # noqa: BLE001 each kind of store has its own
                self.broken = error
                return
            if again and not job.run.ended:
                self._jobs.put(job)
            else:
                with self._counting:
                    self.pending -= 1

    def _next(self, slot: Slot) -> Job | None:
        # A planner that is still starting would hold up the batch that is due next, while others are ready.
        slot.get_ready()
        return self._jobs.take()

    def _advance(self, job: Job, slot: Slot) -> bool:
        """Plan a job and publish the plan; whether it needs another try."""
        if not job.batch:
            try:
                job.batch = job.encode()
            except BaseException as error:  # noqa: BLE001 of the user's mask function, say: every rank has to know
                self._give_up(job, Answer(error=f"{type(error).__name__}: {error}", details=traceback.format_exc()))
                return False
        key = cache_key(self.planning, job.batch)
        known = self._cache.get(key)
        if known:
            self._health.count("cached")
            self._publish(job, known)
        elif self._elsewhere and job.rung == 0 and self._elsewhere.plan(job):
            self._health.count("remote")
        elif answer := self._try(job, slot):
            self._health.count_plan(answer.seconds)
            if job.rung == 0:
                self._cache.put(key, answer)
            else:
                self._health.count("fallbacks")
            self._publish(job, answer)
        elif job.rung == len(RUNGS):
            self._give_up(job, job.errors[0])
        else:
            return True
        return False

    def _try(self, job: Job, slot: Slot) -> Answer | None:
        """The plan of a job; None if that went wrong, and the job says how to go on."""
        try:
            answer = slot.plan(Task(self.planning, job.batch, job.rung))
        except WorkerLost as error:
            job.deaths += error.ready  # else it cannot have been this plan
            if job.deaths < MOST_DEATHS:
                return None
            answer = Answer(error=f"{error}, {MOST_DEATHS} times")
        except WorkerSlow as error:
            answer = Answer(error=str(error))
        else:
            if answer.error:
                self._health.count("failed")
        if not answer.error:
            return answer
        job.errors.append(answer)
        rung = job.rung
        job.next_rung(self.planning)
        if job.rung < len(RUNGS) and not job.run.ended:
            log.warning(
                "iteration %d: planning %s failed (%s); falling back to %s",
                job.iteration,
                "as asked" if rung == 0 else f"by {RUNGS[rung]}",
                answer.error,
                RUNGS[job.rung],
            )
        return None

    def _publish(self, job: Job, answer: Answer) -> None:
        rung = RUNGS[job.rung]
        pointer = Pointer("", self._name, job.draw, self.planned, answer.digest, rung)
        self._exchange.publish(job.run, job.iteration, pointer, answer.parts)

    def _give_up(self, job: Job, answer: Answer) -> None:
        message = f"iteration {job.iteration} could not be planned by {self._name}: {' '.join(answer.error.split())}"
        message, details = _cut(message, MOST_MESSAGE_BYTES), _cut(answer.details, MOST_DETAILS_BYTES)
        pointer = Pointer("", self._name, job.draw, self.planned, failure=message, details=details)
        self._exchange.publish(job.run, job.iteration, pointer, [])


def _cut(text: str, most_bytes: int) -> str:
    """Text that travels: what UTF-8 cannot say is replaced, and what is too long left out in the middle."""
    data = text.encode("utf-8", "replace")
    if len(data) > most_bytes:
        half = most_bytes // 2 - 3
        data = data[:half] + b" ... " + data[-half:]
    return data.decode("utf-8", "ignore")


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
