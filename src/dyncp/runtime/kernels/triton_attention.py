"""Blockwise attention in Triton: a program for each line of tiles of each block that is written, forward and backward.

Letters: M packed rows of a tile (see `tiles.py`), N keys of a tile, H query heads of a head group, D head dim, D1 and
D2 its parts where it is no power of two (192 = 128 + 64), E value head dim, E1 the same rounded up. Tables are those of
`tables.py`. Everything is summed in fp32, in the order of the tables and without atomics: the same tables and inputs
give the same bits.

A *field* is (caller's tensor, elements from a row to the next, from a head to the next); memory is (scratch memory,
kept memory). Where a field of a slot is, tables say as a place and a position: a row of the caller's tensor, or UNIT
bytes of memory, in which the heads of a row lie side by side.

Each loop is over all tiles of a line, across blocks, so that loading ahead does not stop at the end of a block. It
comes twice: for full tiles, where nothing is masked and nothing checked, and for the others. What says where a tile is
and what masks it are loaded apart, even where they are the same: of a number that is used both early and late, Triton
does not load ahead, nor then of anything that hangs on it.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
PROGRAM = tl.constexpr(20)  # columns of the tables
RUN = tl.constexpr(12)
STATS_UNIT = tl.constexpr(4)  # in place of UNIT, for log-sum-exps and deltas
LOCAL, ARENA = tl.constexpr(0), tl.constexpr(1)  # Place


@triton.jit
def row_pointers(
    field, memory, place, position, head, first,
    COUNT: tl.constexpr, H: tl.constexpr, D: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Pointers to COUNT packed rows from `first` on, of a slot whose first head is `head`."""
    local, pitch, head_pitch = field
    arena, kept = memory
    scratch = tl.where(place == ARENA, arena, kept) + position.to(tl.int64) * UNIT
    begin = local + position.to(tl.int64) * pitch + tl.cast(head, tl.int64) * head_pitch
    pitch = tl.where(place == LOCAL, pitch, H * D)
    head_pitch = tl.where(place == LOCAL, head_pitch, D)
    begin = tl.where(place == LOCAL, begin, scratch.to(tl.pointer_type(local.dtype.element_ty)))
    m = first + tl.arange(0, COUNT)
    row = first // H
    # Heads may be far apart, where they are the outer dimension; the rows of a tile are not.
    return begin + row.to(tl.int64) * pitch + ((m // H - row) * pitch + (m % H).to(tl.int64) * head_pitch)


@triton.jit
def load(rows, here, WHOLE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """[rows, BLOCK]: WIDTH columns of each row and 0 beyond; 0 in rows that are not `here`, unless all are."""
    column = tl.arange(0, BLOCK)
    at = rows[:, None] + column[None, :]
    if WHOLE and WIDTH == BLOCK:
        return tl.load(at)
    if WHOLE:
        return tl.load(at, mask=(column < WIDTH)[None, :], other=0.0)
    if WIDTH == BLOCK:
        return tl.load(at, mask=here[:, None], other=0.0)
    return tl.load(at, mask=here[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def store(rows, here, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store what `load` would load."""
    column = tl.arange(0, BLOCK)
    tl.store(rows[:, None] + column[None, :], value, mask=here[:, None] & (column < WIDTH)[None, :])


@triton.jit
def add(rows, here, begun, value, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Add to the rows that are `here`; those that are not `begun` hold nothing yet."""
    store(rows, here, value + load(rows, here & begun, False, WIDTH, BLOCK), WIDTH, BLOCK)


@triton.jit
def line_of(program):
    """What all programs have: see the columns in `tables.py`."""
    group, first, extent, fresh = tl.load(program), tl.load(program + 1), tl.load(program + 2), tl.load(program + 3)
    full, full_tiles = tl.load(program + 4), tl.load(program + 5)
    return group, first, extent, fresh, full, full_tiles, tl.load(program + 6), tl.load(program + 7)


@triton.jit
def tile_of(run, tile, SIZE: tl.constexpr):
    """The first row or key of a tile of a run, and how many the block has."""
    return (tl.load(run) + tile) * SIZE, tl.load(run + 2)


@triton.jit
def next_tile(run, tile):
    """The run and the tile in it that come after."""
    done = tile + 1 == tl.load(run + 1)
    return tl.where(done, run + RUN, run), tl.where(done, 0, tile + 1)


@triton.jit
def seen_keys(planes, run, row, here):
    """int32[M] each: the first key that each row sees in the run's plane, and the end."""
    at = planes + tl.load(run + 3) + row
    return tl.load(at, mask=here, other=0), tl.load(at + tl.load(run + 4), mask=here, other=0)


@triton.jit
def scores(dots, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores, times log2 e, of dot products; and the slope of the softcap at each."""
    if SOFTCAP:
        # tanh by way of exp2, which all targets have; where that would cancel, by its series
        x = dots * (scale / softcap)
        square = x * x
        near = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
        bent = tl.where(square < 0.05, near, 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E))))
        value, slope = bent * (softcap * LOG2E), 1.0 - bent * bent
    else:
        value, slope = dots * (scale * LOG2E), 1.0
    return value, slope


@triton.jit
def look_at_keys(
    run, tile, q1, q2, group, k, v, memory, WHOLE: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of keys: their numbers, dot products with the queries, the keys in two parts, and values."""
    first, keys = tile_of(run, tile, BLOCK_N)
    key = (tl.load(run + 8) + tile) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.load(run + 5)
    k_rows = row_pointers(k, memory, place, tl.load(run + 6), group, first, BLOCK_N, 1, D, UNIT)
    v_rows = row_pointers(v, memory, place, tl.load(run + 7), group, first, BLOCK_N, 1, E, UNIT)
    k1 = load(k_rows, key < keys, WHOLE, min(D, D1), D1)
    k2 = k1
    dots = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
    if D2 > 0:
        k2 = load(k_rows + D1, key < keys, WHOLE, D - D1, D2)
        dots = tl.dot(q2, tl.trans(k2), dots, input_precision=PRECISION)
    return key, dots, k1, k2, load(v_rows, key < keys, WHOLE, E, E1)


@triton.jit
def forward_tiles(
    state, q1, q2, row, here, runs, tiles, group, k, v, memory, planes, scale, softcap,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold tiles into `state`: output sums, largest scores (times log2 e), and sums of weights."""
    acc, top, total = state
    run, tile = runs, 0
    for _ in range(tiles):
        key, dots, _k1, _k2, v_tile = look_at_keys(
            run, tile, q1, q2, group, k, v, memory, not MASKED, D, D1, D2, E, E1, BLOCK_N, UNIT, PRECISION
        )
        value, _slope = scores(dots, scale, softcap, SOFTCAP)
        if MASKED:
            lo, hi = seen_keys(planes, run, row, here)
            value = tl.where((key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None]), value, float("-inf"))
        new_top = tl.maximum(top, tl.max(value, 1))
        base = new_top
        if MASKED:
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # rows that have seen nothing yet
        weights = tl.exp2(value - base[:, None])
        faded = tl.exp2(top - base)
        total = total * faded + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * faded[:, None], input_precision=PRECISION)
        top = new_top
        run, tile = next_tile(run, tile)
    return acc, top, total


@triton.jit
def attend_forward(
    q_local, k_local, v_local, o_local, lse_local, arena, kept, programs, runs, planes,
    q_pitch, q_head, k_pitch, k_head, v_pitch, v_head, o_pitch, o_head, lse_pitch, lse_head, scale, softcap,
    SOFTCAP: tl.constexpr, H: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Forward of one division: each program adds a line of tiles to its rows of an (O, LSE)."""
    program = programs + tl.program_id(0) * PROGRAM
    group, first, extent, fresh, full, full_tiles, masked, masked_tiles = line_of(program)
    memory = (arena, kept)
    k, v = (k_local, k_pitch, k_head), (v_local, v_pitch, v_head)
    m = first + tl.arange(0, BLOCK_M)
    here = m < extent
    used = here & (full_tiles + masked_tiles > 0)  # with nothing to do there may be no query at all

    place, at = tl.load(program + 9), tl.load(program + 10)
    q_rows = row_pointers((q_local, q_pitch, q_head), memory, place, at, group * H, first, BLOCK_M, H, D, UNIT)
    q1 = load(q_rows, used, False, min(D, D1), D1)
    q2 = load(q_rows + D1, used, False, D - D1, D2) if D2 > 0 else q1
    place, at = tl.load(program + 11), tl.load(program + 12)
    o_rows = row_pointers((o_local, o_pitch, o_head), memory, place, at, group * H, first, BLOCK_M, H, E, UNIT)
    at = tl.load(program + 13)
    lse = (lse_local, lse_pitch, lse_head)
    lse_rows = row_pointers(lse, memory, place, at, group * H, first, BLOCK_M, H, 1, STATS_UNIT)

    begun = here & (fresh == 0)
    acc = load(o_rows, begun, False, E, E1)
    top = tl.load(lse_rows, mask=begun, other=float("-inf")) * LOG2E
    total = tl.where(top == float("-inf"), 0.0, 1.0)
    acc, top, total = forward_tiles(
        (acc, top, total), q1, q2, m // H, here, runs + full * RUN, full_tiles, group, k, v, memory, planes,
        scale, softcap, False, SOFTCAP, D, D1, D2, E, E1, BLOCK_N, UNIT, PRECISION,
    )  # fmt: skip
    acc, top, total = forward_tiles(
        (acc, top, total), q1, q2, m // H, here, runs + masked * RUN, masked_tiles, group, k, v, memory, planes,
        scale, softcap, True, SOFTCAP, D, D1, D2, E, E1, BLOCK_N, UNIT, PRECISION,
    )  # fmt: skip
    divisor = tl.where(total == 0.0, 1.0, total)
    store(o_rows, here, acc / divisor[:, None], E, E1)
    tl.store(lse_rows, top * LN2 + tl.log(divisor), mask=here)


@triton.jit
def key_gradient_tiles(
    state, k1, k2, v_tile, key, runs, tiles, head, q, do, lse, delta, memory, planes, scale, softcap,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, H: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to `state`, the gradients of a key tile, what query tiles contribute."""
    dk1, dk2, dv = state
    WHOLE: tl.constexpr = not MASKED
    run, tile = runs, 0
    for _ in range(tiles):
        first, rows = tile_of(run, tile, BLOCK_M)
        m = first + tl.arange(0, BLOCK_M)
        here = m < rows
        q_rows = row_pointers(q, memory, tl.load(run + 5), tl.load(run + 6), head, first, BLOCK_M, H, D, UNIT)
        do_rows = row_pointers(do, memory, tl.load(run + 7), tl.load(run + 8), head, first, BLOCK_M, H, E, UNIT)
        place = tl.load(run + 9)
        lse_rows = row_pointers(lse, memory, place, tl.load(run + 10), head, first, BLOCK_M, H, 1, STATS_UNIT)
        delta_rows = row_pointers(delta, memory, place, tl.load(run + 11), head, first, BLOCK_M, H, 1, STATS_UNIT)
        q1 = load(q_rows, here, WHOLE, min(D, D1), D1)
        dots = tl.dot(k1, tl.trans(q1), input_precision=PRECISION)  # [N, M]
        if D2 > 0:
            q2 = load(q_rows + D1, here, WHOLE, D - D1, D2)
            dots = tl.dot(k2, tl.trans(q2), dots, input_precision=PRECISION)
        do_tile = load(do_rows, here, WHOLE, E, E1)
        row_lse = tl.load(lse_rows) if WHOLE else tl.load(lse_rows, mask=here, other=0.0)
        row_delta = tl.load(delta_rows) if WHOLE else tl.load(delta_rows, mask=here, other=0.0)
        value, slope = scores(dots, scale, softcap, SOFTCAP)
        weights = tl.exp2(value - (row_lse * LOG2E)[None, :])
        if MASKED:
            lo, hi = seen_keys(planes, run, m // H, here)
            weights = tl.where((key[:, None] >= lo[None, :]) & (key[:, None] < hi[None, :]), weights, 0.0)
        dv = tl.dot(weights.to(do_tile.dtype), do_tile, dv, input_precision=PRECISION)
        dweights = tl.dot(v_tile, tl.trans(do_tile), input_precision=PRECISION)
        ds = weights * (dweights - row_delta[None, :])
        if SOFTCAP:
            ds *= slope
        dk1 = tl.dot(ds.to(q1.dtype), q1, dk1, input_precision=PRECISION)
        if D2 > 0:
            dk2 = tl.dot(ds.to(q1.dtype), q2, dk2, input_precision=PRECISION)
        run, tile = next_tile(run, tile)
    return dk1, dk2, dv


@triton.jit
def key_gradients(
    program, runs, planes, memory, q, k, v, do, lse, delta, dk, dv, scale, softcap,
    SOFTCAP: tl.constexpr, H: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add to (dK, dV) of a key tile."""
    group, first, extent, fresh, full, full_tiles, masked, masked_tiles = line_of(program)
    key = first + tl.arange(0, BLOCK_N)
    here = key < extent
    used = here & (full_tiles + masked_tiles > 0)
    place = tl.load(program + 9)
    k_rows = row_pointers(k, memory, place, tl.load(program + 10), group, first, BLOCK_N, 1, D, UNIT)
    v_rows = row_pointers(v, memory, place, tl.load(program + 11), group, first, BLOCK_N, 1, E, UNIT)
    k1 = load(k_rows, used, False, min(D, D1), D1)
    k2 = load(k_rows + D1, used, False, D - D1, D2) if D2 > 0 else k1
    v_tile = load(v_rows, used, False, E, E1)
    dk1 = tl.zeros([BLOCK_N, D1], tl.float32)
    dk2 = tl.zeros([BLOCK_N, D2 if D2 > 0 else 16], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, E1], tl.float32)
    dk1, dk2, dv_tile = key_gradient_tiles(
        (dk1, dk2, dv_tile), k1, k2, v_tile, key, runs + full * RUN, full_tiles, group * H, q, do, lse, delta,
        memory, planes, scale, softcap, False, SOFTCAP, H, D, D1, D2, E, E1, BLOCK_M, UNIT, PRECISION,
    )  # fmt: skip
    dk1, dk2, dv_tile = key_gradient_tiles(
        (dk1, dk2, dv_tile), k1, k2, v_tile, key, runs + masked * RUN, masked_tiles, group * H, q, do, lse, delta,
        memory, planes, scale, softcap, True, SOFTCAP, H, D, D1, D2, E, E1, BLOCK_M, UNIT, PRECISION,
    )  # fmt: skip
    place = tl.load(program + 12)
    dk_rows = row_pointers(dk, memory, place, tl.load(program + 13), group, first, BLOCK_N, 1, D, UNIT)
    dv_rows = row_pointers(dv, memory, place, tl.load(program + 14), group, first, BLOCK_N, 1, E, UNIT)
    add(dk_rows, here, fresh == 0, dk1 * scale, min(D, D1), D1)
    if D2 > 0:
        add(dk_rows + D1, here, fresh == 0, dk2 * scale, D - D1, D2)
    add(dv_rows, here, fresh == 0, dv_tile, E, E1)


@triton.jit
def query_gradient_tiles(
    state, q1, q2, do_tile, row_lse, row_delta, row, here, runs, tiles, group, k, v, memory, planes, scale, softcap,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to `state`, the gradient of a query tile, what key tiles contribute."""
    dq1, dq2 = state
    run, tile = runs, 0
    for _ in range(tiles):
        key, dots, k1, k2, v_tile = look_at_keys(
            run, tile, q1, q2, group, k, v, memory, not MASKED, D, D1, D2, E, E1, BLOCK_N, UNIT, PRECISION
        )
        value, slope = scores(dots, scale, softcap, SOFTCAP)
        weights = tl.exp2(value - row_lse[:, None])
        if MASKED:
            lo, hi = seen_keys(planes, run, row, here)
            weights = tl.where((key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None]), weights, 0.0)
        ds = weights * (tl.dot(do_tile, tl.trans(v_tile), input_precision=PRECISION) - row_delta[:, None])
        if SOFTCAP:
            ds *= slope
        dq1 = tl.dot(ds.to(k1.dtype), k1, dq1, input_precision=PRECISION)
        if D2 > 0:
            dq2 = tl.dot(ds.to(k1.dtype), k2, dq2, input_precision=PRECISION)
        run, tile = next_tile(run, tile)
    return dq1, dq2


@triton.jit
def query_gradients(
    program, runs, planes, memory, q, k, v, do, lse, delta, dq, scale, softcap,
    SOFTCAP: tl.constexpr, H: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add to dQ of a query tile."""
    group, first, extent, fresh, full, full_tiles, masked, masked_tiles = line_of(program)
    head = group * H
    m = first + tl.arange(0, BLOCK_M)
    here = m < extent
    used = here & (full_tiles + masked_tiles > 0)
    q_rows = row_pointers(q, memory, tl.load(program + 9), tl.load(program + 10), head, first, BLOCK_M, H, D, UNIT)
    do_rows = row_pointers(do, memory, tl.load(program + 11), tl.load(program + 12), head, first, BLOCK_M, H, E, UNIT)
    place = tl.load(program + 13)
    lse_rows = row_pointers(lse, memory, place, tl.load(program + 14), head, first, BLOCK_M, H, 1, STATS_UNIT)
    delta_rows = row_pointers(delta, memory, place, tl.load(program + 15), head, first, BLOCK_M, H, 1, STATS_UNIT)
    q1 = load(q_rows, used, False, min(D, D1), D1)
    q2 = load(q_rows + D1, used, False, D - D1, D2) if D2 > 0 else q1
    do_tile = load(do_rows, used, False, E, E1)
    row_lse = tl.load(lse_rows, mask=used, other=0.0) * LOG2E
    row_delta = tl.load(delta_rows, mask=used, other=0.0)
    dq1 = tl.zeros([BLOCK_M, D1], tl.float32)
    dq2 = tl.zeros([BLOCK_M, D2 if D2 > 0 else 16], tl.float32)
    dq1, dq2 = query_gradient_tiles(
        (dq1, dq2), q1, q2, do_tile, row_lse, row_delta, m // H, here, runs + full * RUN, full_tiles, group, k, v,
        memory, planes, scale, softcap, False, SOFTCAP, D, D1, D2, E, E1, BLOCK_N, UNIT, PRECISION,
    )  # fmt: skip
    dq1, dq2 = query_gradient_tiles(
        (dq1, dq2), q1, q2, do_tile, row_lse, row_delta, m // H, here, runs + masked * RUN, masked_tiles, group, k, v,
        memory, planes, scale, softcap, True, SOFTCAP, D, D1, D2, E, E1, BLOCK_N, UNIT, PRECISION,
    )  # fmt: skip
    dq_rows = row_pointers(dq, memory, tl.load(program + 16), tl.load(program + 17), head, first, BLOCK_M, H, D, UNIT)
    add(dq_rows, here, fresh == 0, dq1 * scale, min(D, D1), D1)
    if D2 > 0:
        add(dq_rows + D1, here, fresh == 0, dq2 * scale, D - D1, D2)


@triton.jit
def attend_backward(
    q_local, k_local, v_local, do_local, lse_local, delta_local, dq_local, dk_local, dv_local, arena, kept,
    programs, key_runs, query_runs, planes,
    q_pitch, q_head, k_pitch, k_head, v_pitch, v_head, do_pitch, do_head, lse_pitch, lse_head, delta_pitch, delta_head,
    dq_pitch, dq_head, dk_pitch, dk_head, dv_pitch, dv_head, scale, softcap,
    SOFTCAP: tl.constexpr, H: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    E: tl.constexpr, E1: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    KEYS_M: tl.constexpr, KEYS_N: tl.constexpr, QUERIES_M: tl.constexpr, QUERIES_N: tl.constexpr,
):  # fmt: skip
    """Backward of one division: some programs add to (dK, dV) of a tile of KEYS_N keys, looking at KEYS_M packed rows
    at a time, others to dQ of QUERIES_M packed rows, looking at QUERIES_N keys."""
    program = programs + tl.program_id(0) * PROGRAM
    memory = (arena, kept)
    q, k, v = (q_local, q_pitch, q_head), (k_local, k_pitch, k_head), (v_local, v_pitch, v_head)
    do = (do_local, do_pitch, do_head)
    lse, delta = (lse_local, lse_pitch, lse_head), (delta_local, delta_pitch, delta_head)
    if tl.load(program + 8) == 0:
        dk, dv = (dk_local, dk_pitch, dk_head), (dv_local, dv_pitch, dv_head)
        key_gradients(
            program, key_runs, planes, memory, q, k, v, do, lse, delta, dk, dv, scale, softcap,
            SOFTCAP, H, D, D1, D2, E, E1, UNIT, PRECISION, KEYS_M, KEYS_N,
        )  # fmt: skip
    else:
        dq = (dq_local, dq_pitch, dq_head)
        query_gradients(
            program, query_runs, planes, memory, q, k, v, do, lse, delta, dq, scale, softcap,
            SOFTCAP, H, D, D1, D2, E, E1, UNIT, PRECISION, QUERIES_M, QUERIES_N,
        )  # fmt: skip
