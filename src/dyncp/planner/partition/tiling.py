"""A first placement of the computation: every sequence's (query, key) matrix cut into tiles, as a matrix product is cut
where communication is to be avoided.

A rank that computes a tile of one head group's matrix pays for the tile's rows (the query side: Q, partial outputs and
their gradients) and its columns (the KV side), a perimeter; its work is the area. So the matrix of each (sequence, head
group), a *sheet*, is cut into *strips* of rows, and each strip along the keys into as many tiles as it has work for.
Where the strips lie is found by dynamic programming, for the least sum of

    tiles that reach into the strip x bytes of its rows  +  bytes of the columns that it touches.

Work is counted and not area, so masks may have any shape and holes. Sheets follow each other: what is left of one
shares a tile with what comes next. A strip that would end near a whole number of tiles is cut into that number, so
tiles have the work that they should have only roughly; the local search evens that out at less cost than a tile in two
strips.
"""

from __future__ import annotations

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.jit import jit
from dyncp.planner.partition.nets import Nets

NEAR = 0.1  # of a tile: strips that end this near to a whole number of tiles are taken to end there
MOST_TILES = 64  # in a strip


def tile(nets: Nets, sheet: Ints, targets: Ints) -> Ints:
    """int64[C]: the part of each computation block of one mask.

    Args:
        nets: the hypergraph; edges of one side ascend with their place in the sequence.
        sheet: int64[C], the (sequence, head group) of each computation block, in the order in which they are to be cut.
        targets: float64[parts], the work that each part should have, in any unit.
    """
    if not len(nets):
        return np.zeros(0, "int64")
    order = np.lexsort((nets.kv_edge, nets.q_edge, sheet))
    q_edge, kv_edge, of_sheet = nets.q_edge[order], nets.kv_edge[order], sheet[order]
    begins = np.append(True, (q_edge[1:] != q_edge[:-1]) | (of_sheet[1:] != of_sheet[:-1]))
    first = np.flatnonzero(begins)  # of each line: one query block of one sheet
    work = np.concatenate([[0.0], np.cumsum(np.add.reduceat(nets.work[order], first))])
    lines = np.append(first, len(order))
    sheet_first = np.flatnonzero(np.append(True, of_sheet[first][1:] != of_sheet[first][:-1]))
    ends = np.concatenate([[0.0], np.cumsum(np.maximum(targets, 1e-9 * targets.max()))])
    ends *= work[-1] / ends[-1]
    tiles = np.interp(work, ends, np.arange(len(ends)))  # the work above each line, in tiles
    strip, cuts = np.zeros(len(first), "int64"), np.zeros((len(first), 2))
    row_bytes = nets.edge_bytes[q_edge[first]]
    _strips(lines, np.append(sheet_first, len(first)), tiles, row_bytes, kv_edge, nets.edge_bytes, strip, cuts)
    of_comp = np.repeat(strip, np.diff(lines))
    along = np.where(of_comp % 2 == 0, kv_edge, -kv_edge)  # back and forth, so that neighbours stay neighbours
    curve = np.lexsort((q_edge, along, of_comp))
    part = np.empty(len(order), "int64")
    part[order[curve]] = _deal(
        nets.work[order][curve], of_comp[curve], np.repeat(cuts, np.diff(lines), axis=0)[curve], ends
    )
    return part


def _deal(work: Ints, strip: Ints, cuts: Ints, ends: Ints) -> Ints:
    """int64[C]: the part of each computation block, in the order of the strips and along them; `cuts`, float64[C, 2],
    says which tiles its strip is to fill."""
    before = np.cumsum(work) - work / 2
    first = np.flatnonzero(np.append(True, strip[1:] != strip[:-1]))
    count = np.diff(np.append(first, len(strip)))
    start = np.repeat(before[first] - work[first] / 2, count)
    total = np.repeat(np.add.reduceat(work, first), count)
    low, high = np.interp(cuts.T, np.arange(len(ends)), ends)  # in work
    aim = low + (before - start) / total * (high - low)
    return np.clip(np.searchsorted(ends, aim, "right") - 1, 0, len(ends) - 2)


@jit
def _strips(
    lines: Ints, sheets: Ints, tiles: Ints, row_bytes: Ints, kv_edge: Ints, edge_bytes: Ints, strip: Ints, span: Ints
) -> None:
    """Fill in the strip of each line, and which tiles it is to fill.

    Args:
        lines: int64[L + 1], first computation block of each line (a row of a sheet).
        sheets: int64[S + 1], first line of each sheet.
        tiles: float64[L + 1], the work of all lines before, in tiles.
        row_bytes: float64[L], bytes of a line's query side.
        kv_edge: int64[C], column of each computation block.
        edge_bytes: float64[E], bytes of a column.
        strip: int64[L], result; numbers ascend over all sheets.
        span: float64[L, 2], result, from and to, in tiles.
    """
    seen = np.zeros(len(edge_bytes), np.int64)  # when each column was last touched
    stamp = number = 0
    cost = np.zeros(len(strip) + 1)
    before = np.zeros(len(strip) + 1, np.int64)
    for sheet in range(len(sheets) - 1):
        start, stop = sheets[sheet], sheets[sheet + 1]
        cost[start : stop + 1] = np.inf
        cost[start] = 0.0
        for i in range(start, stop):
            stamp += 1
            rows = columns = 0.0
            for line in range(i, stop):
                rows += row_bytes[line]
                for comp in range(lines[line], lines[line + 1]):
                    edge = kv_edge[comp]
                    if seen[edge] != stamp:
                        seen[edge] = stamp
                        columns += edge_bytes[edge]
                inside = max(1.0, np.ceil(_rounded(tiles[line + 1])) - np.floor(_rounded(tiles[i])))
                if cost[i] + inside * rows + columns < cost[line + 1]:
                    cost[line + 1] = cost[i] + inside * rows + columns
                    before[line + 1] = i
                if inside > MOST_TILES:
                    break
        number += stop - start  # from the last strip to the first
        j = stop
        while j > start:
            number -= 1
            for line in range(before[j], j):
                strip[line] = number
                span[line, 0], span[line, 1] = _rounded(tiles[before[j]]), _rounded(tiles[j])
            j = before[j]
        number += stop - start


@jit
def _rounded(tiles: float) -> float:
    """A number of tiles, or the whole number nearby."""
    whole = np.floor(tiles + 0.5)
    return whole if abs(tiles - whole) < NEAR else tiles
