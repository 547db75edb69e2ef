"""All results in a few numbers, as a JSON-able dictionary."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import exp, log
from statistics import median
from typing import Any

from dyncp.bench.results import FIGURES, ROUNDING, STAGES, Figures, Result

# what is compared with a solver: name -> (of which objectives, what of the figures)
COMPARED: dict[str, tuple[tuple[str, ...], Callable[[Result, Figures], float]]] = {
    "bytes": (("total", "time"), lambda result, figures: figures.total_bytes),
    "bytes, for fewest bytes": (("total",), lambda result, figures: figures.total_bytes),
    "time of bytes, for least time": (("time",), lambda result, figures: result.setting.cost(figures)),
    "bytes between nodes, for least time": (("time",), lambda result, figures: figures.inter_node_bytes),
}


def summarize_results(results: Sequence[Result]) -> dict[str, Any]:
    """The numbers of a whole run: what is compared with solvers, the rings and the bound; planning by stage; targets.

    A ratio is ours over theirs. Solvers are compared by what placements cost, with one formula for both, over the cases
    that they were given; all else by what plans move.
    """
    presets = dict.fromkeys(preset for result in results for preset in result.solvers)
    rings = {
        "bound": spread(result.bound_ratio for result in results),
        "ring": spread(_over(result.total_bytes, result.ring.total_bytes) for result in results),
        "zigzag": spread(_over(result.total_bytes, result.zigzag.total_bytes) for result in results),
        "ring, between nodes": spread(
            _over(result.inter_node_bytes, result.ring.inter_node_bytes) for result in results
        ),
    }
    return {
        "cases": len(results),
        "solvers": {preset: against_solver(results, preset) for preset in presets},
        "ratios": rings,
        "broken": [result.name for result in results if result.own_broken],
        "planning_s": planning(results),
        "targets": [row for result in results for row in target_rows(result)],
    }


def against_solver(results: Iterable[Result], preset: str) -> dict[str, Any]:
    """How plans compare with what a solver made of the same cases."""
    asked = [(result, result.solvers[preset]) for result in results if preset in result.solvers]
    pairs = [
        (result, result.placement, solved.figures, solved.seconds)
        for result, solved in asked
        if solved.figures is not None and result.placement is not None
    ]
    compared = {
        name: spread(
            _over(value(result, own), value(result, theirs))
            for result, own, theirs, _ in pairs
            if result.setting.objective in objectives
        )
        for name, (objectives, value) in COMPARED.items()
    }
    broken = [result.name for result, _, theirs, _ in pairs if result.setting.broken(theirs)]
    worse = [
        result.name for result, _, theirs, _ in pairs if set(result.own_broken) - set(result.setting.broken(theirs))
    ]
    return {
        "cases": len(pairs),
        "skipped": {result.name: solved.skipped for result, solved in asked if solved.skipped},
        "ratios": compared,
        "seconds": spread(_over(result.stage_s("place"), seconds) for result, _, _, seconds in pairs),
        "broken": broken,  # limits on balance that the solver did not keep
        "broken_only_here": worse,  # those that it kept and we did not
    }


def spread(ratios: Iterable[float | None]) -> dict[str, float] | None:
    """Of the ratios that exist: how many, their geometric mean, median and largest, and the share of at most 1."""
    known = [ratio for ratio in ratios if ratio is not None]
    if not known:
        return None
    positive = [ratio for ratio in known if ratio > 0]  # of 0 there is no mean
    return {
        "cases": len(known),
        "mean": exp(sum(map(log, positive)) / len(positive)) if positive else 0.0,
        "median": median(known),
        "largest": max(known),
        "at_most_1": sum(ratio <= 1 for ratio in known) / len(known),
    }


def planning(results: Sequence[Result]) -> dict[str, Any]:
    """Seconds of planning and of each stage: sums of the cases' medians, and the largest."""
    stages = {stage: [result.stage_s(stage) for result in results] for stage in (*STAGES, "encode")}
    total = [result.planning_s for result in results]
    return {
        name: {"sum": sum(values), "median": median(values), "largest": max(values)}
        for name, values in {"planning": total, **stages}.items()
        if values
    }


def target_rows(result: Result) -> list[dict[str, Any]]:
    """A case's targets: the figure that is limited, what was found, and whether it is met (None: not known)."""
    rows = []
    for figure in (figure for figure in FIGURES if figure in result.limits):
        most = result.limits[figure]
        got: float | None = getattr(result, figure)
        met = None if got is None else got <= most + (ROUNDING if figure in ("compute", "tokens") else 0.0)
        rows.append({"case": result.name, "figure": figure, "most": most, "got": got, "met": met})
    return rows


def _over(own: float, theirs: float) -> float | None:
    """A ratio; 1 where both are 0, none where only theirs is."""
    if theirs:
        return own / theirs
    return None if own else 1.0
