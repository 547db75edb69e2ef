"""The result as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from dyncp.report.table import columns

LINK_WORDS = {
    "duplex_bytes_per_s": "both ways",
    "incast_bytes_per_s": "two into one together",
    "ring_bytes_per_s": "all in a ring",
    "mesh_bytes_per_s": "all to all",
}
HEAD = ["strategy", "tokens", "MB/link", "measured", "from", "to", "forward", "backward", "of dynamic"]
HEAD += ["predicted", "error", "by pairs"]


def result_text(result: Mapping[str, Any]) -> str:
    """All that was measured and predicted, for people to read."""
    parts = [settings_text(result)]
    for case in result["cases"]:
        parts.append(case_text(case))
    parts.append(errors_text(result["cases"]))
    return "\n\n".join(parts)


def settings_text(result: Mapping[str, Any]) -> str:
    """Machine, rate and calibration, and why the rate is what it is."""
    link, slower = result["link"], result["slower"]
    rate = result["rate"]
    lines = [
        f"{result['hosts']} hosts on links of {rate['bits_per_s'] / 1e6:g} Mbit/s, full duplex; "
        f"{result['processors']} processors, one thread per host",
        f"rate: {rate['why']}",
        f"link: {link['bytes_per_s'] * 8e-6:.1f} Mbit/s in one message, and {link['message_s'] * 1e3:.2f} ms for each"
        + "".join(f", {words} {link[key] * 8e-6:.1f}" for key, words in LINK_WORDS.items() if link[key]),
        f"computation: {computation_text(result)}; hosts at once take "
        + ", ".join(f"{count + 1}: {times:.2f}" for count, times in enumerate(slower))
        + " times as long as one alone",
        masks_text(result["masks"]),
    ]
    return "\n".join(lines)


def computation_text(result: Mapping[str, Any]) -> str:
    """What a host has of the processors."""
    if result["share"] is None:
        return f"hosts share the processors, as on {result['cores']:.2f} cores"
    block = f"a block takes {result['alone_s'] * 1e3:.2f} ms, and {result['alone_priced_s'] * 1e3:.2f} by the table"
    return f"each host has {result['share']:.3f} of a processor; {block}"


def masks_text(checks: Sequence[Mapping[str, Any]]) -> str:
    """How well blocks with masks are priced by their pairs."""
    errors = [each["priced_s"] / each["measured_s"] - 1 for each in checks]
    if not errors:
        return "blocks with masks: not measured"
    middle = median(abs(error) for error in errors)
    return f"blocks with masks, by the table: {min(errors):+.0%} to {max(errors):+.0%} off, {middle:.0%} in the median"


def case_text(case: Mapping[str, Any]) -> str:
    """One batch: its strategies, fastest first."""
    rows = sorted((row for row in case["strategies"] if "measured_s" in row), key=lambda row: row["measured_s"])
    dynamic = next((row["measured_s"] for row in rows if row["strategy"] == "dynamic"), None)
    cells = [row_cells(row, dynamic) for row in rows]
    title = f"{case['name']}: {case['tokens']} tokens in {case['sequences']} sequences"
    if rows:
        title += f"; other work took {median(row['others_share'] for row in rows):.0%} of the processors"
    lines = [title, columns([HEAD, *cells])]
    lines += [f"{row['strategy']}: {row['refused']}" for row in case["strategies"] if "refused" in row]
    return "\n".join(lines)


def row_cells(row: Mapping[str, Any], dynamic_s: float | None) -> list[str]:
    """The cells of one strategy; times in ms."""
    times = [row[key] * 1e3 for key in ("measured_s", "least_s", "most_s", "forward_s", "backward_s")]
    faster = f"{row['measured_s'] / dynamic_s:.2f} x" if dynamic_s else ""
    predicted = row.get("predicted_s")
    guess = [f"{predicted * 1e3:.0f}", f"{error_of(row):+.0%}"] if predicted else ["", ""]
    guess += [f"{row['by_pairs_s'] * 1e3:.0f}"] if row.get("by_pairs_s") else [""]
    of_plan = [row["strategy"], f"{row['tokens']:.2f}", f"{row['link_bytes'] / 1e6:.1f}"]
    return [*of_plan, *(f"{time:.0f}" for time in times), faster, *guess]


def error_of(row: Mapping[str, Any]) -> float:
    """The prediction's relative error."""
    return row["predicted_s"] / row["measured_s"] - 1


def errors_text(cases: Sequence[Mapping[str, Any]]) -> str:
    """How good predictions were, by strategy and in all, and whether they put strategies in the right order."""
    rows = [row for case in cases for row in case["strategies"] if row.get("predicted_s")]
    if not rows:
        return "no predictions"
    names = dict.fromkeys(row["strategy"] for row in rows)
    of_names = (f"{name} {median(abs(error_of(row)) for row in rows if row['strategy'] == name):.0%}" for name in names)
    overall = median(abs(error_of(row)) for row in rows)
    right, pairs = order_kept(cases)
    by_pairs = [abs(row["by_pairs_s"] / row["measured_s"] - 1) for row in rows if row.get("by_pairs_s")]
    return (
        f"error of predictions, median of all: {overall:.1%}; by strategy: {'; '.join(of_names)}\n"
        + (f"with masks priced by their pairs alone: {median(by_pairs):.1%}\n" if by_pairs else "")
        + f"largest: {max(abs(error_of(row)) for row in rows):.0%}\n"
        f"of {pairs} pairs of strategies whose medians differ by more than their spreads, {right} are predicted in "
        "their order"
    )


def order_kept(cases: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """Of the pairs of strategies on a batch whose runs do not overlap, how many are predicted in the order measured;
    and the number of pairs."""
    right = pairs = 0
    for case in cases:
        rows = [row for row in case["strategies"] if row.get("predicted_s")]
        for a in rows:
            for b in rows:
                if a["most_s"] < b["least_s"]:
                    pairs += 1
                    right += a["predicted_s"] < b["predicted_s"]
    return right, pairs
