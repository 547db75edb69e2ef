"""The demo from start to end: train under torchrun, train densely, compare, report."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dyncp.demo.config import DemoConfig, DemoError
from dyncp.demo.data import DocumentMasks, TextFiles
from dyncp.demo.dense import global_batches, planner_batch, train_dense
from dyncp.demo.model import GPT, ModelSize
from dyncp.demo.picture import draw
from dyncp.demo.report import result_table
from dyncp.demo.traffic import RankLoad, rank_load, strategy_figures
from dyncp.demo.worker import (
    CONFIG_FILE,
    DOCUMENTS_FILE,
    EXITS_FILE,
    FAILURE_FILE,
    RESULT_FILE,
    attention_shape,
)
from dyncp.lookahead.workers import interpreter_command
from dyncp.strategies import make_plan

BASELINES = ("ring", "zigzag")
TOLERANCE = 1e-3  # between the loss curves, in nats per byte
END_TIMEOUT_S = 45.0  # torchrun gives its processes 30 s
DETAILS_FILE = "failure.txt"  # in `DemoConfig.out`


def run(config: DemoConfig) -> dict[str, Any]:
    """Run the demo; the result is also written to `result.json`, and drawn in `demo.png`, in `config.out`.

    Raises:
        DemoError: a training process failed, or the loss curves differ by more than `TOLERANCE`.
        ValueError: no text in the data folder.
    """
    dataset = TextFiles.below(config.data, config.max_length, config.out)
    config.out.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    with timed(seconds, "total"):
        with timed(seconds, "distributed"):
            ranks = train_distributed(config, dataset)
        with timed(seconds, "dense"):
            dense_losses = train_dense(config, dataset)
        with timed(seconds, "comparison"):
            baselines = {name: baseline_figures(config, dataset, name) for name in BASELINES if name != config.strategy}
    steps_of_ranks = [[RankLoad(**load) for load in rank["loads"]] for rank in ranks]
    loads = [list(step) for step in zip(*steps_of_ranks, strict=True)]
    losses = ranks[0]["losses"]
    difference = max(abs(ours - dense) for ours, dense in zip(losses, dense_losses, strict=True))
    result = {
        "passed": difference <= TOLERANCE,
        "config": json.loads(config.to_json()),
        "documents": len(dataset),
        "parameters": sum(parameter.numel() for parameter in GPT(ModelSize(), config.seed).parameters()),
        "loss": {
            "distributed": losses,
            "dense": dense_losses,
            "largest_difference": difference,
            "tolerance": TOLERANCE,
        },
        "strategies": {config.strategy: strategy_figures(loads, ModelSize().layers), **baselines},
        "planning": planning_figures(ranks, config.workers),
        "seconds": {**seconds, "training_steps": max(rank["training_s"] for rank in ranks)},
    }
    (config.out / "result.json").write_text(json.dumps(result, indent=1))
    sys.stdout.write(result_table(result) + "\n")
    drawn = draw(result, config.out / "demo.png")
    sys.stdout.write(
        f"wrote result.json{' and demo.png' if drawn else ' (no matplotlib: no picture)'} in {config.out}\n"
    )
    if not result["passed"]:
        raise DemoError(f"the loss curves differ by {difference:.2e}; they must agree to {TOLERANCE:g}")
    return result


def train_distributed(config: DemoConfig, dataset: TextFiles) -> list[dict[str, Any]]:
    """Train under torchrun; what `worker.train` returned on each rank.

    Raises:
        DemoError: a process failed; gives the first failure, and leaves its traceback in `DETAILS_FILE`.
    """
    details = config.out / DETAILS_FILE
    details.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="dyncp-demo-") as name:
        folder = Path(name)
        (folder / CONFIG_FILE).write_text(config.to_json())
        (folder / DOCUMENTS_FILE).write_text(dataset.to_json())
        # One thread per process, said before torchrun warns that it decides so.
        command = ["env", "OMP_NUM_THREADS=1", *interpreter_command("dyncp.demo.worker", "launch", name)]
        code = run_to_end(command)
        files = [folder / RESULT_FILE.format(rank=rank) for rank in range(config.ranks)]
        if code == 0 and all(file.exists() for file in files):
            return [json.loads(file.read_text()) for file in files]
        cause, traceback = first_failure(folder, config.ranks)
    sys.stderr.write("\n")  # a progress bar may stand on the line
    if traceback:
        details.write_text(traceback)
        cause += f" (traceback in {details})"
    raise DemoError(cause or f"training ended with exit code {code} and no result; see what was printed above")


def first_failure(folder: Path, ranks: int) -> tuple[str, str]:
    """Which training process failed first and why, and its traceback if it left one; empty if that is not known.

    A process that was killed, or could not even report, is always the cause: the others report that they lost it.
    """
    files = {rank: folder / FAILURE_FILE.format(rank=rank) for rank in range(ranks)}
    reports = {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}
    exits = json.loads((folder / EXITS_FILE).read_text()) if (folder / EXITS_FILE).exists() else []
    for rank, code in exits:
        if rank not in reports and code != -signal.SIGTERM:  # which is how torchrun ends the others
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return f"training failed on rank {rank}: its process {how} without a report", ""
    if not reports:
        return "", ""
    rank = min(reports, key=lambda rank: reports[rank]["time_s"])
    return f"training failed on rank {rank}: {reports[rank]['error']}", reports[rank]["details"]


def run_to_end(command: list[str]) -> int:
    """Run a command and return its exit code. It does not outlive this call, which may end by ctrl-C or SIGTERM too.
    Its stdin is a pipe that closes when this process ends, however that happens."""
    with sigterm_exits():
        # A session of its own: ctrl-C is for this process alone, or every other prints what it was doing.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert process.stdin
        try:
            return process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(END_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            process.stdin.close()


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit, so that `finally` runs (only the main thread can arrange it)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def baseline_figures(config: DemoConfig, dataset: TextFiles, strategy: str) -> dict[str, Any]:
    """`strategy_figures` of another strategy on the same batches."""
    masks = DocumentMasks(config.masks, config.seed)
    shape = attention_shape(ModelSize())
    loads = []
    for samples in tqdm(global_batches(config, dataset.lengths), strategy, config.steps, unit="plan", leave=False):
        batch = planner_batch(samples, dataset.lengths, masks)
        plan = make_plan(batch, shape, config.cluster, strategy, config.options)
        loads.append([rank_load(plan.rank(rank)) for rank in range(config.ranks)])
    return strategy_figures(loads, ModelSize().layers)


def planning_figures(ranks: list[dict[str, Any]], workers: int) -> dict[str, Any]:
    """What planning cost, and how much of it was hidden behind training.

    Planners work side by side, which alone makes plans come sooner but hides nothing. So the yardstick is how long the
    busiest rank's planners were at it: without any training to hide behind, a step would have waited for that. `hidden`
    is 1 - waited / busiest, and 0 where training waited even longer. In each step the rank that waits longest delays
    all; `waited_s` sums that over the steps. The first step of an epoch waits for all of its plan (and, the very first
    one, for the planner processes to start), so the figure without these is given beside it.

    Args:
        ranks: what `worker.train` returned on each.
        workers: planner processes of each rank.
    """
    reports = [rank["loader"] for rank in ranks]
    busiest_s = max(report["planning_s"] for report in reports) / max(1, workers)
    waited_s = sum(max(waits) for waits in zip(*(rank["waits_s"] for rank in ranks), strict=True))
    first_wait_s = max(report["first_wait_s"] for report in reports)
    return {
        "plans": sum(report["plans_made"] for report in reports),
        "planning_s": sum(report["planning_s"] for report in reports),
        "busiest_s": busiest_s,
        "waited_s": waited_s,
        "first_wait_s": first_wait_s,
        "hidden": max(0.0, 1 - waited_s / busiest_s),
        "hidden_after_first_step": max(0.0, 1 - (waited_s - first_wait_s) / busiest_s),
    }


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the seconds of a `with` block to `seconds`."""
    started = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - started
