"""The demo's result as one figure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GRID = "#333333", "#dddddd"
COLOURS = ("#2266aa", "#dd7722", "#55aa77")
# strategy -> its line, from below to above. Some move the same in every step: ever thinner, or with gaps, all are seen
LINES: dict[str, dict[str, Any]] = {
    "ring": {"color": "#dd7722", "linewidth": 5, "alpha": 0.45},
    "dynamic": {"color": "#2266aa", "linewidth": 2},
    "zigzag": {"color": "#444444", "linewidth": 1.2, "linestyle": "--"},
}
OTHER = {"color": "#55aa77", "linewidth": 2, "linestyle": ":"}


def draw(result: dict[str, Any], path: Path) -> bool:
    """Draw the result into a PNG file; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(12, 8), dpi=120, layout="constrained")
    (losses, differences), (moved, balance) = figure.subplots(2, 2)
    _draw_losses(losses, result)
    _draw_differences(differences, result)
    _draw_moved(moved, result)
    _draw_balance(balance, result)
    config = result["config"]
    masks = ", ".join(mask.partition(":")[0] for mask in config["masks"])
    title = (
        f"{result['parameters']:,} parameters on {config['ranks']} processes, {config['steps']} steps of up to "
        f"{config['tokens']:,} tokens; masks: {masks}"
    )
    figure.suptitle(title, fontsize=12, color=INK)
    figure.savefig(path, format="png")
    return True


def _draw_losses(axes: Axes, result: dict[str, Any]) -> None:
    loss, config = result["loss"], result["config"]
    axes.plot(loss["dense"], color=COLOURS[1], linewidth=5, alpha=0.5, label="one process, dense attention")
    axes.plot(loss["distributed"], color=COLOURS[0], label=f"{config['ranks']} processes, {config['strategy']} plans")
    _finish(axes, "Loss", "step", "nats per byte")


def _draw_differences(axes: Axes, result: dict[str, Any]) -> None:
    """Points on a logarithmic axis, which has no 0: steps without any difference are crosses below all others."""
    loss = result["loss"]
    gaps = [abs(ours - dense) for ours, dense in zip(loss["distributed"], loss["dense"], strict=True)]
    above = [(step, gap) for step, gap in enumerate(gaps) if gap > 0]
    equal = [step for step, gap in enumerate(gaps) if gap == 0]
    floor = min([loss["tolerance"] / 100, *(gap for _, gap in above)]) / 3
    axes.set_yscale("log")
    if above:
        axes.plot(*zip(*above, strict=True), "o", markersize=4, color=COLOURS[0], label="|distributed - dense|")
    if equal:
        label = f"exactly 0 in {len(equal)} of {len(gaps)} steps (height has no meaning)"
        axes.plot(equal, [floor] * len(equal), "x", markersize=5, color=COLOURS[0], label=label)
    axes.axhline(loss["tolerance"], color=COLOURS[1], linestyle="--", label="tolerance")
    _finish(axes, f"Difference of the losses: at most {loss['largest_difference']:.1e}", "step", "nats per byte")


def _draw_moved(axes: Axes, result: dict[str, Any]) -> None:
    names = [name for name in LINES if name in result["strategies"]]
    for name in [*names, *(name for name in result["strategies"] if name not in LINES)]:
        per_step = [step / 1e6 for step in result["strategies"][name]["bytes_per_step"]]
        mean = sum(per_step) / len(per_step)
        axes.plot(per_step, label=f"{name} (mean {mean:.1f} MB)", **LINES.get(name, OTHER))
    axes.set_ylim(0, 1.3 * max(max(figures["bytes_per_step"]) for figures in result["strategies"].values()) / 1e6 or 1)
    _finish(axes, "Moved between ranks, forward and backward, all layers", "step", "MB per step")


def _draw_balance(axes: Axes, result: dict[str, Any]) -> None:
    strategies = result["strategies"]
    for shift, key, colour, label in (
        (-0.2, "compute_imbalance", COLOURS[0], "computation"),
        (0.2, "token_imbalance", COLOURS[2], "tokens"),
    ):
        heights = [figures[key] for figures in strategies.values()]
        bars = axes.bar([place + shift for place in range(len(strategies))], heights, 0.38, color=colour, label=label)
        axes.bar_label(bars, fmt="%.2f", fontsize=9, color=INK)
    axes.axhline(1, color=INK, linewidth=1, linestyle=":")
    axes.set_xticks(range(len(strategies)), list(strategies))
    axes.margins(y=0.25)
    _finish(axes, "Imbalance (1 is even)", "", "largest rank / mean rank,\nsum of max / sum of mean over steps")


def _finish(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=11, color=INK)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID)
