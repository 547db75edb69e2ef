"""Rows sorted by small numbers, as of ranks, steps and blocks, in linear time."""

from __future__ import annotations

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.jit import jit


def sort_by(*columns: Ints) -> Ints:
    """int64[n]: the rows in ascending order, the first column counting most; rows that are equal keep their order.

    Args:
        columns: int64[n] each, not negative. Takes linear time for small numbers, as of ranks, steps and cells.
    """
    order = np.arange(len(columns[0]))
    for column in reversed(columns):
        stop = int(column.max(initial=0)) + 1
        if stop == 1:
            continue
        if stop <= 4 * len(column) + 65536:
            order = counting_sort(order, column, stop)
        else:
            order = order[np.argsort(column[order], kind="stable")]
    return order


@jit
def counting_sort(rows: Ints, column: Ints, stop: int) -> Ints:
    """Some or all rows, sorted by their values in `column`, which lie in [0, stop); equal ones stay in their order."""
    place = np.zeros(stop + 1, np.int64)
    for row in rows:
        place[column[row] + 1] += 1
    for value in range(stop):
        place[value + 1] += place[value]
    result = np.empty_like(rows)
    for row in rows:
        result[place[column[row]]] = row
        place[column[row]] += 1
    return result


def pointers(values: Ints, stop: int) -> Ints:
    """int64[stop + 1]: bounds of the rows of each value below `stop`, once they are sorted."""
    return np.append(0, np.cumsum(np.bincount(values, minlength=stop)))
