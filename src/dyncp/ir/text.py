"""Plans as lines of text, to read and to compare: one slot, one computation block, one message a line.

Every form of line is written once, as a template, and used both to write and to read. Indented lines belong to the
instruction above them. Blank lines, and lines that begin with `#`, are skipped in reading.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, assert_never

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import HAS_KV, HAS_Q, TokenBlocks
from dyncp.ir.errors import DecodeError, decoding
from dyncp.ir.plan import (
    KEEP,
    PASSES,
    PLAN_VERSION,
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
    RankProgram,
    Reduction,
    Slots,
)
from dyncp.ir.shape import ITEMSIZE, AttentionShape

Programs = tuple[tuple[RankProgram, ...], ...]


class Value(NamedTuple):
    """One type of value in a line: what it looks like, and how it becomes and is made from text."""

    pattern: str
    write: Callable[[Any], str]
    read: Callable[[str], Any]


def _integer(bits: int) -> Callable[[str], int]:
    def read(word: str) -> int:
        if int(word) >> (bits - 1):
            raise ValueError(f"{word} is too large, expected less than 2**{bits - 1}")
        return int(word)

    return read


def _choice(words: Mapping[Any, str]) -> Value:
    values = {word: value for value, word in words.items()}
    return Value("|".join(map(re.escape, values)), words.__getitem__, values.__getitem__)


def _list(repeat: str) -> Value:
    read = _integer(32)
    return Value(repeat, lambda items: " ".join(map(str, items)), lambda words: [read(word) for word in words.split()])


VALUES = {
    "int": Value("[0-9]{1,10}", str, _integer(32)),
    "size": Value("[0-9]{1,19}", str, _integer(64)),
    "float": Value(r"[0-9.e+-]+", lambda value: repr(float(value)), float),
    "text": Value(r'"(?:[^"\\]|\\.)*"', json.dumps, json.loads),
    "digest": Value("[0-9a-f]{64}", str, str),
    "list": _list("[0-9 ]*"),
    **{str(count): _list(" ".join(["[0-9]{1,10}"] * count)) for count in range(1, 5)},
    "dtype": _choice({name: name for name in ITEMSIZE}),
    "keep": _choice({name: name for name in KEEP}),
    "wire": _choice({name: name for name in WIRE}),
    "role": _choice({HAS_Q: "q", HAS_KV: "kv", HAS_Q | HAS_KV: "qkv"}),
    "kind": _choice({kind: kind.name for kind in Kind}),
    "place": _choice({place: place.name.lower() for place in Place}),
    "step": _choice({0: "", 1: " + r"}),
    "narrow": _choice({0: "", 1: " wire"}),
    "way": _choice({1: "send to", 0: "receive from"}),
}


class Line:
    """One form of line: literal text with values `{name}` or `{name:type}` in it; see VALUES."""

    def __init__(self, template: str) -> None:
        self.template = template
        pieces = re.split(r"\{\w+(?::(\w+))?\}", template)
        self.literals = pieces[::2]
        self.values = [VALUES[name or "int"] for name in pieces[1::2]]
        groups = [f"({value.pattern})" for value in self.values] + [""]
        self.pattern = re.compile("".join(map("".join, zip(map(re.escape, self.literals), groups, strict=True))))

    def write(self, *values: Any) -> str:
        """The line with these values."""
        words = [value.write(item) for value, item in zip(self.values, values, strict=True)] + [""]
        return "".join(map("".join, zip(self.literals, words, strict=True)))

    def write_all(self, *columns: Any) -> Iterator[str]:
        """One line for each entry of the columns, as arrays or lists."""
        lists = [column.tolist() if isinstance(column, np.ndarray) else column for column in columns]
        return (self.write(*values) for values in zip(*lists, strict=True))

    def read(self, line: str) -> list[Any] | None:
        """The values of a line, None if it has another form."""
        found = self.pattern.fullmatch(line)
        return found and [value.read(word) for value, word in zip(self.values, found.groups(), strict=True)]


TITLE = Line("dyncp plan version {version}")
DIGEST = Line("digest {digest:digest}")
STRATEGY = Line("strategy {name:text}")
SHAPE = Line(
    "shape {q_heads} query heads, {kv_heads} kv heads, head_dim {head_dim}, v_head_dim {v_head_dim}, {dtype:dtype}"
)
RANKS = Line("ranks {nodes} nodes x {ranks_per_node}")
OPTIONS = Line("keep {keep:keep}, wire {wire:wire}")
MASK = Line("mask {name:text} weight {weight:float}")
BLOCK = Line("block {number}: seq {sequence} [{start:size}, {stop:size}) {role:role} rank {owner}")

RANK = Line("rank {rank} mask {name:text}")
COMP = Line("comp {number}: index {index} q b{q_block} kv b{kv_block}")
SLICE = Line("  rows [{q_start}, {q_stop}) keys [{lo}{lo_step:step}, {hi}{hi_step:step})")  # r: row, from q_start on
SLOT = Line("slot {number}: {kind:kind} b{block} g{group} {place:place}@{offset:size}{wire:narrow}")
PASS = {p.name: Line(f"{p.name}: arena {{arena:size}} bytes, kept {{kept:size}} bytes") for p in PASSES}

ATTENTION = Line("attention")
WORK = {
    p.name: Line(f"  comp {{comp}} reads {{reads:{len(p.reads)}}} writes {{writes:{len(p.writes)}}}") for p in PASSES
}
REDUCE = Line("reduce")
COPY = Line("copy")
FRESH = Line("  fresh [{slots:list}]")
FROM_TO = Line("  {src} -> {dst}")
LAUNCH = Line("launch step {step}")
MESSAGE = Line("  {way:way} {peer} [{slots:list}]")
WAIT = Line("wait step {step}")
INDENT = "  "
LINES = (
    *(TITLE, DIGEST, STRATEGY, SHAPE, RANKS, OPTIONS, MASK, BLOCK, RANK, COMP, SLICE, SLOT, *PASS.values()),
    *(ATTENTION, *WORK.values(), REDUCE, COPY, FRESH, FROM_TO, LAUNCH, MESSAGE, WAIT),
)


# Writing


def format_plan(plan: Plan) -> str:
    """A plan as text, with a line break at the end."""
    return "\n".join(_plan_lines(plan)) + "\n"


def _plan_lines(plan: Plan) -> Iterator[str]:
    header, shape, tokens = plan.header, plan.header.shape, plan.header.tokens
    yield TITLE.write(PLAN_VERSION)
    yield DIGEST.write(plan.digest)
    yield STRATEGY.write(header.strategy)
    yield SHAPE.write(shape.q_heads, shape.kv_heads, shape.head_dim, shape.v_head_dim, shape.dtype)
    yield RANKS.write(header.nodes, header.ranks_per_node)
    yield OPTIONS.write(header.keep, header.wire)
    yield from MASK.write_all(header.mask_names, header.mask_weights)
    yield from BLOCK.write_all(
        range(len(tokens)), tokens.sequence, tokens.start, tokens.stop, tokens.role, header.owner
    )
    for rank, programs in enumerate(plan.programs):
        for name, program in zip(header.mask_names, programs, strict=True):
            yield ""
            yield RANK.write(rank, name)
            yield from _comps_lines(program.comps)
            for pass_, one in zip(PASSES, (program.forward, program.backward), strict=True):
                yield from _program_lines(pass_, one)


def _comps_lines(comps: Comps) -> Iterator[str]:
    rows = zip(comps.index, comps.q_block, comps.kv_block, pairwise(comps.slice_ptr), strict=True)
    for comp, (index, q_block, kv_block, (start, stop)) in enumerate(rows):
        yield COMP.write(comp, index, q_block, kv_block)
        yield from SLICE.write_all(*comps.slices[start:stop].T)


def _program_lines(pass_: Pass, program: Program) -> Iterator[str]:
    slots = program.slots
    yield PASS[pass_.name].write(program.arena_bytes, program.kept_bytes)
    yield from SLOT.write_all(
        range(len(slots)), slots.kind, slots.block, slots.group, slots.place, slots.offset, slots.wire
    )
    for instruction in program.instructions:
        yield from _instruction_lines(pass_, instruction)


def _instruction_lines(pass_: Pass, instruction: Instruction) -> Iterator[str]:
    match instruction:
        case Attention(comp, reads, writes, fresh):
            yield ATTENTION.write()
            yield from _fresh_lines(fresh)
            yield from WORK[pass_.name].write_all(comp, reads, writes)
        case Reduction(src, dst, fresh):
            yield REDUCE.write()
            yield from _fresh_lines(fresh)
            yield from FROM_TO.write_all(src, dst)
        case Copy(src, dst):
            yield COPY.write()
            yield from FROM_TO.write_all(src, dst)
        case CommLaunch(step, peer, send, ptr, slots):
            yield LAUNCH.write(step)
            yield from MESSAGE.write_all(send, peer, [slots[a:b].tolist() for a, b in pairwise(ptr)])
        case CommWait(step):
            yield WAIT.write(step)
        case _:
            assert_never(instruction)


def _fresh_lines(fresh: Ints) -> Iterator[str]:
    if len(fresh):
        yield FRESH.write(fresh.tolist())


# Reading


def _first_word(line: str) -> str:
    return re.split(r"(?<=\w)\b", line, maxsplit=1)[0]  # with the spaces before it


def parse_plan(text: str) -> tuple[PlanHeader, Programs, str | None]:
    """The header, the programs and, if it is there, the digest of `format_plan`'s text. Only the form is checked, not
    whether numbers are in range.

    Raises:
        DecodeError: with the number of the line.
    """
    lines = _Lines(text)
    try:
        with decoding():
            return _read_plan(lines)
    except DecodeError as error:
        raise DecodeError(f"line {lines.number} of the plan's text: {error}") from None


class _Lines:
    """The lines of a text, read from the first to the last."""

    def __init__(self, text: str) -> None:
        numbered = enumerate(text.split("\n"), 1)
        self.lines = [(number, line) for number, line in numbered if line.strip() and not line.startswith("#")]
        self.next = 0
        self.number = 1  # of the line last looked at

    def look(self, form: Line) -> list[Any] | None:
        """The next line's values if it has the form; else None, and it stays the next."""
        if self.next == len(self.lines):
            return None
        self.number, line = self.lines[self.next]
        values = form.read(line)
        self.next += values is not None
        return values

    def take(self, form: Line) -> list[Any]:
        """The next line's values; it must have the form."""
        values = self.look(form)
        if values is None:
            self.fail(form.template)
        return values

    def fail(self, expected: str) -> NoReturn:
        """The next line is none of those that may come here."""
        if self.next == len(self.lines):
            raise ValueError(f"the text ends, expected {expected!r}")
        self.number, line = self.lines[self.next]
        others = [form.template for form in LINES if not form.pattern.fullmatch(line)]
        alike = [template for template in others if _first_word(template) == _first_word(line)]
        if not alike and line.startswith(INDENT):
            alike = [template for template in others if template.startswith(INDENT)]
        raise ValueError(f"got {line[:120]!r}, expected {' or '.join(map(repr, alike or [expected]))}")

    def each(self, form: Line) -> Iterator[list[Any]]:
        """The values of the next lines, as long as they have the form."""
        while (values := self.look(form)) is not None:
            yield values

    def columns(self, form: Line) -> list[Any]:
        """What `write_all` was given."""
        return _transposed(self.each(form), len(form.values))

    def numbered(self, form: Line) -> Iterator[list[Any]]:
        """As `each`, for lines whose first value counts them from 0; without that value."""
        for count, (number, *values) in enumerate(self.each(form)):
            if number != count:
                raise ValueError(f"number {number}, expected {count}: these lines are counted from 0")
            yield values


def _read_plan(lines: _Lines) -> tuple[PlanHeader, Programs, str | None]:
    (version,) = lines.take(TITLE)
    if version != PLAN_VERSION:
        raise ValueError(f"version {version}, expected {PLAN_VERSION}: plan again with this dyncp")
    digest = lines.look(DIGEST)
    (strategy,) = lines.take(STRATEGY)
    shape = AttentionShape(*lines.take(SHAPE))
    nodes, ranks_per_node = lines.take(RANKS)
    keep, wire = lines.take(OPTIONS)
    names, weights = lines.columns(MASK)
    if not names:
        lines.fail(MASK.template)
    sequence, start, stop, role, owner = _transposed(lines.numbered(BLOCK), 5)
    tokens = TokenBlocks(sequence, start, stop, role)
    header = PlanHeader(strategy, shape, nodes, ranks_per_node, keep, wire, tuple(names), tuple(weights), tokens, owner)
    programs = tuple(tuple(_read_rank_program(lines, rank, name) for name in names) for rank in range(header.ranks))
    if lines.next < len(lines.lines):
        lines.fail("the end of the text")
    return header, programs, digest[0] if digest else None


def _read_rank_program(lines: _Lines, rank: int, name: str) -> RankProgram:
    found = lines.take(RANK)
    if found != [rank, name]:
        raise ValueError(f"got {RANK.write(*found)!r}, expected {RANK.write(rank, name)!r}")
    comps = _read_comps(lines)
    forward, backward = (_read_program(lines, pass_) for pass_ in PASSES)
    return RankProgram(comps, forward, backward)


def _read_comps(lines: _Lines) -> Comps:
    slices: list[list[int]] = []
    ptr = [0]
    rows: list[list[int]] = []
    for row in lines.numbered(COMP):
        rows.append(row)
        slices.extend(lines.each(SLICE))
        ptr.append(len(slices))
    index, q_block, kv_block = _transposed(rows, 3)
    return Comps(index, q_block, kv_block, np.array(ptr), np.reshape(slices, (-1, len(SLICE.values))))


def _read_program(lines: _Lines, pass_: Pass) -> Program:
    arena_bytes, kept_bytes = lines.take(PASS[pass_.name])
    kind, block, group, place, offset, wire = _transposed(lines.numbered(SLOT), 6)
    slots = Slots(kind, block, group, place, wire, offset)
    instructions = []
    while (instruction := _read_instruction(lines, pass_)) is not None:
        instructions.append(instruction)
    return Program(slots, tuple(instructions), arena_bytes, kept_bytes)


def _read_instruction(lines: _Lines, pass_: Pass) -> Instruction | None:
    """The next instruction; None if the next line begins none."""
    if lines.look(ATTENTION) is not None:
        fresh = _read_fresh(lines)
        comp, reads, writes = lines.columns(WORK[pass_.name])
        return Attention(
            comp, np.reshape(reads, (-1, len(pass_.reads))), np.reshape(writes, (-1, len(pass_.writes))), fresh
        )
    if lines.look(REDUCE) is not None:
        fresh = _read_fresh(lines)
        src, dst = lines.columns(FROM_TO)
        return Reduction(src, dst, fresh)
    if lines.look(COPY) is not None:
        src, dst = lines.columns(FROM_TO)
        return Copy(src, dst)
    if step := lines.look(LAUNCH):
        send, peer, messages = lines.columns(MESSAGE)
        slots = np.array([slot for message in messages for slot in message])
        return CommLaunch(step[0], peer, send, np.cumsum([0, *map(len, messages)]), slots)
    if step := lines.look(WAIT):
        return CommWait(step[0])
    return None


def _read_fresh(lines: _Lines) -> Any:
    found = lines.look(FRESH)
    return found[0] if found else []


def _transposed(rows: Iterable[list[Any]], width: int) -> list[Any]:
    # one list per column, of rows that may be none; Any, as the plan's classes make arrays of them
    rows = [*rows]
    return [[row[column] for row in rows] for column in range(width)]
