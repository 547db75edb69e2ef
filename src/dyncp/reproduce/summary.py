"""All figures in a few lines."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

from dyncp.reproduce.compare import BEST, BEST_BASELINE, BEST_STATIC
from dyncp.reproduce.points import Point

TOLERANCE = 0.995  # of a speed-up: what is below is slower


def in_short(figures: Mapping[str, list[Point]]) -> str:
    """A list: how much faster dyncp is than the rivals, where not, and what is not hidden; empty without rivals."""
    lines = []
    rivals = figures.get("rivals", [])
    for constants in dict.fromkeys(point.at["constants"] for point in rivals):
        here = [point for point in rivals if point.at["constants"] == constants]
        lines.append(f"- `{constants}` constants: {spread(here, BEST_BASELINE)}.")
        lines.append(f"- `{constants}`: {spread(here, BEST_STATIC)}.")
        lines.append(f"- `{constants}`: {spread(here, BEST)}.")
        lines.append(f"- `{constants}`: {against_paper(here)}.")
        shares = [point.mean for point in here if point.method.startswith("hidden")]
        lines.append(f"- `{constants}`: of dyncp's communication that could hide, {statistics.fmean(shares):.0%} does.")
    return "\n".join(["## In short", "", *lines]) if lines else ""


def spread(points: Iterable[Point], method: str) -> str:
    """Smallest and largest speed-up over a method, and the places where it is none."""
    chosen = [point for point in points if point.method == method]
    values = [point.mean for point in chosen]
    slower = [point for point in chosen if point.mean < TOLERANCE]
    text = (
        f"against the {method} dyncp is {min(values):.2f} to {max(values):.2f} times as fast "
        f"(geometric mean {statistics.geometric_mean(values):.2f})"
    )
    if slower:
        places = ", ".join(" ".join(value for key, value in point.at.items() if key != "constants") for point in slower)
        text += f", and slower in {len(slower)} of {len(values)} settings ({places})"
    return text


def against_paper(points: Iterable[Point]) -> str:
    """In how many settings the speed-up over the best baseline is the paper's over its baselines, or more."""
    ratios = [point.ratio for point in points if point.method == BEST_BASELINE and point.ratio is not None]
    reached = sum(ratio >= TOLERANCE for ratio in ratios)
    return (
        f"in {reached} of {len(ratios)} settings the speed-up over the best baseline is at least the "
        "paper's over its own baselines"
    )
