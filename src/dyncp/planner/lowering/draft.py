"""A program while it is written: arrays with room for the longest program of a mask, filled from the front."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.planner.lowering.tables import PassTable, Pieces, Traffic, Work

SLOT = np.dtype(
    [
        ("piece", "int64"),
        ("run", "int64"),  # the first of the slots that it lies behind; -1 where its place is given from outside
        ("birth", "int64"),  # the instruction that writes it first
        ("death", "int64"),  # the last instruction that uses it
        ("size_bytes", "int64"),
        # these as in plan.Slots
        ("offset", "int64"),
        ("block", "int32"),
        ("group", "int32"),
        ("kind", "uint8"),
        ("place", "uint8"),
        ("wire", "uint8"),
    ],
    align=True,
)
INSTRUCTION = np.dtype([(name, "int64") for name in ("name", "step", "a", "b")])  # `step` of LAUNCH and WAIT
PARCEL = np.dtype(
    [
        ("peer", "int64"),
        ("is_send", "int64"),
        ("start", "int64"),  # bounds of its part of Draft.held
        ("stop", "int64"),
        ("slot", "int64"),  # the first of its slots, which lie one behind the other
    ]
)


class Draft(NamedTuple):
    """A program while it is written, and what is known of it on the way.

    The operands of an instruction lie one behind the other in `operands`. With `a` and `b` from its row of
    `instructions`, they are

        ATTENTION  comp [a], reads [a, r], writes [a, w], fresh [b]
        REDUCTION  src [a], dst [a], fresh [b]
        COPY       src [a], dst [a]
        LAUNCH     peer [a], send [a], ptr [a + 1], slots [b]
        WAIT
    """

    used: Ints  # int64[3], how much of slots, instructions and operands is filled
    fault: Ints  # int64[3], what is wrong with the schedule first, with which piece, at which step
    slot_of: Ints  # int64[P], by piece: where an input is now, or where a partial result grows; -1 for nowhere
    slots: Ints  # SLOT
    instructions: Ints  # INSTRUCTION
    operands: Ints  # int64
    parcels: Ints  # PARCEL, the messages of the launch being written
    held: Ints  # int64, the pieces in them; of those that are sent then the slots that hold them now


def new_draft(pieces: Pieces, traffic: Traffic, work: Work, passes: list[PassTable]) -> Draft:
    """Room for any rank's program in any of the passes. What of it is never touched takes no memory."""
    comps, messages = work.most_comps(), traffic.most_messages()
    moved = traffic.most_transfers() * max(pass_.moves.shape[1] for pass_ in passes)  # pieces sent, or received
    named = comps * max(len(pass_.reads) + len(pass_.writes) for pass_ in passes)
    # Attention makes a slot per piece. Of a piece that is sent there are three more (where it was, the message, and a
    # partial result that begins anew), of one that is received five (the message, what it is added to, and what is kept
    # of it, once more in the backward).
    return Draft(
        used=np.zeros(3, "int64"),
        fault=np.zeros(3, "int64"),
        slot_of=np.full(pieces.total, -1),
        slots=np.empty(min(named, pieces.total) + 8 * moved, SLOT),
        instructions=np.empty(comps + 6 * messages, INSTRUCTION),
        operands=np.empty(comps + 2 * named + 12 * moved + 4 * messages, "int64"),
        parcels=np.empty(messages, PARCEL),
        held=np.empty(2 * moved, "int64"),
    )
