"""Schedule -> Plan: turn steps and transfers into instructions over slots, forward and backward from one table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dyncp.ir import codec
from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import HAS_KV, HAS_Q, Blocks
from dyncp.ir.placement import Placement
from dyncp.ir.plan import (
    BACKWARD,
    FORWARD,
    KEEP,
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
from dyncp.ir.schedule import Schedule, Side
from dyncp.planner.memory import Run, assign_offsets


class Piece(NamedTuple):
    """The data of one kind of one (block, head group)."""

    kind: Kind
    block: int
    group: int

    def __str__(self) -> str:
        return f"{self.kind.name} of block {self.block}, head group {self.group}"


class Work(NamedTuple):
    """One computation block of one head group."""

    comp: int  # row of Blocks
    group: int


@dataclass(slots=True)
class RankSteps:
    """What one rank does under one mask, step by step: the part of a Schedule that concerns it."""

    work: dict[int, list[Work]] = field(default_factory=lambda: defaultdict(list))
    # step -> (peer, is_send) -> (side, block, group), in the same order on both sides
    moves: dict[int, dict[tuple[int, bool], list[tuple[Side, int, int]]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )


def lower(header: PlanHeader, batch: Batch, blocks: Blocks, placement: Placement, schedule: Schedule) -> Plan:
    """The plan that carries out a schedule.

    Raises:
        ValueError: a schedule that reads or sends what a rank does not have by then.
    """
    sizes = {(kind, wire): header.piece_bytes(kind, wire).tolist() for kind in Kind for wire in (False, True)}
    rows = {False: header.local_rows(HAS_Q).tolist(), True: header.local_rows(HAS_KV).tolist()}
    per_rank: list[list[RankProgram]] = [[] for _ in range(header.ranks)]
    for mask in range(len(blocks.mask_names)):
        for rank, steps in enumerate(split_by_rank(blocks, placement, schedule, mask, header.ranks)):
            comps = make_comps(batch, blocks, mask, (work.comp for works in steps.work.values() for work in works))
            context = Context(header, rank, blocks, comps, sizes, rows)
            forward = _Lowering(context, FORWARD).run(steps)
            backward = _Lowering(context, BACKWARD, forward).run(steps)
            per_rank[rank].append(RankProgram(comps, forward, backward))
    programs = tuple(tuple(rank_programs) for rank_programs in per_rank)
    return Plan(header, programs, codec.digest(header, programs))


def split_by_rank(blocks: Blocks, placement: Placement, schedule: Schedule, mask: int, ranks: int) -> list[RankSteps]:
    """Deal the rows of a schedule for one mask out to the ranks, in an order that every rank agrees on."""
    result = [RankSteps() for _ in range(ranks)]
    part = blocks.of_mask(mask)
    rank, step = placement.comp_rank[:, part], schedule.comp_step[:, part]
    groups, comps = np.indices(rank.shape)
    for r, s, g, n in zip(rank.ravel().tolist(), step.ravel().tolist(), groups.flat, comps.flat, strict=True):
        result[r].work[s].append(Work(part.start + int(n), int(g)))
    moves = schedule.transfers
    order = np.lexsort((moves.group, moves.block, moves.side, moves.dst, moves.src, moves.step))
    moves = moves.take(order[moves.mask[order] == mask])
    columns = (moves.side, moves.block, moves.group, moves.src, moves.dst, moves.step)
    for side, block, group, src, dst, s in zip(*(column.tolist() for column in columns), strict=True):
        if s < 1 or src == dst:
            raise ValueError(f"a transfer from rank {src} to rank {dst} at step {s}; steps start at 1, ranks differ")
        result[src].moves[s][dst, True].append((Side(side), block, group))
        result[dst].moves[s][src, False].append((Side(side), block, group))
    return result


def make_comps(batch: Batch, blocks: Blocks, mask: int, used: Iterable[int]) -> Comps:
    """The table of the computation blocks that a rank uses, each with its part of the mask."""
    index = np.array(sorted(set(used)), dtype=np.int64)
    q_block, kv_block = blocks.q_block[index], blocks.kv_block[index]
    start, stop, sequence = blocks.tokens.start, blocks.tokens.stop, blocks.tokens.sequence
    sizes = blocks.tokens.tokens
    areas = sizes[q_block] * sizes[kv_block]
    slices: list[Ints] = []
    for n, q, kv in zip(index.tolist(), q_block.tolist(), kv_block.tolist(), strict=True):
        if blocks.pairs[n] == areas[len(slices)]:  # nothing is masked: no need to look at the mask
            slices.append(np.array([[0, sizes[q], 0, 0, sizes[kv], 0]]))
        else:
            whole = batch.sequences[sequence[q]].masks[blocks.mask_names[mask]]
            slices.append(whole.crop(int(start[q]), int(stop[q]), int(start[kv]), int(stop[kv])).slices)
    ptr = np.cumsum([0] + [len(rows) for rows in slices])
    return Comps(index, q_block, kv_block, ptr, np.concatenate(slices) if slices else np.empty((0, 6)))


def kept_pieces(forward: Program) -> dict[Piece, int]:
    """Offsets of what a forward program leaves in the kept memory."""
    slots = forward.slots
    kept = np.flatnonzero(slots.place == Place.KEPT)
    return {Piece(Kind(slots.kind[i]), int(slots.block[i]), int(slots.group[i])): int(slots.offset[i]) for i in kept}


@dataclass(frozen=True, slots=True)
class Context:
    """What both passes of one rank under one mask share."""

    header: PlanHeader
    rank: int
    blocks: Blocks
    comps: Comps
    sizes_bytes: dict[tuple[Kind, bool], list[int]]  # (kind, wire) -> per token block
    rows: dict[bool, list[int]]  # of keys or of queries -> first local row, per token block


@dataclass(slots=True)
class Slot:
    """A slot while its program is being written."""

    piece: Piece
    place: Place
    wire: bool
    offset: int = -1
    run: Run | None = None  # the memory it needs; None for local and for kept slots of the backward
    position: int = 0  # in the run

    def use(self, instruction: int) -> None:
        """Keep the slot's memory at least until an instruction."""
        if self.run is not None:
            self.run.deaths[self.position] = max(self.run.deaths[self.position], instruction)


class _Lowering:
    """Writes the program of one pass of one rank under one mask.

    At each step: wait for the step's transfers, put away and merge what came, pack and launch the next step's
    transfers, compute. So transfers overlap the computation between their launch and their wait.
    """

    def __init__(self, context: Context, pass_: Pass, forward: Program | None = None) -> None:
        self.context, self.pass_ = context, pass_
        self.keeps = KEEP[context.header.keep] if pass_ is FORWARD else ()
        self.slots: list[Slot] = []
        self.runs: dict[Place, list[Run]] = {Place.ARENA: [], Place.KEPT: []}
        self.inputs: dict[Piece, int] = {}  # where each input is now
        self.sums: dict[Piece, int] = {}  # where each partial result grows
        self.in_flight: dict[int, list[int]] = {}  # step -> slots of its messages
        self.received: dict[int, list[int]] = {}
        self.instructions: list[Instruction] = []
        self.forward = forward
        for piece, offset in kept_pieces(forward).items() if forward else ():
            self.inputs[piece] = self.add_slot(Slot(piece, Place.KEPT, False, offset))

    def run(self, steps: RankSteps) -> Program:
        """The whole program."""
        for step in range(max([*steps.work, *steps.moves], default=-1) + 1):
            if step in self.in_flight:
                self.wait(step)
            if step + 1 in steps.moves:
                self.launch(step + 1, steps.moves[step + 1])
            if step in steps.work:
                self.attend(step, steps.work[step])
        arena_bytes = self.place_runs(Place.ARENA)
        kept_bytes = self.forward.kept_bytes if self.forward else self.place_runs(Place.KEPT)
        rows = [(s.piece.kind, s.piece.block, s.piece.group, s.place, s.wire, s.offset) for s in self.slots]
        slots = Slots(*np.array(rows, dtype=np.int64).reshape(-1, 6).T)
        return Program(slots, tuple(self.instructions), arena_bytes, kept_bytes)

    def place_runs(self, place: Place) -> int:
        """Give memory to all runs of a place; returns its size."""
        if place is Place.KEPT:  # lives on after the program
            for run in self.runs[place]:
                run.deaths = [len(self.instructions)] * len(run.slots)
        offsets, size_bytes = assign_offsets(self.runs[place])
        for slot, offset in offsets.items():
            self.slots[slot].offset = offset
        return size_bytes

    # Slots

    def size(self, slot: Slot) -> int:
        return self.context.sizes_bytes[slot.piece.kind, slot.wire][slot.piece.block]

    def add_slot(self, slot: Slot) -> int:
        self.slots.append(slot)
        return len(self.slots) - 1

    def add_run(self, pieces: Iterable[Piece], place: Place, wire: bool, birth: int) -> list[int]:
        """New slots, one behind the other, written first by instruction `birth`."""
        run = Run([], [], birth, [])
        for piece in pieces:
            slot = Slot(piece, place, wire and piece.kind.is_partial, run=run, position=len(run.slots))
            run.slots.append(self.add_slot(slot))
            run.sizes_bytes.append(self.size(slot))
            run.deaths.append(birth)
        self.runs[place].append(run)
        return run.slots

    def owns(self, piece: Piece) -> bool:
        return bool(self.context.header.owner[piece.block] == self.context.rank)

    def local(self, piece: Piece) -> int:
        row = self.context.rows[piece.kind.of_keys][piece.block]
        return self.add_slot(Slot(piece, Place.LOCAL, False, row))

    def input(self, piece: Piece, step: int) -> int:
        """The slot that holds an input now."""
        if piece not in self.inputs:
            if not self.owns(piece):
                raise ValueError(
                    f"broken schedule: rank {self.context.rank} needs the {piece} at step {step} of the "
                    f"{self.pass_.name} pass, but it does not own it and no transfer has brought it by then"
                )
            self.inputs[piece] = self.local(piece)
        return self.inputs[piece]

    def sum(self, piece: Piece, birth: int, fresh: list[int]) -> int:
        """The slot in which a partial result grows; a new one is added to `fresh`."""
        if piece not in self.sums:
            if self.owns(piece):  # the caller's accumulators start from nothing
                self.sums[piece] = self.local(piece)
            else:
                (self.sums[piece],) = self.add_run([piece], Place.ARENA, False, birth)
                fresh.append(self.sums[piece])
        return self.sums[piece]

    def emit(self, instruction: Instruction, *used: Iterable[int]) -> None:
        for slots in used:
            for slot in slots:
                self.slots[slot].use(len(self.instructions))
        self.instructions.append(instruction)

    # Instructions

    def wait(self, step: int) -> None:
        """Wait for a step's transfers, keep what the backward needs, merge partial results."""
        self.emit(CommWait(step), self.in_flight.pop(step))
        received = self.received.pop(step)
        keep_src: list[int] = []
        partial: list[int] = []
        for slot in received:
            piece, place = self.slots[slot].piece, self.slots[slot].place
            if piece.kind.is_partial:
                partial.append(slot)
            elif piece.kind in self.keeps and place is Place.ARENA and not self.is_kept(piece):
                keep_src.append(slot)
            else:
                self.inputs.setdefault(piece, slot)
        if keep_src:
            keep_dst = [
                self.add_run([self.slots[slot].piece], Place.KEPT, False, len(self.instructions))[0]
                for slot in keep_src
            ]
            self.emit(Copy(np.array(keep_src), np.array(keep_dst)), keep_src, keep_dst)
            self.inputs.update((self.slots[slot].piece, slot) for slot in keep_dst)
        if partial:
            fresh: list[int] = []
            dst = [self.sum(self.slots[slot].piece, len(self.instructions), fresh) for slot in partial]
            self.emit(Reduction(np.array(partial), np.array(dst), np.array(fresh)), partial, dst)

    def is_kept(self, piece: Piece) -> bool:
        return piece in self.inputs and self.slots[self.inputs[piece]].place is Place.KEPT

    def launch(self, step: int, messages: dict[tuple[int, bool], list[tuple[Side, int, int]]]) -> None:
        """Pack and start a step's transfers."""
        outgoing: dict[int, list[int]] = {}
        incoming: dict[int, list[Piece]] = {}
        for (peer, is_send), moves in messages.items():
            pieces = [
                Piece(kind, block, group)
                for side, block, group in moves
                for kind in moved(self.pass_, side, self.context.header.keep)
            ]
            if pieces and is_send:
                outgoing[peer] = self.sources(pieces, step)
            elif pieces:
                incoming[peer] = pieces
        if not outgoing and not incoming:
            return
        runs = [(peer, True, slots) for peer, slots in self.pack(outgoing).items()]
        self.received[step] = []
        for peer, pieces in incoming.items():
            place = Place.KEPT if all(piece.kind in self.keeps for piece in pieces) else Place.ARENA
            slots = self.add_run(pieces, place, True, len(self.instructions))
            runs.append((peer, False, slots))
            self.received[step] += slots
        runs.sort(key=lambda run: run[:2])
        slots = [slot for _, _, run in runs for slot in run]
        ptr = np.cumsum([0] + [len(run) for _, _, run in runs])
        self.in_flight[step] = slots
        peers, sends = np.array([peer for peer, _, _ in runs]), np.array([send for _, send, _ in runs])
        self.emit(CommLaunch(step, peers, sends, ptr, np.array(slots)), slots)

    def sources(self, pieces: list[Piece], step: int) -> list[int]:
        """The slots that hold what a message carries."""
        missing = [piece for piece in pieces if piece.kind.is_partial and piece not in self.sums]
        if missing:  # a strategy may pass on a partial result that nobody has contributed to yet
            fresh: list[int] = []
            for piece in missing:
                self.sum(piece, len(self.instructions), fresh)
            self.emit(Reduction(np.empty(0), np.empty(0), np.array(fresh)), fresh)
        slots = [self.sums.pop(p) if p.kind.is_partial else self.input(p, step) for p in pieces]
        for piece in pieces:
            if piece.kind.is_partial and self.owns(piece):
                raise ValueError(f"broken schedule: rank {self.context.rank} sends away the {piece}, which it owns")
        return slots

    def pack(self, sends: dict[int, list[int]]) -> dict[int, list[int]]:
        """Copy what is sent into runs, one per message; what already lies in a run is sent from where it is."""
        packed: dict[int, list[int]] = {}
        src: list[int] = []
        dst: list[int] = []
        for peer, slots in sends.items():
            if self.is_run(slots):
                packed[peer] = slots
                continue
            pieces = [self.slots[slot].piece for slot in slots]
            packed[peer] = self.add_run(pieces, Place.ARENA, True, len(self.instructions))
            src += slots
            dst += packed[peer]
        if src:
            self.emit(Copy(np.array(src), np.array(dst)), src, dst)
        return packed

    def is_run(self, slots: list[int]) -> bool:
        """Whether inputs lie one behind the other as they would in a message (so a ring passes them on as they are)."""
        first = self.slots[slots[0]]
        return first.run is not None and all(
            slot.run is first.run and slot.position == first.position + i and not slot.piece.kind.is_partial
            for i, slot in enumerate(self.slots[s] for s in slots)
        )

    def attend(self, step: int, works: list[Work]) -> None:
        """Compute the blocks of a step."""
        blocks = self.context.blocks
        fresh: list[int] = []
        at = len(self.instructions)
        comps = np.array([work.comp for work in works])
        ends = {False: blocks.q_block[comps].tolist(), True: blocks.kv_block[comps].tolist()}
        reads = [
            [self.input(Piece(kind, ends[kind.of_keys][i], work.group), step) for kind in self.pass_.reads]
            for i, work in enumerate(works)
        ]
        writes = [
            [self.sum(Piece(kind, ends[kind.of_keys][i], work.group), at, fresh) for kind in self.pass_.writes]
            for i, work in enumerate(works)
        ]
        index = np.searchsorted(self.context.comps.index, comps)
        self.emit(Attention(index, np.array(reads), np.array(writes), np.array(fresh)), *reads, *writes)
