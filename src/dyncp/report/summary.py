"""A plan in numbers: what it moves, how even it is, what it needs and what it took to make."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dyncp.cost.model import block_seconds
from dyncp.cost.roofline import Roofline
from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import HAS_Q, Blocks
from dyncp.ir.plan import PASSES, Attention, CommLaunch, Kind, Pass, Plan, PlanHeader, Program
from dyncp.planner.partition.balance import asked_epsilon
from dyncp.planner.partition.bounds import PassBound, lower_bound
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
    """The figures of a plan that was just made: those of `plan_figures` and of `bound_figures`, `time_imbalance` (as
    `compute_imbalance`, but of the seconds that the cluster's cost model gives each block), how long planning took
    (`planning_s`, in total and by stage), and `notes`, which say what limits on balance could not be met, and whether
    the layout is another strategy's."""
    figures = plan_figures(planned.plan, planned.layout.blocks)
    return {
        **figures,
        "time_imbalance": time_imbalance(planned),
        **bound_figures(planned, figures),
        "planning_s": {"total": sum(planned.seconds.values()), **planned.seconds},
        "notes": list(planned.layout.notes),
    }


def time_imbalance(planned: Planned) -> float:
    """The most seconds of computation of a rank over the mean, as the cost model has them, of all layers."""
    blocks, header = planned.layout.blocks, planned.plan.header
    seconds = block_seconds(blocks, header.shape, Roofline.of(planned.cluster))
    weighted = seconds * np.asarray(blocks.mask_weights)[blocks.mask]
    rank = planned.layout.placement.comp_rank.ravel()
    return _imbalance(np.bincount(rank, np.tile(weighted, blocks.groups), header.ranks))


def bound_figures(planned: Planned, figures: dict[str, Any]) -> dict[str, Any]:
    """How few bytes any placement of the batch can move at the balance that is allowed, or that the plan has if it is
    worse (`planner.partition.bounds`): of the forward pass `bound_bytes` and `bound_inter_node_bytes`, and
    `bound_ratio`, what the plan moves over the first (None where nothing need move); the same of both passes with one
    placement under `both`, with what the plan moves there."""
    header, options = planned.plan.header, planned.options
    compute = [part["compute_imbalance"] for part in figures.get("masks", {"": figures}).values()]
    epsilon = max(asked_epsilon(options), max(compute) - 1)
    token_epsilon = max(options.token_epsilon, figures["token_imbalance"] - 1)
    bound = lower_bound(planned.batch, header.shape, header.cluster, epsilon, token_epsilon, header.keep, header.wire)
    both = {key: figures[key] + figures["backward"][key] for key in ("total_bytes", "inter_node_bytes")}
    return {**_bound_keys(bound.forward, figures), "both": {**both, **_bound_keys(bound.both, both)}}


def _bound_keys(bound: PassBound, figures: dict[str, Any]) -> dict[str, Any]:
    return {
        "bound_bytes": bound.total_bytes,
        "bound_inter_node_bytes": bound.inter_node_bytes,
        "bound_ratio": figures["total_bytes"] / bound.total_bytes if bound.total_bytes > 0 else None,
    }


def plan_figures(plan: Plan, blocks: Blocks | None = None) -> dict[str, Any]:
    """What a plan itself says of its cost, as one JSON-able dictionary.

    The figures of the forward pass stand at the top, those of the backward pass under `backward`. Bytes are the payload
    of all messages between ranks, counted from the plan's own `CommLaunch` instructions. Of several masks, `pairs`,
    bytes and messages are sums in which each mask counts as often as its weight says; each mask's own figures stand
    under `masks`. `pairs` counts (query, key) pairs of one head. `block_tokens` is the size of the largest token block,
    whatever was asked for, and `token_blocks` their number. `compute_imbalance` and `token_imbalance` are the largest
    rank's share over the mean. `peak_buffer_bytes` is the scratch and kept memory of the rank that needs most, under
    the mask that needs most.

    Args:
        plan: the plan.
        blocks: what it was made from, where that is at hand: pairs need not be counted again then.
    """
    header = plan.header
    sizes, queries = header.tokens.tokens, (header.tokens.role & HAS_Q) > 0
    weights = np.array(header.mask_weights)
    traffic = {pass_.name: [_mask_traffic(plan, mask, pass_) for mask in range(len(weights))] for pass_ in PASSES}
    forward, backward = (_weighted(traffic[pass_.name], weights) for pass_ in PASSES)
    work = computed_pairs(plan, blocks)
    pairs = work.sum(axis=1) / header.shape.groups
    figures = {
        "strategy": header.strategy,
        "ranks": header.ranks,
        "nodes": header.nodes,
        "shape": asdict(header.shape),
        "sequences": int(header.tokens.sequence.max()) + 1,
        "tokens": int(sizes[queries].sum()),
        "pairs": _number(pairs @ weights),
        "block_tokens": int(sizes.max()),
        "token_blocks": len(header.tokens),
        **forward.figures(header),
        "compute_imbalance": _imbalance(weights @ work),
        "token_imbalance": _imbalance(np.bincount(header.owner, sizes, minlength=header.ranks)),
        "idle_ranks": np.flatnonzero(work.sum(axis=0) == 0).tolist(),
        "backward": {**backward.figures(header), "compute_imbalance": _imbalance(weights @ work)},
    }
    if len(weights) > 1:
        figures["masks"] = {
            name: {
                "weight": header.mask_weights[mask],
                "pairs": _number(pairs[mask]),
                **traffic["forward"][mask].figures(header),
                "compute_imbalance": _imbalance(work[mask]),
                "backward": traffic["backward"][mask].figures(header),
            }
            for mask, name in enumerate(header.mask_names)
        }
    return figures


def computed_pairs(plan: Plan, blocks: Blocks | None = None) -> Ints:
    """float64[masks, R]: unmasked pairs that each rank computes under each mask, counted once per head group."""
    header = plan.header
    work = np.zeros((len(header.mask_names), header.ranks))
    for rank, programs in enumerate(plan.programs):
        for mask, program in enumerate(programs):
            comps = program.comps
            if blocks is not None:
                pairs = blocks.pairs[comps.index]
            else:
                pairs = np.array([comps.mask(comp, header.tokens).pairs() for comp in range(len(comps))], "int64")
            for instruction in program.forward.instructions:
                if isinstance(instruction, Attention):
                    work[mask, rank] += pairs[instruction.comp].sum()
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
    """A summary as a table for people, with or without what only `summarize` adds to `plan_figures`."""
    rows = []
    if "planning_s" in summary:
        planning = summary["planning_s"]
        parts = ", ".join(f"{name} {format_seconds(time_s)}" for name, time_s in planning.items() if name != "total")
        rows.append(("planning", f"{format_seconds(planning['total'])} ({parts})"))
    rows.append(("compute", f"{summary['compute_imbalance']:.3f} max/mean over ranks"))
    if "time_imbalance" in summary:
        rows.append(("  in time", f"{summary['time_imbalance']:.3f} max/mean over ranks"))
    rows.append(("tokens", f"{summary['token_imbalance']:.3f} max/mean over ranks"))
    if summary["idle_ranks"]:
        rows.append(("idle ranks", ", ".join(map(str, summary["idle_ranks"]))))
    if "bound_bytes" in summary:
        rows.append(("bound", f"{_bound_text(summary)} forward, {_bound_text(summary['both'])} both ways"))
    lines = [head_text(summary), *map(_head_line, rows)]
    lines += ["", columns(_pass_rows(summary)), *(f"note: {note}" for note in summary.get("notes", ()))]
    return "\n".join(lines)


def _bound_text(figures: dict[str, Any]) -> str:
    ratio = figures["bound_ratio"]
    return f"{format_bytes(figures['bound_bytes'])}{'' if ratio is None else f' (moved {ratio:.2f} x)'}"


def head_text(summary: dict[str, Any]) -> str:
    """What was planned, in five lines: strategy, batch, ranks, blocks and attention layer."""
    count, blocks, shape = summary["sequences"], summary["token_blocks"], summary["shape"]
    nodes, per_node = summary["nodes"], summary["ranks"] // summary["nodes"]
    masks = " + ".join(f"{part['weight']:g} x {name}" for name, part in summary.get("masks", {}).items())
    values = f" (values of {shape['v_head_dim']})" if shape["v_head_dim"] != shape["head_dim"] else ""
    rows = [
        ("strategy", summary["strategy"]),
        (
            "batch",
            f"{_count(count, 'sequence')}, {_count(summary['tokens'], 'token')}, {_count(summary['pairs'], 'pair')}"
            f"{masks and f' ({masks})'}",
        ),
        ("ranks", f"{summary['ranks']} ({_count(nodes, 'node')} x {per_node})"),
        ("block", f"up to {_count(summary['block_tokens'], 'token')} ({_count(blocks, 'block')})"),
        (
            "shape",
            f"{_count(shape['q_heads'], 'query head')} and {_count(shape['kv_heads'], 'KV head')} of "
            f"{shape['head_dim']}{values}, {shape['dtype']}",
        ),
    ]
    return "\n".join(map(_head_line, rows))


def _head_line(row: tuple[str, str]) -> str:
    return f"{row[0]:<12}{row[1]}"


def _count(number: float, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


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
