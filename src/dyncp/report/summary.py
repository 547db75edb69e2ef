"""A plan in numbers: what it moves, how even it is, what it needs and what it took to make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.plan import PASSES, Attention, CommLaunch, Kind, Pass, Plan, PlanHeader, Program
from dyncp.report.table import columns, format_bytes, format_seconds
from dyncp.strategies import Planned


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one pass sends and holds; of several masks, the weighted sum (but the largest buffer)."""

    sent_bytes: Ints  # float64[R, R, len(Kind)], from rank, to rank
    messages: float
    peak_buffer_bytes: int

    def figures(self, header: PlanHeader) -> dict[str, Any]:
        """The keys that the summary gives for each pass."""
        node = np.arange(header.ranks) // header.ranks_per_node
        crosses_nodes = node[:, None] != node[None, :]
        by_kind = self.sent_bytes.sum(axis=(0, 1))
        return {
            "total_bytes": _number(by_kind.sum()),
            "inter_node_bytes": _number(self.sent_bytes[crosses_nodes].sum()),
            "max_recv_bytes": _number(self.sent_bytes.sum(axis=(0, 2)).max()),
            "messages": _number(self.messages),
            "peak_buffer_bytes": self.peak_buffer_bytes,
            "bytes_by_kind": {kind.name.lower(): _number(by_kind[kind]) for kind in Kind if by_kind[kind]},
        }


def summarize(planned: Planned) -> dict[str, Any]:
    """A plan's figures, as one JSON-able dictionary.

    The figures of the forward pass stand at the top, those of the backward pass under `backward`. Bytes are the payload
    of all messages between ranks, counted from the plan's own `CommLaunch` instructions. `pairs`, bytes and messages
    are sums over the batch's masks, each taken as often as its weight says; each mask's own figures stand under `masks`
    where there are several. `compute_imbalance` and `token_imbalance` are the largest rank's share over the mean.
    `peak_buffer_bytes` is the scratch and kept memory of the rank that needs most, under the mask that needs most.
    `notes` says which constraints were not met.
    """
    plan, blocks = planned.plan, planned.layout.blocks
    header = plan.header
    weights = np.array(header.mask_weights)
    traffic = {pass_.name: [_mask_traffic(plan, mask, pass_) for mask in range(len(weights))] for pass_ in PASSES}
    forward, backward = (_weighted(traffic[pass_.name], weights) for pass_ in PASSES)
    work = computed_pairs(planned)
    tokens = np.bincount(header.owner, header.tokens.tokens, minlength=header.ranks)
    pairs = np.bincount(blocks.mask, blocks.pairs, minlength=len(weights))
    summary = {
        "strategy": header.strategy,
        "ranks": header.ranks,
        "nodes": header.nodes,
        "sequences": len(planned.batch.sequences),
        "tokens": planned.batch.tokens,
        "pairs": _number(pairs @ weights),
        "block_tokens": planned.options.block_tokens,
        **forward.figures(header),
        "compute_imbalance": _imbalance(weights @ work),
        "token_imbalance": _imbalance(tokens),
        "idle_ranks": np.flatnonzero(work.sum(axis=0) == 0).tolist(),
        "planning_s": {"total": sum(planned.seconds.values()), **planned.seconds},
        "notes": list(planned.layout.notes),
        "backward": {**backward.figures(header), "compute_imbalance": _imbalance(weights @ work)},
    }
    if len(weights) > 1:
        summary["masks"] = {
            name: {
                "weight": header.mask_weights[mask],
                "pairs": _number(pairs[mask]),
                **traffic["forward"][mask].figures(header),
                "compute_imbalance": _imbalance(work[mask]),
                "backward": traffic["backward"][mask].figures(header),
            }
            for mask, name in enumerate(header.mask_names)
        }
    return summary


def computed_pairs(planned: Planned) -> Ints:
    """float64[masks, R]: unmasked pairs that each rank computes under each mask, counted once per head group."""
    header, pairs = planned.plan.header, planned.layout.blocks.pairs
    work = np.zeros((len(header.mask_names), header.ranks))
    for rank, programs in enumerate(planned.plan.programs):
        for mask, program in enumerate(programs):
            for instruction in program.forward.instructions:
                if isinstance(instruction, Attention):
                    work[mask, rank] += pairs[program.comps.index[instruction.comp]].sum()
    return work


def launch_bytes(header: PlanHeader, program: Program, launch: CommLaunch, send: bool) -> tuple[Ints, Ints, Ints]:
    """(int32[k] peer, uint8[k] kind, int64[k] bytes) of each slot that a launch sends, or receives."""
    message = np.repeat(np.arange(len(launch.peer)), np.diff(launch.ptr))
    chosen = launch.send[message] == send
    slots = launch.slots[chosen]
    kind, block = program.slots.kind[slots], program.slots.block[slots]
    size_bytes = np.zeros(len(slots), "int64")
    for wire in (False, True):
        for value in np.unique(kind):
            here = (kind == value) & (program.slots.wire[slots] == wire)
            size_bytes[here] = header.piece_bytes(Kind(value), wire)[block[here]]
    return launch.peer[message[chosen]], kind, size_bytes


def _mask_traffic(plan: Plan, mask: int, pass_: Pass) -> Traffic:
    header = plan.header
    sent = np.zeros((header.ranks, header.ranks, len(Kind)))
    messages, peak = 0, 0
    for rank, programs in enumerate(plan.programs):
        program: Program = getattr(programs[mask], pass_.name)
        peak = max(peak, program.arena_bytes + program.kept_bytes)
        for instruction in program.instructions:
            if isinstance(instruction, CommLaunch):
                messages += int(instruction.send.sum())
                peer, kind, size_bytes = launch_bytes(header, program, instruction, send=True)
                np.add.at(sent[rank], (peer, kind), size_bytes)
    return Traffic(sent, messages, peak)


def _weighted(parts: list[Traffic], weights: Ints) -> Traffic:
    return Traffic(
        sum(weight * part.sent_bytes for part, weight in zip(parts, weights, strict=True)),
        float(sum(weight * part.messages for part, weight in zip(parts, weights, strict=True))),
        max(part.peak_buffer_bytes for part in parts),
    )


def _imbalance(share: Ints) -> float:
    total = float(share.sum())
    return float(share.max()) * len(share) / total if total else 1.0


def _number(value: float) -> int | float:
    """An integer where it is one, so that JSON shows counts as counts."""
    return int(value) if float(value).is_integer() else float(value)


def summary_text(summary: dict[str, Any]) -> str:
    """A summary as a table for people."""
    idle, planning = summary["idle_ranks"], summary["planning_s"]
    parts = ", ".join(f"{name} {format_seconds(time_s)}" for name, time_s in planning.items() if name != "total")
    count = summary["sequences"]
    nodes, per_node = summary["nodes"], summary["ranks"] // summary["nodes"]
    head = [
        ("strategy", summary["strategy"]),
        ("batch", f"{count:,} sequence{'s' * (count > 1)}, {summary['tokens']:,} tokens, {summary['pairs']:,} pairs"),
        ("ranks", f"{summary['ranks']} ({nodes} node{'s' * (nodes > 1)} x {per_node})"),
        ("block", f"{summary['block_tokens']:,} tokens"),
        ("planning", f"{format_seconds(planning['total'])} ({parts})"),
        ("compute", f"{summary['compute_imbalance']:.3f} max/mean over ranks"),
        ("tokens", f"{summary['token_imbalance']:.3f} max/mean over ranks"),
    ]
    if idle:
        head.append(("idle ranks", ", ".join(map(str, idle))))
    lines = [f"{name:<12}{value}" for name, value in head]
    lines += ["", columns(_pass_rows(summary)), *(f"note: {note}" for note in summary["notes"])]
    return "\n".join(lines)


def _pass_rows(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    passes = [("forward", summary), ("backward", summary["backward"])]
    for name, mask in summary.get("masks", {}).items():
        passes += [(f"{name} fwd", mask), (f"{name} bwd", mask["backward"])]
    figures = [figures for _, figures in passes]
    kinds = list(dict.fromkeys(kind for part in figures for kind in part["bytes_by_kind"]))
    rows: list[tuple[str, ...]] = [("", *(name for name, _ in passes))]
    for label, key in (("moved", "total_bytes"), ("between nodes", "inter_node_bytes")):
        rows.append((label, *(format_bytes(part[key]) for part in figures)))
    rows[2:2] = [
        (f"  {kind}", *(format_bytes(part["bytes_by_kind"].get(kind, 0)) for part in figures)) for kind in kinds
    ]
    rows.append(("most received", *(format_bytes(part["max_recv_bytes"]) for part in figures)))
    rows.append(("messages", *(f"{part['messages']:,}" for part in figures)))
    rows.append(("peak buffer", *(format_bytes(part["peak_buffer_bytes"]) for part in figures)))
    return rows
