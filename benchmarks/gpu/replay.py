"""Ranks of real plans, each alone on the device: what they compute, without what they wait for.

Messages do not move; what they would bring is random. So a rank's time is that of its attention, copies and reductions
in the plan's order, which is what the cost models price: beside it stand their sums, by the data sheet (`Roofline`) and
by the table of the section `table`. `wall_s` is a pass from an idle device until it is idle again, `host_s` what the
host takes to launch it with scratch memory made anew, as in a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from statistics import median

import numpy as np
import torch

from benchmarks.gpu.cases import mask_of
from benchmarks.gpu.clock import Deadline, spread
from benchmarks.gpu.compare import reason
from benchmarks.gpu.pieces import Piece, fill, piece_of
from benchmarks.gpu.session import Findings, Row, Session
from benchmarks.network.batches import scaled
from dyncp.bench.corpus import lengths_of
from dyncp.cost.model import CostModel
from dyncp.cost.roofline import Roofline
from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import PASSES, CommLaunch, Pass, Plan
from dyncp.simulator.program import ATTENTION, MOVE, track_of
from dyncp.strategies import build

PRESET = "dgx-h200"
RANKS_PER_NODE = 8
LENGTHS_TOKENS = 131_072  # for which lengths are drawn; fewer tokens are shorter sequences
MASKS = ("causal", "lambda", "causal_blockwise", "shared_question")  # of the sequences, in turn


def mixed_batch(tokens: int) -> Batch:
    """Long-tailed lengths under masks of four kinds."""
    lengths = scaled(lengths_of("longtail", LENGTHS_TOKENS, Random("replay")), tokens)
    return Batch([Sequence(n, mask_of(MASKS[at % len(MASKS)], n)) for at, n in enumerate(lengths)])


def cluster_of(ranks: int) -> Cluster:
    """Whole nodes, or a part of one."""
    return Cluster.preset(PRESET, max(1, ranks // RANKS_PER_NODE), min(ranks, RANKS_PER_NODE))


def replay(session: Session, deadline: Deadline, found: Findings) -> None:
    """The ranks with most, middling and least work of a few plans."""
    scale = session.scale
    cases = [(tokens, ranks) for tokens in scale.replay_tokens for ranks in scale.replay_ranks]
    for tokens, ranks in deadline.in_time(cases, lambda case: f"{case[0]:,} on {case[1]} ranks", found.left_out):
        name = f"{tokens:,} tokens on {ranks} ranks"
        plan = build(mixed_batch(tokens), scale.shape, cluster_of(ranks)).plan
        session.replayed[name] = plan
        cost = Roofline.of(cluster_of(ranks))
        by_pass = {pass_.name: priced(plan, pass_, cost) for pass_ in PASSES}
        for rank in chosen_ranks(sum(by_pass.values())):
            for pass_ in PASSES:
                row = {"plan": name, "rank": rank, "pass": pass_.name, **measured(session, plan, rank, pass_)}
                found.rows.append(row | {"roofline_s": float(by_pass[pass_.name][rank]), "table_s": None})


def priced(plan: Plan, pass_: Pass, cost: CostModel) -> Ints:
    """float64[R]: what a model says of each rank's attention, copies and reductions."""
    track = track_of(plan, 0, pass_, cost)
    rank = np.repeat(np.arange(plan.header.ranks), np.diff(track.operations.ptr))
    mine = np.isin(track.label, (ATTENTION, MOVE))
    total: Ints = np.bincount(rank[mine], track.operations.seconds[mine], plan.header.ranks)
    return total


def chosen_ranks(seconds: Ints) -> list[int]:
    """Those with most, middling and least to do."""
    order = np.argsort(seconds)[::-1]
    return list(dict.fromkeys(order[[0, len(order) // 2, -1]].tolist()))


def rank_piece(session: Session, plan: Plan, rank: int, pass_: Pass) -> Piece:
    """A rank's pass, with random values where messages would come."""
    part = plan.rank(rank)
    piece = piece_of(part, pass_, session.kernels[0], session.device)
    for instruction in piece.instructions():
        if isinstance(instruction, CommLaunch):
            fill(piece, received(instruction))
    return piece


def received(launch: CommLaunch) -> Iterable[int]:
    """The slots that a launch receives into."""
    return launch.slots[np.repeat(launch.send == 0, np.diff(launch.ptr))].tolist()


def measured(session: Session, plan: Plan, rank: int, pass_: Pass) -> Row:
    """Times of one pass of a rank alone."""
    clock, repeats = session.clock, session.scale.repeats
    piece = rank_piece(session, plan, rank, pass_)
    count = len(piece.instructions())
    times = clock.times(piece.run, repeats)
    wall_s = median(clock.wall_s(piece.run) for _ in range(repeats))
    host_s = median(clock.host_s(piece.run_anew) for _ in range(repeats))
    syncs = clock.host_syncs(piece.run_anew)
    each = {"host_s": host_s, "instruction_host_s": host_s / max(count, 1)}
    return {"instructions": count, **spread(times), "wall_s": wall_s, **each, "host_syncs": syncs}


def finish(session: Session, rows: list[Row]) -> None:
    """What could not be said before: the table's prices; and last, because what fails there may take the device with
    it, whether a pass can be captured into a CUDA graph."""
    if session.table is not None:
        for name, plan in session.replayed.items():
            for pass_ in PASSES:
                seconds = priced(plan, pass_, session.table)
                for row in rows:
                    if (row["plan"], row["pass"]) == (name, pass_.name):
                        row["table_s"] = float(seconds[row["rank"]])
    first = {row["plan"]: row["rank"] for row in reversed(rows)}
    for name, plan in list(session.replayed.items())[:1]:
        for pass_ in PASSES:
            graph = captured(session, rank_piece(session, plan, first[name], pass_))
            rows.append({"graph": name, "rank": first[name], "pass": pass_.name, **graph})


def captured(session: Session, piece: Piece) -> Row:
    """Capture a pass into a CUDA graph and replay it; or why that does not work."""
    clock = session.clock
    if not clock.on_gpu:
        return {"error": "n/a: no GPU"}
    try:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            piece.run()  # once before, on the stream of the capture, so that nothing is left to prepare
        clock.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            piece.run()
        return spread(clock.times(graph.replay, session.scale.repeats))
    except Exception as error:  # noqa: BLE001 whatever stops a capture is the answer
        return {"error": reason(error)}
