"""`dyncp bench planner`: how fast planning is, and what plans move, over a corpus of batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

from tqdm import tqdm
from tyro.conf import Positional, arg

from dyncp.bench.corpus import Case, corpus
from dyncp.bench.machine import machine
from dyncp.bench.measure import measure, warm_up
from dyncp.bench.results import Result
from dyncp.bench.summary import summarize_results
from dyncp.bench.table import LEGEND, bytes_table, summary_table, target_table, time_table
from dyncp.bench.targets import targets
from dyncp.ir.arguments import positive_number

BENCHES = ("planner",)


@dataclass(frozen=True)
class Command:
    """Plan a corpus of batches, and say how long it took and what the plans move: beside a lower bound, the classical
    rings, and a general hypergraph partitioner on the same blocks under the same limits.

    The corpus is the same in every run. All of it takes 10 to 25 minutes on one core, most of them for the partitioner
    (Mt-KaHyPar, the extra `hypergraph`; without it those columns are empty).
    """

    what: Annotated[Positional[str], arg(metavar="|".join(BENCHES))]
    """What to measure."""
    quick: bool = False
    """A few cases, without the partitioner: about a minute."""
    only: Annotated[str | None, arg(metavar="PATTERN")] = None
    """Only cases whose name has this in it; `*` stands for anything."""
    seeds: int = 5
    """Plans of each case, from different seeds."""
    effort: float = 1.0
    """Steps of the local search, against the usual number; with targets of time, leave it at 1."""
    list: bool = False
    """Print the names of the cases."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write all results to a JSON file, anew after each case."""


def run(command: Command) -> int:
    """Do what `Command` says."""
    if command.what not in BENCHES:
        raise ValueError(f"unknown benchmark {command.what!r}; choose one of {', '.join(BENCHES)}")
    positive_number("effort", command.effort)
    if command.seeds < 1:
        raise ValueError(f"--seeds is {command.seeds}; it must be at least 1")
    cases = chosen(command)
    if command.list:
        print("\n".join(case.name for case in cases))
        return 0
    if command.out is not None:
        command.out.touch()  # rather fail now than after the first case
    warm_up()
    results: list[Result] = []
    for case in tqdm(cases, unit="case", disable=None if len(cases) > 1 else True):
        results.append(measure(case, command.seeds, solvers=not command.quick))
        if command.out is not None:
            command.out.write_text(json.dumps(report(results, command), indent=1) + "\n", encoding="utf-8")
    print(text(results, command.seeds))
    return 0


def chosen(command: Command) -> list[Case]:
    """The cases that were asked for.

    Raises:
        ValueError: none is left.
    """
    cases = [case for case in (*targets(), *corpus()) if case.quick or not command.quick]
    cases = [replace(case, effort=command.effort) for case in cases]
    if command.only is not None:
        cases = [case for case in cases if fnmatch(case.name, f"*{command.only}*")]
    if not cases:
        raise ValueError(f"no case has {command.only!r} in its name; --list prints the names")
    return cases


def report(results: Sequence[Result], command: Command) -> dict[str, Any]:
    """All results as one JSON-able dictionary."""
    return {
        "machine": machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "asked": {"seeds": command.seeds, "quick": command.quick, "only": command.only, "effort": command.effort},
        "summary": summarize_results(results),
        "cases": [asdict(result) for result in results],
    }


def text(results: Sequence[Result], seeds: int) -> str:
    """All results as tables."""
    host, summary = machine(), summarize_results(results)
    runs = f"{seeds} seed{'s' * (seeds > 1)}"
    parts = [
        f"{host['cpu']}, {host['cores']} cores, python {host['python']}, numpy {host['numpy']}, numba {host['numba']}",
        LEGEND.format(runs=runs),
        bytes_table(results),
        time_table(results),
        summary_table(summary),
    ]
    if summary["targets"]:
        parts.append(target_table(summary["targets"]))
    return "\n\n".join(parts)
