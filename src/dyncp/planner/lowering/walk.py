"""The walk over the steps: writes the program of one pass of one rank under one mask.

At each step: wait for the step's transfers, put away and merge what came, pack and launch the next step's transfers,
compute. So transfers overlap the computation between their launch and their wait. Where a rank has nothing to wait for
or to launch, the computation of several steps is one. Forward and backward differ in the `PassTable` alone.

This is compiled code. It checks no bounds: what it is given has been checked before (`tables.py`), and drafts have
room enough (`draft.py`). It allocates nothing, so that arrays are passed without reference counts, which would take
more time than all else. All whole numbers are int64, so that each function is compiled once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dyncp.ir.arrays import Ints
from dyncp.ir.plan import Place
from dyncp.jit import lean_jit, part
from dyncp.planner.lowering.draft import Draft
from dyncp.planner.lowering.tables import PassTable, Pieces, Traffic, Work

# Compiled in as they are; in this file, because the compiler's cache does not see changes in others.
LOCAL, ARENA, KEPT = int(Place.LOCAL), int(Place.ARENA), int(Place.KEPT)
ATTENTION, REDUCTION, COPY, LAUNCH, WAIT = range(5)  # INSTRUCTION.name
SLOTS, INSTRUCTIONS, OPERANDS = range(3)  # what Draft.used counts
NONE, MISSING, SENT_BY_OWNER, SENT_TWICE = range(4)  # what can be wrong with a schedule
STEP, COMP, Q_CELL, KV_CELL = range(4)  # columns of Work.rows
SIDE, CELL = range(2)  # columns of Traffic.transfers


class Walk(NamedTuple):
    """All that a walk has at hand."""

    rank: int
    # as in Pieces
    blocks: int
    groups: int
    owner: Ints
    # as in PassTable
    reads: Ints
    writes: Ints
    moves: Ints
    kinds: Ints
    # what the rank does
    work: Ints  # int64[n, 4], its part of Work.rows
    own: Ints  # int64[m], its part of Traffic.by_rank
    # as in Traffic
    transfers: Ints
    messages: Ints
    # as in Draft
    used: Ints
    fault: Ints
    slot_of: Ints
    slots: Ints
    instructions: Ints
    operands: Ints
    parcels: Ints
    held: Ints

    @classmethod
    def of(cls, rank: int, pieces: Pieces, table: PassTable, work: Work, traffic: Traffic, draft: Draft) -> Walk:
        """The walk of one rank in the pass of `table`."""
        rows = work.rows[work.ptr[rank] : work.ptr[rank + 1]]
        own = traffic.by_rank[traffic.ptr[rank] : traffic.ptr[rank + 1]]
        plan_wide = (rank, pieces.blocks, pieces.groups, pieces.owner)
        return cls(*plan_wide, *table, rows, own, traffic.transfers, traffic.messages, *draft)


@lean_jit
def write_program(fields: tuple[Any, ...], kept_piece: Ints, kept_offset: Ints) -> None:
    """Write a program into the draft.

    Args:
        fields: of a `Walk`, as a plain tuple; see `part`.
        kept_piece: int64[k], what the pass before has left in kept memory.
        kept_offset: int64[k], where, in bytes.
    """
    walk = Walk(*fields)
    work, own = walk.work, walk.own
    begin(walk, kept_piece, kept_offset)
    step = computed = moved = 0  # parts of `work` and `own` that are done with
    flying = landed = (0, 0)  # operands and new slots of the launch that is under way
    while computed < len(work) or moved < len(own) or flying[0] < flying[1]:
        if flying[0] < flying[1]:
            wait(walk, step, flying)
            keep(walk, landed)
            merge(walk, landed)
        first = moved
        while moved < len(own) and walk.messages[own[moved]].step == step + 1:
            moved += 1
        flying, landed = launch(walk, step + 1, own[first:moved])
        first = computed
        until = step  # the last step of which this rank can compute now: where it has nothing to wait for or to launch
        if flying[0] == flying[1] and computed < len(work):
            until = walk.messages[own[moved]].step - 2 if moved < len(own) else work[len(work) - 1, STEP]
        while computed < len(work) and work[computed, STEP] <= max(step, until):
            computed += 1
        if computed > first:
            attend(walk, step, work[first:computed])
        step += 1


@part
def begin(walk: Walk, kept_piece: Ints, kept_offset: Ints) -> None:
    """Empty the draft; what the pass before has kept is there."""
    walk.used[:] = 0
    walk.fault[:] = 0
    for i in range(len(kept_piece)):
        slot = add_slot(walk, kept_piece[i], KEPT, False, -1)
        walk.slots[slot].offset = kept_offset[i]
        walk.slot_of[kept_piece[i]] = slot


@lean_jit
def describe_slots(
    slots: Ints, slot_of: Ints, last: int, kinds: Ints, row: Ints, size_bytes: Ints, groups: int
) -> None:
    """Fill in what follows from the pieces of a program's slots, and forget where pieces are.

    Args:
        slots: SLOT[S], the slots.
        slot_of: as in Draft.
        last: the number of instructions.
        kinds: as in PassTable.
        row: as in Pieces.
        size_bytes: as in Pieces.
        groups: as in Pieces.
    """
    for number in range(len(slots)):
        slot = slots[number]
        slot_of[slot.piece] = -1
        block, group = slot.piece // groups % row.shape[1], slot.piece % groups
        kind = slot.piece // (groups * row.shape[1])
        slot.kind, slot.block, slot.group = kind, block, group
        slot.wire &= kinds[kind].is_partial
        slot.size_bytes = size_bytes[slot.wire, kind, block]
        if slot.place == LOCAL:
            slot.offset = row[kind, block]
        elif slot.place == KEPT:  # lives on after the program
            slot.death = last


# Instructions. Each function lists its operands in the order that Draft says, and then emits.


@part
def wait(walk: Walk, step: int, flying: tuple[int, int]) -> None:
    """Wait for a step's transfers; their slots are the operands `flying`."""
    use(walk, flying[0], flying[1])
    emit(walk, WAIT, step, 0, 0, walk.used[OPERANDS])


@part
def keep(walk: Walk, landed: tuple[int, int]) -> None:
    """Put away the inputs among the slots `landed`. What the backward needs is copied into kept memory, if it did not
    arrive there."""
    slots, slot_of, operands, src = walk.slots, walk.slot_of, walk.operands, walk.used[OPERANDS]
    for slot in range(landed[0], landed[1]):
        piece = slots[slot].piece
        kind, known = kind_of(walk, piece), slot_of[piece]
        is_kept = slots[slot].place == KEPT or (known >= 0 and slots[known].place == KEPT)
        if kind.is_kept and not is_kept:
            push(walk, slot)
        elif known < 0 and not kind.is_partial:
            slot_of[piece] = slot
    dst = walk.used[OPERANDS]
    for i in range(src, dst):
        piece = slots[operands[i]].piece
        slot_of[piece] = add_slot(walk, piece, KEPT, False, walk.used[SLOTS])
        push(walk, slot_of[piece])
    if dst > src:
        emit(walk, COPY, 0, dst - src, 0, src)


@part
def merge(walk: Walk, landed: tuple[int, int]) -> None:
    """Add the partial results among the slots `landed` to this rank's own."""
    slots, operands, first_slot, src = walk.slots, walk.operands, walk.used[SLOTS], walk.used[OPERANDS]
    for slot in range(landed[0], landed[1]):
        if kind_of(walk, slots[slot].piece).is_partial:
            push(walk, slot)
    dst = walk.used[OPERANDS]
    for i in range(src, dst):
        push(walk, slot_of_piece(walk, slots[operands[i]].piece, 0))
    if dst > src:
        emit(walk, REDUCTION, 0, dst - src, push_fresh(walk, first_slot), src)


@part
def attend(walk: Walk, step: int, work: Ints) -> None:
    """Compute the blocks of a step."""
    first_slot = walk.used[SLOTS]
    for i in range(len(work)):
        push(walk, work[i, COMP])
    reads = walk.used[OPERANDS]
    push_slots(walk, work, walk.reads, step)
    push_slots(walk, work, walk.writes, step)
    emit(walk, ATTENTION, 0, len(work), push_fresh(walk, first_slot), reads)


@part
def push_slots(walk: Walk, work: Ints, kinds: Ints, step: int) -> None:
    """List the slots of these kinds of each computation block."""
    per_kind = walk.blocks * walk.groups
    for i in range(len(work)):
        for k in range(len(kinds)):
            cell = work[i, KV_CELL] if walk.kinds[kinds[k]].of_keys else work[i, Q_CELL]
            push(walk, slot_of_piece(walk, kinds[k] * per_kind + cell, step))


@part
def launch(walk: Walk, step: int, messages: Ints) -> tuple[tuple[int, int], tuple[int, int]]:
    """Pack and start a step's transfers. Returns the bounds of the operands that are their slots, and the bounds of the
    slots that are received into."""
    parcels = walk.parcels[: list_parcels(walk, messages)]
    if len(parcels) == 0:
        return (0, 0), (0, 0)
    find_sources(walk, step, parcels)
    pack(walk, parcels)
    landed = walk.used[SLOTS]
    receive(walk, parcels)
    for i in range(len(parcels)):
        push(walk, parcels[i].peer)
    for i in range(len(parcels)):
        push(walk, parcels[i].is_send)
    push(walk, 0)
    size = 0
    for i in range(len(parcels)):
        size += parcels[i].stop - parcels[i].start
        push(walk, size)
    flying = walk.used[OPERANDS]
    for i in range(len(parcels)):
        for n in range(parcels[i].stop - parcels[i].start):
            push(walk, parcels[i].slot + n)
    emit(walk, LAUNCH, step, len(parcels), size, flying)
    return (flying, flying + size), (landed, walk.used[SLOTS])


@part
def list_parcels(walk: Walk, messages: Ints) -> int:
    """Unfold messages into `parcels`, and what they carry in this pass into `held`. Returns the number of those that
    are not empty."""
    moves, transfers, held, per_kind, count, at = walk.moves, walk.transfers, walk.held, walk.blocks * walk.groups, 0, 0
    for i in range(len(messages)):
        message, parcel = walk.messages[messages[i]], walk.parcels[count]
        parcel.is_send = message.src == walk.rank
        parcel.peer = message.dst if parcel.is_send else message.src
        parcel.start = at
        for transfer in range(message.start, message.stop):
            for k in range(moves.shape[1]):
                kind = moves[transfers[transfer, SIDE], k]
                if kind >= 0:
                    held[at] = kind * per_kind + transfers[transfer, CELL]
                    at += 1
        parcel.stop = at
        count += parcel.stop > parcel.start
    return count


@part
def find_sources(walk: Walk, step: int, parcels: Ints) -> None:
    """Put the slots that hold what is sent in the place of the pieces."""
    held, slot_of = walk.held, walk.slot_of
    for i in range(len(parcels)):
        if not parcels[i].is_send:
            continue
        begin_missing(walk, held[parcels[i].start : parcels[i].stop])
        for at in range(parcels[i].start, parcels[i].stop):
            piece = held[at]
            if kind_of(walk, piece).is_partial:
                check_sent(walk, piece, step)
                held[at] = max(slot_of[piece], 0)
                slot_of[piece] = -1  # what comes later begins anew
            else:
                held[at] = slot_of_piece(walk, piece, step)


@part
def begin_missing(walk: Walk, pieces: Ints) -> None:
    """A strategy may pass on a partial result that nobody has contributed to yet: begin those of one message."""
    first_slot, fresh = walk.used[SLOTS], walk.used[OPERANDS]
    for i in range(len(pieces)):
        if kind_of(walk, pieces[i]).is_partial:
            slot_of_piece(walk, pieces[i], 0)
    if walk.used[SLOTS] > first_slot:
        emit(walk, REDUCTION, 0, 0, push_fresh(walk, first_slot), fresh)


@part
def pack(walk: Walk, parcels: Ints) -> None:
    """Copy what is sent into runs of slots, one per message; what lies in a run already is sent from where it is."""
    held, first_slot, src = walk.held, walk.used[SLOTS], walk.used[OPERANDS]
    for i in range(len(parcels)):
        parcel = parcels[i]
        if not parcel.is_send:
            continue
        if is_run(walk, held[parcel.start : parcel.stop]):
            parcel.slot = held[parcel.start]
            continue
        parcel.slot = walk.used[SLOTS]
        for at in range(parcel.start, parcel.stop):
            push(walk, held[at])
            add_slot(walk, walk.slots[held[at]].piece, ARENA, True, parcel.slot)
    packed = walk.used[SLOTS] - first_slot
    for n in range(packed):
        push(walk, first_slot + n)
    if packed:
        emit(walk, COPY, 0, packed, 0, src)


@part
def is_run(walk: Walk, held: Ints) -> bool:
    """Whether slots of inputs lie one behind the other as in a message (so a ring passes them on as they are)."""
    slots, first = walk.slots, walk.slots[held[0]]
    if first.run < 0 or kind_of(walk, first.piece).is_partial:
        return False  # a partial result is in the dtype to sum in, not to send in
    for i in range(1, len(held)):  # noqa: SIM110 (a generator would not compile)
        if held[i] != held[0] + i or slots[held[i]].run != first.run:
            return False
    return True


@part
def receive(walk: Walk, parcels: Ints) -> None:
    """Make the slots of the messages that come, in kept memory where all of a message is to be kept."""
    for i in range(len(parcels)):
        parcel, place = parcels[i], KEPT
        if parcel.is_send:
            continue
        for at in range(parcel.start, parcel.stop):
            if not kind_of(walk, walk.held[at]).is_kept:
                place = ARENA
        parcel.slot = walk.used[SLOTS]
        for at in range(parcel.start, parcel.stop):
            add_slot(walk, walk.held[at], place, True, parcel.slot)


# Pieces, slots and operands


@part
def kind_of(walk: Walk, piece: int) -> Any:
    """What is known of a piece's kind."""
    return walk.kinds[piece // (walk.blocks * walk.groups)]


@part
def add_slot(walk: Walk, piece: int, place: int, wire: bool, run: int) -> int:
    """A new slot, written first by the next instruction. `run` is the first of the slots that it lies behind (its own
    number begins a run), or -1 where its place is given from outside; with `wire` it lies in a message."""
    number = walk.used[SLOTS]
    walk.used[SLOTS] = number + 1
    slot = walk.slots[number]
    slot.piece, slot.place, slot.wire, slot.run = piece, place, wire, run
    slot.birth = slot.death = walk.used[INSTRUCTIONS]
    return number


@part
def slot_of_piece(walk: Walk, piece: int, step: int) -> int:
    """The slot that holds an input, or in which a partial result grows; made if there is none. What the rank owns is in
    the caller's tensors."""
    if walk.slot_of[piece] < 0:
        if walk.owner[piece // walk.groups % walk.blocks] == walk.rank:
            walk.slot_of[piece] = add_slot(walk, piece, LOCAL, False, -1)
        else:
            if not kind_of(walk, piece).is_partial:
                blame(walk, MISSING, piece, step)
            walk.slot_of[piece] = add_slot(walk, piece, ARENA, False, walk.used[SLOTS])
    return walk.slot_of[piece]


@part
def push(walk: Walk, operand: int) -> None:
    """One more operand of the next instruction."""
    walk.operands[walk.used[OPERANDS]] = operand
    walk.used[OPERANDS] += 1


@part
def push_fresh(walk: Walk, first_slot: int) -> int:
    """List the slots in which partial results begin: those made since `first_slot`, without the caller's own, which
    begin with nothing. Returns their number."""
    before = walk.used[OPERANDS]
    for slot in range(first_slot, walk.used[SLOTS]):
        if walk.slots[slot].place == ARENA:
            push(walk, slot)
    return walk.used[OPERANDS] - before


@part
def emit(walk: Walk, name: int, step: int, a: int, b: int, slots_from: int) -> None:
    """The next instruction; its operands from `slots_from` on are the slots that it uses."""
    use(walk, slots_from, walk.used[OPERANDS])
    row = walk.instructions[walk.used[INSTRUCTIONS]]
    row.name, row.step, row.a, row.b = name, step, a, b
    walk.used[INSTRUCTIONS] += 1


@part
def use(walk: Walk, first: int, stop: int) -> None:
    """The next instruction uses the slots that these operands name."""
    for i in range(first, stop):
        walk.slots[walk.operands[i]].death = walk.used[INSTRUCTIONS]


@part
def check_sent(walk: Walk, piece: int, step: int) -> None:
    """A partial result is sent to its owner, and once."""
    slot = walk.slot_of[piece]
    if slot < 0:
        blame(walk, SENT_TWICE, piece, step)
    elif walk.slots[slot].place == LOCAL:
        blame(walk, SENT_BY_OWNER, piece, step)


@part
def blame(walk: Walk, fault: int, piece: int, step: int) -> None:
    """Note what is wrong with the schedule, if nothing has been before. The walk goes on; its result is not used."""
    if walk.fault[0] == NONE:
        walk.fault[0], walk.fault[1], walk.fault[2] = fault, piece, step
