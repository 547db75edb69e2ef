"""What the simulator is told of this machine and this network, measured at the start of a benchmark.

Blocks, moves and instructions are measured by processes like the hosts' own, one thread each, all at once and each held
to its share of a processor. Links, and how hosts slow each other down, are measured between the hosts' processes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.network.batches import SHAPE
from benchmarks.network.pieces import Piece, form_masks, seconds_of, spinning_share
from benchmarks.network.process import die_with_parent, environment, go_first
from benchmarks.network.quiet import Patience
from benchmarks.network.shares import Shares, join
from benchmarks.network.team import Team, TeamError
from dyncp.cost.model import FORMS, Work
from dyncp.cost.profiled import Profiled
from dyncp.cost.roofline import PRODUCTS, TILE
from dyncp.ir.cluster import Cluster
from dyncp.ir.mask import Mask
from dyncp.ir.plan import FORWARD, PASSES, Kind, Plan
from dyncp.ir.shape import AttentionShape
from dyncp.simulator.program import attention_seconds

SIZES = (16, 64, 128, 256, 384, 512, 768, 1024, 2048)
QUICK_SIZES = (16, 128, 512, 1024)
MOVED_TOKENS = 384  # of a slot, as blocks on the measured network have them
MOVED_ITEMS = 8
WAIT_RATIO = 3.0  # time of a ring's bytes on a link over time of computation
COMPUTED_TOKENS, COMPUTED_S = 512, 0.5  # of what is computed to see how hosts slow each other down
LINK_BYTES = 2_000_000
REPEATS = 5
Cell = tuple[str, str, int, int, float]  # pass, form, which query and KV tokens, seconds


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """Measured between hosts, by messages as the executor sends them.

    Args:
        message_s: of one message of one byte, from the start on both hosts until both are done.
        bytes_per_s: of one large message, without `message_s`.
        duplex_bytes_per_s: of each of two that cross between two hosts.
        incast_bytes_per_s: of two together from two hosts into one.
        ring_bytes_per_s: of each of the messages from every host to the next, all at once.
        mesh_bytes_per_s: of each host's messages to all others together, all hosts at once.
    """

    message_s: float
    bytes_per_s: float
    duplex_bytes_per_s: float | None = None
    incast_bytes_per_s: float | None = None
    ring_bytes_per_s: float | None = None
    mesh_bytes_per_s: float | None = None

    @property
    def loaded_bytes_per_s(self) -> float:
        """Of a link that is used both ways at once, as plans do: the ring's, or that of two hosts."""
        return self.ring_bytes_per_s or self.duplex_bytes_per_s or self.bytes_per_s


def measure_attention(shape: AttentionShape, sizes: Sequence[int], part: int = 0, parts: int = 1) -> list[Cell]:
    """Processor seconds of blocks of one head group: one part of the cells of a table."""
    cells = [
        (form, i, j)
        for form in FORMS
        for i in range(len(sizes))
        for j in range(len(sizes))
        if form != "causal" or i == j
    ]
    cells.sort(key=lambda cell: sizes[cell[1]] * sizes[cell[2]])
    measured = []
    for form, i, j in cells[part::parts]:
        made = [Piece(mask, shape) for mask in form_masks(form, sizes[i], sizes[j])]
        for pass_ in PASSES:
            seconds = sum(seconds_of(piece.attention(pass_)) for piece in made) / (shape.groups * len(made))
            measured.append((pass_.name, form, i, j, seconds))
    return measured


def grids(cells: Sequence[Cell], count: int) -> dict[str, dict[str, list[list[float]]]]:
    """Cells of all parts, as `Profiled` has them."""
    table = {pass_.name: {form: np.zeros((count, count)) for form in FORMS} for pass_ in PASSES}
    for name, form, i, j, seconds in cells:
        table[name][form][i, j] = seconds
    for forms in table.values():
        forms["causal"] = squares_only(np.diagonal(forms["causal"]))
    return {name: {form: grid.tolist() for form, grid in forms.items()} for name, forms in table.items()}


def squares_only(seconds: np.ndarray) -> np.ndarray:
    """A grid in which only squares are known. Blocks of the form `causal` are square; with the geometric mean beside
    the diagonal, interpolation between two squares depends on these two alone."""
    root = np.sqrt(seconds)
    return root[:, None] * root[None, :]


def measure_moves(shape: AttentionShape) -> float:
    """Bytes read and written per second by copies and reductions, both alike, of the kinds that plans move."""
    size_bytes, seconds = 0, 0.0
    mask = form_masks("full", MOVED_TOKENS, MOVED_TOKENS)[0]
    kinds = ((Kind.KV, False), (Kind.Q, False), (Kind.DKV, True), (Kind.OUT, True), (Kind.DQ, True))
    for kind, reduce in kinds:
        call, moved = Piece(mask, shape).moves(kind, reduce, MOVED_ITEMS)
        size_bytes += moved
        seconds += seconds_of(call, budget_s=0.2, most=50)
    return size_bytes / seconds


def measure_instruction(shape: AttentionShape) -> float:
    """Seconds of an instruction that moves nearly nothing."""
    call, _ = Piece(form_masks("full", 1, 1)[0], shape).moves(Kind.Q, False, 1)
    return seconds_of(call, most=200)


def measure_part(part: int, parts: int, quick: bool) -> dict[str, Any]:
    """What one host measures of itself while the others do the same. All but the cells is measured by each."""
    sizes = QUICK_SIZES if quick else SIZES
    share = spinning_share()
    cells = measure_attention(SHAPE, sizes, part, parts)
    return {
        "share": share,
        "cells": cells,
        "bytes_per_s": measure_moves(SHAPE),
        "instruction_s": measure_instruction(SHAPE),
        "masks": measure_masks(SHAPE) if part == 0 else [],
    }


def table_of(measured: Sequence[dict[str, Any]], sizes: Sequence[int]) -> Profiled:
    """The times of all parts: processor time, and as much longer as a host has only a share of a processor."""
    share = median(each["share"] for each in measured)
    cells = [(*cell[:-1], cell[-1] / share) for each in measured for cell in each["cells"]]
    return Profiled(
        tuple(sizes),
        tuple(sizes),
        grids(cells, len(sizes)),
        bytes_per_s=share * median(each["bytes_per_s"] for each in measured),
        instruction_s=median(each["instruction_s"] for each in measured) / share,
    )


def calibrated(folder: Path, shares: Shares, quick: bool) -> tuple[Profiled, dict[str, Any]]:
    """The table of times, measured by all hosts at once as they later compute; and figures about it.

    Without shares, one host alone measures all of it.
    """
    parts = 1 if shares.lacking else len(shares.folders)
    with contextlib.ExitStack() as stack:
        processes = []
        for part in range(parts):
            words = [str(folder / f"part{part}.json"), str(part), str(parts), "quick" if quick else "all"]
            group = shares.folders[part]
            command = [
                sys.executable,
                "-m",
                "benchmarks.network.calibrate",
                *words,
                *([] if group is None else [str(group)]),
            ]
            process = stack.enter_context(subprocess.Popen(command, env=environment(), start_new_session=True))
            stack.callback(process.kill)
            processes.append(process)
        codes = [process.wait() for process in processes]
    if any(codes):
        raise TeamError(f"measuring blocks of attention ended with exit code {max(codes, key=abs)}")
    measured = [json.loads((folder / f"part{part}.json").read_text()) for part in range(parts)]
    table = table_of(measured, QUICK_SIZES if quick else SIZES)
    checks = mask_checks(measured[0]["masks"], measured[0]["share"], table)
    return table, {"share": median(each["share"] for each in measured), "masks": checks}


def computation_s(plan: Plan, table: Profiled) -> float:
    """Seconds of all attention of all ranks of a plan, forward and backward, one after the other."""
    return sum(
        float(attention_seconds(program.comps, getattr(program, pass_.name), plan.header, pass_, table).sum())
        for programs in plan.programs
        for program in programs
        for pass_ in PASSES
    )


def rate_for(ring_bytes: float, work_s: float, computing_at_once: float, ratio: float = WAIT_RATIO) -> float:
    """The rate of links in bits/s at which a ring's bytes take `ratio` times as long as the computation.

    Args:
        ring_bytes: that one link carries in one direction.
        work_s: of computation, of all hosts together.
        computing_at_once: how many hosts compute at once at full speed.
        ratio: of the two times.
    """
    rate = 8 * ring_bytes / (ratio * work_s / computing_at_once)
    digits = 1 - math.floor(math.log10(rate))
    return float(round(rate, digits))


def measure_slowdown(team: Team, shape: AttentionShape, patience: Patience) -> tuple[float, list[float]]:
    """Seconds of one block of one head group on one host alone, and how long 1, 2, ... hosts at once take over that."""
    words = {"q_heads": shape.q_heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "dtype": shape.dtype}
    request: dict[str, Any] = {"do": "compute", "tokens": COMPUTED_TOKENS, "shape": words, "times": 3}

    def seconds(hosts: int) -> float:
        patience.wait()
        at, answers = team.ask([request if rank < hosts else None for rank in range(len(team))], timed=True)
        return max(answer["end"] for answer in answers[:hosts]) - at

    request["times"] = max(3, round(3 * COMPUTED_S / min(seconds(1) for _ in range(2))))
    # Least, and in turns: what else runs on the machine makes times longer, never shorter.
    turns = [[seconds(hosts) for hosts in range(1, len(team) + 1)] for _ in range(4)]
    least = [min(times) for times in zip(*turns, strict=True)]
    return least[0] / (request["times"] * shape.groups), [times / least[0] for times in least]


def priced_s(table: Profiled, shape: AttentionShape) -> float:
    """What the table says of the block that `measure_slowdown` computes."""
    block = Work(*np.array([[0], [0], [COMPUTED_TOKENS], [COMPUTED_TOKENS], [COMPUTED_TOKENS**2]]))
    return float(table.attention_s(FORWARD, shape, block, 1)[0])


def cores_of(slower: Sequence[float]) -> float:
    """How many compute at once at full speed, if `slower[-1]` times as long is what all of them take."""
    return len(slower) / max(1.0, slower[-1])


def measure_link(team: Team, patience: Patience) -> LinkFigures:
    """Links, see `LinkFigures`. With fewer hosts than a figure needs, it is None."""
    hosts = len(team)
    patience.wait()
    message_s = exchange_s(team, [(0, 1, 1)], 4 * REPEATS)

    def rate(messages: list[tuple[int, int, int]]) -> float:
        patience.wait()
        return LINK_BYTES / (exchange_s(team, messages) - message_s)

    return LinkFigures(
        message_s,
        rate([(0, 1, LINK_BYTES)]),
        rate([(0, 1, LINK_BYTES), (1, 0, LINK_BYTES)]),
        2 * rate([(1, 0, LINK_BYTES), (2, 0, LINK_BYTES)]) if hosts > 2 else None,
        rate([(host, (host + 1) % hosts, LINK_BYTES) for host in range(hosts)]) if hosts > 2 else None,
        (hosts - 1) * rate([(a, b, LINK_BYTES) for a in range(hosts) for b in range(hosts) if a != b]),
    )


def exchange_s(team: Team, messages: Sequence[tuple[int, int, int]], repeats: int = REPEATS) -> float:
    """Median seconds until all of some messages (source, destination, bytes) that start at once are there."""
    requests: list[dict[str, Any] | None] = [None] * len(team)
    for rank in {rank for message in messages for rank in message[:2]}:
        requests[rank] = {
            "do": "exchange",
            "sends": [[dst, size] for src, dst, size in messages if src == rank],
            "recvs": [[src, size] for src, dst, size in messages if dst == rank],
        }
    times = []
    for _ in range(repeats):
        at, answers = team.ask(requests, timed=True)
        times.append(max(answer["end"] for answer in answers if answer) - at)
    return median(times)


def fitted(table: Profiled, shape: AttentionShape) -> tuple[float, float, float]:
    """Fixed seconds of a block, FLOP/s of the forward, and the backward's rate as a fraction of it: those with which
    `Roofline` is closest to the table's full blocks, by relative squares."""
    sizes = [size for size in table.q_tokens if size % TILE == 0] or list(table.q_tokens)
    cells = [(pass_, rows, keys) for pass_ in PASSES for rows in sizes for keys in sizes]
    lines, ones = [], np.ones(len(cells))
    for pass_, rows, keys in cells:
        block = Work(*np.array([[0], [0], [rows], [keys], [rows * keys]]))
        seconds = shape.groups * float(table.attention_s(pass_, shape, block, 1)[0])
        flops = 2 * shape.group_heads * (shape.head_dim + shape.value_dim) * PRODUCTS[pass_ is FORWARD]
        of_all = shape.groups * flops * rows * keys
        lines.append(np.array([1.0, of_all * (pass_ is FORWARD), of_all * (pass_ is not FORWARD)]) / seconds)
    scale = np.abs(lines).max(axis=0)
    fixed_s, forward, backward = np.linalg.lstsq(np.array(lines) / scale, ones, rcond=None)[0] / scale
    return max(float(fixed_s), 0.0), 1 / float(forward), float(forward) / float(backward)


def cluster_of(hosts: int, link: LinkFigures, table: Profiled, shape: AttentionShape) -> Cluster:
    """The cluster that plans are made for and simulated on. Without shares, what a host computes is its part of the
    shared cores."""
    fixed_s, flops_per_s, backward_rate = fitted(table, shape)
    return Cluster(
        hosts,
        1,
        intra_bytes_per_s=link.loaded_bytes_per_s,
        inter_bytes_per_s=link.loaded_bytes_per_s,
        intra_latency_s=link.message_s,
        inter_latency_s=link.message_s,
        flops_per_s=min(1.0, table.cores / hosts) * flops_per_s,
        flow_bytes_per_s=link.bytes_per_s,
        memory_bytes_per_s=table.bytes_per_s,
        backward_rate=backward_rate,
        launch_s=table.instruction_s,
        block_s=max(fixed_s - table.instruction_s, 0.0),
    )


def with_cores(table: Profiled, cores: float) -> Profiled:
    """A table with the measured number of cores."""
    return replace(table, cores=cores)


def measure_masks(shape: AttentionShape) -> list[dict[str, Any]]:
    """Processor seconds of blocks with masks of other kinds, which the table knows only by their pairs."""
    measured = []
    for name, mask in checked_masks():
        piece = Piece(mask, shape)
        seconds = {pass_.name: seconds_of(piece.attention(pass_)) / shape.groups for pass_ in PASSES}
        measured.append({"name": name, "size": [mask.q_length, mask.k_length, mask.pairs()], "seconds": seconds})
    return measured


def checked_masks() -> list[tuple[str, Mask]]:
    """Blocks as they are cut from masks with a window and from a shared question."""
    made = []
    for n in (256, 512, 1024, 2048):
        row = np.arange(n)
        for width in (64, 256):
            window = np.stack([np.maximum(row + 1 - width, 0), row + 1], axis=1)
            made.append((f"window of {width}", Mask.from_intervals(n, n, window[:, None])))
        corner = np.stack([np.minimum(row + n - n // 4, n), np.full(n, n)], axis=1)
        made.append(("corner", Mask.from_intervals(n, n, corner[:, None])))
        answers = np.stack([np.maximum(row // (n // 4) * (n // 4), n // 4), row + 1], axis=1)
        shared = np.stack([np.stack([np.zeros(n, int), np.minimum(row + 1, n // 4)], axis=1), answers], axis=1)
        shared[: n // 4, 1] = 0
        made.append(("shared question", Mask.from_intervals(n, n, shared)))
    return made


def mask_checks(measured: Sequence[dict[str, Any]], share: float, table: Profiled) -> list[dict[str, Any]]:
    """Blocks with masks as measured, and as the table has them."""
    checks = []
    for each in measured:
        rows, keys, pairs = each["size"]
        work = Work(*np.array([[0], [0], [rows], [keys], [pairs]]))
        for pass_ in PASSES:
            priced_s = float(table.attention_s(pass_, SHAPE, work, 1)[0])
            figures = {"measured_s": each["seconds"][pass_.name] / share, "priced_s": priced_s}
            checks.append({"name": each["name"], "tokens": rows, "pairs": pairs, "pass": pass_.name, **figures})
    return checks


def main(out: str, part: str, parts: str, extent: str, group: str | None = None) -> None:
    """Measure one part, in a process of its own."""
    die_with_parent()
    go_first()
    torch.set_num_threads(1)
    if group is not None:
        join(Path(group), os.getpid(), threading.get_native_id())
    Path(out).write_text(json.dumps(measure_part(int(part), int(parts), extent == "quick")))


if __name__ == "__main__":
    main(*sys.argv[1:])
