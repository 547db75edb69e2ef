"""docs/reproduction.md: a section for each figure, between markers, so that what stands around them stays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dyncp.reproduce.points import RATIO, Point

BEGIN, END = "<!-- begin {name} -->", "<!-- end {name} -->"


def section(title: str, text: str, points: Sequence[Point], picture: str | None) -> str:
    """One figure: what it is, its table, its picture."""
    parts = [f"## {title}", text, table(points)]
    if picture is not None:
        parts.append(f"![{title}]({picture})")
    return "\n\n".join(parts)


def table(points: Sequence[Point]) -> str:
    """Rows are places, columns methods; a cell is ours, and where the paper has a value `ours / paper = ratio`."""
    methods = list(dict.fromkeys(point.method for point in points))
    keys = list(dict.fromkeys(key for point in points for key in point.at))
    rows: dict[tuple[str, ...], dict[str, Point]] = {}
    for point in points:
        rows.setdefault(tuple(point.at.get(key, "") for key in keys), {})[point.method] = point
    units = {method: {point.unit for point in points if point.method == method} for method in methods}
    heads = [f"{method} ({unit.pop()})" if len(unit) == 1 else method for method, unit in units.items()]
    lines = [row([*keys, *heads]), row(["---"] * len(keys) + ["---:"] * len(methods))]
    lines += [
        row([*place, *(cell(found[method]) if method in found else "" for method in methods)])
        for place, found in rows.items()
    ]
    return "\n".join(lines)


def row(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(cells)} |"


def cell(point: Point) -> str:
    """A value with its spread; of ratios the mean alone."""
    if point.unit == RATIO or point.unit == "share":
        shown = f"{point.mean:.2f}"
    else:
        shown = number(point.mean) + (f" ± {number(point.spread)}" if len(point.ours) > 1 else "")
    if point.paper is None or point.ratio is None:
        return shown
    return f"{shown} / {number(point.paper)} = {point.ratio:.2f}"


def number(value: float) -> str:
    """Three digits or so."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def put(path: Path, name: str, text: str) -> None:
    """Write a part of a page between its markers: in the place of what is there, or at the end."""
    begin, end = BEGIN.format(name=name), END.format(name=name)
    old = path.read_text(encoding="utf-8") if path.exists() else "# Reproduction\n"
    whole = f"{begin}\n{text.rstrip()}\n{end}"
    if begin in old and end in old:
        before, _, rest = old.partition(begin)
        new = before + whole + rest.partition(end)[2]
    else:
        new = f"{old.rstrip()}\n\n{whole}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(new, encoding="utf-8")
