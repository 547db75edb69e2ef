"""Results as text: a short table for each section."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.gpu.session import Row
from benchmarks.gpu.speed import PASSES
from benchmarks.gpu.targets import by, faster
from dyncp.report.table import columns


def section_text(name: str, section: Mapping[str, Any]) -> str:
    """What a section found, in short."""
    lines = [f"{name}: {section['seconds']:.0f} s"]
    if section["rows"]:
        lines.append(columns(TABLES[name](section["rows"])))
    if section["left_out"]:
        lines.append(f"left out for lack of time: {'; '.join(section['left_out'])}")
    if section.get("broken"):
        lines.append(f"BROKEN: {section['broken'].strip().splitlines()[-1]}")
    return "\n".join(lines)


def ms(seconds: float | None) -> str:
    """Seconds in milliseconds."""
    return "" if seconds is None else f"{seconds * 1e3:.3f}"


def check_table(rows: Sequence[Row]) -> list[list[str]]:
    """The worst of each dtype and contender, and every case that went wrong."""
    lines = [["dtype, by", "cases", "failed", "error/tolerance", "same bits", "error/fused"]]
    for (dtype, contender), own in by(rows, "dtype", "contender").items():
        ran = [row for row in own if "errors" in row]
        worst = f"{max(row['of_tolerance'] for row in ran):.3f}" if ran else "n/a"
        ratios = [row["ratio"] for row in own if "ratio" in row]
        cells = [str(len(own)), str(len(own) - len(ran)), worst, f"{sum(row['same_bits'] for row in ran)}"]
        lines.append([f"{dtype}, {contender}", *cells, f"{max(ratios):.2f}" if ratios else ""])
    return lines


def speed_table(rows: Sequence[Row]) -> list[list[str]]:
    """Each contender on each case; ours also as a multiple of the best peer's speed, by pass."""
    lines = [["ms (useful TFLOP/s)", *PASSES, "x best peer", "host ms", "build ms", "built + both ms"]]
    reasons: dict[str, int] = {}
    for group in by(rows, "mask", "tokens").values():
        peers = [row for row in group if row["peer"]]
        for row in group:
            size = f"blocks of {row['block_tokens']:,}" if "block_tokens" in row else row["contender"]
            cells = [pass_cell(row[name], reasons) for name in PASSES]
            times = [faster(row[name], [peer[name] for peer in peers]) for name in PASSES]
            compared = "" if row["peer"] or not peers else " ".join("-" if x is None else f"{x:.2f}" for x in times)
            others = [ms(row.get(name)) for name in ("host_s", "build_s", "built_s")]
            lines.append([f"{row['mask']} {row['tokens']:,}, {size}", *cells, compared, *others])
    return lines + [[f"[{number}] {words}"] for words, number in reasons.items()]


def pass_cell(found: Mapping[str, Any], reasons: dict[str, int]) -> str:
    """Milliseconds and useful TFLOP/s; or the number of the reason why there are none."""
    if "error" in found:
        return f"n/a [{reasons.setdefault(found['error'], len(reasons) + 1)}]"
    return f"{ms(found['median_s'])} ({found['flops_per_s'] * 1e-12:.3g})"


def moves_table(rows: Sequence[Row]) -> list[list[str]]:
    """Rates beside those of plain copies."""
    lines = [["", "MB", "GB/s", "plain copy", "of it"]]
    for row in rows:
        rates = [row["bytes_per_s"] * 1e-9, row["copy_bytes_per_s"] * 1e-9]
        figures = [f"{row['size_bytes'] / 1e6:.3g}", *(f"{rate:.4g}" for rate in rates), f"{rates[0] / rates[1]:.0%}"]
        lines.append([row["move"], *figures])
    return lines


def replay_table(rows: Sequence[Row]) -> list[list[str]]:
    """Each rank and pass, beside what the models say."""
    head = ["ms", "device", "by data sheet", "by table", "wall", "host", "instructions", "host us each", "syncs"]
    lines = [head]
    for row in rows:
        if "graph" in row:
            lines.append([f"CUDA graph of {row['pass']}: {row.get('error') or ms(row['median_s']) + ' ms'}"])
            continue
        times = [ms(row[name]) for name in ("median_s", "roofline_s", "table_s", "wall_s", "host_s")]
        syncs = "n/a" if row["host_syncs"] is None else str(row["host_syncs"])
        host = [str(row["instructions"]), f"{row['instruction_host_s'] * 1e6:.1f}", syncs]
        lines.append([f"{row['plan']}, rank {row['rank']}, {row['pass']}", *times, *host])
    return lines


def table_table(rows: Sequence[Row]) -> list[list[str]]:
    """Fixed costs, and launches that are too small for the chip."""
    fixed, *few = rows
    words = f"launch {fixed['launch_s'] * 1e6:.1f} us, other instruction {fixed['instruction_s'] * 1e6:.1f} us"
    lines = [[f"{words}, moves {fixed['bytes_per_s'] * 1e-9:.4g} GB/s"], ["ms", "measured", "by table"]]
    for row in few:
        label = f"{row['few']} items of {row['block_tokens']:,} tokens, {row['pass']}"
        lines.append([label, ms(row["median_s"]), ms(row["table_s"])])
    return lines


def tiles_table(rows: Sequence[Row]) -> list[list[str]]:
    """Each candidate, the fastest of each pass first."""
    lines = [["tiles (rows, keys..., warps, stages)", "ms", "useful TFLOP/s"]]
    for row in sorted(rows, key=lambda row: (row["pass"] == "backward", row.get("median_s", math.inf))):
        speed = [row["error"]] if "error" in row else [ms(row["median_s"]), f"{row['flops_per_s'] * 1e-12:.3g}"]
        lines.append([f"{row['pass']}, {row['tiles']}", *speed])
    return lines


TABLES: dict[str, Callable[[Sequence[Row]], list[list[str]]]] = {
    "check": check_table,
    "dense": speed_table,
    "masks": speed_table,
    "blocks": speed_table,
    "moves": moves_table,
    "replay": replay_table,
    "table": table_table,
    "tiles": tiles_table,
}
