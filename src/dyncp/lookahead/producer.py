"""Plans the batches dealt to one rank, on background threads, and hands every rank its part through the store."""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from dyncp.ir.batch import Batch
from dyncp.lookahead.config import Planning
from dyncp.lookahead.stores.api import PlanStore
from dyncp.lookahead.workers import Worker, WorkerError, plan_parts

PLAN, FAILURE = b"P", b"E"  # first byte of a stored value: an encoded RankPlan; or a message and lines of details


class PlanningError(RuntimeError):
    """A batch could not be planned; names the iteration, the planner's rank and the cause."""


def part_key(run: int, iteration: int, rank: int) -> str:
    """The key of a rank's part of a plan. `run` counts the loader's passes over its batches."""
    return f"{run}/{iteration}/{rank}"


def open_part(value: bytes) -> bytes:
    """The encoded RankPlan in a stored value.

    Raises:
        PlanningError: the planner stored what went wrong instead.
    """
    if value[:1] == FAILURE:
        message, _, details = value[1:].decode().partition("\n")
        error = PlanningError(message)
        error.add_note(details)
        raise error
    assert value[:1] == PLAN, f"foreign value {value[:16]!r} in the plan store"
    return value[1:]


@dataclass(slots=True)
class Run:
    """One pass over the batches: what was handed over, and whether anybody still wants more."""

    number: int
    handed_over: list[int] = field(default_factory=list)  # iterations
    ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while a plan is handed over


@dataclass(frozen=True, slots=True)
class Job:
    """One batch to plan."""

    run: Run
    iteration: int
    make_batch: Callable[[], Batch]


class PlanProducer:
    """The planner of one rank: a thread for each worker process, which feeds it and stores its plans.

    Args:
        planning: how to plan.
        rank: of this planner.
        workers: planner processes; with 0 one thread plans by itself.
        store: where the parts go.
    """

    def __init__(self, planning: Planning, rank: int, workers: int, store: PlanStore) -> None:
        self.planning = planning
        self.rank = rank
        self.plans_made = 0
        self.planning_s = 0.0
        self.broken: Exception | None = None  # why this planner cannot reach the store any more
        self._store = store
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._counting = threading.Lock()
        self._workers = [Worker() for _ in range(workers)]
        # Daemons: a trainer that ends without closing its loader must not hang on a plan nobody wants.
        self._threads = [
            threading.Thread(target=self._work, args=(worker,), name="dyncp-planner", daemon=True)
            for worker in (self._workers or (None,))
        ]
        for thread in self._threads:
            thread.start()

    def request(self, run: Run, iteration: int, make_batch: Callable[[], Batch]) -> None:
        """Plan a batch in the background. `make_batch` is called on a background thread."""
        self._jobs.put(Job(run, iteration, make_batch))

    def end(self, run: Run, reached: int) -> None:
        """Drop what is left of a run that is over. Other ranks may still have to fetch plans of iterations below
        `reached`; nobody will ask for the later ones."""
        with run.lock:
            run.ended = True
        for iteration in run.handed_over:
            if iteration >= reached:
                for rank in range(self.planning.cluster.ranks):
                    self._store.delete(part_key(run.number, iteration, rank))

    def close(self) -> None:
        """End the worker processes and the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for worker in self._workers:
            worker.close()
        for thread in self._threads:
            thread.join()

    def _work(self, worker: Worker | None) -> None:
        while (job := self._jobs.get()) is not None:
            if job.run.ended:
                continue
            values = self._plan(job, worker)
            try:
                self._hand_over(job, values)
            except Exception as error:  # noqa: BLE001 each kind of store has its own
                self.broken = error
                return

    def _plan(self, job: Job, worker: Worker | None) -> list[bytes]:
        """What to store for each rank: its part of the plan, or the reason why there is none."""
        try:
            batch = job.make_batch()
            if worker is None:
                parts, seconds = plan_parts(batch, self.planning)
            else:
                parts, seconds = worker.call(plan_parts, batch, self.planning)
        except WorkerError as error:
            return self._failure(job, str(error), error.details)
        except Exception as error:  # noqa: BLE001 of the user's mask function, say: every rank has to know
            return self._failure(job, f"{type(error).__name__}: {error}", traceback.format_exc())
        with self._counting:
            self.plans_made += 1
            self.planning_s += seconds
        return [PLAN + part for part in parts]

    def _failure(self, job: Job, cause: str, details: str) -> list[bytes]:
        message = f"iteration {job.iteration} could not be planned by rank {self.rank}: {' '.join(cause.split())}"
        return [FAILURE + f"{message}\n{details}".encode()] * self.planning.cluster.ranks

    def _hand_over(self, job: Job, values: list[bytes]) -> None:
        with job.run.lock:
            if job.run.ended:
                return
            job.run.handed_over.append(job.iteration)
            for rank, value in enumerate(values):
                self._store.put(part_key(job.run.number, job.iteration, rank), value)
