"""Plans the batches dealt to one rank, on background threads, and hands every rank its part through the store."""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from dyncp.ir.batch import Batch
from dyncp.lookahead.config import Planning
from dyncp.lookahead.stores.api import PlanStore
from dyncp.lookahead.workers import Worker, WorkerError, plan_parts

STOP_TIMEOUT_S = 5.0
PLAN, FAILURE = b"P", b"E"  # first byte of a stored value: an encoded RankPlan; or a message and lines of details


class PlanningError(RuntimeError):
    """A batch could not be planned, or its plan not be fetched; names the iteration, the rank and the cause."""


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


@dataclass(slots=True, eq=False)
class Run:
    """One pass over the batches: what was handed over, and whether anybody still wants more.

    `prefix` begins its keys: no other pass of any loader on the store has it, and all ranks have the same.
    """

    prefix: str
    reached: int = 0  # iterations that training has begun
    handed_over: list[int] = field(default_factory=list)  # iterations
    ended: bool = False
    # Held while a plan is handed over. Reentrant: garbage collection may end a run in the middle of that.
    lock: threading.RLock = field(default_factory=threading.RLock)

    def key(self, iteration: int, rank: int) -> str:
        """Of a rank's part of a plan."""
        return f"{self.prefix}/{iteration}/{rank}"


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
        self.broken: Exception | None = None  # why this rank cannot reach the store any more
        self._store = store
        self._runs: set[Run] = set()  # that have not ended
        self._stopped = False
        # Not a Queue: the collector may call `stop` while this very thread is inside one.
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self._workers = [Worker() for _ in range(workers)]
        # Daemons: a trainer that ends without closing its loader must not hang on a plan nobody wants.
        self._threads = [
            threading.Thread(target=self._work, args=(worker,), name="dyncp-planner", daemon=True)
            for worker in (self._workers or (None,))
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, prefix: str) -> Run:
        """Begin a pass over the batches."""
        run = Run(prefix)
        self._runs.add(run)
        return run

    def request(self, run: Run, iteration: int, make_batch: Callable[[], Batch]) -> None:
        """Plan a batch in the background. `make_batch` is called on a background thread."""
        self._jobs.put(Job(run, iteration, make_batch))

    def end(self, run: Run) -> None:
        """Drop what is left of a run that is over. Other ranks may still have to fetch plans of the iterations that
        training has begun; nobody will ask for the later ones."""
        with run.lock:
            run.ended = True
            unused = [iteration for iteration in run.handed_over if iteration >= run.reached]
            run.handed_over.clear()
        self._runs.discard(run)
        if self.broken:
            return
        with contextlib.suppress(ConnectionError):  # then nobody finds the plans anyway
            for iteration in unused:
                for rank in range(self.planning.cluster.ranks):
                    self._store.delete(run.key(iteration, rank))

    def stop(self) -> None:
        """End the worker processes and the threads, without a word to the store."""
        self._stopped = True
        for _ in self._threads:
            self._jobs.put(None)
        for worker in self._workers:
            worker.close()
        for thread in self._threads:
            if thread is not threading.current_thread():  # the collector may run on any
                thread.join(STOP_TIMEOUT_S)

    def close(self) -> None:
        """End all runs, the worker processes and the threads."""
        for run in tuple(self._runs):
            self.end(run)
        self.stop()

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
        except BaseException as error:  # noqa: BLE001 of the user's mask function, say: every rank has to know
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
            if job.run.ended or self._stopped:
                return
            job.run.handed_over.append(job.iteration)
            for rank, value in enumerate(values):
                self._store.put(job.run.key(job.iteration, rank), value)
