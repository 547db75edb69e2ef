"""Schedule -> Plan: turn steps and transfers into instructions over slots, forward and backward from one table.

A *piece* is the data of one kind of one (token block, head group). There can be millions of slots, so pieces are plain
numbers here, `(kind * B + block) * G + group`, and what is known of slots lies in lists by slot number.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from dyncp.ir import codec
from dyncp.ir.arrays import Ints, ragged_ranges
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import HAS_KV, HAS_Q, Blocks
from dyncp.ir.placement import Placement
from dyncp.ir.plan import (
    BACKWARD,
    FORWARD,
    KEEP,
    PASSES,
    Attention,
    CommLaunch,
    CommWait,
    Comps,
    Copy,
    Instruction,
    Kind,
    Pass,
    Place,
    Plan,
    PlanHeader,
    Program,
    RankProgram,
    Reduction,
    Slots,
    moved,
)
from dyncp.ir.schedule import Schedule, Side, Transfers
from dyncp.planner.blockgen import make_comps
from dyncp.planner.memory import Run, assign_offsets

IS_PARTIAL = [kind.is_partial for kind in Kind]
ARENA, KEPT, LOCAL = int(Place.ARENA), int(Place.KEPT), int(Place.LOCAL)


@dataclass(slots=True)
class RankSteps:
    """What one rank does under one mask, step by step: the part of a Schedule that concerns it."""

    work: dict[int, tuple[Ints, Ints]] = field(default_factory=dict)  # step -> rows of Blocks, head groups
    # step -> (peer, is_send, number of the message), in the same order on both sides
    moves: dict[int, list[tuple[int, bool, int]]] = field(default_factory=lambda: defaultdict(list))


class Numbering:
    """Pieces as numbers, and what is known of them whatever the rank."""

    def __init__(self, header: PlanHeader) -> None:
        self.blocks, self.groups = len(header.tokens), header.shape.groups
        self.per_kind = self.blocks * self.groups
        self.owner = np.repeat(header.owner, self.groups).tolist()  # of piece % per_kind
        rows = {of_keys: header.local_rows(HAS_KV if of_keys else HAS_Q) for of_keys in (False, True)}
        self.row = [np.repeat(rows[kind.of_keys], self.groups).tolist() for kind in Kind]  # by kind, piece % per_kind
        # int64[wire, kind, B], bytes of a slot
        self.size_bytes = np.array([[header.piece_bytes(kind, wire) for kind in Kind] for wire in (False, True)])

    def pieces(self, kind: Ints | int, block: Ints, group: Ints) -> Ints:
        """int64, the numbers of pieces."""
        numbers: Ints = (kind * self.blocks + block.astype("int64")) * self.groups + group
        return numbers

    def parts(self, pieces: Ints) -> tuple[Ints, Ints, Ints]:
        """Kind, block and group of pieces."""
        rest, group = np.divmod(pieces, self.groups)
        return *np.divmod(rest, self.blocks), group

    def name(self, piece: int) -> str:
        """A piece in words, for errors."""
        rest, group = divmod(piece, self.groups)
        kind, block = divmod(rest, self.blocks)
        return f"{Kind(kind).name} of block {block}, head group {group}"

    def messages(self, moves: Transfers, ptr: Ints, pass_: Pass, keep: str) -> list[list[int]]:
        """The pieces of each message `moves[ptr[i]:ptr[i + 1]]` in a pass, in the order in which they lie in it."""
        kinds = [moved(pass_, side, keep) for side in Side]
        table = np.array([[*of_side, *[0] * (len(Kind) - len(of_side))] for of_side in kinds])
        side = moves.side.astype("int64")
        count = np.array([len(of_side) for of_side in kinds])[side]
        of = np.repeat(np.arange(len(moves)), count)
        pieces = self.pieces(table[side[of], ragged_ranges(count)], moves.block[of], moves.group[of]).tolist()
        bounds = np.append(0, np.cumsum(count))[ptr].tolist()
        return [pieces[start:stop] for start, stop in pairwise(bounds)]


def lower(header: PlanHeader, batch: Batch, blocks: Blocks, placement: Placement, schedule: Schedule) -> Plan:
    """The plan that carries out a schedule.

    Raises:
        ValueError: a schedule that reads or sends what a rank does not have by then.
    """
    numbering = Numbering(header)
    per_rank: list[list[RankProgram]] = [[] for _ in range(header.ranks)]
    for mask in range(len(blocks.mask_names)):
        moves, ptr = messages_of(schedule.transfers, mask)
        cargo = [numbering.messages(moves, ptr, pass_, header.keep) for pass_ in PASSES]
        per_rank_steps = split_by_rank(header, blocks, placement, schedule, mask, moves.take(ptr[:-1]))
        for rank, steps in enumerate(per_rank_steps):
            used = [comps for comps, _ in steps.work.values()]
            comps = make_comps(batch, blocks, mask, np.unique(np.concatenate([np.empty(0, "int64"), *used])))
            context = Context(header, rank, blocks, comps, numbering)
            forward = _Lowering(context, FORWARD, cargo[0]).run(steps)
            backward = _Lowering(context, BACKWARD, cargo[1], forward).run(steps)
            per_rank[rank].append(RankProgram(comps, forward, backward))
    programs = tuple(tuple(rank_programs) for rank_programs in per_rank)
    return Plan(header, programs, codec.digest(header, programs))


def messages_of(transfers: Transfers, mask: int) -> tuple[Transfers, Ints]:
    """The transfers of one mask, message by message in an order that every rank agrees on, and the bounds of the
    messages: all that one rank sends to another at a step is one message."""
    moves = transfers.take(transfers.mask == mask)
    wrong = np.flatnonzero((moves.step < 1) | (moves.src == moves.dst))
    if len(wrong):
        src, dst, step = (int(column[wrong[0]]) for column in (moves.src, moves.dst, moves.step))
        raise ValueError(f"a transfer from rank {src} to rank {dst} at step {step}; steps start at 1, ranks differ")
    moves = moves.take(np.lexsort((moves.group, moves.block, moves.side, moves.dst, moves.src, moves.step)))
    return moves, bounds_of(moves.step, moves.src, moves.dst)


def bounds_of(*columns: Ints) -> Ints:
    """int64[n + 1]: bounds of the runs of rows in which no column changes."""
    changes = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    count = len(columns[0])
    return np.concatenate([np.zeros(min(count, 1), "int64"), np.flatnonzero(changes) + 1, [count]])


def split_by_rank(
    header: PlanHeader, blocks: Blocks, placement: Placement, schedule: Schedule, mask: int, messages: Transfers
) -> list[RankSteps]:
    """Deal the computation of one mask and its messages, of which `messages` has a row each, out to the ranks."""
    result = [RankSteps() for _ in range(header.ranks)]
    part = blocks.of_mask(mask)
    rank, step = placement.comp_rank[:, part].ravel(), schedule.comp_step[:, part].ravel()
    group, comp = (axis.ravel() for axis in np.indices((blocks.groups, part.stop - part.start)))
    order = np.lexsort((step, rank))
    for rows in np.split(order, bounds_of(rank[order], step[order])[1:-1]) if len(order) else ():
        result[rank[rows[0]]].work[int(step[rows[0]])] = (comp[rows] + part.start, group[rows])
    ends = zip(messages.src.tolist(), messages.dst.tolist(), messages.step.tolist(), strict=True)
    for number, (src, dst, at) in enumerate(ends):
        result[src].moves[at].append((dst, True, number))
        result[dst].moves[at].append((src, False, number))
    return result


@dataclass(frozen=True, slots=True)
class Context:
    """What both passes of one rank under one mask share."""

    header: PlanHeader
    rank: int
    blocks: Blocks
    comps: Comps
    numbering: Numbering


class _Lowering:
    """Writes the program of one pass of one rank under one mask.

    At each step: wait for the step's transfers, put away and merge what came, pack and launch the next step's
    transfers, compute. So transfers overlap the computation between their launch and their wait.
    """

    def __init__(
        self, context: Context, pass_: Pass, messages: list[list[int]], forward: Program | None = None
    ) -> None:
        self.context, self.pass_, self.messages, self.forward = context, pass_, messages, forward
        self.keeps = KEEP[context.header.keep] if pass_ is FORWARD else ()
        self.per_kind = context.numbering.per_kind
        # by slot
        self.piece: list[int] = []
        self.place: list[int] = []
        self.wire: list[bool] = []  # whether it lies in a message, partial results in the wire dtype
        self.last_use: list[int] = []  # instruction
        self.run_of: list[int] = []  # index in `runs`, -1 for local slots and for kept ones of the backward
        self.given: dict[int, int] = {}  # slots -> offset, where it is known from the start
        self.runs: list[tuple[int, int, int, int]] = []  # first slot, last + 1, first instruction, place
        # by piece
        self.inputs: dict[int, int] = {}  # where each input is now
        self.sums: dict[int, int] = {}  # where each partial result grows
        self.in_flight: dict[int, list[int]] = {}  # step -> slots of its messages
        self.received: dict[int, list[int]] = {}
        self.instructions: list[Instruction] = []
        if forward:
            kept = np.flatnonzero(forward.slots.place == Place.KEPT)
            kind, block, group = (getattr(forward.slots, name)[kept] for name in ("kind", "block", "group"))
            pieces = context.numbering.pieces(kind.astype("int64"), block, group).tolist()
            for piece, offset in zip(pieces, forward.slots.offset[kept].tolist(), strict=True):
                self.inputs[piece] = self.add_slot(piece, KEPT, offset)

    def run(self, steps: RankSteps) -> Program:
        """The whole program."""
        for step in range(max([*steps.work, *steps.moves], default=-1) + 1):
            if step in self.in_flight:
                self.wait(step)
            if step + 1 in steps.moves:
                self.launch(step + 1, steps.moves[step + 1])
            if step in steps.work:
                self.attend(step, *steps.work[step])
        numbering = self.context.numbering
        kind, block, group = numbering.parts(np.array(self.piece, "int64"))
        wire = np.array(self.wire, bool) & np.array(IS_PARTIAL)[kind]
        offset = np.full(len(kind), -1)
        offset[list(self.given)] = list(self.given.values())
        size_bytes = numbering.size_bytes[wire.astype("int64"), kind, block]
        arena_bytes, kept_bytes = (self.place_runs(place, size_bytes, offset) for place in (ARENA, KEPT))
        slots = Slots(kind, block, group, np.array(self.place), wire, offset)
        kept_bytes = self.forward.kept_bytes if self.forward else kept_bytes
        return Program(slots, tuple(self.instructions), arena_bytes, kept_bytes)

    def place_runs(self, place: int, size_bytes: Ints, offset: Ints) -> int:
        """Give memory to all runs of a place: fills in the offsets of their slots, returns the size of the memory."""
        sizes = size_bytes.tolist()
        last_use = self.last_use
        if place == KEPT:  # lives on after the program
            last_use = [len(self.instructions)] * len(last_use)
        rows = [(first, stop, birth) for first, stop, birth, of_run in self.runs if of_run == place]
        runs = [Run(sizes[first:stop], birth, last_use[first:stop]) for first, stop, birth in rows]
        starts, total_bytes = assign_offsets(runs)
        first, stop, _ = np.array(rows, "int64").reshape(-1, 3).T
        count = stop - first
        slots = np.repeat(first, count) + ragged_ranges(count)
        before = np.cumsum(size_bytes) - size_bytes
        offset[slots] = before[slots] + np.repeat(np.array(starts, "int64") - before[first], count)
        return total_bytes

    # Slots

    def add_slot(self, piece: int, place: int, offset: int) -> int:
        """A new slot that lies at a known offset."""
        slot = len(self.piece)
        self.piece.append(piece)
        self.place.append(place)
        self.wire.append(False)
        self.last_use.append(-1)
        self.run_of.append(-1)
        self.given[slot] = offset
        return slot

    def add_run(self, pieces: list[int], place: int, wire: bool) -> list[int]:
        """New slots, one behind the other, written first by the next instruction."""
        first, count, birth = len(self.piece), len(pieces), len(self.instructions)
        self.piece += pieces
        self.place += [place] * count
        self.wire += [wire] * count
        self.last_use += [birth] * count
        self.run_of += [len(self.runs)] * count
        self.runs.append((first, first + count, birth, place))
        return list(range(first, first + count))

    def owns(self, piece: int) -> bool:
        return bool(self.context.numbering.owner[piece % self.per_kind] == self.context.rank)

    def local(self, piece: int) -> int:
        kind, rest = divmod(piece, self.per_kind)
        return self.add_slot(piece, LOCAL, self.context.numbering.row[kind][rest])

    def input(self, piece: int, step: int) -> int:
        """The slot that holds an input now."""
        if piece not in self.inputs:
            if not self.owns(piece):
                name = self.context.numbering.name(piece)
                raise ValueError(
                    f"broken schedule: rank {self.context.rank} needs the {name} at step {step} of the "
                    f"{self.pass_.name} pass, but it does not own it and no transfer has brought it by then"
                )
            self.inputs[piece] = self.local(piece)
        return self.inputs[piece]

    def sum(self, piece: int, fresh: list[int]) -> int:
        """The slot in which a partial result grows; a new one is added to `fresh`."""
        if piece not in self.sums:
            if self.owns(piece):  # the caller's accumulators start from nothing
                self.sums[piece] = self.local(piece)
            else:
                (self.sums[piece],) = self.add_run([piece], ARENA, False)
                fresh.append(self.sums[piece])
        return self.sums[piece]

    def emit(self, instruction: Instruction, *used: list[int]) -> None:
        at, last_use = len(self.instructions), self.last_use
        for slots in used:
            for slot in slots:
                last_use[slot] = at
        self.instructions.append(instruction)

    # Instructions

    def wait(self, step: int) -> None:
        """Wait for a step's transfers, keep what the backward needs, merge partial results."""
        self.emit(CommWait(step), self.in_flight.pop(step))
        keep_src: list[int] = []
        partial: list[int] = []
        for slot in self.received.pop(step):
            piece = self.piece[slot]
            kind = piece // self.per_kind
            if IS_PARTIAL[kind]:
                partial.append(slot)
            elif kind in self.keeps and self.place[slot] == ARENA and not self.is_kept(piece):
                keep_src.append(slot)
            else:
                self.inputs.setdefault(piece, slot)
        if keep_src:
            pieces = [self.piece[slot] for slot in keep_src]
            keep_dst = [self.add_run([piece], KEPT, False)[0] for piece in pieces]
            self.emit(Copy(np.array(keep_src), np.array(keep_dst)), keep_src, keep_dst)
            self.inputs.update(zip(pieces, keep_dst, strict=True))
        if partial:
            fresh: list[int] = []
            dst = [self.sum(self.piece[slot], fresh) for slot in partial]
            self.emit(Reduction(np.array(partial), np.array(dst), np.array(fresh)), partial, dst)

    def is_kept(self, piece: int) -> bool:
        return piece in self.inputs and self.place[self.inputs[piece]] == KEPT

    def launch(self, step: int, moves: list[tuple[int, bool, int]]) -> None:
        """Pack and start a step's transfers."""
        outgoing: dict[int, list[int]] = {}
        incoming: dict[int, list[int]] = {}
        for peer, is_send, number in moves:
            pieces = self.messages[number]
            if pieces and is_send:
                outgoing[peer] = self.sources(pieces, step)
            elif pieces:
                incoming[peer] = pieces
        if not outgoing and not incoming:
            return
        runs = [(peer, True, slots) for peer, slots in self.pack(outgoing).items()]
        self.received[step] = []
        for peer, pieces in incoming.items():
            kept = bool(self.keeps) and all(piece // self.per_kind in self.keeps for piece in pieces)
            slots = self.add_run(pieces, KEPT if kept else ARENA, True)
            runs.append((peer, False, slots))
            self.received[step] += slots
        runs.sort(key=lambda run: run[:2])
        slots = [slot for _, _, run in runs for slot in run]
        ptr = np.cumsum([0] + [len(run) for _, _, run in runs])
        self.in_flight[step] = slots
        peers, sends = np.array([peer for peer, _, _ in runs]), np.array([send for _, send, _ in runs])
        self.emit(CommLaunch(step, peers, sends, ptr, np.array(slots)), slots)

    def sources(self, pieces: list[int], step: int) -> list[int]:
        """The slots that hold what a message carries."""
        partial = [piece for piece in pieces if IS_PARTIAL[piece // self.per_kind]]
        missing = [piece for piece in partial if piece not in self.sums]
        if missing:  # a strategy may pass on a partial result that nobody has contributed to yet
            fresh: list[int] = []
            for piece in missing:
                self.sum(piece, fresh)
            self.emit(Reduction(np.empty(0), np.empty(0), np.array(fresh)), fresh)
        for piece in partial:
            if self.owns(piece):
                name = self.context.numbering.name(piece)
                raise ValueError(f"broken schedule: rank {self.context.rank} sends away the {name}, which it owns")
        if not partial:
            return [self.input(piece, step) for piece in pieces]
        return [
            self.sums.pop(piece) if IS_PARTIAL[piece // self.per_kind] else self.input(piece, step) for piece in pieces
        ]

    def pack(self, sends: dict[int, list[int]]) -> dict[int, list[int]]:
        """Copy what is sent into runs, one per message; what already lies in a run is sent from where it is."""
        packed: dict[int, list[int]] = {}
        src: list[int] = []
        dst: list[int] = []
        for peer, slots in sends.items():
            if self.is_run(slots):
                packed[peer] = slots
                continue
            packed[peer] = self.add_run([self.piece[slot] for slot in slots], ARENA, True)
            src += slots
            dst += packed[peer]
        if src:
            self.emit(Copy(np.array(src), np.array(dst)), src, dst)
        return packed

    def is_run(self, slots: list[int]) -> bool:
        """Whether inputs lie one behind the other as they would in a message (so a ring passes them on as they are)."""
        first, run = slots[0], self.run_of[slots[0]]
        return (
            run >= 0
            and self.run_of[slots[-1]] == run
            and slots == list(range(first, first + len(slots)))
            and not any(IS_PARTIAL[self.piece[slot] // self.per_kind] for slot in slots)
        )

    def attend(self, step: int, comps: Ints, groups: Ints) -> None:
        """Compute the blocks of a step."""
        blocks = self.context.blocks
        ends = {False: blocks.q_block[comps], True: blocks.kv_block[comps]}
        fresh: list[int] = []
        wanted, added = (
            np.stack([self.context.numbering.pieces(kind, ends[kind.of_keys], groups) for kind in kinds], axis=1)
            for kinds in (self.pass_.reads, self.pass_.writes)
        )
        reads = [self.input(piece, step) for piece in wanted.ravel().tolist()]
        writes = [self.sum(piece, fresh) for piece in added.ravel().tolist()]
        index = np.searchsorted(self.context.comps.index, comps)
        table = Attention(
            index, np.array(reads).reshape(wanted.shape), np.array(writes).reshape(added.shape), np.array(fresh)
        )
        self.emit(table, reads, writes)
