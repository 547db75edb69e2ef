"""A loader that runs for long while its planner processes and its store are killed again and again.

    PYTHONPATH=src python -m benchmarks.lookahead.soak [--minutes 15] [--iterations 100000] [--out FILE.json]

Two ranks, threads of this process, train on small batches without a cache; each has two planner processes, and the
plans go through a `dyncp store` process. Every batch is compared with what it must be. See docs/lookahead-benchmark.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.lookahead.expected import SoakData, WrongBatch
from benchmarks.lookahead.machine import described
from benchmarks.lookahead.servers import Server, tcp_server
from dyncp.lookahead import DynamicLoader, LookAhead, TcpStore
from dyncp.lookahead.workers import memory_bytes
from dyncp.report.table import columns

RANKS = 2
MARKS = (0.1, 0.5, 1.0)  # parts of the soak after which memory, threads and files are looked at
MOST_GROWTH_BYTES = 32 << 20  # of memory, from the first mark to the last
MOST_GROWTH = 8  # of threads and of files; one that leaks with every pass, kill or restart has many more
PATIENCE_S = 60.0
SERVER_AWAY_S = 0.5
LONGEST_PLAN_S = 60.0  # with planners that are killed and started anew


@dataclass(frozen=True, slots=True)
class Settings:
    """What a soak is to be: it ends after `iterations`, or after `seconds`. `kill_s` is the mean time between two kills
    of planner processes; the store is restarted `restarts` times, evenly over the soak."""

    iterations: int = 100_000
    seconds: float = 900.0
    kill_s: float = 1.6
    restarts: int = 4
    epoch: int = 10_000  # iterations of a pass, about
    strategy: str = "zigzag"
    seed: int = 0


DEFAULTS = Settings()


@dataclass(slots=True)
class Progress:
    """How far a soak is, and what became of it."""

    began_s: float  # when the first batch was there
    iterations: list[int] = field(default_factory=lambda: [0] * RANKS)
    kills: int = 0
    restarts: int = 0
    rungs: Counter[str] = field(default_factory=Counter)
    marks: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    together: threading.Barrier = field(default_factory=lambda: threading.Barrier(RANKS))

    def part(self, settings: Settings) -> float:
        """How much of the soak is done."""
        return max(
            0.0, min(self.iterations) / settings.iterations, (time.monotonic() - self.began_s) / settings.seconds
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, help="after which it ends in any case")
    parser.add_argument("--iterations", type=int, default=100_000, help="after which it ends")
    parser.add_argument("--kill-s", type=float, default=DEFAULTS.kill_s, help="mean seconds between two kills")
    parser.add_argument("--restarts", type=int, default=DEFAULTS.restarts, help="of the store")
    parser.add_argument("--strategy", default=DEFAULTS.strategy)
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--out", type=Path, help="the result as JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    settings = Settings(
        options.iterations,
        60 * options.minutes,
        options.kill_s,
        options.restarts,
        strategy=options.strategy,
        seed=options.seed,
    )
    result = soak(settings)
    print(result_text(result))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nwrote {options.out}")
    for problem in result["problems"]:
        print(f"bench-soak: {problem}", file=sys.stderr)
    return 1 if result["problems"] else 0


def soak(settings: Settings) -> dict[str, Any]:
    """Run one, and say what happened."""
    data = SoakData(settings.epoch, RANKS, settings.strategy)
    progress = Progress(math.inf)
    with tempfile.TemporaryDirectory(prefix="dyncp-soak-") as name, ExitStack() as stack:
        server = tcp_server(Path(name))
        stack.callback(server.kill)
        server.start()
        loaders = [stack.enter_context(new_loader(data, rank, server.port)) for rank in range(RANKS)]
        trainers = [start("rank", train, data, loader, rank, settings, progress) for rank, loader in enumerate(loaders)]
        others = [
            start("killer", kill_planners, loaders, settings, progress),
            start("restarts", restart_store, server, settings, progress),
        ]
        watch(trainers, settings, progress)
        for thread in others:
            thread.join()
        elapsed_s = time.monotonic() - progress.began_s
        reports = [asdict(loader.report()) for loader in loaders]
    return summary(settings, progress, data, reports, elapsed_s)


def new_loader(data: SoakData, rank: int, port: int) -> DynamicLoader:
    """Of a rank, without a cache, so that every batch is planned."""
    store = TcpStore.connect("127.0.0.1", port, "soak")
    lookahead = LookAhead(kappa=8, workers=2, patience_s=PATIENCE_S, cache_bytes=0)
    return DynamicLoader(data, data.planning, data.batching, lookahead, rank=rank, store=store, run="0")


def start(name: str, function: Callable[..., None], *arguments: Any) -> threading.Thread:
    """A thread that ends the soak when it fails."""
    progress: Progress = arguments[-1]

    def guarded() -> None:
        try:
            function(*arguments)
        except Exception:  # noqa: BLE001 whatever it is, it is what the soak was to find
            progress.errors.append(f"{name}: {traceback.format_exc()}")
            progress.over.set()
            progress.together.abort()

    thread = threading.Thread(target=guarded, name=f"soak-{name}", daemon=True)
    thread.start()
    return thread


def train(data: SoakData, loader: DynamicLoader, rank: int, settings: Settings, progress: Progress) -> None:
    """Be a rank: take every batch, and compare it with what it must be. All ranks make the same passes."""
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        wanted = data.batches(epoch)
        got = 0
        for batch in loader:
            if got == len(wanted):
                raise WrongBatch(f"epoch {epoch} has more than its {got} batches")
            progress.rungs[data.check(batch, epoch, got, wanted[got], rank)] += 1
            got += 1
            progress.began_s = min(progress.began_s, time.monotonic())
            progress.iterations[rank] += 1
            if not meet(progress):
                return
        if got != len(wanted):
            raise WrongBatch(f"epoch {epoch} ended after {got} of its {len(wanted)} batches")
        epoch += 1


def meet(progress: Progress) -> bool:
    """Wait for the other ranks, as they do for each other in attention; whether the soak goes on."""
    with suppress(threading.BrokenBarrierError):
        progress.together.wait(PATIENCE_S + LONGEST_PLAN_S)
        return True
    if not progress.over.is_set():
        raise WrongBatch("another rank did not come to this batch")
    return False


def watch(trainers: Sequence[threading.Thread], settings: Settings, progress: Progress) -> None:
    """Note memory at the marks, until the soak is over."""
    marks = list(MARKS)
    while not progress.over.wait(0.02):
        part = progress.part(settings)
        if part >= marks[0]:
            progress.marks.append(footprint() | {"part": marks.pop(0), "iterations": min(progress.iterations)})
            print(f"{part:.0%}: {progress.marks[-1]}", file=sys.stderr, flush=True)
        if not marks:
            progress.over.set()
            progress.together.abort()
    for thread in trainers:
        thread.join(PATIENCE_S + LONGEST_PLAN_S)
        if thread.is_alive():
            progress.errors.append(f"{thread.name} hangs")


def footprint() -> dict[str, int]:
    """Memory, threads and open files of this process."""
    names = Counter(thread.name.rstrip("-0123456789") for thread in threading.enumerate())
    return {
        "memory_bytes": memory_bytes(),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "store_threads": names["dyncp-store"],
        "files": len(list(Path("/proc/self/fd").iterdir())),
    }


def kill_planners(loaders: Sequence[DynamicLoader], settings: Settings, progress: Progress) -> None:
    """Kill a planner process now and then, whatever it is doing."""
    dice = random.Random(settings.seed)
    while not progress.over.wait(dice.expovariate(1 / settings.kill_s)):
        producer = dice.choice(loaders)._producer
        pids = producer.pids if producer else []
        if pids and kill_child(dice.choice(pids)):
            progress.kills += 1


def kill_child(pid: int) -> bool:
    """Kill a process, if it is a child of this one: another may have its number by now."""
    with suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                return True
        finally:
            os.close(handle)
    return False


def restart_store(server: Server, settings: Settings, progress: Progress) -> None:
    """Kill the store, and start it again with nothing in it, evenly over the soak."""
    while progress.restarts < settings.restarts:
        due = (progress.restarts + 0.5) / settings.restarts
        while progress.part(settings) < due:
            if progress.over.wait(0.05):
                return
        server.kill()
        time.sleep(SERVER_AWAY_S)
        server.start()
        progress.restarts += 1


def summary(
    settings: Settings, progress: Progress, data: SoakData, reports: list[dict[str, Any]], elapsed_s: float
) -> dict[str, Any]:
    """The soak as figures, and what is wrong about it."""
    totals = {name: sum(report[name] for report in reports) for name in reports[0]}
    problems = list(progress.errors)
    fallbacks = sum(count for rung, count in progress.rungs.items() if rung != "asked")
    first, last = progress.marks[0] if progress.marks else {}, progress.marks[-1] if progress.marks else {}
    for what, most in (("memory_bytes", MOST_GROWTH_BYTES), ("threads", MOST_GROWTH), ("files", MOST_GROWTH)):
        if first and last[what] > first[what] + most:
            problems.append(f"{what} grew from {first[what]} to {last[what]}")
    return {
        "machine": described(),
        "settings": asdict(settings),
        "elapsed_s": elapsed_s,
        "iterations": min(progress.iterations),
        "batches_checked": sum(progress.iterations),
        "shapes": data.shapes,
        "kills": progress.kills,
        "restarts": progress.restarts,
        "fallback_batches": fallbacks,
        "reports": totals,
        "waited_share": (totals["waited_s"] - totals["first_wait_s"]) / (RANKS * elapsed_s),  # but for starts of passes
        "marks": progress.marks,
        "problems": problems,
    }


def result_text(result: dict[str, Any]) -> str:
    """A soak for people to read."""
    reports = result["reports"]
    each_ms = 1e3 * result["elapsed_s"] / max(1, result["iterations"])
    lines = [
        f"{result['iterations']:,} iterations of {RANKS} ranks in {result['elapsed_s']:.0f} s, {each_ms:.1f} ms "
        f"each; {result['batches_checked']:,} batches of {result['shapes']} shapes compared",
        f"{result['kills']} planner processes killed ({reports['lost']} noticed), the store restarted "
        f"{result['restarts']} times ({reports['outages']} outages noticed by ranks)",
        f"{reports['plans_made']:,} plans made, {reports['in_process']} of them by the ranks' own process, "
        f"{reports['fallbacks']} by simpler means; ranks waited {result['waited_share']:.1%} of the time",
    ]
    rows = [["after", "iterations", "memory", "threads", "store threads", "files"]]
    for mark in result["marks"]:
        memory = f"{mark['memory_bytes'] / 2**20:.1f} MiB"
        figures = [str(mark[name]) for name in ("threads", "store_threads", "files")]
        rows.append([f"{mark['part']:.0%}", f"{mark['iterations']:,}", memory, *figures])
    verdict = "; ".join(line.splitlines()[-1] for line in result["problems"])
    lines += [columns(rows), verdict or "nothing lost, doubled or planned wrong"]
    return "\n".join(lines)


if __name__ == "__main__":
    np.seterr(all="raise")
    sys.exit(main())
