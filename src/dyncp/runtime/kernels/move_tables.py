"""Tables that tell Triton's kernels what the reductions and copies of a program do, made once.

A launch has a table of *programs*, a row for some packed rows of each field of each slot that is written, and a table
of *sources*, a row for what is merged or copied into a field, in order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.plan import FIELDS, FORWARD, Copy, Kind, Pass, Place, Reduction
from dyncp.runtime.kernels.tables import SlotTable

MOVE_WIDTH, SOURCE_WIDTH = 12, 4
GROUP, FIRST, EXTENT, FRESH, SOURCE, SOURCES, PLACE, POSITION, STATISTIC, FORM, TO_WIRE = range(11)
SOURCE_PLACE, SOURCE_POSITION, SOURCE_STATISTIC, FROM_WIRE = range(4)

# what a field is for the kernel, by kind and number of the field
COPY_FORMS = {
    (Kind.Q, 0): 0,
    (Kind.KV, 0): 1,
    (Kind.KV, 1): 2,
    (Kind.DO, 0): 3,
    (Kind.OUT, 0): 4,
    (Kind.DQ, 0): 5,
    (Kind.DKV, 0): 6,
    (Kind.DKV, 1): 7,
    (Kind.OUT, 1): 8,
    (Kind.STATS, 0): 8,
    (Kind.STATS, 1): 9,
}
SUM_FORMS = {(Kind.DQ, 0): 0, (Kind.DKV, 0): 1, (Kind.DKV, 1): 2}
INPUTS = (Kind.Q, Kind.KV, Kind.DO, Kind.STATS)


class Chunks(NamedTuple):
    """How many packed rows a program moves."""

    rows: int
    statistics: int  # of fields with one value per packed row


class Moves(NamedTuple):
    """Tables of one reduction or copy."""

    programs: Ints  # int64[P, MOVE_WIDTH]
    sources: Ints  # int64[K, SOURCE_WIDTH]
    unit: int


def reduction_tables(slots: SlotTable, instruction: Reduction, chunks: Chunks) -> Moves:
    """Tables of a reduction. Outputs are merged with their log-sum-exps, so these have no programs of their own."""
    src, dst, fresh = (some.astype("int64") for some in (instruction.src, instruction.dst, instruction.fresh))
    order = np.argsort(dst, kind="stable")
    src, dst = src[order], dst[order]
    out = np.unique(np.concatenate([dst, fresh]))
    first, stop = np.searchsorted(dst, out), np.searchsorted(dst, out, "right")
    forms, is_merge = {**SUM_FORMS, (Kind.OUT, 0): 0}, bool((slots.kind[out] == Kind.OUT).any())
    unit = slots.unit(np.concatenate([src, out]), 1 if is_merge else len(FIELDS[Kind.STATS]))
    parts, sources, count = [], [], 0
    for (kind, number), form in forms.items():
        of_kind = np.flatnonzero(slots.kind[out] == kind)
        if not len(of_kind):
            continue
        read = np.flatnonzero(slots.kind[src] == kind)
        of_src = np.searchsorted(read, np.arange(len(src) + 1))  # where a source is among those of its kind
        programs, slot = _programs(slots, out[of_kind], kind, number, unit, chunks.rows)
        programs[:, FRESH] = np.isin(out[of_kind], fresh)[slot]
        programs[:, SOURCE] = (count + of_src[first[of_kind]])[slot]
        programs[:, SOURCES] = (stop - first)[of_kind][slot]
        programs[:, FORM] = form
        parts.append(programs)
        sources.append(_sources(slots, src[read], kind, number, unit))
        count += len(read)
    return _joined(parts, sources, unit)


def copy_tables(slots: SlotTable, instruction: Copy, pass_: Pass, chunks: Chunks) -> Moves:
    """Tables of a copy."""
    src, dst = instruction.src.astype("int64"), instruction.dst.astype("int64")
    unit = slots.unit(np.concatenate([src, dst]), 1 if pass_ is FORWARD else len(FIELDS[Kind.STATS]))
    parts, sources, count = [], [], 0
    for (kind, number), form in COPY_FORMS.items():
        of_kind = np.flatnonzero(slots.kind[dst] == kind)
        if not len(of_kind):
            continue
        is_statistic = FIELDS[kind][number].dim == "one"
        size = chunks.statistics if is_statistic else chunks.rows
        programs, slot = _programs(slots, dst[of_kind], kind, number, unit, size)
        programs[:, GROUP] = slots.group[src[of_kind]][slot]  # of the caller's tensor, where it is one
        programs[:, SOURCE], programs[:, SOURCES] = count + slot, 1
        programs[:, FORM] = form
        programs[:, TO_WIRE] = slots.in_wire_dtype[dst[of_kind]][slot]
        parts.append(programs)
        sources.append(_sources(slots, src[of_kind], kind, number, unit))
        count += len(of_kind)
    return _joined(parts, sources, unit)


def _joined(programs: list[Ints], sources: list[Ints], unit: int) -> Moves:
    none = np.empty((0, MOVE_WIDTH), "int64"), np.empty((0, SOURCE_WIDTH), "int64")
    return Moves(np.concatenate([none[0], *programs]), np.concatenate([none[1], *sources]), unit)


def runs_in_kernels(slots: SlotTable, instruction: Reduction | Copy) -> bool:
    """Whether the kernels can do it: nothing is both read and written, partial results are summed in fp32 and come from
    memory, copies go into memory. The plans that this library makes have nothing else."""
    src, dst = instruction.src, instruction.dst
    if np.isin(src, dst).any():  # one after the other, where programs run side by side
        return False
    if isinstance(instruction, Reduction):
        in_fp32 = not (slots.in_wire_dtype[dst].any() or slots.in_wire_dtype[instruction.fresh].any())
        return bool(in_fp32 and (slots.place[src] != Place.LOCAL).all())
    from_caller = slots.kind[src[slots.place[src] == Place.LOCAL]]
    once = len(np.unique(dst)) == len(dst)
    return bool(once and (slots.place[dst] != Place.LOCAL).all() and np.isin(from_caller, INPUTS).all())


def _programs(slots: SlotTable, out: Ints, kind: Kind, number: int, unit: int, size: int) -> tuple[Ints, Ints]:
    """Programs that write a field of slots, `size` packed rows each; and int64[P], the number of the slot of each."""
    heads = 1 if kind.of_keys else slots.shape.group_heads
    rows = slots.tokens[out] * heads
    chunks = -(-rows // size)
    slot = np.repeat(np.arange(len(out)), chunks)
    programs = np.zeros((len(slot), MOVE_WIDTH), "int64")
    programs[:, GROUP] = slots.group[out][slot]
    programs[:, FIRST] = (np.arange(len(slot)) - np.repeat(np.cumsum(chunks) - chunks, chunks)) * size
    programs[:, EXTENT] = rows[slot]
    operands = slots.operands(kind, out, unit)[slot]
    programs[:, PLACE], programs[:, POSITION], programs[:, STATISTIC] = operands[:, [0, 1 + number, -1]].T
    return programs, slot


def _sources(slots: SlotTable, src: Ints, kind: Kind, number: int, unit: int) -> Ints:
    """int64[n, SOURCE_WIDTH]: a field of slots."""
    sources = np.zeros((len(src), SOURCE_WIDTH), "int64")
    sources[:, :FROM_WIRE] = slots.operands(kind, src, unit)[:, [0, 1 + number, -1]]
    sources[:, FROM_WIRE] = slots.in_wire_dtype[src]
    return sources
