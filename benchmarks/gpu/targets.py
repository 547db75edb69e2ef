"""What was asked of the numbers, and what went wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.gpu.cases import DENSE, SPARSE
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.session import Row
from benchmarks.gpu.speed import PASSES
from dyncp.report.table import columns

MOST_RATIO = 1.5  # our errors over those of PyTorch's fused kernels
OF_BEST_PEER = 0.9
OF_FLEX = 1.2
TOY = "not judged (toy)"
Sections = Mapping[str, Mapping[str, Any]]


class Target(NamedTuple):
    """What was asked for and what was measured; `met` is None where that cannot be said."""

    name: str
    asked: str
    measured: str
    met: bool | None


def failures(sections: Sections) -> list[str]:
    """What is wrong: errors past the tolerance, kernels of ours that do not run, and sections that broke."""
    found = []
    for name, section in sections.items():
        if section.get("broken"):
            found.append(f"{name} broke: {section['broken'].strip().splitlines()[-1]}")
        for row in section["rows"]:
            if name == "check" and not row["peer"] and not row["ok"]:
                why = row.get("error") or ", ".join(f"{key} {value:.1e}" for key, value in row["errors"].items())
                found.append(f"{name}: {row['contender']}, {row['case']}: {why}")
            elif row.get("peer") is False:
                errors = {row[which]["error"] for which in PASSES if which in row and "error" in row[which]}
                found += [f"{name}: {row['contender']}, {row['mask']} {row['tokens']:,}: {why}" for why in errors]
    return found


def targets(sections: Sections, kernels: str, scale: Scale) -> list[Target]:
    """All targets of the sections that ran, for one set of kernels."""
    makers = {"check": check_targets, "dense": dense_targets, "masks": mask_targets, "replay": replay_targets}
    made = []
    for name, maker in makers.items():
        if name in sections and sections[name]["rows"]:
            made += maker(sections[name]["rows"], kernels, scale)
    return made


def check_targets(rows: Sequence[Row], kernels: str, scale: Scale) -> list[Target]:
    """Errors, errors beside those of fused kernels, and bits."""
    own = [row for row in rows if row["contender"] == kernels]
    ran = [row for row in own if "errors" in row]
    made = []
    for (dtype,), group in by(own, "dtype").items():
        worst = max((row.get("of_tolerance", math.inf) for row in group), default=math.inf)
        met = all(row["ok"] for row in group)
        made.append(Target(f"errors in {dtype}, {len(group)} cases, of the tolerance", "<= 1", f"{worst:.3f}", met))
    held = [row for row in ran if "ratio" in row and row["dtype"] != "float32"]
    worst = max((row["ratio"] for row in held), default=None)
    met = None if worst is None or not scale.judged else worst <= MOST_RATIO
    shown = "n/a: no fused kernel ran" if worst is None else f"{worst:.2f}, to {held[0]['ratio_to']}"
    made.append(Target("errors beside a fused kernel's", f"<= {MOST_RATIO}", shown, met))
    same = sum(row["same_bits"] for row in ran)
    made.append(Target("the same bits in a second run", "all", f"{same} of {len(ran)}", same == len(ran)))
    return made


def dense_targets(rows: Sequence[Row], kernels: str, scale: Scale) -> list[Target]:
    """Against the best peer, at the worst of the lengths that count."""
    made = []
    long = [row for row in rows if row["tokens"] >= scale.judged_tokens]
    for kind in DENSE:
        for name in PASSES:
            found = []
            for (_, tokens), group in by((row for row in long if row["mask"] == kind), "mask", "tokens").items():
                mine = [row[name] for row in group if row["contender"] == kernels]
                times = faster(mine[0], [row[name] for row in group if row["peer"]])
                found += [] if times is None else [(times, tokens)]
            shown = "n/a" if not found else f"{min(found)[0]:.2f} at {min(found)[1]:,}"
            met = min(found)[0] >= OF_BEST_PEER if found and scale.judged else None
            made.append(Target(f"{kind}, {name}: speed of the best peer", f">= {OF_BEST_PEER}", shown, met))
    return made


def mask_targets(rows: Sequence[Row], kernels: str, scale: Scale) -> list[Target]:
    """Against FlexAttention, forward and backward together, at the longest length; without and with building."""
    made = []
    longest = max(row["tokens"] for row in rows)
    for kind in SPARSE:
        group = [row for row in rows if (row["mask"], row["tokens"]) == (kind, longest)]
        mine, peers = ([row for row in group if row["peer"] is peer] for peer in (False, True))
        mine = [row for row in mine if row["contender"] == kernels]
        if not mine:
            continue
        plain = faster(mine[0]["both"], [row["both"] for row in peers])
        ran = [row if "median_s" in row["both"] else {} for row in (mine[0], *peers)]
        built = [{"median_s": row["built_s"]} if row else {} for row in ran]
        built_too = faster(built[0], built[1:])
        shown = "n/a" if plain is None or built_too is None else f"{built_too:.2f} ({plain:.2f} without building)"
        met = built_too >= OF_FLEX if built_too is not None and scale.judged else None
        made.append(Target(f"{kind} {longest:,}: speed of FlexAttention", f">= {OF_FLEX}", shown, met))
    return made


def replay_targets(rows: Sequence[Row], kernels: str, scale: Scale) -> list[Target]:
    """Host and device do not wait for each other."""
    syncs = [row["host_syncs"] for row in rows if row.get("host_syncs") is not None]
    shown = str(max(syncs)) if syncs else "n/a: no GPU"
    return [Target("waits of the host in a pass, in the steady state", "0", shown, max(syncs) == 0 if syncs else None)]


def targets_text(made: Sequence[Target], scale: Scale) -> str:
    """A line for each."""
    unknown = "n/a" if scale.judged else TOY
    words = {True: "ok", False: "MISSED", None: unknown}
    return columns([["target", "asked", "measured", ""], *([*each[:3], words[each.met]] for each in made)])


def by(rows: Iterable[Row], *names: str) -> dict[tuple, list[Row]]:
    """Rows that agree in some of their columns."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def faster(ours: Mapping[str, Any], peers: Iterable[Mapping[str, Any]]) -> float | None:
    """How many times as fast as the best of some peers; None where one side has no time."""
    times = [peer["median_s"] for peer in peers if "median_s" in peer]
    return min(times) / ours["median_s"] if times and "median_s" in ours else None
