"""Results as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dyncp.bench.results import STAGES, Figures, Result
from dyncp.report.table import columns, format_bytes, format_seconds

PRESET_NAMES = {"default": "default", "highest_quality": "highest"}
NONE = "-"
BESIDE = ("bound", "ring", "default", "highest")
BYTES = ("moved", "worst", *BESIDE, "inter-node", "worst", *BESIDE)
TIMES = ("comps", "block", "planning", *STAGES, "encode", "default", "highest", "compute", "limit", "tokens")
LEGEND = """\
One line for each case: batch / masks / nodes x ranks / query-KV heads / objective. Bytes are those of forward and
backward, in cases with targets of the forward alone; medians over {runs}, and how much more the worst moves. Behind
them, what they are of the lower bound, of a ring's bytes (those of a zigzag ring are the same), and of what
Mt-KaHyPar's default and highest quality move on blocks of the same size or half of it, under the same limits (by one
formula for both; "!" where it broke a limit that is met here). Then computation blocks over all head groups, tokens of
the largest block, times, and over the mean: the largest rank's computation and tokens, in the worst run, and its
computation in a ring and in a zigzag ring. Last the process's memory."""


def bytes_table(results: Sequence[Result]) -> str:
    """What the plans move, beside the bound, the rings and the solvers."""
    rows: list[tuple[str, ...]] = [("", *BYTES)]
    for result in results:
        rows.append((result.name, *_bytes(result, "total_bytes"), *_bytes(result, "inter_node_bytes")))
    return columns(rows)


def time_table(results: Sequence[Result]) -> str:
    """How long planning took by stage, how even the plans are, and the memory it took."""
    rows: list[tuple[str, ...]] = [("", *TIMES, "ring", "zigzag", "peak")]
    for result in results:
        peak = result.peak_bytes
        rows.append(
            (
                result.name,
                f"{result.computation_blocks:,}",
                f"{result.block_tokens:,}",
                format_seconds(result.planning_s),
                *(format_seconds(result.stage_s(stage)) for stage in (*STAGES, "encode")),
                *(_solver_seconds(result, preset) for preset in PRESET_NAMES),
                f"{result.compute:.3f}",
                f"{result.setting.most_compute:.2f}",
                f"{result.tokens:.3f}",
                *(f"{ring.compute:.2f}" for ring in (result.ring, result.zigzag)),
                NONE if peak is None else format_bytes(peak),
            )
        )
    return columns(rows)


def summary_table(summary: dict[str, Any]) -> str:
    """The numbers of a whole run."""
    rows: list[tuple[str, ...]] = [("ours over theirs", "cases", "geo. mean", "median", "largest", "at most 1")]
    for preset, compared in summary["solvers"].items():
        rows += [
            (f"Mt-KaHyPar {PRESET_NAMES[preset]}: {name}", *_spread(ratios))
            for name, ratios in (*compared["ratios"].items(), ("seconds of placement", compared["seconds"]))
            if ratios
        ]
    rows += [(f"{name}: bytes", *_spread(ratios)) for name, ratios in summary["ratios"].items() if ratios]
    seconds: list[tuple[str, ...]] = [("seconds", "sum", "median", "largest")]
    for name, found in summary["planning_s"].items():
        label = name if name in ("planning", "encode") else f"  {name}"
        seconds.append((label, *(format_seconds(found[key]) for key in ("sum", "median", "largest"))))
    lines = [columns(rows), "", columns(seconds), ""]
    lines.append(f"limits broken in {_named(summary['broken'], summary['cases'])}")
    for preset, compared in summary["solvers"].items():
        name, skipped = f"Mt-KaHyPar {PRESET_NAMES[preset]}", compared["skipped"]
        if compared["cases"]:
            lines.append(f"  by {name} in {_named(compared['broken'], compared['cases'])}")
            lines.append(f"  kept by {name} but not by us in {_named(compared['broken_only_here'], compared['cases'])}")
        if skipped:
            reasons = "; ".join(dict.fromkeys(skipped.values()))
            lines.append(f"{name} was not tried in {len(skipped)} of {summary['cases']} cases: {reasons}")
    return "\n".join(lines)


def target_table(rows: Sequence[dict[str, Any]]) -> str:
    """The targets, met or missed."""
    table: list[tuple[str, ...]] = [("target", "figure", "at most", "got", "")]
    last = ""
    for row in rows:
        words = {None: "not known", True: "met", False: "MISSED"}[row["met"]]
        name = row["case"] if row["case"] != last else ""
        last = row["case"]
        table.append(
            (name, row["figure"], _figure(row["figure"], row["most"]), _figure(row["figure"], row["got"]), words)
        )
    return columns(table)


def _bytes(result: Result, key: str) -> tuple[str, ...]:
    """The cells of one kind of bytes."""
    own, all_runs = getattr(result, key), [getattr(run.plan, key) for run in result.runs]
    return (
        format_bytes(own),
        _ratio(max(all_runs), own, "+"),
        _ratio(own, getattr(result, f"bound_{key.removeprefix('total_')}")),
        _ratio(own, getattr(result.ring, key)),
        *(_solved(result, preset, key) for preset in PRESET_NAMES),
    )


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return NONE
    if name.endswith("_s"):
        return format_seconds(value)
    return format_bytes(value) if name.endswith("_bytes") else f"{value:.3f}"


def _spread(ratios: dict[str, float]) -> tuple[str, ...]:
    shown = (f"{ratios[key]:.3f}" for key in ("mean", "median", "largest"))
    return (f"{ratios['cases']}", *shown, f"{ratios['at_most_1']:.0%}")


def _named(names: Sequence[str], count: int) -> str:
    return f"{len(names)} of {count} cases{': ' if names else ''}{', '.join(names)}"


def _ratio(own: float, theirs: float, sign: str = "x") -> str:
    """`1.23x`, or what comes on top as `+1.2%`."""
    if not theirs:
        return NONE
    return f"+{own / theirs - 1:.1%}" if sign == "+" else f"{own / theirs:.2f}{sign}"


def _solved(result: Result, preset: str, key: str) -> str:
    """What a placement costs over what a solver's costs."""
    own, theirs = result.placement, _figures(result, preset)
    if own is None or theirs is None:
        return NONE
    mark = "!" if set(result.setting.broken(theirs)) - set(result.own_broken) else ""
    return mark + _ratio(getattr(own, key), getattr(theirs, key))


def _figures(result: Result, preset: str) -> Figures | None:
    solved = result.solvers.get(preset)
    return solved.figures if solved else None


def _solver_seconds(result: Result, preset: str) -> str:
    return format_seconds(result.solvers[preset].seconds) if _figures(result, preset) else NONE
