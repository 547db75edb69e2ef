"""Whether slices of a mask share a pair, without a pass over its rows: those of foreign bytes may claim many."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dyncp.ir.arrays import Ints, ragged_ranges
from dyncp.ir.slices import HI, HI_STEP, LO, LO_STEP, Q_START, Q_STOP

CHUNK = 1 << 15  # pieces of slices looked at together, to bound the memory


def check_disjoint(slices: Ints) -> None:
    """Slices must share no pair.

    The starts and stops of all slices cut the rows into bands, in each of which the same slices have rows. The edges
    of slices are straight lines there: where they do not cross in a band's first and last row, they do not between.

    Args:
        slices: int64[N, 6], each of them a possible one of its mask.

    Raises:
        ValueError: naming a row and what two slices of it see.
    """
    edges = np.unique(slices[:, :2])
    first, last = (np.searchsorted(edges, slices[:, side]) for side in (Q_START, Q_STOP))
    for begin, end in _chunks(first, last, len(edges) - 1):
        here = np.flatnonzero((first < end) & (last > begin))
        low = np.maximum(first[here], begin)
        counts = np.minimum(last[here], end) - low
        band = np.repeat(low, counts) + ragged_ranges(counts)
        _check_bands(slices[np.repeat(here, counts)], band, edges)


def _chunks(first: Ints, last: Ints, bands: int) -> Iterator[tuple[int, int]]:
    """Ranges of bands in which slices have about CHUNK pieces together (or one band with more)."""
    starts, stops = (np.bincount(side, minlength=bands + 1)[:bands] for side in (first, last))
    pieces = np.cumsum(np.cumsum(starts - stops))  # of all bands up to one
    begin = 0
    while begin < bands:
        done = pieces[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(pieces, done + CHUNK, side="right")))
        yield begin, end
        begin = end


def _check_bands(slices: Ints, band: Ints, edges: Ints) -> None:
    """One slice per piece, and the band that the piece is of."""
    at_first = edges[band] - slices[:, Q_START]
    order = np.lexsort((slices[:, LO] + slices[:, LO_STEP] * at_first, band))
    slices, band = slices[order], band[order]
    same = band[1:] == band[:-1]
    for row in (edges[band], edges[band + 1] - 1):
        at = row - slices[:, Q_START]
        lo, hi = slices[:, LO] + slices[:, LO_STEP] * at, slices[:, HI] + slices[:, HI_STEP] * at
        overlap = same & (lo[1:] < hi[:-1])
        if overlap.any():
            i = int(np.argmax(overlap))
            raise ValueError(
                f"row {row[i]} sees keys [{lo[i]}, {hi[i]}) and [{lo[i + 1]}, {hi[i + 1]}), which overlap; slices "
                "must be disjoint: build the mask with Mask.from_intervals or masks.from_slices, which take the union"
            )
