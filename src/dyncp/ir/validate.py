"""Structural validation of a plan: every number in every field is one that its field can have.

This is what makes a plan that came from outside safe to use as an index. Whether the plan also computes the right thing
is the checker's question.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, assert_never

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import HAS_KV, HAS_Q, TokenBlocks
from dyncp.ir.cluster import MAX_RANKS
from dyncp.ir.mask import Mask
from dyncp.ir.overlaps import check_disjoint
from dyncp.ir.plan import (
    PASSES,
    WIRE,
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
    RankPlan,
    RankProgram,
    Reduction,
    Slots,
    token_bytes,
)
from dyncp.ir.slices import Q_START, Q_STOP

MAX_COMPS = (1 << 31) - 1
MAX_STEPS = (1 << 31) - 1
MAX_TOKENS = (1 << 31) - 1  # of a sequence; the slices of a computation block are int32
MAX_SIZE_BYTES = 1 << 60  # of anything; so that sums of sizes stay within int64
MAX_PADDING_BYTES = 1 << 12  # per slot; so that no memory is claimed beyond what slots need
MAX_SLICE_ROWS = 1 << 24  # rows over all slices of one computation block; looking for overlaps takes time per row
CHUNK_COMPS = 1 << 12  # computation blocks looked at together, to bound the memory

ROLES = np.array([HAS_KV if kind.of_keys else HAS_Q for kind in Kind])  # that a token block needs, by Kind


def validate_plan(plan: Plan) -> None:
    """`validate_rank` of all ranks.

    Raises:
        ValueError: as `validate_rank`; or not one list of programs per rank.
    """
    validate_header(plan.header)
    _require(
        len(plan.programs) == plan.header.ranks,
        f"the plan has programs for {len(plan.programs)} ranks, expected {plan.header.ranks}",
    )
    layout = _layout(plan.header)
    for rank, programs in enumerate(plan.programs):
        _validate_programs(layout, rank, programs)


def validate_rank(rank_plan: RankPlan) -> None:
    """Check that every field of a rank's plan holds numbers in its range: indices name something that exists, pointer
    tables ascend, slots lie inside their memory, and the slices of every computation block make a `Mask`.

    Raises:
        ValueError: naming the field, what was got and what is expected.
    """
    header = rank_plan.header
    validate_header(header)
    _require(0 <= rank_plan.rank < header.ranks, f"rank is {rank_plan.rank}, expected 0 to {header.ranks - 1}")
    _validate_programs(_layout(header), rank_plan.rank, rank_plan.programs)


def validate_header(header: PlanHeader) -> None:
    """The part of `validate_rank` that concerns the header.

    Raises:
        ValueError: as `validate_rank`.
    """
    _require(
        min(header.nodes, header.ranks_per_node) >= 1 and header.ranks <= MAX_RANKS,
        f"the plan is for {header.nodes} nodes x {header.ranks_per_node} ranks, expected 1 to {MAX_RANKS} ranks",
    )
    names, weights = header.mask_names, header.mask_weights
    if not names or len(set(names)) != len(names):
        raise ValueError(f"mask names are {_cut(names)}, expected at least one, all different")
    _require(len(names) == len(weights), f"{len(names)} mask names but {len(weights)} weights")
    for weight in weights:
        _require(weight > 0 and math.isfinite(weight), f"a mask weight is {weight}, expected a positive number")
    tokens = header.tokens
    _same_length("token blocks", tokens.sequence, tokens.start, tokens.stop, tokens.role, header.owner)
    _in_range("token block sequences", tokens.sequence, MAX_TOKENS)
    _in_range("token block starts", tokens.start, MAX_TOKENS)
    _in_range("token block stops", tokens.stop, MAX_TOKENS)
    _each("token block sizes", tokens.tokens, tokens.tokens >= 1, "at least 1")
    _each("token block roles", tokens.role, (tokens.role >= 1) & (tokens.role <= (HAS_Q | HAS_KV)), "1, 2 or 3")
    _in_range("token block owners", header.owner, header.ranks)
    _validate_tiling(tokens)
    largest = int(tokens.tokens.sum()) * max(token_bytes(header.shape, kind, "float32") for kind in Kind)
    _require(largest <= MAX_SIZE_BYTES, f"the data of all tokens takes {largest} bytes, expected at most 2**60")


def _validate_tiling(tokens: TokenBlocks) -> None:
    """The queries, and the keys, of every sequence are cut into blocks from the first to the last, without overlap."""
    for what, role in (("queries", HAS_Q), ("keys", HAS_KV)):
        blocks = np.flatnonzero(tokens.role & role)
        blocks = blocks[np.lexsort((tokens.start[blocks], tokens.sequence[blocks]))]
        sequence, start, stop = tokens.sequence[blocks], tokens.start[blocks], tokens.stop[blocks]
        first = np.append(True, sequence[1:] != sequence[:-1])[: len(blocks)]
        expected = np.where(first, 0, np.roll(stop, 1))
        if not np.array_equal(start, expected):
            at = int(np.argmax(start != expected))
            raise ValueError(
                f"token block {blocks[at]} starts at {start[at]}, but the {what} of sequence {sequence[at]} go on at "
                f"{expected[at]}"
            )


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the programs of all ranks are held against."""

    header: PlanHeader
    tokens: Ints  # int64[B]
    token_bytes: Ints  # int64[kinds, 2], by kind and whether the slot has the wire dtype
    rows: Ints  # int64[2, B], first row in its owner's tensors of each token block: of its queries, of its keys; or -1


def _layout(header: PlanHeader) -> _Layout:
    wires = ("float32", header.wire)
    token_bytes_ = np.array([[token_bytes(header.shape, kind, wire) for wire in wires] for kind in Kind], np.int64)
    tokens = header.tokens.tokens
    rows = np.full((2, len(tokens)), -1, np.int64)
    for side, role in enumerate((HAS_Q, HAS_KV)):
        blocks = np.flatnonzero(header.tokens.role & role)
        blocks = blocks[np.argsort(header.owner[blocks], kind="stable")]
        owner, sizes = header.owner[blocks], tokens[blocks]
        start = np.cumsum(sizes) - sizes
        first = np.append(True, owner[1:] != owner[:-1])[: len(blocks)]
        rows[side, blocks] = start - np.maximum.accumulate(np.where(first, start, 0))
    return _Layout(header, tokens, token_bytes_, rows)


@dataclass(frozen=True, slots=True)
class _Scope:
    """One rank's program under one mask, and what its fields are held against."""

    where: str
    layout: _Layout
    rank: int

    @property
    def header(self) -> PlanHeader:
        """The plan's header."""
        return self.layout.header


@dataclass(slots=True)
class _References:
    """Numbers of one sort, gathered from many small arrays so that they are looked at once."""

    arrays: list[Ints] = field(default_factory=list)
    names: list[tuple[int, str]] = field(default_factory=list)

    def add(self, instruction: int, name: str, values: Ints) -> None:
        self.arrays.append(values.ravel())
        self.names.append((instruction, name))

    def check(self, where: str, stop: int) -> None:
        """Every number must lie in [0, stop)."""
        everything = np.concatenate(self.arrays) if self.arrays else np.empty(0, np.int32)
        if not everything.size or (everything.min() >= 0 and everything.max() < stop):
            return
        for values, (instruction, name) in zip(self.arrays, self.names, strict=True):
            _in_range(f"{where}, instruction {instruction}: {name}", values, stop)


def _validate_programs(layout: _Layout, rank: int, programs: Sequence[RankProgram]) -> None:
    header = layout.header
    _require(
        len(programs) == len(header.mask_names),
        f"rank {rank} has programs for {len(programs)} masks, expected {len(header.mask_names)}",
    )
    for name, program in zip(header.mask_names, programs, strict=True):
        where = f"rank {rank}, mask {name!r}"
        _validate_comps(where, layout, program.comps)
        for pass_, one in zip(PASSES, (program.forward, program.backward), strict=True):
            scope = _Scope(f"{where}, {pass_.name}", layout, rank)
            _validate_slots(scope, one)
            _validate_instructions(scope, pass_, one, len(program.comps))
        kept, used = program.forward.kept_bytes, program.backward.kept_bytes
        _require(used == kept, f"{where}: kept_bytes is {used} backward, expected the forward's {kept}")


def _validate_comps(where: str, layout: _Layout, comps: Comps) -> None:
    tokens = layout.header.tokens
    _same_length(f"{where}, computation blocks", comps.index, comps.q_block, comps.kv_block)
    _in_range(f"{where}: index", comps.index, MAX_COMPS)
    for name, blocks, role in (("q_block", comps.q_block, HAS_Q), ("kv_block", comps.kv_block, HAS_KV)):
        _in_range(f"{where}: {name}", blocks, len(tokens))
        has_role = (tokens.role[blocks] & role) > 0
        _each(f"{where}: {name}", blocks, has_role, f"a token block with role {role}")
    slices = comps.slices
    _require(slices.ndim == 2 and slices.shape[1] == 6, f"{where}: slices are {slices.shape}, expected [K, 6]")
    _pointers(f"{where}: slice_ptr", comps.slice_ptr, len(comps), len(slices))
    for first in range(0, len(comps), CHUNK_COMPS):
        _validate_masks(where, layout.tokens, comps, first, min(first + CHUNK_COMPS, len(comps)))


def _validate_masks(where: str, tokens: Ints, comps: Comps, first: int, last: int) -> None:
    """The slices of computation blocks `[first, last)`."""
    q_size, kv_size = (tokens[blocks[first:last]].tolist() for blocks in (comps.q_block, comps.kv_block))
    ptr = comps.slice_ptr[first : last + 1].tolist()
    slices = comps.slices[ptr[0] : ptr[-1]]
    raw, row_bytes = slices.tobytes(), 6 * slices.itemsize
    seen = set()  # most computation blocks have one of a few masks
    for at, (q, kv, (start, stop)) in enumerate(zip(q_size, kv_size, pairwise(ptr), strict=True)):
        start, stop = start - ptr[0], stop - ptr[0]
        key = (q, kv, raw[start * row_bytes : stop * row_bytes])
        if key in seen:
            continue
        seen.add(key)
        try:
            _validate_slices(q, kv, slices[start:stop])
        except ValueError as error:
            raise ValueError(f"{where}, computation block {first + at}: {error}") from None


def _validate_slices(q_size: int, kv_size: int, slices: Ints) -> None:
    mask = Mask(q_size, kv_size, slices)
    _require(np.array_equal(mask.slices, slices), "its slices are not sorted, or a single row has a step")
    if len(slices) > 1:
        rows = int((mask.slices[:, Q_STOP] - mask.slices[:, Q_START]).sum())
        _require(rows <= MAX_SLICE_ROWS, f"its slices have {rows} rows, expected at most {MAX_SLICE_ROWS}")
        check_disjoint(mask.slices)


def _validate_slots(scope: _Scope, program: Program) -> None:
    slots, where = program.slots, f"{scope.where}, slots"
    header = scope.header
    _same_length(where, slots.kind, slots.block, slots.group, slots.place, slots.wire, slots.offset)
    limits = (("kind", len(Kind)), ("block", len(header.tokens)), ("group", header.shape.groups))
    for name, stop in (*limits, ("place", len(Place)), ("wire", len(WIRE)), ("offset", MAX_SIZE_BYTES)):
        _in_range(f"{where}: {name}", getattr(slots, name), stop)
    role = ROLES[slots.kind]
    has_role = (header.tokens.role[slots.block] & role) > 0
    _each(f"{where}: block", slots.block, has_role, "a token block that has data of the slot's kind")
    for name in ("arena_bytes", "kept_bytes"):
        size = getattr(program, name)
        _require(0 <= size <= MAX_SIZE_BYTES, f"{scope.where}: {name} is {size}, expected 0 to 2**60")
    _validate_places(scope, slots, program)


def _validate_places(scope: _Scope, slots: Slots, program: Program) -> None:
    """Every slot lies inside the memory that it says it is in."""
    where = f"{scope.where}, slots: offset"
    layout = scope.layout
    row = layout.rows[(ROLES[slots.kind] == HAS_KV).astype(np.intp), slots.block]
    row = np.where(layout.header.owner[slots.block] == scope.rank, row, -1)
    _each(where, slots.offset, (slots.place == Place.LOCAL) | (slots.offset % 4 == 0), "a multiple of 4 bytes")
    at_row = (slots.place != Place.LOCAL) | ((slots.offset == row) & (row >= 0))
    _each(where, slots.offset, at_row, f"of a local slot, the first row of a token block of rank {scope.rank}")
    slot_bytes = layout.token_bytes[slots.kind, slots.wire] * layout.tokens[slots.block]
    end = slots.offset + slot_bytes
    for place, size in ((Place.ARENA, program.arena_bytes), (Place.KEPT, program.kept_bytes)):
        here = slots.place == place
        name = f"{place.name.lower()}_bytes"
        _each(where, slots.offset, ~here | (end <= size), f"the slot to end within the {size} of {name}")
        most = int((slot_bytes[here] + MAX_PADDING_BYTES).sum())
        _require(size <= most, f"{scope.where}: {name} is {size}, expected at most {most}, as its slots need no more")


def _validate_instructions(scope: _Scope, pass_: Pass, program: Program, comps: int) -> None:
    slot_refs, comp_refs = _References(), _References()
    for at, instruction in enumerate(program.instructions):
        where = f"{scope.where}, instruction {at}"
        match instruction:
            case Attention():
                _validate_attention(where, pass_, instruction)
                comp_refs.add(at, "comp", instruction.comp)
            case Reduction() | Copy():
                _same_length(where, instruction.src, instruction.dst)
            case CommLaunch():
                _validate_launch(where, scope, instruction)
            case CommWait():
                _validate_step(where, instruction.step)
            case _:
                assert_never(instruction)
        for name in SLOT_FIELDS[type(instruction)]:
            slot_refs.add(at, name, getattr(instruction, name))
    slot_refs.check(scope.where, len(program.slots))
    comp_refs.check(scope.where, comps)


SLOT_FIELDS: dict[type[Instruction], tuple[str, ...]] = {
    Attention: ("reads", "writes", "fresh"),
    Reduction: ("src", "dst", "fresh"),
    Copy: ("src", "dst"),
    CommLaunch: ("slots",),
    CommWait: (),
}


def _validate_attention(where: str, pass_: Pass, attention: Attention) -> None:
    for name, values, width in (
        ("reads", attention.reads, len(pass_.reads)),
        ("writes", attention.writes, len(pass_.writes)),
    ):
        expected = (len(attention.comp), width)
        _require(values.shape == expected, f"{where}: {name} are {list(values.shape)}, expected {list(expected)}")


def _validate_step(where: str, step: int) -> None:
    _require(0 <= step < MAX_STEPS, f"{where}: step is {step}, expected 0 to {MAX_STEPS - 1}")


def _validate_launch(where: str, scope: _Scope, launch: CommLaunch) -> None:
    _validate_step(where, launch.step)
    _same_length(where, launch.peer, launch.send)
    _in_range(f"{where}: peer", launch.peer, scope.header.ranks)
    _each(f"{where}: peer", launch.peer, launch.peer != scope.rank, "another rank")
    _in_range(f"{where}: send", launch.send, 2)
    _pointers(f"{where}: ptr", launch.ptr, len(launch.peer), len(launch.slots))


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _each(where: str, values: Ints, holds: Any, expected: str) -> None:
    if not holds.all():
        at = int(np.argmin(holds))
        raise ValueError(f"{where}[{at}] is {values[at]}, expected {expected}")


def _in_range(where: str, values: Ints, stop: int) -> None:
    if values.size and (values.min() < 0 or values.max() >= stop):
        _each(where, values, (values >= 0) & (values < stop), f"0 to {stop - 1}" if stop else "none, as there is none")


def _same_length(where: str, *arrays: Ints) -> None:
    shapes = {array.shape for array in arrays}
    _require(
        len(shapes) == 1 and all(len(shape) == 1 for shape in shapes),
        f"{where}: fields have shapes {_list_shapes(shapes)}, expected the same length",
    )


def _list_shapes(shapes: Iterable[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in sorted(shapes))


def _pointers(where: str, ptr: Ints, count: int, total: int) -> None:
    """`ptr` must cut `total` items into `count` runs."""
    _require(ptr.shape == (count + 1,), f"{where}: {ptr.size} numbers, expected {count + 1}")
    ascends = ptr[0] == 0 and ptr[-1] == total and not (ptr[1:] < ptr[:-1]).any()
    _require(ascends, f"{where}: {_shown(ptr)}, expected to ascend from 0 to {total}")


def _cut(value: object) -> str:
    """A value in an error message, cut short."""
    if isinstance(value, tuple):
        shown = ", ".join(map(_cut, value[:8])) + (", ..." if len(value) > 8 else "," if len(value) == 1 else "")
        return f"({shown})"
    return repr(value[:80]) if isinstance(value, str) else repr(value)


def _shown(values: Ints) -> str:
    return f"[{', '.join(map(str, values[:8].tolist()))}{', ...' if len(values) > 8 else ''}]"
