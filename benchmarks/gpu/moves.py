"""Copies and reductions: bytes per second, beside those of a plain copy from device memory to device memory.

Measured are the instructions that plans have most of: packing Q and KV into messages, merging outputs that other ranks
computed by their log-sum-exps, and summing gradients from them. Bytes are those read and those written: a reduction
reads both of its operands and writes one. The plain copy beside each moves as many.
"""

from __future__ import annotations

from statistics import median

import torch

from benchmarks.gpu.clock import Deadline, spread
from benchmarks.gpu.pieces import Piece, fill, moving, pass_of, piece_of
from benchmarks.gpu.session import Findings, Row, Session
from dyncp.ir.plan import Kind

MOVES = ((Kind.KV, False), (Kind.Q, False), (Kind.OUT, True), (Kind.DQ, True), (Kind.DKV, True))
WORDS = {False: "pack", True: "add"}


def moves(session: Session, deadline: Deadline, found: Findings) -> None:
    """All kinds."""
    for case in deadline.in_time(MOVES, lambda case: case[0].name, found.left_out):
        found.rows.append(measured(session, *case))


def measured(session: Session, kind: Kind, reduce: bool) -> Row:
    """One instruction on blocks that fill the chip, and a plain copy. `counted_bytes` is what the simulator takes it to
    move, source and destination once each."""
    scale, clock = session.scale, session.clock
    part = moving(kind, reduce, scale.move_blocks, scale.move_tokens, scale.shape)
    piece = piece_of(part, pass_of(kind), session.kernels[0], session.device)
    here, there = bytes_of(piece)
    fill(piece, range(len(piece.buffers.layout.slots)))
    times = clock.times(piece.run, scale.repeats)
    size_bytes = here + there + here * reduce
    source = torch.randint(0, 256, (size_bytes // 2,), dtype=torch.uint8, device=session.device)
    target = torch.empty_like(source)
    plain = clock.times(lambda: target.copy_(source), scale.repeats)
    return {
        "move": f"{WORDS[reduce]} {kind.name}",
        "size_bytes": size_bytes,
        "counted_bytes": here + there,
        **spread(times),
        "bytes_per_s": size_bytes / median(times),
        "copy_bytes_per_s": size_bytes / median(plain),
    }


def bytes_of(piece: Piece) -> tuple[int, int]:
    """Bytes of the slots in local tensors and of those in scratch memory."""
    header, (program,) = piece.executor.plan.header, piece.executor.plan.programs
    slots = getattr(program, piece.pass_.name).slots
    half = len(slots) // 2
    of = [int(header.piece_bytes(Kind(slots.kind[at]), bool(slots.wire[at]))[slots.block[at]]) for at in (0, half)]
    return half * of[0], half * of[1]


def counted_bytes_per_s(session: Session) -> float:
    """All moves together, by the simulator's count of bytes."""
    rows = [measured(session, kind, reduce) for kind, reduce in MOVES]
    return sum(row["counted_bytes"] for row in rows) / sum(row["median_s"] for row in rows)
