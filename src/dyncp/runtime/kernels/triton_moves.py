"""Blockwise reduction and copy in Triton: a program for some rows of each field of each slot that is written.

Letters and tables as in `triton_attention.py`; a table of *sources* lists what is merged into each field, in order.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl

from dyncp.runtime.kernels.triton_attention import STATS_UNIT, load, row_pointers, store

MOVE = tl.constexpr(12)  # columns of the table of programs
SOURCE = tl.constexpr(4)  # columns of the table of sources


@triton.jit
def load_part(
    source, partial, wire, memory, first, here, BLOCK_M: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    D1: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """fp32[M, D1]: rows of a partial result, which lies in the wire dtype or in fp32."""
    place, at = tl.load(source), tl.load(source + 1)
    if tl.load(source + 3) != 0:
        part = load(row_pointers(wire, memory, place, at, 0, first, BLOCK_M, H, D, UNIT), here, False, D, D1)
        value = part.to(tl.float32)
    else:
        value = load(row_pointers(partial, memory, place, at, 0, first, BLOCK_M, H, D, UNIT), here, False, D, D1)
    return value


@triton.jit
def merge_outputs(
    o_local, lse_local, q_local, arena, kept, programs, sources,
    o_pitch, o_head, lse_pitch, lse_head, q_pitch, q_head,
    H: tl.constexpr, E: tl.constexpr, E1: tl.constexpr, UNIT: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merge partial outputs by their log-sum-exps, each program into some rows of an (O, LSE)."""
    program = programs + tl.program_id(0) * MOVE
    group, first, extent, fresh = tl.load(program), tl.load(program + 1), tl.load(program + 2), tl.load(program + 3)
    memory = (arena, kept)
    o, lse, wire = (o_local, o_pitch, o_head), (lse_local, lse_pitch, lse_head), (q_local, q_pitch, q_head)
    here = first + tl.arange(0, BLOCK_M) < extent
    place, head = tl.load(program + 6), group * H
    o_rows = row_pointers(o, memory, place, tl.load(program + 7), head, first, BLOCK_M, H, E, UNIT)
    lse_rows = row_pointers(lse, memory, place, tl.load(program + 8), head, first, BLOCK_M, H, 1, STATS_UNIT)
    begun = here & (fresh == 0)
    value = load(o_rows, begun, False, E, E1)
    total = tl.load(lse_rows, mask=begun, other=float("-inf"))
    source = sources + tl.load(program + 4) * SOURCE
    for _ in range(tl.load(program + 5)):
        part = load_part(source, o, wire, memory, first, here, BLOCK_M, H, E, E1, UNIT)
        part_rows = row_pointers(lse, memory, tl.load(source), tl.load(source + 2), 0, first, BLOCK_M, H, 1, STATS_UNIT)
        part_total = tl.load(part_rows, mask=here, other=float("-inf"))
        top = tl.maximum(total, part_total)
        top = tl.where(top == float("-inf"), 0.0, top)  # two parts that saw nothing stay nothing
        weight, part_weight = tl.exp(total - top), tl.exp(part_total - top)
        both = weight + part_weight
        divisor = tl.where(both == 0.0, 1.0, both)
        value = value * (weight / divisor)[:, None] + part * (part_weight / divisor)[:, None]
        total = tl.where(both == 0.0, float("-inf"), top + tl.log(divisor))
        source += SOURCE
    store(o_rows, here, value, E, E1)
    tl.store(lse_rows, total, mask=here)


@triton.jit
def sum_rows(
    program, sources, field, wire, memory, BLOCK_M: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    D1: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Add all sources of a program to its rows."""
    group, first, extent, fresh = tl.load(program), tl.load(program + 1), tl.load(program + 2), tl.load(program + 3)
    here = first + tl.arange(0, BLOCK_M) < extent
    place, at = tl.load(program + 6), tl.load(program + 7)
    rows = row_pointers(field, memory, place, at, group * H, first, BLOCK_M, H, D, UNIT)
    value = load(rows, here & (fresh == 0), False, D, D1)
    source = sources + tl.load(program + 4) * SOURCE
    for _ in range(tl.load(program + 5)):
        value += load_part(source, field, wire, memory, first, here, BLOCK_M, H, D, D1, UNIT)
        source += SOURCE
    store(rows, here, value, D, D1)


@triton.jit
def sum_gradients(
    dq_local, dk_local, dv_local, q_local, arena, kept, programs, sources,
    dq_pitch, dq_head, dk_pitch, dk_head, dv_pitch, dv_head, q_pitch, q_head,
    H: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E1: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Sum partial gradients, each program into some rows of a dQ, dK or dV."""
    program = programs + tl.program_id(0) * MOVE
    memory, wire = (arena, kept), (q_local, q_pitch, q_head)
    form = tl.load(program + 9)
    if form == 0:
        sum_rows(program, sources, (dq_local, dq_pitch, dq_head), wire, memory, BLOCK_M, H, D, D1, UNIT)
    elif form == 1:
        sum_rows(program, sources, (dk_local, dk_pitch, dk_head), wire, memory, BLOCK_M, 1, D, D1, UNIT)
    else:
        sum_rows(program, sources, (dv_local, dv_pitch, dv_head), wire, memory, BLOCK_M, 1, E, E1, UNIT)


@triton.jit
def copy_input(
    program, sources, field, memory, BLOCK_M: tl.constexpr, H: tl.constexpr, D: tl.constexpr, D1: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Copy rows as they are."""
    group, first, extent = tl.load(program), tl.load(program + 1), tl.load(program + 2)
    here = first + tl.arange(0, BLOCK_M) < extent
    source = sources + tl.load(program + 4) * SOURCE
    src, src_at, dst, dst_at = tl.load(source), tl.load(source + 1), tl.load(program + 6), tl.load(program + 7)
    rows = row_pointers(field, memory, src, src_at, group * H, first, BLOCK_M, H, D, UNIT)
    value = load(rows, here, False, D, D1)
    store(row_pointers(field, memory, dst, dst_at, 0, first, BLOCK_M, H, D, UNIT), here, value, D, D1)


@triton.jit
def copy_partial(
    program, sources, partial, wire, memory, BLOCK_M: tl.constexpr, H: tl.constexpr, D: tl.constexpr, D1: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Copy rows of a partial result from memory to memory, each in fp32 or in the wire dtype."""
    first, extent, place, at = tl.load(program + 1), tl.load(program + 2), tl.load(program + 6), tl.load(program + 7)
    here = first + tl.arange(0, BLOCK_M) < extent
    source = sources + tl.load(program + 4) * SOURCE
    value = load_part(source, partial, wire, memory, first, here, BLOCK_M, H, D, D1, UNIT)
    if tl.load(program + 10) != 0:
        rows = row_pointers(wire, memory, place, at, 0, first, BLOCK_M, H, D, UNIT)
        store(rows, here, value.to(wire[0].dtype.element_ty), D, D1)
    else:
        store(row_pointers(partial, memory, place, at, 0, first, BLOCK_M, H, D, UNIT), here, value, D, D1)


@triton.jit
def copy_statistic(program, sources, field, memory, BLOCK: tl.constexpr, H: tl.constexpr):
    """Copy values of which each row and head has one."""
    group, first, extent = tl.load(program), tl.load(program + 1), tl.load(program + 2)
    here = first + tl.arange(0, BLOCK) < extent
    source = sources + tl.load(program + 4) * SOURCE
    src, src_at, dst, dst_at = tl.load(source), tl.load(source + 1), tl.load(program + 6), tl.load(program + 7)
    value = tl.load(row_pointers(field, memory, src, src_at, group * H, first, BLOCK, H, 1, STATS_UNIT), mask=here)
    tl.store(row_pointers(field, memory, dst, dst_at, 0, first, BLOCK, H, 1, STATS_UNIT), value, mask=here)


@triton.jit
def copy_slots(
    q_local, k_local, v_local, do_local, lse_local, delta_local, arena, kept, programs, sources,
    q_pitch, q_head, k_pitch, k_head, v_pitch, v_head, do_pitch, do_head, lse_pitch, lse_head, delta_pitch, delta_head,
    H: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, E: tl.constexpr, E1: tl.constexpr, UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_STATISTICS: tl.constexpr,
):  # fmt: skip
    """Copy fields of slots into memory, each program some rows; `FORMS` in `triton.py` says which code is what."""
    program = programs + tl.program_id(0) * MOVE
    memory = (arena, kept)
    form = tl.load(program + 9)
    partial, wire = (lse_local, lse_pitch, lse_head), (q_local, q_pitch, q_head)  # for their types
    if form == 0:
        copy_input(program, sources, (q_local, q_pitch, q_head), memory, BLOCK_M, H, D, D1, UNIT)
    elif form == 1:
        copy_input(program, sources, (k_local, k_pitch, k_head), memory, BLOCK_M, 1, D, D1, UNIT)
    elif form == 2:
        copy_input(program, sources, (v_local, v_pitch, v_head), memory, BLOCK_M, 1, E, E1, UNIT)
    elif form == 3:
        copy_input(program, sources, (do_local, do_pitch, do_head), memory, BLOCK_M, H, E, E1, UNIT)
    elif form == 4:
        copy_partial(program, sources, partial, wire, memory, BLOCK_M, H, E, E1, UNIT)
    elif form == 5:
        copy_partial(program, sources, partial, wire, memory, BLOCK_M, H, D, D1, UNIT)
    elif form == 6:
        copy_partial(program, sources, partial, wire, memory, BLOCK_M, 1, D, D1, UNIT)
    elif form == 7:
        copy_partial(program, sources, partial, wire, memory, BLOCK_M, 1, E, E1, UNIT)
    elif form == 8:
        copy_statistic(program, sources, (lse_local, lse_pitch, lse_head), memory, BLOCK_STATISTICS, H)
    else:
        copy_statistic(program, sources, (delta_local, delta_pitch, delta_head), memory, BLOCK_STATISTICS, H)
