"""Tables that tell Triton's kernels what the attention instructions of a program do, made once.

A launch has a table of *programs*, a row for each line of tiles that is written, the longest first; and tables of
*runs*, rows of consecutive tiles that a program visits. Places and positions of slots come behind the columns that all
have: of a program what its items read and then what they write, of a run what its item reads of the other side.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.plan import FIELDS, Attention, Kind, Pass, Place, PlanHeader, Program
from dyncp.ir.shape import ITEMSIZE
from dyncp.jit import jit
from dyncp.runtime.kernels.tiles import FULL, Cut, Patterns, Tiling, cut

STATS_UNIT = 4  # bytes that positions of log-sum-exps and deltas count
MOST_UNIT = 16  # bytes that other positions count, where all of a launch are multiples; a load of a thread at most
MOST_POSITION = 2**31 - 1
MOST_FIELDS = max(map(len, FIELDS.values()))
IS_STATISTIC = np.array(  # bool[kinds, fields]; also where there is no field
    [
        [number >= len(fields) or fields[number].dim == "one" for number in range(MOST_FIELDS)]
        for fields in FIELDS.values()
    ]
)

PROGRAM_WIDTH, RUN_WIDTH = 20, 12
# the columns that all programs have; then come the places and positions that one reads and writes
GROUP, FIRST, EXTENT, FRESH, FULL_RUN, FULL_TILES, MASKED_RUN, MASKED_TILES, OF_QUERIES, OPERANDS = range(10)
# the columns that all runs have; then come places and positions
RUN_FIRST, RUN_TILES, RUN_EXTENT, RUN_PLANE, RUN_ROWS, RUN_OPERANDS = range(6)
RUN_FIRST_AGAIN = 8  # RUN_FIRST, for masks; where one place and two positions are before it


class SlotTable:
    """The slots of a program as columns, which are int64[S] where nothing is said.

    Args:
        header, program: the slots' plan and program.
    """

    def __init__(self, header: PlanHeader, program: Program) -> None:
        slots = program.slots
        self.shape, self.memory_bytes = header.shape, program.arena_bytes + program.kept_bytes
        self.kind, self.place, self.group = (x.astype("int64") for x in (slots.kind, slots.place, slots.group))
        self.tokens = header.tokens.tokens[slots.block].astype("int64")
        # bool[S]: partial results in the dtype of the model
        self.in_wire_dtype = np.zeros(len(slots), bool)
        # of each field, a row of the caller's tensors or bytes of memory; 0 for a field that there is not
        self.offsets = np.zeros((MOST_FIELDS, len(slots)), "int64")
        in_memory = self.place != Place.LOCAL
        for kind, fields in FIELDS.items():
            for wire in (False, True):
                some = np.flatnonzero((self.kind == kind) & (slots.wire == wire))
                offset, layout = slots.offset[some].astype("int64"), header.field_layout(kind, wire)
                for number, (heads, dim, dtype) in enumerate(layout):
                    self.offsets[number, some] = offset
                    offset += in_memory[some] * self.tokens[some] * (heads * dim * ITEMSIZE[dtype])
                    if fields[number].dtype == "partial" and dtype != "float32":
                        self.in_wire_dtype[some] = True

    def unit(self, slots: Ints, statistics: int) -> int:
        """A number of bytes, MOST_UNIT at most, of which all positions of these slots in memory are multiples, those
        of statistics left aside.

        It is compiled into kernels. So it depends on the layer alone, and not on where slots happen to lie, wherever
        that is possible: a plan with shorter rows than those before must not make a kernel compile anew.

        Args:
            slots: those that a launch touches.
            statistics: how many of a row and head lie before other slots in a message.
        """
        shape, found = self.shape, MOST_UNIT
        for number in range(MOST_FIELDS):
            wide = slots[(self.place[slots] != Place.LOCAL) & ~IS_STATISTIC[self.kind[slots], number]]
            found = int(np.gcd.reduce(self.offsets[number, wide], initial=found))
        rows = (ITEMSIZE[shape.dtype] * dim for dim in (shape.head_dim, shape.value_dim))
        expected = math.gcd(MOST_UNIT, *rows, STATS_UNIT * statistics * shape.group_heads)
        return expected if found % expected == 0 else found

    def operands(self, kind: Kind, slots: Ints, unit: int) -> Ints:
        """int64[n, 1 + fields]: place of slots of a kind, and the position of each field; 0 for slot -1.

        Raises:
            ValueError: a position beyond what tables hold.
        """
        columns = np.zeros((len(slots), 1 + len(FIELDS[kind])), "int64")
        used = slots >= 0
        some = slots[used]
        assert (self.kind[some] == kind).all(), "slots of one kind"
        columns[used, 0] = self.place[some]
        in_memory = self.place[some] != Place.LOCAL
        for number in range(len(FIELDS[kind])):
            units = np.where(in_memory, STATS_UNIT if IS_STATISTIC[kind, number] else unit, 1)
            columns[used, 1 + number] = self.offsets[number, some] // units
        if columns.max(initial=0) > MOST_POSITION:
            raise ValueError(
                f"{self.memory_bytes >> 20} MiB of scratch and kept memory are more than the tables of GPU kernels can "
                "address, 8 GiB where there are partial results: use smaller batches, more ranks, or keep='none'"
            )
        return columns


class Masks:
    """The masks of a rank's computation blocks, for one pass.

    Args:
        pass_: of the instructions.
        of_comp: int64[n], the pattern of each computation block.
        patterns: see there.
    """

    def __init__(self, pass_: Pass, of_comp: Ints, patterns: Patterns) -> None:
        self.pass_, self.of_comp, self.patterns = pass_, of_comp, patterns
        self._cuts: dict[Tiling, Cut] = {}

    def cut(self, tiling: Tiling) -> Cut:
        """The patterns cut into tiles, once."""
        if tiling not in self._cuts:
            self._cuts[tiling] = cut(self.patterns, tiling)
        return self._cuts[tiling]


class Tables(NamedTuple):
    """Of one division."""

    programs: Ints  # int64[P, PROGRAM_WIDTH]
    runs: tuple[Ints, ...]  # int64[K, RUN_WIDTH] each: in the forward one; in the backward those of keys and of queries
    unit: int


def forward_tables(slots: SlotTable, instruction: Attention, masks: Masks, tiling: Tiling) -> Tables:
    """Tables of a division of the forward."""
    q, kv = instruction.reads.astype("int64").T
    lines = lines_of(slots, instruction, 0, masks, tiling)
    unit = slots.unit(np.concatenate([q, kv, lines.slot]), 0)
    q_of_program = _slots_of(q, lines)
    columns = [slots.operands(Kind.Q, q_of_program, unit), slots.operands(Kind.OUT, lines.slot, unit)]
    put(lines.programs, OPERANDS, *columns)
    put(lines.runs, RUN_OPERANDS, slots.operands(Kind.KV, kv[lines.run_item], unit))
    lines.runs[:, RUN_FIRST_AGAIN] = lines.runs[:, RUN_FIRST]
    return Tables(lines.programs[longest_first(lines.programs)], (lines.runs,), unit)


def backward_tables(
    slots: SlotTable, instruction: Attention, masks: Masks, key_tiling: Tiling, query_tiling: Tiling
) -> Tables:
    """Tables of a division of the backward."""
    q, do, stats, kv = instruction.reads.astype("int64").T
    of_queries = {Kind.Q: q, Kind.DO: do, Kind.STATS: stats}
    queries = lines_of(slots, instruction, 0, masks, query_tiling)
    keys = lines_of(slots, instruction, 1, masks, key_tiling)
    unit = slots.unit(np.concatenate([q, do, kv, queries.slot, keys.slot]), len(FIELDS[Kind.STATS]))
    kv_of_program = slots.operands(Kind.KV, _slots_of(kv, keys), unit)
    put(keys.programs, OPERANDS, kv_of_program, slots.operands(Kind.DKV, keys.slot, unit))
    put(keys.runs, RUN_OPERANDS, *(slots.operands(kind, of_queries[kind][keys.run_item], unit) for kind in of_queries))
    reads = (slots.operands(kind, _slots_of(read, queries), unit) for kind, read in of_queries.items())
    put(queries.programs, OPERANDS, *reads, slots.operands(Kind.DQ, queries.slot, unit))
    put(queries.runs, RUN_OPERANDS, slots.operands(Kind.KV, kv[queries.run_item], unit))
    queries.runs[:, RUN_FIRST_AGAIN] = queries.runs[:, RUN_FIRST]
    programs = np.concatenate([keys.programs, queries.programs])
    return Tables(programs[longest_first(programs)], (keys.runs, queries.runs), unit)


def _slots_of(read: Ints, lines: Lines) -> Ints:
    """int64[P]: the slot that each program reads, the same for all its items; -1 without items."""
    slots: Ints = np.where(lines.item >= 0, np.append(read, -1)[lines.item], -1)
    return slots


def attends_in_kernels(slots: SlotTable, instruction: Attention, pass_: Pass) -> bool:
    """Whether the kernels can do it: results are summed in fp32, and what adds to a slot reads one slot of each kind.
    The plans that this library makes have nothing else."""
    if slots.in_wire_dtype[instruction.writes].any() or slots.in_wire_dtype[instruction.fresh].any():
        return False
    for written, kind in enumerate(pass_.writes):
        _, first, number = np.unique(instruction.writes[:, written], return_index=True, return_inverse=True)
        same_side = [column for column, read in enumerate(pass_.reads) if read.of_keys == kind.of_keys]
        reads = instruction.reads[:, same_side]
        if (reads != reads[first][number]).any():
            return False
    return True


def put(table: Ints, column: int, *columns: Ints) -> None:
    """Fill in columns of a table from `column` on."""
    values = np.concatenate(columns, axis=1)
    table[:, column : column + values.shape[1]] = values


class Lines(NamedTuple):
    """Programs and runs of one tiling of one instruction, before places and positions are filled in."""

    programs: Ints  # int64[P, PROGRAM_WIDTH]
    runs: Ints  # int64[K, RUN_WIDTH]
    slot: Ints  # int64[P], the slot that each program writes
    item: Ints  # int64[P], the first item that writes it (-1 for a slot that is only cleared)
    run_item: Ints  # int64[K], the item of each run


def lines_of(slots: SlotTable, instruction: Attention, written: int, masks: Masks, tiling: Tiling) -> Lines:
    """What one division does to one of the kinds that it writes, column `written` of its `writes`."""
    of_items, fresh = instruction.writes[:, written].astype("int64"), instruction.fresh.astype("int64")
    pattern, patterns, pieces = masks.of_comp[instruction.comp], masks.patterns, masks.cut(tiling)
    alone = fresh[(slots.kind[fresh] == masks.pass_.writes[written]) & ~np.isin(fresh, of_items)]
    out, number = np.unique(np.concatenate([of_items, alone]), return_inverse=True)
    order = np.argsort(number[: len(of_items)], kind="stable")
    ptr = np.searchsorted(number[order], np.arange(len(out) + 1))
    first_item = np.where(ptr[:-1] < ptr[1:], np.append(order, -1)[ptr[:-1]], -1)
    tokens = slots.tokens[out]
    lines = tiling.lines(tokens, tokens)
    runs_of_pattern = np.diff(pieces.run_ptr[pieces.line_ptr])
    programs = np.zeros((int(lines.sum()), PROGRAM_WIDTH), "int64")
    runs = np.zeros((int(runs_of_pattern[pattern].sum()), RUN_WIDTH), "int64")
    slot_line = np.repeat(np.arange(len(out)), lines)
    run_item, run_plane = np.empty((2, len(runs)), "int64")
    assemble(order, ptr, lines, pattern, tuple(pieces), programs, runs, run_item, run_plane)
    programs[:, GROUP] = slots.group[out][slot_line]
    programs[:, FIRST] *= tiling.block_n if tiling.by_keys else tiling.block_m
    programs[:, EXTENT] = (tokens if tiling.by_keys else tokens * tiling.heads)[slot_line]
    programs[:, FRESH] = np.isin(out, fresh)[slot_line]
    programs[:, OF_QUERIES] = not tiling.by_keys
    of_run = pattern[run_item]
    runs[:, RUN_EXTENT] = (patterns.rows * tiling.heads if tiling.by_keys else patterns.keys)[of_run]
    runs[:, RUN_PLANE] = patterns.base[of_run] + 2 * np.maximum(run_plane, 0) * patterns.rows[of_run]
    runs[:, RUN_ROWS] = patterns.rows[of_run]
    return Lines(programs, runs, out[slot_line], first_item[slot_line], run_item)


@jit
def assemble(
    order: Ints,
    ptr: Ints,
    lines: Ints,
    pattern: Ints,
    pieces: tuple[Ints, ...],
    programs: Ints,
    runs: Ints,
    run_item: Ints,
    run_plane: Ints,
) -> None:
    """Collect the runs of each line of each slot from its items `order[ptr[s]:ptr[s + 1]]`, full ones first."""
    line_ptr, run_ptr, cut_runs = pieces
    program = at = 0
    for slot in range(len(lines)):
        for line in range(lines[slot]):
            programs[program, FIRST] = line
            for masked in range(2):
                begin, tiles = at, 0
                for i in range(ptr[slot], ptr[slot + 1]):
                    of_line = line_ptr[pattern[order[i]]] + line
                    for run in range(run_ptr[of_line], run_ptr[of_line + 1]):
                        if (cut_runs[run, 2] == FULL) != (masked == 0):
                            continue
                        runs[at, RUN_FIRST], runs[at, RUN_TILES] = cut_runs[run, 0], cut_runs[run, 1]
                        run_item[at], run_plane[at] = order[i], cut_runs[run, 2]
                        tiles += cut_runs[run, 1]
                        at += 1
                programs[program, FULL_RUN + 2 * masked] = begin
                programs[program, FULL_TILES + 2 * masked] = tiles
            program += 1


def longest_first(programs: Ints) -> Ints:
    """int64[P]: the order of programs in which a chip is filled best: those with most tiles first; without those that
    have nothing to do."""
    tiles = programs[:, FULL_TILES] + programs[:, MASKED_TILES]
    useful = np.flatnonzero((tiles > 0) | (programs[:, FRESH] > 0))
    order: Ints = useful[np.argsort(-tiles[useful], kind="stable")]
    return order
