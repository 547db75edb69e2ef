"""The demo from start to end: train under torchrun, train densely, compare, report."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from dyncp.demo.config import DemoConfig, DemoError
from dyncp.demo.data import DocumentMasks, TextFolder
from dyncp.demo.dense import global_batches, planner_batch, train_dense
from dyncp.demo.model import GPT, ModelSize
from dyncp.demo.picture import draw
from dyncp.demo.report import result_table
from dyncp.demo.traffic import RankLoad, rank_load, strategy_figures
from dyncp.demo.worker import CONFIG_FILE, FAILURE_FILE, RESULT_FILE, attention_shape
from dyncp.lookahead.workers import interpreter_command
from dyncp.strategies import make_plan

BASELINES = ("ring", "zigzag")
TOLERANCE = 1e-3  # between the loss curves, in nats per byte
END_TIMEOUT_S = 45.0  # torchrun gives its processes 30 s


def run(config: DemoConfig) -> dict[str, Any]:
    """Run the demo; the result is also written to `result.json`, and drawn in `demo.png`, in `config.out`.

    Raises:
        DemoError: a training process failed, or the loss curves differ by more than `TOLERANCE`.
        ValueError: no text in the data folder.
    """
    dataset = TextFolder(config.data, config.max_length)
    config.out.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    with timed(seconds, "total"):
        with timed(seconds, "distributed"):
            ranks = train_distributed(config)
        with timed(seconds, "dense"):
            dense_losses = train_dense(config)
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
        "planning": planning_figures([rank["loader"] for rank in ranks]),
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


def train_distributed(config: DemoConfig) -> list[dict[str, Any]]:
    """Train under torchrun; what `worker.train` returned on each rank.

    Raises:
        DemoError: a process failed; gives the first failure.
    """
    (config.out / CONFIG_FILE).write_text(config.to_json())
    results = config.out / RESULT_FILE
    failures = [config.out / FAILURE_FILE.format(rank=rank) for rank in range(config.ranks)]
    for file in (results, *failures):
        file.unlink(missing_ok=True)
    child = interpreter_command("dyncp.demo.worker", "main", str(config.out))
    torchrun = ["--standalone", "--nproc-per-node", str(config.ranks), "--no-python", *child]
    # One thread per process, said before torchrun warns that it decides so.
    command = ["env", "OMP_NUM_THREADS=1", sys.executable, "-m", "torch.distributed.run", *torchrun]
    code = run_to_end(command)
    if code == 0 and results.exists():
        return list(json.loads(results.read_text()))
    reports = [json.loads(file.read_text()) | {"rank": rank} for rank, file in enumerate(failures) if file.exists()]
    if reports:
        first = min(reports, key=lambda report: report["time_s"])
        details = config.out / FAILURE_FILE.format(rank=first["rank"])
        raise DemoError(f"training failed on rank {first['rank']}: {first['error']} (traceback in {details})")
    raise DemoError(f"the training processes ended with exit code {code} and no result; see what they printed above")


def run_to_end(command: list[str]) -> int:
    """Run a command and return its exit code. It does not outlive this call, which may end by ctrl-C or SIGTERM too."""
    with sigterm_exits():
        process = subprocess.Popen(command)
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


def baseline_figures(config: DemoConfig, dataset: TextFolder, strategy: str) -> dict[str, Any]:
    """`strategy_figures` of another strategy on the same batches."""
    masks = DocumentMasks(config.masks, config.seed)
    shape = attention_shape(ModelSize())
    loads = []
    for samples in tqdm(global_batches(config, dataset.lengths), strategy, config.steps, unit="plan", leave=False):
        batch = planner_batch(samples, dataset.lengths, masks)
        plan = make_plan(batch, shape, config.cluster, strategy, config.options)
        loads.append([rank_load(plan.rank(rank)) for rank in range(config.ranks)])
    return strategy_figures(loads, ModelSize().layers)


def planning_figures(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """What planning cost and how much of it training did not see, from the `LoaderReport` of each rank.

    Were nothing hidden, every rank would wait for all of planning; so the hidden part is 1 - waited / planning, of
    the rank that waited longest. The first step's wait (start of the planner processes included) is given beside it.
    """
    planning_s = sum(report["planning_s"] for report in reports)
    slowest = max(reports, key=lambda report: report["waited_s"])
    return {
        "plans": sum(report["plans_made"] for report in reports),
        "planning_s": planning_s,
        "waited_s": slowest["waited_s"],
        "first_wait_s": slowest["first_wait_s"],
        "hidden": max(0.0, 1 - slowest["waited_s"] / planning_s),
        "hidden_after_first_step": max(0.0, 1 - (slowest["waited_s"] - slowest["first_wait_s"]) / planning_s),
    }


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Add the seconds of a `with` block to `seconds`."""
    started = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - started
