"""Attention on one GPU: right, and how fast. `-h` says what the sections are; docs/gpu-benchmark.md, what they mean.

    PYTHONPATH=src python -m benchmarks.gpu.run [--only check] [--minutes 9] [--out FILE.json] [--table FILE.json]

Needs PyTorch with CUDA, numpy and numba. Exits with 1 where a check fails or a section breaks; a target that is missed
does not count as that. `--toy` runs all of it at tiny sizes on the CPU, to try the benchmark itself.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu import check, moves, replay, report, speed, table, targets, tiling
from benchmarks.gpu.clock import Budget, Clock, Deadline
from benchmarks.gpu.scale import FULL, TOY
from benchmarks.gpu.session import Findings, Session
from dyncp.bench.machine import machine, package_version
from dyncp.runtime.kernels.api import KERNELS, objection_to

FURTHER = ("flex", "flash")  # kernels that run beside those asked for, where they are there


class Section(NamedTuple):
    """A part of the benchmark; time is dealt out by weights."""

    measure: Callable[[Session, Deadline, Findings], None]
    weight: float
    about: str


SECTIONS = {
    "check": Section(check.check, 150, "errors of outputs and gradients against fp64; plans with all ranks on the GPU"),
    "dense": Section(speed.dense, 130, "causal and full attention, 2K to 64K tokens, against PyTorch's kernels"),
    "masks": Section(speed.masked, 130, "sparse masks against FlexAttention, without and with building block masks"),
    "blocks": Section(speed.blocks, 25, "the same by the size of a plan's blocks"),
    "moves": Section(moves.moves, 10, "copies and reductions against plain copies"),
    "replay": Section(replay.replay, 40, "ranks of plans for 8 and 32 ranks, alone; cost models; the host's time"),
    "table": Section(table.table, 55, "times of blocks, for `dyncp simulate --cost`"),
    "tiles": Section(tiling.tiling, 45, "tiles of the Triton kernels against each other"),
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    sections = "\n".join(f"  {name:8} {section.about}" for name, section in SECTIONS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"sections, in their order:\n{sections}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=SECTIONS, action="append", help="a section; may be given several times")
    parser.add_argument("--minutes", type=float, default=9.0, help="of all sections; they leave out what takes longer")
    parser.add_argument("--kernels", default="triton", help="dyncp's kernels that are measured")
    parser.add_argument("--out", type=Path, help="the result as JSON (build/bench-gpu.json)")
    parser.add_argument("--table", type=Path, help="the table of times (build/gpu-attention.json)")
    parser.add_argument("--toy", action="store_true", help="tiny sizes on the CPU: whether everything runs")
    options = parser.parse_args(arguments)
    if options.kernels not in KERNELS:
        parser.error(f"there are no kernels {options.kernels!r}; choose one of {', '.join(KERNELS)}")
    toy = "-toy" if options.toy else ""  # which must not take the place of a real result
    options.out = options.out or Path(f"build/bench-gpu{toy}.json")
    options.table = options.table or Path(f"build/gpu-attention{toy}.json")
    if options.toy and options.kernels == "triton" and not os.environ.get("TRITON_INTERPRET"):
        parser.error("on a CPU the Triton kernels run in its interpreter alone: set TRITON_INTERPRET=1")
    if not options.toy and not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU; --toy tries the benchmark without one")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections asked for."""
    started_s = time.perf_counter()
    options = parse(arguments)
    device = torch.device("cpu") if options.toy else torch.device("cuda", torch.cuda.current_device())
    scale = TOY if options.toy else FULL
    session = Session(Clock(device), scale, kernels_on(device, options.kernels), options.table)
    names = [name for name in SECTIONS if not options.only or name in options.only]
    budget = Budget(options.minutes, {name: SECTIONS[name].weight for name in names}, started_s)
    result: dict[str, Any] = {"machine": described(device), "kernels": session.kernels, "scale": asdict(scale)}
    result["sections"] = {}
    with warnings.catch_warnings(), compiling_planner():
        warnings.simplefilter("ignore")  # of backends that do not run, and of eager FlexAttention on the CPU
        for name in names:
            run_section(name, session, budget, result["sections"])
            write(options.out, result)
            if name != "replay":  # of which more is known at the end
                print(report.section_text(name, result["sections"][name]) + "\n", flush=True)
            if lost(session.clock):
                break
    failed = finish(session, result, options.out)
    print(f"{time.perf_counter() - started_s:.0f} s; all numbers in {options.out}")
    return 1 if failed else 0


def kernels_on(device: torch.device, first: str) -> tuple[str, ...]:
    """The kernels asked for, and those of `FURTHER` that run here."""
    fit = [name for name in FURTHER if name != first and objection_to(KERNELS[name], device, 1) is None]
    return (first, *fit)


def run_section(name: str, session: Session, budget: Budget, sections: dict[str, Any]) -> None:
    """Run one section; what breaks in it does not end the others, because a GPU is rarely there."""
    print(f"bench-gpu: {name}", file=sys.stderr, flush=True)
    started = time.perf_counter()
    found, broken = Findings(), None
    try:
        SECTIONS[name].measure(session, budget.deadline(name), found)
    except Exception:  # noqa: BLE001 whatever it is, it is in the result
        broken = traceback.format_exc()
        print(broken, file=sys.stderr, flush=True)
    sections[name] = {"rows": found.rows, "left_out": found.left_out, "seconds": time.perf_counter() - started}
    if broken is not None:
        sections[name]["broken"] = broken


def finish(session: Session, result: dict[str, Any], out: Path) -> list[str]:
    """What is said last: failures first, then the targets. Returns the failures."""
    sections = result["sections"]
    if "replay" in sections:
        if not lost(session.clock):
            replay.finish(session, sections["replay"]["rows"])
        print(report.section_text("replay", sections["replay"]) + "\n")
    failed = targets.failures(sections)
    made = targets.targets(sections, session.kernels[0], session.scale)
    result |= {"failures": failed, "targets": [each._asdict() for each in made]}
    write(out, result)
    for line in failed:
        print(f"FAILED {line}")
    where = {name: result["machine"][name] for name in ("device", "driver", "torch", "triton", "date")}
    print(", ".join(f"{name} {value}" for name, value in where.items()))
    print(targets.targets_text(made, session.scale))
    if session.table is not None:
        print(f"table of times in {session.table_path}")
    return failed


def lost(clock: Clock) -> bool:
    """Whether the device answers no more, as after an access to memory that is not there."""
    try:
        clock.synchronize()
    except RuntimeError as error:
        print(f"bench-gpu: the device is lost: {error}", file=sys.stderr, flush=True)
        return True
    return False


def compiling_planner() -> subprocess.Popen[bytes]:
    """A process that compiles the planner meanwhile, which is then on disk when it is needed."""
    return subprocess.Popen([sys.executable, "-c", "from dyncp.strategies.warm import warm_up; warm_up()"])


def described(device: torch.device) -> dict[str, Any]:
    """The card, its driver, and versions."""
    on_gpu = device.type == "cuda"
    return {
        **machine(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU (toy)",
        "driver": driver_version() if on_gpu else None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "date": datetime.date.today().isoformat(),
    }


def driver_version() -> str | None:
    """As the driver's tool says."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError):
        return None


def write(out: Path, result: dict[str, Any]) -> None:
    """All that is known so far, in place of what was."""
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_suffix(".part")
    beside.write_text(json.dumps(result, indent=1) + "\n")
    beside.replace(out)


if __name__ == "__main__":
    sys.exit(main())
