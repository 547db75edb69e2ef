"""Plan -> operations and messages: what the instructions of all ranks take and move, in one pass under one mask."""

from __future__ import annotations

from typing import NamedTuple, assert_never

import numpy as np

from dyncp.cost.fluid import LAUNCH, WAIT, WORK, Messages, Operations
from dyncp.cost.model import CostModel, Work
from dyncp.ir.arrays import Ints
from dyncp.ir.plan import (
    FORWARD,
    Attention,
    CommLaunch,
    CommWait,
    Comps,
    Copy,
    Kind,
    Pass,
    Plan,
    PlanHeader,
    Program,
    Reduction,
)
from dyncp.ir.slices import HI, HI_STEP, LO, LO_STEP, Q_START, Q_STOP

ATTENTION, MOVE, COMM, WAITING = range(4)  # what an operation is, for reports
LABELS = ("attention", "move", "launch", "wait")


class Track(NamedTuple):
    """One pass of all ranks under one mask, ready to be played."""

    operations: Operations
    messages: Messages
    label: Ints  # int64[n], of each operation


def track_of(plan: Plan, mask: int, pass_: Pass, cost: CostModel) -> Track:
    """The operations of all ranks, an instruction each, and the messages between them.

    Raises:
        ValueError: a message that is sent and not received, or the other way round.
    """
    header = plan.header
    sizes = np.array([[header.piece_bytes(kind, wire) for kind in Kind] for wire in (False, True)], "int64")
    rows: list[tuple[int, float, int, int]] = []  # kind, seconds, group, label
    ptr = [0]
    ends: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}  # (src, dst, step): (is_send, group, bytes)
    groups = 0
    for rank, programs in enumerate(plan.programs):
        program = programs[mask].forward if pass_ is FORWARD else programs[mask].backward
        of_slot = sizes[program.slots.wire, program.slots.kind, program.slots.block]
        attention = iter(attention_seconds(programs[mask].comps, program, header, pass_, cost).tolist())
        launched: dict[int, int] = {}  # step -> group
        for instruction in program.instructions:
            match instruction:
                case Attention():
                    rows.append((WORK, next(attention), 0, ATTENTION))
                case Copy() | Reduction():
                    moved = int(of_slot[instruction.src].sum() + of_slot[instruction.dst].sum())
                    seconds = cost.instruction_s + float(cost.move_s(np.array([moved], "float64"))[0])
                    rows.append((WORK, seconds, 0, MOVE))
                case CommLaunch():
                    launched[instruction.step] = groups
                    rows.append((LAUNCH, cost.instruction_s, groups, COMM))
                    running = np.append(0, np.cumsum(of_slot[instruction.slots]))
                    for i, (peer, send) in enumerate(
                        zip(instruction.peer.tolist(), instruction.send.tolist(), strict=True)
                    ):
                        size = int(running[instruction.ptr[i + 1]] - running[instruction.ptr[i]])
                        key = (rank, peer, instruction.step) if send else (peer, rank, instruction.step)
                        ends.setdefault(key, []).append((send, groups, size))
                    groups += 1
                case CommWait():
                    rows.append((WAIT, 0.0, launched[instruction.step], WAITING))
                case _:
                    assert_never(instruction)
        ptr.append(len(rows))
    kind, seconds_of, group, label = zip(*rows, strict=True) if rows else ((),) * 4
    operations = Operations(
        np.array(ptr), np.array(kind, "int64"), np.array(seconds_of, "float64"), np.array(group, "int64")
    )
    return Track(operations, messages_of(ends), np.array(label, "int64"))


def messages_of(ends: dict[tuple[int, int, int], list[tuple[int, int, int]]]) -> Messages:
    """Both ends of each message put together."""
    table = []
    for (src, dst, step), pair in ends.items():
        if sorted(end[0] for end in pair) != [0, 1] or pair[0][2] != pair[1][2]:
            raise ValueError(f"rank {src} and rank {dst} do not agree on the message of step {step}")
        (_, into, size), (_, out, _) = sorted(pair)
        table.append((src, dst, size, out, into))
    rows = np.array(table, "int64").reshape(-1, 5)
    src_, dst_, size_, out_, into_ = np.ascontiguousarray(rows.T)  # views would have `play` compiled once more
    return Messages(src_, dst_, size_.astype("float64"), out_, into_)


def attention_seconds(comps: Comps, program: Program, header: PlanHeader, pass_: Pass, cost: CostModel) -> Ints:
    """float64[a]: seconds of each attention instruction of a program, in order."""
    launches = [instruction for instruction in program.instructions if isinstance(instruction, Attention)]
    if not launches:
        return np.zeros(0)
    comp = np.concatenate([instruction.comp for instruction in launches])
    tokens, pairs = header.tokens.tokens, pairs_of(comps)
    work = Work(
        np.repeat(np.arange(len(launches)), [len(instruction.comp) for instruction in launches]),
        comp,
        tokens[comps.q_block[comp]],
        tokens[comps.kv_block[comp]],
        pairs[comp],
    )
    return cost.attention_s(pass_, header.shape, work, len(launches))


def pairs_of(comps: Comps) -> Ints:
    """int64[n]: unmasked pairs of each computation block."""
    slices = comps.slices.astype("int64")
    rows = slices[:, Q_STOP] - slices[:, Q_START]
    growth = slices[:, HI_STEP] - slices[:, LO_STEP]
    pairs = rows * (slices[:, HI] - slices[:, LO]) + growth * (rows * (rows - 1) // 2)
    running = np.append(0, np.cumsum(pairs))
    total: Ints = running[comps.slice_ptr[1:]] - running[comps.slice_ptr[:-1]]
    return total
