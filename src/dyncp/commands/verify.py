"""`dyncp verify`: execute plans with all ranks in this process and compare with dense attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

from tqdm import tqdm
from tyro.conf import arg

from dyncp.commands.options import BatchOptions, ClusterOptions, ShapeOptions
from dyncp.ir.check import check_plan
from dyncp.report.summary import head_text, plan_figures
from dyncp.report.table import columns, format_bytes
from dyncp.strategies import STRATEGIES, build
from dyncp.strategies.api import Options
from dyncp.verify import Case, mask_errors, random_case, verify, worse


@dataclass(frozen=True)
class Command:
    """Plan a batch, execute the plan forward and backward with all ranks in this process, compare with dense attention.

    Prints what was planned, and the largest relative L2 errors over the batch's masks; the exit code is 1 where one is
    above the tolerance (1e-5 in float32, 2e-2 in bfloat16). With --corpus N it does so for N random batches.
    """

    batch: BatchOptions = field(default_factory=BatchOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    shape: ShapeOptions = field(default_factory=lambda: ShapeOptions(head_dim=16, dtype="float32"))
    planning: Options = field(default_factory=Options)
    strategy: Annotated[str, arg(metavar="|".join(STRATEGIES))] = "dynamic"
    """How to spread the batch."""
    corpus: Annotated[int | None, arg(metavar="N")] = None
    """Verify N random batches instead of one: lengths 1 to 600, every kind of mask, 1 to 8 ranks, every strategy and
    keep. Of the other options only --seed has a meaning then."""


def run(command: Command) -> int:
    """Do what `Command` says; 1 when an error is above its tolerance."""
    if command.corpus is not None:
        if command.corpus < 1:
            raise ValueError(f"--corpus is {command.corpus}; it must be at least 1")
        if command.batch != BatchOptions():
            raise ValueError("got both a batch and --corpus; choose one")
        seed = command.planning.seed
        return verify_cases((random_case(seed, number) for number in range(command.corpus)), command.corpus)
    case = Case(
        command.batch.batch(), command.shape.build(), command.cluster.build(), command.strategy, command.planning
    )
    return verify_one(case)


def verify_one(case: Case) -> int:
    """Verify a case, and print what was planned and the errors under each mask; returns the exit code."""
    planned = build(case.batch, case.shape, case.cluster, case.strategy, case.options)
    check_plan(planned.plan, planned.layout.blocks, planned.batch)
    figures = plan_figures(planned.plan, planned.layout.blocks)
    moved, back = (format_bytes(part["total_bytes"]) for part in (figures, figures["backward"]))
    print(f"{head_text(figures)}\nmoved       {moved} forward, {back} backward\n")
    by_mask = mask_errors(planned.plan, case)
    named = by_mask if len(by_mask) > 1 else dict.fromkeys([case.shape.dtype], *by_mask.values())
    print(_table(named, dict.fromkeys(named, case.tolerance)))
    failed = [name for name, errors in by_mask.items() if max(errors.values()) > case.tolerance]
    for name in failed:
        print(f"mask {name!r} fails: {_words(by_mask[name])}")
    print(f"{0 if failed else 1} of 1 batch passed")
    return 1 if failed else 0


def verify_cases(cases: Iterable[Case], count: int) -> int:
    """Verify cases, print the largest errors by dtype, and name the cases that fail; returns the exit code."""
    worst: dict[str, dict[str, float]] = {}
    failed = 0
    tolerance: dict[str, float] = {}
    for number, case in enumerate(tqdm(cases, total=count, unit="batch", disable=None if count > 1 else True)):
        errors = verify(case)
        largest = worst.setdefault(case.shape.dtype, {})
        largest.update({name: worse(error, largest.get(name, 0.0)) for name, error in errors.items()})
        tolerance[case.shape.dtype] = case.tolerance
        if max(errors.values()) > case.tolerance:
            failed += 1
            tqdm.write(f"batch {number} fails: {_words(errors)}; {_described(case)}")
    print(_table(worst, tolerance))
    print(f"{count - failed} of {count} batch{'es' * (count > 1)} passed")
    return 1 if failed else 0


def _table(worst: dict[str, dict[str, float]], tolerance: dict[str, float]) -> str:
    names = list(dict.fromkeys(name for errors in worst.values() for name in errors))
    rows = [("largest relative error", *worst)]
    rows += [
        (f"  {name}", *(f"{errors[name]:.1e}" if name in errors else "-" for errors in worst.values()))
        for name in names
    ]
    return columns([*rows, ("  tolerance", *(f"{tolerance[dtype]:.0e}" for dtype in worst))])


def _words(errors: dict[str, float]) -> str:
    return ", ".join(f"{name} {error:.1e}" for name, error in errors.items())


def _described(case: Case) -> str:
    lengths = [sequence.length for sequence in case.batch.sequences]
    ranks = f"{case.cluster.nodes} x {case.cluster.ranks_per_node} ranks"
    return f"lengths {lengths}, {ranks}, {case.strategy}, {case.shape}, {case.options}"
