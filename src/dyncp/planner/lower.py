"""Schedule -> Plan: turn steps and transfers into instructions over slots, forward and backward from one table.

This file deals the work out rank by rank, and makes records of the programs that the compiled walk in `lowering/`
writes.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from dyncp.ir import codec
from dyncp.ir.arrays import Ints, frozen
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import Blocks
from dyncp.ir.placement import Placement
from dyncp.ir.plan import (
    PASSES,
    Attention,
    CommLaunch,
    CommWait,
    Copy,
    Instruction,
    Kind,
    Pass,
    Plan,
    PlanHeader,
    Program,
    RankProgram,
    Reduction,
    Slots,
)
from dyncp.ir.schedule import Schedule
from dyncp.planner.blockgen import make_all_comps
from dyncp.planner.lowering.draft import new_draft
from dyncp.planner.lowering.tables import PassTable, Pieces, Traffic, Work
from dyncp.planner.lowering.walk import (
    ARENA,
    ATTENTION,
    COPY,
    INSTRUCTIONS,
    KEPT,
    LAUNCH,
    MISSING,
    NONE,
    OPERANDS,
    REDUCTION,
    SENT_BY_OWNER,
    SENT_TWICE,
    SLOTS,
    WAIT,
    Walk,
    describe_slots,
    write_program,
)
from dyncp.planner.memory import assign_offsets


def lower(header: PlanHeader, batch: Batch, blocks: Blocks, placement: Placement, schedule: Schedule) -> Plan:
    """The plan that carries out a schedule.

    Raises:
        ValueError: a schedule that reads or sends what a rank does not have by then, or that names what there is not.
    """
    pieces = Pieces.of(header, blocks)
    tables = [PassTable.of(pass_, header.keep) for pass_ in PASSES]
    per_rank: list[list[RankProgram]] = [[] for _ in range(header.ranks)]
    for mask in range(len(blocks.mask_names)):
        traffic = Traffic.of(schedule.transfers, mask, blocks, header.ranks)
        work = Work.of(blocks, placement, schedule, mask, header.ranks)
        draft = new_draft(pieces, traffic, work, tables)
        for rank, comps in enumerate(make_all_comps(batch, blocks, mask, work.comps_ptr, work.comps)):
            programs, program = [], None
            for pass_, table in zip(PASSES, tables, strict=True):
                program = write(Walk.of(rank, pieces, table, work, traffic, draft), pieces, pass_, program)
                programs.append(program)
            per_rank[rank].append(RankProgram(comps, *programs))
    by_rank = tuple(tuple(rank_programs) for rank_programs in per_rank)
    return Plan(header, by_rank, codec.digest(header, by_rank))


def write(walk: Walk, pieces: Pieces, pass_: Pass, before: Program | None) -> Program:
    """The program of one pass of one rank under one mask; `before` is that of the pass before."""
    kept_piece, kept_offset, kept_bytes = np.empty(0, "int64"), np.empty(0, "int64"), 0
    if before:
        kept = np.flatnonzero(before.slots.place == KEPT)
        kept_piece = pieces.numbers(before.slots.kind[kept], before.slots.block[kept], before.slots.group[kept])
        kept_offset, kept_bytes = before.slots.offset[kept], before.kept_bytes
    write_program(tuple(walk), kept_piece, kept_offset)
    if walk.fault[0] != NONE:
        refuse(walk, pass_)
    written, last, _ = walk.used.tolist()
    slots = walk.slots[:written]
    describe_slots(slots, walk.slot_of, last, walk.kinds, pieces.row, pieces.size_bytes, pieces.groups)
    arena_bytes = assign_offsets(slots, ARENA)
    return read_program(walk, pass_, arena_bytes, kept_bytes + assign_offsets(slots, KEPT))


def refuse(walk: Walk, pass_: Pass) -> NoReturn:
    """Say what is wrong with a schedule."""
    fault, piece, step = walk.fault.tolist()
    cell, group = divmod(piece, walk.groups)
    kind, block = divmod(cell, walk.blocks)
    name = f"{Kind(kind).name} of block {block}, head group {group}"
    problem = {
        MISSING: f"needs the {name} at step {step} of the {pass_.name} pass, but it does not own it and no transfer "
        "has brought it by then",
        SENT_BY_OWNER: f"sends away the {name}, which it owns",
        SENT_TWICE: f"sends the {name} twice in one message at step {step} of the {pass_.name} pass",
    }
    raise ValueError(f"broken schedule: rank {walk.rank} {problem[fault]}")


def read_program(walk: Walk, pass_: Pass, arena_bytes: int, kept_bytes: int) -> Program:
    """What has been written, as records of their own."""
    names = ("kind", "block", "group", "place", "wire", "offset")
    slots = Slots(*(walk.slots[name][: walk.used[SLOTS]] for name in names))
    operands = _Operands(frozen(walk.operands[: walk.used[OPERANDS]], "int32"))
    rows = walk.instructions[: walk.used[INSTRUCTIONS]].tolist()
    return Program(slots, tuple(read_instruction(row, operands, pass_) for row in rows), arena_bytes, kept_bytes)


class _Operands:
    """Hands out operands from the first to the last, without a copy."""

    def __init__(self, values: Ints) -> None:
        self.values, self.position = values, 0

    def take(self, count: int) -> Ints:
        self.position += count
        return self.values[self.position - count : self.position]


def read_instruction(row: tuple[int, int, int, int], operands: _Operands, pass_: Pass) -> Instruction:
    """One instruction; see `Draft` for what is where."""
    (name, step, a, b), take = row, operands.take
    if name == ATTENTION:
        reads, writes = len(pass_.reads), len(pass_.writes)
        return Attention(take(a), take(a * reads).reshape(a, reads), take(a * writes).reshape(a, writes), take(b))
    if name == REDUCTION:
        return Reduction(take(a), take(a), take(b))
    if name == COPY:
        return Copy(take(a), take(a))
    if name == LAUNCH:
        return CommLaunch(step, take(a), take(a), take(a + 1), take(b))
    assert name == WAIT
    return CommWait(step)
