"""Masks from what a user has: rectangles, a dense array, or a function of query and key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dyncp.ir.arguments import whole_number
from dyncp.ir.arrays import Ints
from dyncp.ir.mask import Mask

# (lo_step, hi_step) of each kind of rectangle: whether the first and the last key move with the row.
KINDS = {"full": (0, 0), "causal": (0, 1), "inv_causal": (1, 0), "bi_causal": (1, 1)}
CHUNK_PAIRS = 1 << 24  # pairs that from_mask_mod evaluates at once


def from_slices(q_length: int, k_length: int, slices: Sequence[Sequence[Any]]) -> Mask:
    """The union of rectangles `[q_start, q_stop, k_start, k_stop, kind]`.

    Kinds: `full`; `causal`, bottom-right aligned (the last row sees all keys, the one before it all but the last, ...);
    `inv_causal`, top-left aligned (row i sees the keys from k_start + i); `bi_causal`, both. A row may see nothing.
    Rectangles that do not overlap are kept as they are.

    Args:
        q_length: queries of the mask, at least 1.
        k_length: keys of the mask, at least 1; the same number in self-attention.
        slices: the rectangles, each a list or tuple of four ints, half-open ranges of queries and keys, and a kind.

    Raises:
        ValueError: a length below 1, a rectangle that is empty or leaves the mask, or an unknown kind.
    """
    q_length, k_length = whole_number("q_length", q_length, 1), whole_number("k_length", k_length, 1)
    if isinstance(slices, (str, bytes, dict)) or not isinstance(slices, Sequence):
        raise ValueError(f"slices are {slices!r}; expected a list of [q_start, q_stop, k_start, k_stop, kind]")
    pieces = [_rectangle(index, item, q_length, k_length) for index, item in enumerate(slices)]
    mask = Mask(q_length, k_length, np.array([piece for piece in pieces if piece], np.int64).reshape(-1, 6))
    if (mask.slices[1:, 0] >= mask.slices[:-1, 1]).all():
        return mask  # no row is in two slices
    row, lo, hi = mask.row_intervals(0, q_length)
    overlap = (row[1:] == row[:-1]) & (lo[1:] < hi[:-1])
    return Mask.from_row_intervals(q_length, k_length, row, lo, hi) if overlap.any() else mask


def to_slices(mask: Mask) -> list[list[Any]]:
    """The mask as rectangles `[q_start, q_stop, k_start, k_stop, kind]`, one for each slice: the reverse of
    `from_slices`.
    """
    kind_of = {steps: kind for kind, steps in KINDS.items()}
    return [
        [q_start, q_stop, lo, hi + hi_step * (q_stop - q_start - 1), kind_of[lo_step, hi_step]]
        for q_start, q_stop, lo, lo_step, hi, hi_step in mask.slices.tolist()
    ]


def from_dense(dense: NDArray[np.bool_]) -> Mask:
    """The mask that is written out as an array.

    Args:
        dense: `bool[q_length, k_length]`, a numpy array or what `numpy.asarray` makes one of (nested lists of bools, a
            tensor on the CPU); true where the query sees the key.

    Raises:
        ValueError: an array of another shape or dtype, or an empty one.
    """
    dense = np.asarray(dense)
    if dense.ndim != 2 or dense.dtype != np.bool_ or not dense.size:
        raise ValueError(
            f"a dense mask is {dense.dtype}{list(dense.shape)}; expected bool[q_length, k_length], at least 1 by 1"
        )
    row, lo, hi = _intervals(dense)
    return Mask.from_row_intervals(dense.shape[0], dense.shape[1], row, lo, hi)


def from_mask_mod(mask_mod: Callable[[Ints, Ints], Any], q_length: int, k_length: int) -> Mask:
    """The pairs for which a function of query and key index is true, evaluated at every pair, some rows at a time.

    Args:
        mask_mod: `mask_mod(q, k)` gets numpy arrays of indices, `q` int64[rows, 1] and `k` int64[1, k_length], and
            returns a bool array that broadcasts to `[rows, k_length]`: `lambda q, k: (k <= q) & (q - k < 100)`. Not
            `and` or `or`, and not the (batch, head, q, k) of FlexAttention.
        q_length: queries of the mask, at least 1.
        k_length: keys of the mask, at least 1; the same number in self-attention.

    Raises:
        ValueError: a length below 1, or a result of another shape or dtype.
    """
    q_length, k_length = whole_number("q_length", q_length, 1), whole_number("k_length", k_length, 1)
    keys = np.arange(k_length)[None, :]
    rows = max(1, CHUNK_PAIRS // k_length)
    parts = []
    for start in range(0, q_length, rows):
        queries = np.arange(start, min(start + rows, q_length))[:, None]
        seen = np.asarray(mask_mod(queries, keys))
        shape = (len(queries), k_length)
        fits = seen.ndim <= 2 and all(n in (1, m) for n, m in zip(seen.shape[::-1], shape[::-1], strict=False))
        if seen.dtype != np.bool_ or not fits:
            raise ValueError(
                f"mask_mod returned {seen.dtype}{list(seen.shape)} for queries {list(queries.shape)} and keys "
                f"{list(keys.shape)}; expected bool that broadcasts to {list(shape)}: use &, | and ~ on comparisons"
            )
        row, lo, hi = _intervals(np.broadcast_to(seen, shape))
        parts.append((row + start, lo, hi))
    row, lo, hi = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Mask.from_row_intervals(q_length, k_length, row, lo, hi)


def _rectangle(index: int, item: Any, q_length: int, k_length: int) -> list[int] | None:
    """A rectangle as (q_start, q_stop, lo, lo_step, hi, hi_step) of the rows that see something; None if none does."""
    if isinstance(item, (str, bytes, dict)) or not isinstance(item, Sequence) or len(item) != 5:
        raise ValueError(f"slices[{index}] is {item!r}; expected [q_start, q_stop, k_start, k_stop, kind]")
    *numbers, kind = item
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"slices[{index}] has the kind {kind!r}; choose one of {', '.join(KINDS)}")
    q_start, q_stop, k_start, k_stop = (whole_number(f"slices[{index}][{at}]", n, 0) for at, n in enumerate(numbers))
    for name, start, stop, length in (("queries", q_start, q_stop, q_length), ("keys", k_start, k_stop, k_length)):
        if not start < stop <= length:
            raise ValueError(
                f"slices[{index}] covers the {name} [{start}, {stop}); expected start < stop <= {length}, "
                f"the number of {name}"
            )
    lo_step, hi_step = KINDS[kind]
    rows, keys = q_stop - q_start, k_stop - k_start
    hi = k_stop - hi_step * (rows - 1)  # of the first row
    first = max(0, k_start + 1 - hi) if hi_step and not lo_step else 0  # rows above see nothing
    seen = min(rows, keys) if lo_step and not hi_step else rows  # rows below see nothing
    if lo_step and hi_step and hi <= k_start:
        return None
    return [q_start + first, q_start + seen, k_start, lo_step, hi + hi_step * first, hi_step]


def _intervals(dense: NDArray[np.bool_]) -> tuple[Ints, Ints, Ints]:
    """`row, lo, hi` of every run of True in a row, in order."""
    edges = np.zeros((dense.shape[0], dense.shape[1] + 1), np.bool_)
    edges[:, 0], edges[:, -1] = dense[:, 0], dense[:, -1]
    edges[:, 1:-1] = dense[:, 1:] != dense[:, :-1]
    row, key = np.nonzero(edges)  # begins and ends alternate
    return row[::2], key[::2], key[1::2]
