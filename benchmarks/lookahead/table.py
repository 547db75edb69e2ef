"""Results as text: a table per section, and the targets at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dyncp.report.table import columns

Row = Mapping[str, Any]


def result_text(result: Mapping[str, Any]) -> str:
    """All tables."""
    parts = [machine_text(result["machine"])]
    for name, rows in result["tables"].items():
        title, head, cells = TABLES[name]
        shown = [cells(row) for row in rows if "skipped" not in row]
        skipped = [f"{row['store']}: skipped, {row['skipped']}" for row in rows if "skipped" in row]
        parts.append("\n".join([f"{name}: {title}", columns([head, *shown]), *skipped]))
    return "\n\n".join([*parts, *targets(result["tables"])])


def machine_text(machine: Mapping[str, Any]) -> str:
    """Where and with what it was measured."""
    names = ("python", "numpy", "numba", "torch", "msgspec", "redis", "redis-server")
    versions = ", ".join(f"{name} {machine[name]}" for name in names if machine.get(name))
    return f"{machine['date']}: {machine['cpu']}, {machine['cores']} cores; dyncp {machine['dyncp']}, {versions}"


def share(part: float) -> str:
    """A part of the whole."""
    return f"{part:.1%}" if part >= 0.1 else f"{part:.2%}"


def sleeping_cells(row: Row) -> list[str]:
    figures = [share(row["waited_share"]), share(row["expected_share"]), f"{row['start_s']:.2f}"]
    return [
        f"{row['iteration_s']:g} s",
        f"{row['plan_s']:g} s",
        str(row["workers"]),
        str(row["kappa"]),
        str(row["iterations"]),
        *figures,
    ]


def cluster_cells(row: Row) -> list[str]:
    waits = [share(row[name]) for name in ("waited_share", "waited_share_mean", "waited_share_overall", "longer_share")]
    trainer = "one core busy" if row["busy_core"] else "asleep"
    counts = [str(row[name]) for name in ("kappa", "iterations", "planned_elsewhere", "planned_here")]
    return [trainer, f"{row['iteration_s']:g} s", *counts, *waits, f"{row['start_s']:.2f}"]


def size_cells(row: Row) -> list[str]:
    return [f"{row['plans_per_s']:.3g}", f"{row['largest_bytes'] / 1e3:.1f}", f"{row['mean_bytes'] / 1e3:.1f}"]


def ranks_cells(row: Row) -> list[str]:
    return [f"{row['ranks']:,}", f"{row['tokens']:,}", str(row["batches"]), *size_cells(row)]


def mask_cells(row: Row) -> list[str]:
    return [row["mask"], row["lengths"], str(row["block_tokens"]), str(row["batches"]), *size_cells(row)]


def store_cells(row: Row) -> list[str]:
    return [row["store"], row["what"], f"{row['size_bytes'] / 1e3:.1f}", *(f"{row[name]:.3f}" for name in TIMES)]


def loader_cells(row: Row) -> list[str]:
    parts = [f"{row[f'{name}_ms']:.2f}" for name in ("next", "plan", "tokens", "fetch")]
    return [f"{row['tokens_per_rank']:,}", "yes" if row["key"] else "no", *parts]


def remote_cells(row: Row) -> list[str]:
    each = " + ".join(map(str, row["made_by_each"]))
    figures = [str(row["planners"]), str(row["plans"]), each, f"{row['plans_per_s']:.1f}"]
    return [str(row["ranks"]), f"{row['tokens']:,}", *figures]


WAITS = ("waited", "mean", "overall", "longer")
TIMES = ("median_ms", "p99_ms")
SIZE_HEAD = ["plans/s", "largest kB", "mean kB"]
# name -> title, heads of columns, cells of a row
TABLES: dict[str, tuple[str, list[str], Callable[[Row], list[str]]]] = {
    "sleeping": (
        "waiting with planners that sleep, after the first kappa iterations, and by arithmetic",
        ["iteration", "plan", "workers", "kappa", "iterations", "waited", "expected", "start s"],
        sleeping_cells,
    ),
    "cluster": (
        "waiting of 32 ranks with the real planner: of the rank that waited most, the mean, and with the start",
        ["trainer", "iteration", "kappa", "iterations", "elsewhere", "here", *WAITS, "start s"],
        cluster_cells,
    ),
    "ranks": (
        "plans per second of one planner process, and bytes of a rank's part, by ranks",
        ["ranks", "tokens", "batches", *SIZE_HEAD],
        ranks_cells,
    ),
    "masks": (
        "the same for 131,072 tokens on 32 ranks, by masks",
        ["mask", "lengths", "blocks", "batches", *SIZE_HEAD],
        mask_cells,
    ),
    "stores": ("one rank's part through a store, ms", ["store", "what", "kB", "median", "99%"], store_cells),
    "loader": (
        "ms of the trainer's thread in each iteration, and of fetching a plan in the background",
        ["tokens", "key", "next()", "plan", "tokens", "fetch"],
        loader_cells,
    ),
    "remote": (
        "plans per second of `dyncp planner` processes",
        ["ranks", "tokens", "planners", "plans", "made by each", "plans/s"],
        remote_cells,
    ),
}
# table -> the figure with a target, the row's key of the target, and what it is called
TARGETS = {
    "sleeping": ("waited_share", "target", "waiting where planners can keep up"),
    "cluster": ("waited_share", "target", "waiting with the real planner"),
    "masks": ("largest_bytes", "target", "bytes of one rank's part"),
    "stores": ("median_ms", "target_ms", "ms of the whole way by tcp"),
}


def targets(tables: Mapping[str, Sequence[Row]]) -> list[str]:
    """Each target, and the worst of what it asks for."""
    lines = []
    for name, (figure, limit, what) in TARGETS.items():
        rows = [row for row in tables.get(name, ()) if row.get(limit) is not None]
        if rows:
            worst = max(rows, key=lambda row: row[figure] / row[limit])
            met = sum(row[figure] <= row[limit] for row in rows)
            lines.append(
                f"{what}: at most {worst[limit]:g} asked, {worst[figure]:.4g} at worst; {met} of {len(rows)} met"
            )
    return ["\n".join(lines)] if lines else []
