"""The demo's result as a table for people."""

from __future__ import annotations

from typing import Any

from dyncp.report.table import columns, format_bytes, format_seconds


def result_table(result: dict[str, Any]) -> str:
    """The result as lines of text: the loss curves, the strategies side by side, planning and time."""
    loss, planning, seconds, config = (result[key] for key in ("loss", "planning", "seconds", "config"))
    own, dense = loss["distributed"], loss["dense"]
    verdict = "they coincide" if result["passed"] else f"THEY DIFFER by more than {loss['tolerance']:g}"
    head = [
        ("trained", f"{len(own)} steps, {result['parameters']:,} parameters, {config['ranks']} processes"),
        ("loss", f"{own[0]:.4f} to {own[-1]:.4f} nats per byte; dense attention, one process: {dense[-1]:.4f}"),
        ("curves", f"largest difference {loss['largest_difference']:.1e}: {verdict}"),
        (
            "planning",
            f"{planning['plans']} plans, {format_seconds(planning['planning_s'])}, of which "
            f"{format_seconds(planning['busiest_s'])} on the busiest rank; training waited "
            f"{format_seconds(planning['waited_s'])}, {format_seconds(planning['first_wait_s'])} of it before the "
            f"first step; hidden (1 - waited / busiest) {planning['hidden']:.0%}, "
            f"{planning['hidden_after_first_step']:.0%} after that step",
        ),
        (
            "time",
            f"{format_seconds(seconds['total'])}: {config['ranks']} processes {format_seconds(seconds['distributed'])} "
            f"(steps {format_seconds(seconds['training_steps'])}), dense {format_seconds(seconds['dense'])} "
            f"(a reference for correctness, not a speed comparison), "
            f"planning the baselines {format_seconds(seconds['comparison'])}",
        ),
    ]
    lines = ["", *(f"{name:<10}{text}" for name, text in head), "", columns(_strategy_rows(result)), ""]
    return "\n".join(lines)


def _strategy_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    strategies, steps = result["strategies"], len(result["loss"]["dense"])
    own = strategies[result["config"]["strategy"]]["total_bytes"]
    rows: list[tuple[str, ...]] = [("the same batches under", *strategies)]
    for label, key in (("moved, forward", "forward_bytes"), ("moved, backward", "backward_bytes")):
        rows.append((label, *(format_bytes(figures[key]) for figures in strategies.values())))
    rows.append(("moved per step", *(format_bytes(figures["total_bytes"] / steps) for figures in strategies.values())))
    ratios = (figures["total_bytes"] / own if own else float("inf") for figures in strategies.values())
    rows.append(("  relative", *(f"{ratio:.2f}" if own else "-" for ratio in ratios)))
    for label, key in (("computation, max/mean", "compute_imbalance"), ("tokens, max/mean", "token_imbalance")):
        rows.append((label, *(f"{figures[key]:.2f}" for figures in strategies.values())))
    return rows
