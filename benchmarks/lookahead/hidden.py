"""How much of planning is hidden behind training.

`sleeping` has one rank whose planner takes as long as it is told, and no processor: what is measured is the look-ahead
alone. `cluster` has 32 ranks and the real planner: the ranks are threads of one process, which fetch, check and decode
their parts and put their tokens together as ranks do, and meet after every iteration, as attention makes them meet; a
`dyncp planner` process plans for all of them, through a `dyncp store` process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.lookahead import servers
from benchmarks.lookahead.data import RANKS, TOKENS, LongTail, planning
from benchmarks.lookahead.planners import PLAN_S, SLEEPER
from dyncp.ir.cluster import Cluster
from dyncp.ir.shape import AttentionShape
from dyncp.lookahead import Batching, DynamicLoader, LookAhead, Planning, open_store
from dyncp.strategies.api import Options

TARGET = 0.01  # most of the training time that may be spent waiting, once planning is ahead
KAPPAS, WORKERS = (1, 2, 4, 8, 12), (1, 2, 4, 10)
END_S = 60.0
Row = dict[str, Any]


def measure(quick: bool) -> dict[str, list[Row]]:
    """Both tables."""
    if quick:
        return {
            "sleeping": [sleeping_row(0.02, 0.05, 3, 1, 8)],
            "cluster": [cluster_row(0.05, 2, False, 4, ranks=2, tokens=1024, kind="file")],
        }
    cluster = [cluster_row(0.5, kappa, busy, 60) for busy, kappa in ((False, 1), (False, 4), (True, 4), (True, 8))]
    cells = [(0.1, kappa, workers, 50) for workers in WORKERS for kappa in KAPPAS]
    cells += [(iteration_s, 12, 10, 50) for iteration_s in (0.05, 0.2, 0.4)]
    cells.append((0.1, 12, 10, 300))
    sleeping = [
        sleeping_row(iteration_s, 1.0, kappa, workers, iterations_of(iteration_s, kappa, workers, most))
        for iteration_s, kappa, workers, most in cells
    ]
    return {"cluster": cluster, "sleeping": sleeping}


def iterations_of(iteration_s: float, kappa: int, workers: int, most: int) -> int:
    """Iterations after the first kappa: fewer where each waits for most of a second."""
    return max(8, min(most, round(6 / expected_s(iteration_s, 1.0, kappa, workers)))) if most < 100 else most


def expected_s(iteration_s: float, plan_s: float, kappa: int, workers: int) -> float:
    """How long an iteration must take with its wait. A plan is asked for when the iteration kappa before its own is, so
    kappa + 1 iterations have its time and that of the iteration before."""
    return max(iteration_s, plan_s / workers, (plan_s + iteration_s) / (kappa + 1))


def sleeping_row(iteration_s: float, plan_s: float, kappa: int, workers: int, iterations: int) -> Row:
    """One rank, whose trainer and planners sleep; `iterations` are those after the first kappa."""
    dataset = LongTail(64, kappa + iterations)
    wanted = Planning(
        AttentionShape(2, 1, 8, dtype="float32"), Cluster(1, 1), "data_parallel", Options(block_tokens=64)
    )
    lookahead = LookAhead(kappa, workers, cache_bytes=0)
    before = dict(os.environ)
    os.environ.update(servers.environment() | {PLAN_S: str(plan_s)})  # planner processes inherit it
    try:
        with DynamicLoader(
            dataset, wanted, dataset.batching, lookahead, batch_sampler=dataset.sampler, planner=SLEEPER
        ) as loader:
            began_s = ended_s = waited_s = 0.0
            for batch in loader:
                if batch.iteration == kappa:  # what came before is the start
                    began_s, waited_s = time.monotonic(), loader.report().waited_s
                ended_s, report = time.monotonic(), loader.report()
                time.sleep(iteration_s)
    finally:
        os.environ.clear()
        os.environ.update(before)
    least_s = expected_s(iteration_s, plan_s, kappa, workers)
    return {
        "iteration_s": iteration_s,
        "plan_s": plan_s,
        "kappa": kappa,
        "workers": workers,
        "iterations": report.steps,
        "waited_share": (report.waited_s - waited_s) / (ended_s - began_s),
        "expected_share": 1 - iteration_s / least_s,
        "start_s": report.first_wait_s,
        "target": TARGET if least_s == iteration_s else None,
    }


def cluster_row(
    iteration_s: float,
    kappa: int,
    busy: bool,
    iterations: int,
    ranks: int = RANKS,
    tokens: int = TOKENS,
    kind: str = "tcp",
) -> Row:
    """Many ranks, the real planner; `busy`: something keeps one core at work all the time."""
    dataset = LongTail(tokens, kappa + iterations)
    with tempfile.TemporaryDirectory(prefix="dyncp-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        store = stack.enter_context(servers.store(kind, folder, "hidden"))
        stack.enter_context(planner_process(store.address, "hidden", cores(), folder))
        wait_for_word(folder / "planner.log", "planner ")  # else ranks plan the first batches themselves
        loaders = [
            stack.enter_context(new_loader(dataset, dataset.batching, rank, ranks, kappa, store.address))
            for rank in range(ranks)
        ]
        if busy:
            stack.enter_context(spinning())
        ring = Ring(loaders, iteration_s, kappa)
        ring.run()
        reports = [loader.report() for loader in loaders]
    waits = [rank_s / ring.trained_s for rank_s in ring.waited_s]
    return {
        "ranks": ranks,
        "tokens": tokens,
        "iteration_s": iteration_s,
        "kappa": kappa,
        "busy_core": busy,
        "iterations": reports[0].steps,
        "planned_elsewhere": sum(report.remote for report in reports),
        "planned_here": sum(report.plans_made for report in reports),
        "start_s": max(report.first_wait_s for report in reports),
        "waited_share_overall": max(report.waited_s for report in reports) / ring.whole_s,
        "waited_share_mean": sum(waits) / len(waits),
        "waited_share": max(waits),  # of the rank that waited most
        "longer_share": ring.trained_s / (iterations * iteration_s) - 1,
        "target": TARGET if kappa >= LookAhead().kappa else None,  # one iteration is too short for a plan and its way
    }


class Ring:
    """Ranks as threads that train in step.

    Args:
        loaders: of the ranks.
        iteration_s: that each sleeps in an iteration.
        kappa: iterations after which the measurement begins.
    """

    def __init__(self, loaders: list[DynamicLoader], iteration_s: float, kappa: int) -> None:
        self.waited_s = [0.0] * len(loaders)
        self.trained_s = self.whole_s = 0.0  # after the first kappa iterations, and in all
        self._loaders, self._iteration_s, self._kappa = loaders, iteration_s, kappa
        self._meeting = threading.Barrier(len(loaders))
        self._errors: list[BaseException] = []

    def run(self) -> None:
        """Train to the end of the data.

        Raises:
            Exception: what the first rank that failed raised.
        """
        threads = [threading.Thread(target=self._guarded, args=(rank,)) for rank in range(len(self._loaders))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _guarded(self, rank: int) -> None:
        try:
            self._train(rank)
        except BaseException as error:  # noqa: BLE001 raised by the main thread
            self._errors.append(error)
            self._meeting.abort()

    def _train(self, rank: int) -> None:
        loader = self._loaders[rank]
        started_s, began_s, waited_s = time.monotonic(), 0.0, 0.0
        for batch in loader:
            self._meeting.wait()
            if batch.iteration == self._kappa:
                began_s, waited_s = time.monotonic(), loader.report().waited_s
            time.sleep(self._iteration_s)
            self._meeting.wait()
        self.waited_s[rank] = loader.report().waited_s - waited_s
        self.trained_s = max(self.trained_s, time.monotonic() - began_s)
        self.whole_s = max(self.whole_s, time.monotonic() - started_s)


def new_loader(dataset: LongTail, batching: Batching, rank: int, ranks: int, kappa: int, address: str) -> DynamicLoader:
    """Of one of the ranks, which leaves planning to others; each has its own connections."""
    store = open_store(address, "hidden")
    lookahead = LookAhead(kappa, 0, remote=True, cache_bytes=0)
    return DynamicLoader(
        dataset,
        planning(ranks),
        batching,
        lookahead,
        rank=rank,
        store=store,
        batch_sampler=dataset.sampler,
        run="0",
    )


def cores() -> int:
    """Planner processes: one for each core."""
    return len(os.sched_getaffinity(0))


def wait_for_word(file: Path, word: str) -> None:
    """Wait until a process has written what says that it runs."""
    deadline = time.monotonic() + END_S
    while not (file.exists() and word in file.read_text()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{file.name} does not say {word!r}")
        time.sleep(0.05)


@contextmanager
def planner_process(address: str, job: str, workers: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`dyncp planner`."""
    words = f"-m dyncp planner --store {address} --job {job} --workers {workers}"
    with (folder / "planner.log").open("ab") as log:
        process = subprocess.Popen([sys.executable, *words.split()], env=servers.environment(), stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(END_S)


@contextmanager
def spinning() -> Iterator[None]:
    """Inside, something keeps one core at work."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
