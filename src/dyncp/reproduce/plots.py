"""Figures as pictures: ours as bars, the paper's values as marks on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dyncp.reproduce.figures import Figure
from dyncp.reproduce.points import RATIO, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

COLOURS = ("#9db4c8", "#6d8fae", "#c9a66b", "#7a7f87", "#d0743c", "#2b7a4b", "#8a5a9e", "#c0bb9b")
OF_METHOD = {
    "DCP as published": "#d0743c",
    "dyncp": "#2b7a4b",
    "TE": "#6d8fae",
    "Megatron-LM": "#6d8fae",
    "RFA ring": "#b9c9d6",
    "RFA zigzag": "#93a9bc",
    "LoongTrain": "#c9a66b",
}
INK, LINE = "#333333", "#b8b8b8"
PANEL_IN = (4.3, 2.7)
ACROSS = 4  # panels in a row, where there are many


def canvas_type() -> type[Canvas]:
    """What matplotlib draws on.

    Raises:
        ValueError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise ValueError("no matplotlib, which draws the figures; install it with: pip install 'dyncp[viz]'") from None
    return Canvas


def draw(figure: Figure, points: Sequence[Point], path: Path) -> None:
    """Write a figure into a PNG file.

    Raises:
        ValueError: matplotlib is missing.
    """
    make_canvas = canvas_type()
    chosen = [
        point
        for point in points
        if (not figure.shown or point.method in figure.shown)
        and all(point.at.get(key) == value for key, value in figure.where.items())
    ]
    panels: dict[tuple[str, ...], list[Point]] = {}
    for point in chosen:
        panels.setdefault(tuple(point.at[key] for key in figure.panels), []).append(point)
    methods = list(dict.fromkeys(point.method for point in chosen))
    colours = {method: OF_METHOD.get(method, COLOURS[i % len(COLOURS)]) for i, method in enumerate(methods)}
    across = min(ACROSS if len(panels) > 4 else 2, len(panels))
    down = -(-len(panels) // across)
    size = (max(7.0, PANEL_IN[0] * across), PANEL_IN[1] * down + 0.9)
    canvas = make_canvas(figsize=size, layout="constrained", dpi=130)
    axes = canvas.subplots(down, across, squeeze=False).ravel()
    for axis, (name, some) in zip(axes, panels.items(), strict=False):
        panel(axis, figure, some, colours)
        axis.set_title(", ".join(name), fontsize=9, color=INK)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), fontsize=8, frameon=False)
    canvas.suptitle(figure.title, fontsize=11, color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(path, format="png")


def panel(axis: Axes, figure: Figure, points: Sequence[Point], colours: dict[str, str]) -> None:
    """Bars of all methods, in groups along x; thin lines go from the least to the largest batch."""
    groups = list(dict.fromkeys(point.at[figure.x] for point in points))
    methods = list(colours)
    width = 0.8 / len(methods)
    marked = False
    units = {point.unit for point in points}
    base = 1.0 if units == {RATIO} else 0.0  # bars of ratios go up or down from 1
    for i, method in enumerate(methods):
        some = [point for point in points if point.method == method]
        at = [groups.index(point.at[figure.x]) + (i - (len(methods) - 1) / 2) * width for point in some]
        below = [max(0.0, point.mean - min(point.ours)) for point in some]  # rounded, a mean can lie outside
        above = [max(0.0, max(point.ours) - point.mean) for point in some]
        axis.bar(
            at, [point.mean - base for point in some], 0.92 * width, base, yerr=(below, above), color=colours[method],
            label=method,
            error_kw={"elinewidth": 0.8, "ecolor": INK},
        )  # fmt: skip
        marks = [(x, point.paper) for x, point in zip(at, some, strict=True) if point.paper is not None]
        if marks:
            left, values = zip(*marks, strict=True)
            axis.hlines(
                values, [x - width / 2 for x in left], [x + width / 2 for x in left], color="#c01f2f", linewidth=1.6,
                label="" if marked else "the paper's", zorder=3,
            )  # fmt: skip
            marked = True
    if figure.log:
        axis.set_yscale("log", base=2)
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
    if base:
        axis.axhline(base, color=LINE, linewidth=0.8, zorder=0)
    axis.set_ylabel(units.pop() if len(units) == 1 else "", fontsize=8, color=INK)
    axis.set_xlabel(figure.x, fontsize=8, color=INK)
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    axis.tick_params(axis="y", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(LINE)
