"""The executable specification of plans: run a plan on symbols instead of tensors and refuse it at the first fault.

A slot's symbol is either the input that lies in it or, for a partial result, the set of computation blocks it
contains so far. The checker runs all ranks side by side with the semantics of the executor, so what it accepts
- computes every computation block exactly once, and brings every contribution to its owner exactly once;
- reads only what was written before, locally or by a matched receive, and not overwritten since;
- touches no memory that a transfer in flight still uses;
- pairs sends and receives in the same order on both sides, and cannot deadlock.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NoReturn, assert_never

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import HAS_KV, HAS_Q, Blocks
from dyncp.ir.origin import check_blocks, check_masks, check_sequences, expected_comps
from dyncp.ir.plan import (
    FORWARD,
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
    PlanError,
    Program,
    Reduction,
)
from dyncp.ir.step_table import step_table
from dyncp.ir.validate import validate_plan

Piece = tuple[int, int, int]  # (kind, token block, head group)
LOCAL, KEPT = int(Place.LOCAL), int(Place.KEPT)
PARTIAL = frozenset(int(kind) for kind in Kind if kind.is_partial)


@dataclass(slots=True)
class _RankState:
    """One rank in the middle of a program."""

    rank: int
    program: Program
    comps: Comps
    pieces: list[Piece]  # per slot
    place: list[int]  # per slot
    wire: list[int]  # per slot
    group: list[int]  # per slot
    start: list[int]  # per slot, bytes (rows for local slots)
    stop: list[int]
    clashes: list[list[int]]  # per slot: other slots that share bytes with it
    values: dict[int, object] = field(default_factory=dict)  # slot -> Piece (an input) or set[int] (a partial result)
    overwritten_by: dict[int, int] = field(default_factory=dict)
    incoming: Counter[int] = field(default_factory=Counter)  # slot -> receives in flight
    outgoing: Counter[int] = field(default_factory=Counter)  # slot -> sends in flight
    launched: dict[int, list[tuple[int, bool, int]]] = field(default_factory=dict)  # step -> (peer, send, number)
    at: int = 0  # next instruction


@dataclass(slots=True)
class Message:
    """A posted send or receive."""

    step: int
    slots: list[int]
    contents: list[tuple[Piece, int]]  # (piece, wire) per slot
    values: list[object]  # of a send


def check_plan(plan: Plan, blocks: Blocks | None = None, batch: Batch | None = None) -> None:
    """Check a whole plan, every mask and both passes.

    Args:
        plan: the plan.
        blocks: what it was made from. Without it the plan is held only against itself: a computation block that no
            rank has for any head group goes unnoticed.
        batch: what the blocks were made from. Without it the masks inside computation blocks are held only against
            their numbers of pairs.

    Raises:
        PlanError: the first fault; where it lies in a program, with the rank, the instruction and a table of ranks by
            steps.
    """
    try:
        validate_plan(plan)
    except ValueError as error:
        raise PlanError(str(error)) from None
    if blocks is not None:
        check_blocks(plan, blocks)
    if batch is not None:
        check_sequences(plan, batch)
    for mask, name in enumerate(plan.header.mask_names):
        expected = expected_comps(plan, mask, blocks)
        if batch is not None:
            check_masks(plan, mask, batch)
        kept: list[dict[tuple[int, Piece], object]] = [{} for _ in plan.programs]
        for pass_ in PASSES:
            checker = _Checker(plan, mask, pass_, f"mask {name!r}, {pass_.name} pass")
            checker.load_inputs(kept)
            checker.run()
            checker.check_results(expected)
            kept = checker.kept_values()


class _Checker:
    """Runs one pass of a plan under one mask on all ranks."""

    def __init__(self, plan: Plan, mask: int, pass_: Pass, title: str) -> None:
        self.header, self.pass_, self.title = plan.header, pass_, title
        self.sends: dict[tuple[int, int], list[Message]] = defaultdict(list)  # (src, dst) -> in order of posting
        self.receives: dict[tuple[int, int], list[Message]] = defaultdict(list)
        self.ranks = []
        for rank, programs in enumerate(plan.programs):
            program = programs[mask].forward if pass_ is FORWARD else programs[mask].backward
            slots = program.slots
            columns = [column.tolist() for column in (slots.kind, slots.block, slots.group)]
            pieces: list[Piece] = list(zip(*columns, strict=True))
            stop = slots.offset + self.sizes(program)
            shared = clashes(slots.place, slots.offset, stop)
            place, wire, group, start = (c.tolist() for c in (slots.place, slots.wire, slots.group, slots.offset))
            comps = programs[mask].comps
            self.ranks.append(
                _RankState(rank, program, comps, pieces, place, wire, group, start, stop.tolist(), shared)
            )

    def fail(self, state: _RankState, why: str) -> NoReturn:
        """Refuse the plan."""
        number = min(state.at, len(state.program.instructions) - 1)
        where = f"rank {state.rank}, instruction {state.at}"
        if state.program.instructions:
            where += f" ({type(state.program.instructions[number]).__name__})"
        table = step_table([s.program for s in self.ranks], state.rank, number)
        raise PlanError(f"{self.title}, {where}: {why}\n{table}")

    def describe(self, state: _RankState, slot: int) -> str:
        kind, block, group = state.pieces[slot]
        return f"slot {slot} ({Kind(kind).name} of block {block}, head group {group})"

    # Slots

    def sizes(self, program: Program) -> Ints:
        """int64[S]: bytes of every slot."""
        slots = program.slots
        sizes = np.zeros(len(slots), dtype=np.int64)
        for kind in Kind:
            for wire in (0, 1):
                chosen = (slots.kind == kind) & (slots.wire == wire)
                sizes[chosen] = self.header.piece_bytes(kind, bool(wire))[slots.block[chosen]]
        return sizes

    def load_inputs(self, kept: list[dict[tuple[int, Piece], object]]) -> None:
        """What is there before the first instruction: local inputs, empty local results, and what was kept."""
        for state, kept_values in zip(self.ranks, kept, strict=True):
            for slot, piece in enumerate(state.pieces):
                if state.place[slot] == LOCAL:
                    state.values[slot] = set() if piece[0] in PARTIAL else piece
                elif state.place[slot] == KEPT and (state.start[slot], piece) in kept_values:
                    state.values[slot] = kept_values[state.start[slot], piece]

    def read(self, state: _RankState, slot: int) -> object:
        if state.incoming[slot]:
            self.fail(state, f"reads {self.describe(state, slot)}, whose receive has not been waited for")
        if slot not in state.values:
            by = state.overwritten_by.get(slot)
            why = "that nothing has written" if by is None else f"that {self.describe(state, by)} has overwritten"
            self.fail(state, f"reads {self.describe(state, slot)}, {why}")
        return state.values[slot]

    def read_sum(self, state: _RankState, slot: int) -> set[int]:
        value = self.read(state, slot)
        if not isinstance(value, set):
            self.fail(state, f"{self.describe(state, slot)} is an input, where a partial result is expected")
        return value

    def write(self, state: _RankState, slot: int, value: object) -> None:
        if state.place[slot] == LOCAL and state.pieces[slot][0] not in PARTIAL:
            self.fail(state, f"writes {self.describe(state, slot)}, the caller's own tensor")
        for other in (slot, *state.clashes[slot]):
            if state.incoming[other] or state.outgoing[other]:
                self.fail(state, f"writes {self.describe(state, slot)}, memory that a transfer in flight uses")
            if other != slot and state.values.pop(other, None) is not None:
                state.overwritten_by[other] = slot
        state.values[slot] = value

    def clear(self, state: _RankState, slots: list[int]) -> None:
        """Set partial results to nothing."""
        for slot in slots:
            if state.pieces[slot][0] not in PARTIAL:
                self.fail(state, f"clears {self.describe(state, slot)}, which is an input")
            self.write(state, slot, set())

    def keep_apart(self, state: _RankState, reads: list[int], writes: list[int]) -> None:
        """What an instruction writes shares no bytes with what else it reads or writes: its parts have no order that
        a kernel must keep."""
        touched = {*reads, *writes}
        for slot in dict.fromkeys(writes):
            for other in state.clashes[slot]:
                if other in touched:
                    self.fail(state, f"writes {self.describe(state, slot)} over {self.describe(state, other)}")

    def expect(self, state: _RankState, slot: int, piece: Piece) -> None:
        if state.pieces[slot] != piece:
            kind, block, group = piece
            self.fail(
                state,
                f"{self.describe(state, slot)} is used as {Kind(kind).name} of block {block}, head group {group}",
            )

    # Running

    def run(self) -> None:
        """Run all ranks until the end."""
        moved = True
        while moved:
            moved = False
            for state in self.ranks:
                while state.at < len(state.program.instructions):
                    if not self.step(state, state.program.instructions[state.at]):
                        break
                    state.at += 1
                    moved = True
        for state in self.ranks:
            if state.at < len(state.program.instructions):
                self.fail(state, f"deadlock: waits for ever ({self.blocker(state)})")
            state.at = max(len(state.program.instructions) - 1, 0)
            if state.launched:
                self.fail(state, f"the transfers of step {min(state.launched)} are never waited for")
        for (src, dst), messages in self.sends.items():
            if len(messages) != len(self.receives[src, dst]):
                self.fail(self.ranks[src], f"sends {len(messages)} messages to rank {dst}, which receives fewer")

    def step(self, state: _RankState, instruction: Instruction) -> bool:
        """Carry out one instruction; False when it has to wait."""
        match instruction:
            case Attention():
                self.attention(state, instruction)
            case Reduction():
                self.keep_apart(state, instruction.src.tolist(), instruction.dst.tolist())
                self.clear(state, instruction.fresh.tolist())
                for src, dst in zip(instruction.src.tolist(), instruction.dst.tolist(), strict=True):
                    self.expect(state, src, state.pieces[dst])
                    self.add(state, dst, self.read_sum(state, src))
            case Copy():
                self.keep_apart(state, instruction.src.tolist(), instruction.dst.tolist())
                for src, dst in zip(instruction.src.tolist(), instruction.dst.tolist(), strict=True):
                    self.expect(state, dst, state.pieces[src])
                    value = self.read(state, src)
                    self.write(state, dst, set(value) if isinstance(value, set) else value)
            case CommLaunch():
                self.launch(state, instruction)
            case CommWait():
                return self.wait(state, instruction)
            case _:
                assert_never(instruction)
        return True

    def attention(self, state: _RankState, instruction: Attention) -> None:
        self.keep_apart(state, instruction.reads.ravel().tolist(), instruction.writes.ravel().tolist())
        self.clear(state, instruction.fresh.tolist())
        comps = state.comps
        for comp, reads, writes in zip(
            instruction.comp.tolist(), instruction.reads.tolist(), instruction.writes.tolist(), strict=True
        ):
            group = state.group[reads[0]]
            ends = {False: int(comps.q_block[comp]), True: int(comps.kv_block[comp])}
            for kind, slot in zip(self.pass_.reads, reads, strict=True):
                self.expect(state, slot, (kind, ends[kind.of_keys], group))
                if isinstance(self.read(state, slot), set):
                    self.fail(state, f"{self.describe(state, slot)} is a partial result, where an input is expected")
            for kind, slot in zip(self.pass_.writes, writes, strict=True):
                self.expect(state, slot, (kind, ends[kind.of_keys], group))
                self.add(state, slot, {int(comps.index[comp])})

    def add(self, state: _RankState, slot: int, more: set[int]) -> None:
        """Add contributions to a partial result."""
        if state.wire[slot]:
            self.fail(state, f"adds to {self.describe(state, slot)}, which is not in fp32")
        total = self.read_sum(state, slot)
        twice = total & more
        if twice:
            self.fail(state, f"computation block {min(twice)} is added twice to {self.describe(state, slot)}")
        self.write(state, slot, total | more)

    def launch(self, state: _RankState, instruction: CommLaunch) -> None:
        if instruction.step in state.launched:
            self.fail(state, f"the transfers of step {instruction.step} are launched twice")
        state.launched[instruction.step] = []
        ptr, slots = instruction.ptr.tolist(), instruction.slots.tolist()
        place, start, stop = state.place, state.start, state.stop
        for i, (peer, send) in enumerate(zip(instruction.peer.tolist(), instruction.send.tolist(), strict=True)):
            run = slots[ptr[i] : ptr[i + 1]]
            if peer == state.rank or not 0 <= peer < len(self.ranks):
                self.fail(state, f"a message to or from rank {peer}")
            if (
                not run
                or any(place[a] != place[b] or stop[a] != start[b] for a, b in itertools.pairwise(run))
                or place[run[0]] == LOCAL
            ):
                self.fail(state, f"the slots {run} of a message do not lie one behind the other")
            contents = [(state.pieces[slot], state.wire[slot]) for slot in run]
            pair = (state.rank, peer) if send else (peer, state.rank)
            posted = (self.sends if send else self.receives)[pair]
            values = [self.read(state, slot) for slot in run] if send else []
            if not send:
                for slot in run:
                    self.write(state, slot, None)
                    state.values.pop(slot)
            posted.append(Message(instruction.step, run, contents, values))
            state.launched[instruction.step].append((peer, bool(send), len(posted) - 1))
            (state.outgoing if send else state.incoming).update(run)
            self.match(state, pair, len(posted) - 1)

    def match(self, state: _RankState, pair: tuple[int, int], number: int) -> None:
        """Compare both sides of a message once both are posted."""
        if number >= len(self.sends[pair]) or number >= len(self.receives[pair]):
            return
        sent, received = self.sends[pair][number], self.receives[pair][number]
        if (sent.step, sent.contents) != (received.step, received.contents):
            self.fail(
                state,
                f"message {number} from rank {pair[0]} to rank {pair[1]} is sent at step {sent.step} with "
                f"{sent.contents} and received at step {received.step} as {received.contents}",
            )

    def blocker(self, state: _RankState) -> str:
        """Which message a waiting rank waits for ('' for none)."""
        instruction = state.program.instructions[state.at]
        assert isinstance(instruction, CommWait)
        for peer, send, number in state.launched[instruction.step]:
            other = self.receives[state.rank, peer] if send else self.sends[peer, state.rank]
            if number >= len(other):
                verb = f"receive from rank {state.rank}" if send else f"send to rank {state.rank}"
                return f"step {instruction.step}: rank {peer} does not {verb}"
        return ""

    def wait(self, state: _RankState, instruction: CommWait) -> bool:
        if instruction.step not in state.launched:
            self.fail(state, f"waits for the transfers of step {instruction.step}, which were not launched")
        if self.blocker(state):
            return False
        for peer, send, number in state.launched.pop(instruction.step):
            if send:
                state.outgoing.subtract(self.sends[state.rank, peer][number].slots)
                continue
            received = self.receives[peer, state.rank][number]
            state.incoming.subtract(received.slots)
            for slot, value in zip(received.slots, self.sends[peer, state.rank][number].values, strict=True):
                state.values[slot] = set(value) if isinstance(value, set) else value
        return True

    # Results

    def check_results(self, expected: Ints) -> None:
        """Every owner holds the whole result of its blocks."""
        for kind in self.pass_.writes:
            column, role = (2, HAS_KV) if kind.of_keys else (1, HAS_Q)
            wanted: dict[int, set[int]] = defaultdict(set)
            for row in expected.tolist():
                wanted[row[column]].add(row[0])
            for state in self.ranks:
                got = self.local_sums(state, kind)
                for block in self.header.owned(state.rank, role).tolist():
                    for group in range(self.header.shape.groups):
                        have = got.get((block, group), set())
                        if have != wanted[block]:
                            lost, extra = sorted(wanted[block] - have)[:5], sorted(have - wanted[block])[:5]
                            self.fail(
                                state,
                                f"{kind.name} of block {block}, head group {group} ends without computation blocks "
                                f"{lost} and with foreign ones {extra}",
                            )

    def local_sums(self, state: _RankState, kind: Kind) -> dict[tuple[int, int], set[int]]:
        result = {}
        for slot, (slot_kind, block, group) in enumerate(state.pieces):
            if slot_kind == kind and state.place[slot] == LOCAL:
                if (block, group) in result:
                    self.fail(state, f"{self.describe(state, slot)} is a second slot for one local result")
                result[block, group] = self.read_sum(state, slot)
        return result

    def kept_values(self) -> list[dict[tuple[int, Piece], object]]:
        """Per rank, what a pass leaves in the kept memory, by (offset, piece)."""
        return [
            {
                (state.start[slot], state.pieces[slot]): value
                for slot, value in state.values.items()
                if state.place[slot] == KEPT
            }
            for state in self.ranks
        ]


def clashes(place: Ints, start: Ints, stop: Ints) -> list[list[int]]:
    """For each slot, the other slots that share bytes with it. Local slots share none: one piece has one place."""
    result: list[list[int]] = [[] for _ in range(len(place))]
    for where in (Place.ARENA, Place.KEPT):
        chosen = np.flatnonzero((place == where) & (stop > start))
        active: list[int] = []
        for slot in chosen[np.argsort(start[chosen], kind="stable")].tolist():
            active = [other for other in active if stop[other] > start[slot]]
            for other in active:
                result[slot].append(other)
                result[other].append(slot)
            active.append(slot)
    return result
