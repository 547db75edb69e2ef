"""Which keys each query sees: a set of disjoint slices, with closed forms for counting and cropping."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dyncp.ir.arrays import Ints, frozen, ragged_ranges
from dyncp.ir.slices import HI, HI_STEP, LO, LO_STEP, Q_START, Q_STOP, Grid, crop_keys, crop_rows, grid_pairs

MAX_LENGTH = 2**31 - 1  # rows() counts keys in int32


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """`q_length` queries by `k_length` keys, and the pairs of them that are unmasked.

    A slice `(q_start, q_stop, lo, lo_step, hi, hi_step)` lets row q of `[q_start, q_stop)` see the keys
    `[lo + lo_step*(q - q_start), hi + hi_step*(q - q_start))`; steps are 0 or 1. Full, causal, inverse-causal and
    window rectangles are one slice each. Slices are disjoint and sorted by (q_start, lo); a row in no slice sees
    nothing.

    Masks are equal when their lengths and their slices are. `Mask.from_intervals` gives the same slices for the same
    pairs, other ways to make a mask may cut them differently.

    Raises:
        ValueError: a length out of range, or a slice that leaves the mask, has a row that sees no key, or another step.
    """

    q_length: int
    k_length: int
    slices: Ints  # int64[N, 6]: q_start, q_stop, lo, lo_step, hi, hi_step

    def __post_init__(self) -> None:
        for name in ("q_length", "k_length"):
            length = operator.index(getattr(self, name))
            if not 1 <= length <= MAX_LENGTH:
                raise ValueError(f"{name} is {length}; a mask has 1 to {MAX_LENGTH} queries and keys")
            object.__setattr__(self, name, length)
        slices = np.array(self.slices)
        if not slices.size:
            slices = np.zeros((0, 6), np.int64)
        if slices.ndim != 2 or slices.shape[1] != 6 or slices.dtype.kind not in "iu":
            raise ValueError(
                f"slices are {slices.dtype}{list(slices.shape)}; expected integers [N, 6]: "
                "q_start, q_stop, lo, lo_step, hi, hi_step"
            )
        slices = slices.astype(np.int64)
        check_slices(self.q_length, self.k_length, slices)
        object.__setattr__(self, "slices", frozen(_in_one_spelling(slices), "int64"))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        same_size = (self.q_length, self.k_length) == (other.q_length, other.k_length)
        return same_size and np.array_equal(self.slices, other.slices)

    def __hash__(self) -> int:
        return hash((self.q_length, self.k_length, self.slices.tobytes()))

    @classmethod
    def from_intervals(cls, q_length: int, k_length: int, rows: Ints) -> Mask:
        """The mask in which each row sees the union of its key intervals, in few slices.

        Args:
            q_length: queries of the mask.
            k_length: keys of the mask.
            rows: int[q_length, R, 2], half-open intervals `(lo, hi)` of each row in any order; they may overlap, and
                those with hi <= lo are empty.

        Raises:
            ValueError: an array of another shape, or an interval outside `[0, k_length)`.
        """
        rows = np.asarray(rows)
        if rows.ndim != 3 or rows.shape[0] != q_length or rows.shape[2] != 2 or rows.dtype.kind not in "iu":
            raise ValueError(f"rows are {rows.dtype}{list(rows.shape)}; expected integers [{q_length}, R, 2]")
        row, track = np.nonzero(rows[:, :, 0] < rows[:, :, 1])
        lo, hi = rows[row, track].astype(np.int64).T
        return cls.from_row_intervals(q_length, k_length, row, lo, hi)

    @classmethod
    def from_row_intervals(cls, q_length: int, k_length: int, row: Ints, lo: Ints, hi: Ints) -> Mask:
        """As `from_intervals`, from a flat list: `row[N]` sees `[lo[N], hi[N])`, in any order.

        Raises:
            ValueError: a row, or an interval, outside the mask; or an empty interval.
        """
        row, lo, hi = (np.asarray(column, np.int64) for column in (row, lo, hi))
        wrong = (row < 0) | (row >= q_length) | (lo < 0) | (hi > k_length) | (lo >= hi)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ValueError(
                f"row {row[at]} sees keys [{lo[at]}, {hi[at]}), which is empty or outside {q_length} queries by "
                f"{k_length} keys: cut the intervals to the mask"
            )
        return cls(q_length, k_length, _trace_slices(*_merge_intervals(k_length, row, lo, hi)))

    def pairs(self) -> int:
        """Number of unmasked (query, key) pairs."""
        n, lo, hi = (self.slices[:, Q_STOP] - self.slices[:, Q_START]), self.slices[:, LO], self.slices[:, HI]
        slope = self.slices[:, HI_STEP] - self.slices[:, LO_STEP]
        return int((n * (hi - lo) + slope * (n * (n - 1) // 2)).sum())

    def row_intervals(self, start: int, stop: int) -> tuple[Ints, Ints, Ints]:
        """`row, lo, hi`, each int64[N]: the key intervals of rows `[start, stop)`, sorted by (row, lo)."""
        slices = self.slices[(self.slices[:, Q_START] < stop) & (self.slices[:, Q_STOP] > start)]
        first = np.maximum(slices[:, Q_START], start)
        count = np.minimum(slices[:, Q_STOP], stop) - first
        of = np.repeat(np.arange(len(slices)), count)
        row = np.repeat(first, count) + ragged_ranges(count)
        offset = row - slices[of, Q_START]
        lo = slices[of, LO] + slices[of, LO_STEP] * offset
        hi = slices[of, HI] + slices[of, HI_STEP] * offset
        if len(slices) > 1:
            order = np.lexsort((lo, row))
            row, lo, hi = row[order], lo[order], hi[order]
        return row, lo, hi

    def rows(self, start: int, stop: int) -> Ints:
        """int32[stop - start, R, 2]: half-open key intervals of each row, sorted by lo, unused ones `(0, 0)` at the
        end. R is the most that any of these rows has, and at least 1.

        Raises:
            ValueError: rows outside the mask.
        """
        self._check_range("rows", start, stop, self.q_length)
        row, lo, hi = self.row_intervals(start, stop)
        counts = np.bincount(row - start, minlength=stop - start)
        out = np.zeros((stop - start, max(1, int(counts.max(initial=0))), 2), np.int32)
        place = ragged_ranges(counts)
        out[row - start, place, 0] = lo
        out[row - start, place, 1] = hi
        return out

    def dense(self) -> NDArray[np.bool_]:
        """bool[q_length, k_length]: the mask written out, the definition that everything else is tested against."""
        out = np.zeros((self.q_length, self.k_length), np.bool_)
        for row, intervals in zip(out, self.rows(0, self.q_length), strict=True):
            for lo, hi in intervals:
                row[lo:hi] = True
        return out

    def crop(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> Mask:
        """The mask of a rectangle of queries and keys, counted from the rectangle's own corner.

        Raises:
            ValueError: a rectangle that is empty or leaves the mask.
        """
        return Mask(q_stop - q_start, k_stop - k_start, self.crop_slices(q_start, q_stop, k_start, k_stop))

    def crop_slices(self, q_start: int, q_stop: int, k_start: int, k_stop: int) -> Ints:
        """int64[N, 6]: the slices of `crop`, which costs more, as a mask checks its slices."""
        self._check_range("queries", q_start, q_stop, self.q_length)
        self._check_range("keys", k_start, k_stop, self.k_length)
        touched = (self.slices[:, Q_START] < q_stop) & (self.slices[:, Q_STOP] > q_start)
        slices, _ = crop_keys(crop_rows(self.slices[touched], q_start, q_stop), k_start, k_stop)
        return _in_one_spelling(slices - np.array([q_start, q_start, k_start, 0, k_start, 0]))

    def pairs_blocks(self, q_bounds: Ints, k_bounds: Ints) -> tuple[Ints, Ints, Ints]:
        """The rectangles of a grid that have pairs. Costs time and memory in the rectangles that slices touch, not in
        the size of the grid.

        Args:
            q_bounds: int[nq + 1], ascending; rectangle (i, j) has the queries `[q_bounds[i], q_bounds[i + 1])`.
            k_bounds: int[nk + 1], ascending; rectangle (i, j) has the keys `[k_bounds[j], k_bounds[j + 1])`.

        Returns:
            i, j and the number of pairs, each int64[N], sorted by (i, j).

        Raises:
            ValueError: bounds that descend.
        """
        q_bounds, k_bounds = (np.asarray(bounds, np.int64) for bounds in (q_bounds, k_bounds))
        for name, bounds in (("q_bounds", q_bounds), ("k_bounds", k_bounds)):
            if bounds.ndim != 1 or not len(bounds) or (np.diff(bounds) < 0).any():
                raise ValueError(f"{name} {bounds.tolist()[:8]}... must be a flat ascending list of at least one bound")
        return grid_pairs(self.slices, Grid(q_bounds[:-1], q_bounds[1:], k_bounds[:-1], k_bounds[1:]))

    def check(self) -> None:
        """Raise ValueError where two slices share a pair (constructing a mask does not look, as it costs a pass over
        the rows).
        """
        row, lo, hi = self.row_intervals(0, self.q_length)
        overlap = (row[1:] == row[:-1]) & (lo[1:] < hi[:-1])
        if overlap.any():
            at = int(np.argmax(overlap))
            raise ValueError(
                f"row {row[at]} sees keys [{lo[at]}, {hi[at]}) and [{lo[at + 1]}, {hi[at + 1]}), which overlap; slices "
                "must be disjoint: build the mask with Mask.from_intervals or masks.from_slices, which take the union"
            )

    def _check_range(self, what: str, start: int, stop: int, length: int) -> None:
        if not 0 <= start < stop <= length:
            raise ValueError(f"{what} [{start}, {stop}): expected 0 <= start < stop <= {length}, the mask's {what}")


def check_slices(q_length: int, k_length: int, slices: Ints) -> None:
    """Whether slices lie inside a mask, each with rows and keys.

    Args:
        q_length: rows of the mask; or int64[K], of each slice's own.
        k_length: its keys, likewise.
        slices: int64[K, 6].

    Raises:
        ValueError: the first that does not.
    """
    q_start, q_stop, lo, lo_step, hi, hi_step = slices.T
    rows = q_stop - q_start
    last_lo, last_hi = lo + lo_step * (rows - 1), hi + hi_step * (rows - 1)
    # Lines are straight, so what holds for the first and the last row holds between them. Numbers near the end of
    # int64 wrap around in sums and differences, so bounds are asked of what was given, too.
    rules: tuple[tuple[NDArray[Any], str], ...] = (
        ((q_start >= 0) & (q_stop <= q_length), f"its rows must lie in [0, {q_length})"),
        (q_start < q_stop, "q_start must be below q_stop"),
        ((lo_step >= 0) & (lo_step <= 1) & (hi_step >= 0) & (hi_step <= 1), "steps must be 0 or 1"),
        ((lo < hi) & (last_lo < last_hi), "every row must see a key: shorten the slice to the rows that do"),
        (
            (lo >= 0) & (hi <= k_length) & (last_hi <= k_length),
            f"its keys must lie in [0, {k_length}): cut it to the mask",
        ),
    )
    for holds, rule in rules:
        if not holds.all():
            at = int(np.argmin(holds))
            raise ValueError(
                f"slice {at} of the mask, (q_start, q_stop, lo, lo_step, hi, hi_step), is {slices[at].tolist()}: {rule}"
            )


def _in_one_spelling(slices: Ints) -> Ints:
    """Sorted, and without the steps of a single row, which mean nothing."""
    slices[slices[:, Q_STOP] - slices[:, Q_START] == 1, LO_STEP::2] = 0
    return slices[np.lexsort((slices[:, LO], slices[:, Q_START]))] if len(slices) > 1 else slices


def _merge_intervals(k_length: int, row: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints, Ints, int]:
    """Intervals sorted by (row, lo), with those of a row that touch or overlap made one; and the stride below."""
    # On one line, row after row with a gap between, so that one running maximum does all rows.
    stride = k_length + 2
    line_lo, line_hi = row * stride + lo, row * stride + hi
    order = np.argsort(line_lo, kind="stable")
    line_lo, line_hi = line_lo[order], np.maximum.accumulate(line_hi[order])
    begins = np.ones(len(order), np.bool_)
    begins[1:] = line_lo[1:] > line_hi[:-1]
    ends = np.roll(begins, -1)  # the last before a new one begins; the first always begins
    row = row[order][begins]
    return row, line_lo[begins] - row * stride, line_hi[ends] - row * stride, stride


def _trace_slices(row: Ints, lo: Ints, hi: Ints, stride: int) -> Ints:
    """Slices, int64[N, 6], of merged intervals: chains of intervals of consecutive rows that move by steps 0 or 1."""
    count = len(row)
    if not count:
        return np.zeros((0, 6), np.int64)
    # Merged intervals of a row are at least 2 apart, so at most one has its lo in a window of 2: links are unique.
    line_lo = row * stride + lo
    here = np.arange(count)
    after = np.minimum(np.searchsorted(line_lo, line_lo + stride), count - 1)
    lo_step, hi_step = line_lo[after] - line_lo - stride, hi[after] - hi
    linked = (row[after] == row + 1) & (lo_step >= 0) & (lo_step <= 1) & (hi_step >= 0) & (hi_step <= 1)
    root = here.copy()
    root[after[linked]] = here[linked]
    while not np.array_equal(root, further := root[root]):  # pointer doubling: log2(rows) rounds
        root = further
    order = np.lexsort((row, root))
    row, lo, hi, root = row[order], lo[order], hi[order], root[order]
    # In chain order. move[i]: how item i moved from item i - 1 of its chain; 4: it begins a chain.
    move = np.full(count, 4)
    same = root[1:] == root[:-1]
    move[1:][same] = (2 * np.diff(lo) + np.diff(hi))[same]
    # A slice ends where the move changes; the changed move into the new slice's first row is used up by that, so of
    # several changes in a row every second one only begins what the one before has cut.
    change = np.zeros(count, np.bool_)
    change[2:] = (move[2:] != move[1:-1]) & (move[2:] != 4) & (move[1:-1] != 4)
    since = here - np.maximum.accumulate(np.where(change, -1, here))
    begins = (move == 4) | (change & (since % 2 == 1))
    first = np.flatnonzero(begins)
    last = np.append(first[1:], count) - 1
    moved = move[np.minimum(first + 1, last)] * (last > first)
    return np.stack([row[first], row[last] + 1, lo[first], moved // 2, hi[first], moved % 2], axis=1)
