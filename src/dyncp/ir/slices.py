"""Slices of masks: cropping them, and counting and cropping over whole grids of rectangles at once.

A slice is a row `(q_start, q_stop, lo, lo_step, hi, hi_step)`; `Mask` says what it means.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dyncp.ir.arrays import Ints, ragged_ranges

Q_START, Q_STOP, LO, LO_STEP, HI, HI_STEP = range(6)  # columns of Mask.slices
CHUNK_CELLS = 1 << 18  # rectangles counted at once in grid_pairs, to bound its memory and stay in the cache


@dataclass(frozen=True, slots=True)
class Grid:
    """The rectangles `(i, j)` of a range of queries and a range of keys; the ranges of a side ascend, and share no row.

    Slices and ranges may stand for more than one mask, one behind the other along both sides: so a whole batch is
    counted or cropped in one go.
    """

    q_start: Ints  # int64[I]
    q_stop: Ints  # int64[I]
    k_start: Ints  # int64[J]
    k_stop: Ints  # int64[J]


def grid_pairs(slices: Ints, grid: Grid) -> tuple[Ints, Ints, Ints]:
    """The rectangles of a grid in which slices, int64[N, 6], have pairs, as `Mask.pairs_blocks` returns them."""
    strips, q_cell, k_first, count = _strips(slices, grid)
    order = np.lexsort((k_first, q_cell))
    strips, q_cell, k_first, count = strips[order], q_cell[order], k_first[order], count[order]
    rows, widths = strips[:, Q_STOP] - strips[:, Q_START], grid.k_stop - grid.k_start
    counted = [(np.zeros(0, np.int64),) * 3]
    # A whole strip of rectangles at a time, as many strips as fit into the chunk.
    chunk = np.cumsum(count) // CHUNK_CELLS
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(chunk)) + 1, [len(strips)]]).tolist()
    for part in map(slice, bounds[:-1], bounds[1:]):
        sizes = count[part]
        k_cell = np.repeat(k_first[part] - np.cumsum(sizes) + sizes, sizes) + np.arange(int(sizes.sum()))
        pairs = np.repeat(rows[part], sizes) * widths[k_cell]
        of, place = _edges(strips[part], k_first[part], sizes, grid)
        at, edge = (np.cumsum(sizes) - sizes)[of] + place, strips[part][of]
        k_edge = k_cell[at]
        pairs[at] = _pairs_below(edge, grid.k_stop[k_edge]) - _pairs_below(edge, grid.k_start[k_edge])
        counted.append((np.repeat(q_cell[part], sizes), k_cell, pairs))
    i, j, pairs = (np.concatenate(columns) for columns in zip(*counted, strict=True))
    met = (q_cell[1:] == q_cell[:-1]) & (k_first[1:] < k_first[:-1] + count[:-1])
    if met.any():  # several slices have pairs in one rectangle
        key, pairs = _sum_equal(i * len(widths) + j, pairs)
        i, j = np.divmod(key, len(widths))
    if len(pairs) and not pairs.min():  # a range without rows or keys
        i, j, pairs = (column[pairs > 0] for column in (i, j, pairs))
    return i, j, pairs


def grid_slices(slices: Ints, grid: Grid, i: Ints, j: Ints) -> tuple[Ints, Ints]:
    """The slices inside the rectangles `(i[M], j[M])` of a grid, each as `Mask.crop_slices` returns them: the bounds of
    each rectangle's slices, int64[M + 1], and the slices, int64[K, 6]. Rectangles are asked for in ascending order, and
    none with all its pairs unmasked.
    """
    strips, q_cell, k_first, count = _strips(slices, grid)
    # What a strip of all rows sees in full is not asked for.
    short = strips[:, Q_STOP] - strips[:, Q_START] < (grid.q_stop - grid.q_start)[q_cell]
    of, place = _edges(strips, k_first, count, grid, all_of=short)
    k_cell = k_first[of] + place
    asked = i * len(grid.k_start) + j
    assert (asked[1:] > asked[:-1]).all()
    key = q_cell[of] * len(grid.k_start) + k_cell
    at = np.searchsorted(asked, key)
    found = np.append(asked, -1)[at] == key
    at, of, k_cell = at[found], of[found], k_cell[found]
    pieces, source = crop_keys(strips[of], grid.k_start[k_cell], grid.k_stop[k_cell])
    at, k_start = at[source], grid.k_start[k_cell[source]]
    for column in (Q_START, Q_STOP):
        pieces[:, column] -= grid.q_start[i[at]]
    for column in (LO, HI):
        pieces[:, column] -= k_start
    pieces[pieces[:, Q_STOP] - pieces[:, Q_START] == 1, LO_STEP::2] = 0
    order = np.lexsort((pieces[:, LO], pieces[:, Q_START], at))
    return np.append(0, np.cumsum(np.bincount(at, minlength=len(asked)))), pieces[order]


def crop_rows(slices: Ints, start: Any, stop: Any) -> Ints:
    """Slices cut to rows `[start, stop)`: of all of them, or of each its own."""
    out = slices.copy()
    out[:, Q_START] = np.maximum(slices[:, Q_START], start)
    out[:, Q_STOP] = np.minimum(slices[:, Q_STOP], stop)
    skipped = out[:, Q_START] - slices[:, Q_START]
    out[:, LO] += slices[:, LO_STEP] * skipped
    out[:, HI] += slices[:, HI_STEP] * skipped
    return out


def crop_keys(slices: Ints, start: Any, stop: Any) -> tuple[Ints, Ints]:
    """Slices cut to keys `[start, stop)`, of all of them or of each its own; and the slice that each comes from. Each
    becomes up to three: a moving end that meets the edge stays on it, before (lo) or after (hi) the meeting.
    """
    start, stop = np.broadcast_to(start, len(slices)), np.broadcast_to(stop, len(slices))
    q_start, q_stop, lo, lo_step, hi, hi_step = slices.T
    rows = q_stop - q_start
    # Rows, counted from q_start, that see any of the keys: [first, last).
    first = np.where(hi > start, 0, np.where(hi_step == 1, start - hi + 1, rows))
    last = np.where(lo_step == 1, np.minimum(stop - lo, rows), np.where(lo < stop, rows, 0))
    # The rows before lo has reached start, and those before hi has gone past stop.
    past = np.where(hi < stop, stop - hi + 1, 0)
    meets = (np.where(lo_step == 1, start - lo, 0), np.where(hi_step == 1, past, 0))
    one, other = (np.clip(meet, first, np.maximum(first, last)) for meet in meets)
    cuts = np.minimum(one, other), np.maximum(one, other)
    begin = np.concatenate([first, *cuts])
    end = np.concatenate([*cuts, last])
    piece = np.flatnonzero(begin < end)
    of = piece % max(1, len(slices))
    pieces = crop_rows(slices[of], q_start[of] + begin[piece], q_start[of] + end[piece])
    start, stop = start[of], stop[of]
    pieces[pieces[:, LO] < start, LO_STEP] = 0
    pieces[pieces[:, HI] >= stop, HI_STEP] = 0
    pieces[:, LO] = np.maximum(pieces[:, LO], start)
    pieces[:, HI] = np.minimum(pieces[:, HI], stop)
    return pieces, of


def _strips(slices: Ints, grid: Grid) -> tuple[Ints, Ints, Ints, Ints]:
    """The slices cut to the ranges of queries that they touch; of each such strip the range, and the first range of
    keys and how many it touches.
    """
    first, count = _touched(grid.q_start, grid.q_stop, slices[:, Q_START], slices[:, Q_STOP])
    q_cell = np.repeat(first, count) + ragged_ranges(count)
    strips = crop_rows(np.repeat(slices, count, axis=0), grid.q_start[q_cell], grid.q_stop[q_cell])
    return strips, q_cell, *_touched(grid.k_start, grid.k_stop, strips[:, LO], _last_hi(strips))


def _edges(strips: Ints, first: Ints, count: Ints, grid: Grid, all_of: Any = False) -> tuple[Ints, Ints]:
    """The ranges of keys, of those that strips touch, that not all rows of the strip see in full (of strips in `all_of`
    all ranges): the strip, and the place of the range among those it touches.
    """
    last_lo = strips[:, LO] + strips[:, LO_STEP] * (strips[:, Q_STOP] - strips[:, Q_START] - 1)
    left = np.clip(np.searchsorted(grid.k_start, last_lo, "left") - first, 0, count)
    left = np.where(all_of, count, left)
    right = np.clip(np.searchsorted(grid.k_stop, strips[:, HI], "right") - first, left, count)
    of = np.repeat(np.tile(np.arange(len(strips)), 2), np.concatenate([left, count - right]))
    place = np.concatenate([ragged_ranges(left), np.repeat(right, count - right) + ragged_ranges(count - right)])
    return of, place


def _touched(starts: Ints, stops: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """The first of the ranges `[starts, stops)` that `[start, stop)` touches, and how many it does."""
    first = np.searchsorted(stops, start, "right")
    return first, np.maximum(np.searchsorted(starts, stop, "left") - first, 0)


def _pairs_below(slices: Ints, key: Ints) -> Ints:
    """Pairs of each slice with keys below `key[N]`."""
    rows = slices[:, Q_STOP] - slices[:, Q_START]

    def line_sum(base: Ints, step: Ints) -> Ints:  # over the rows, min(the line's key, key)
        moving = np.clip(np.where(step == 1, key - base, np.where(base < key, rows, 0)), 0, rows)
        total: Ints = moving * base + step * (moving * (moving - 1) // 2) + (rows - moving) * key
        return total

    return line_sum(slices[:, HI], slices[:, HI_STEP]) - line_sum(slices[:, LO], slices[:, LO_STEP])


def _last_hi(slices: Ints) -> Ints:
    hi: Ints = slices[:, HI] + slices[:, HI_STEP] * (slices[:, Q_STOP] - slices[:, Q_START] - 1)
    return hi


def _sum_equal(keys: Ints, values: Ints) -> tuple[Ints, Ints]:
    """Ascending keys, each once, and the sums of their values."""
    if (keys[1:] < keys[:-1]).any():
        order = np.argsort(keys, kind="stable")
        keys, values = keys[order], values[order]
    first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
    return keys[first], np.add.reduceat(values, first)
