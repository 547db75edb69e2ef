"""Masks of blocks in tiles: which tiles see nothing, which see all, and which some.

A kernel works on tiles of `BLOCK_M` packed rows by `BLOCK_N` keys. The query heads of a head group lie side by side
in memory, so they are *packed* into the rows: packed row m is head `m % H` of row `m // H`. The tiles of a block are
grouped by query tile (where outputs are per query) or by key tile (where they are per key), its *lines*; what a line
has to visit are *runs* of consecutive tiles of one kind. Tiles that see nothing are in no run.

A row sees several key intervals, of which a kernel looks at one per tile: the r-th intervals of all rows of a block are
the *plane* r of its mask, and a tile that meets several planes is visited once for each. The parts are disjoint, so
this is right wherever partial results are merged or summed; and it is rare, since intervals of a row lie apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.jit import jit, part

FULL = -1  # in place of a plane: all keys of the tile are seen


class Patterns(NamedTuple):
    """The different masks among a rank's computation blocks, as planes."""

    planes: Ints  # int32[P], of each pattern its planes, of each the rows' first keys and then the rows' ends
    base: Ints  # int64[N], where a pattern's planes begin
    depth: Ints  # int64[N], how many it has
    rows: Ints  # int64[N]
    keys: Ints  # int64[N]

    @classmethod
    def of(cls, patterns: list[tuple[Ints, int]]) -> Patterns:
        """Of patterns as `mask_patterns` gives them."""
        planes = [np.ascontiguousarray(rows.transpose(1, 2, 0)).ravel() for rows, _ in patterns]
        sizes = np.array([len(flat) for flat in planes], "int64")
        return cls(
            planes=np.concatenate([*planes, np.empty(0, "int32")]).astype("int32"),
            base=np.cumsum(sizes) - sizes,
            depth=np.array([rows.shape[1] for rows, _ in patterns], "int64"),
            rows=np.array([len(rows) for rows, _ in patterns], "int64"),
            keys=np.array([keys for _, keys in patterns], "int64"),
        )


class Tiling(NamedTuple):
    """How blocks are cut into tiles."""

    heads: int  # packed into the rows
    block_m: int  # packed rows
    block_n: int  # keys
    by_keys: bool  # whether lines are key tiles

    def lines(self, rows: Ints, keys: Ints) -> Ints:
        """int64[n]: lines of blocks with so many rows and keys."""
        lines: Ints = -(-keys // self.block_n) if self.by_keys else -(-rows * self.heads // self.block_m)
        return lines


class Cut(NamedTuple):
    """The runs of all patterns under one tiling."""

    line_ptr: Ints  # int64[N + 1], bounds of the patterns among the lines
    run_ptr: Ints  # int64[L + 1], bounds of the lines among the runs
    runs: Ints  # int64[K, 3]: first tile, number of tiles, plane or FULL; FULL ones first in each line


def cut(patterns: Patterns, tiling: Tiling) -> Cut:
    """Cut patterns into tiles."""
    lines = tiling.lines(patterns.rows, patterns.keys)
    line_ptr = np.concatenate([[0], np.cumsum(lines)]).astype("int64")
    run_ptr = np.zeros(line_ptr[-1] + 1, "int64")
    runs: Ints = cut_patterns(tuple(patterns), tuple(tiling), line_ptr, run_ptr)
    return Cut(line_ptr, run_ptr, runs)


@jit
def cut_patterns(patterns: tuple[Any, ...], tiling: tuple[Any, ...], line_ptr: Ints, run_ptr: Ints) -> Ints:
    """int64[K, 3]: the runs of all lines; fills in `run_ptr`. Takes time for the tiles that are visited, not for all
    that there are."""
    planes, base, depth, rows, keys = patterns
    heads, block_m, block_n, by_keys = tiling
    runs, used = np.empty((1024, 3), np.int64), 0
    for p in range(len(base)):
        own = planes[base[p] : base[p] + 2 * depth[p] * rows[p]].reshape(depth[p], 2, rows[p])
        tiles = visited_tiles(own, keys[p], heads, block_m, block_n, by_keys)
        first, last = line_ptr[p], line_ptr[p + 1]
        order, ptr = by_line(tiles, last - first, 1 if by_keys else 0)
        for line in range(last - first):
            of_line = order[ptr[line] : ptr[line + 1]]
            if used + len(of_line) > len(runs):
                more = np.empty((2 * (used + len(of_line)), 3), np.int64)
                more[:used] = runs[:used]
                runs = more
            for plane in range(FULL, depth[p]):
                used += write_runs(tiles, of_line, 0 if by_keys else 1, plane, runs, used)
            run_ptr[first + line + 1] = used
    return runs[:used]


@part
def visited_tiles(planes: Ints, keys: int, heads: int, block_m: int, block_n: int, by_keys: bool) -> Ints:
    """int32[V, 3]: query tile, key tile and plane (or FULL) of all visits to tiles of a block, by query tile."""
    depth, _, rows = planes.shape
    wide = -(-keys // block_n)
    seen = np.zeros((depth, wide + 1), np.int32)  # pairs that each plane leaves in each tile of a line
    begin, end = np.empty(depth, np.int64), np.empty(depth, np.int64)
    tiles, used = np.empty((1024, 3), np.int32), 0
    for i in range(-(-rows * heads // block_m)):
        first, last = i * block_m // heads, min(-(-(i + 1) * block_m // heads), rows)
        # A tile that reaches beyond the block along its line is left to the loop that looks where it ends.
        whole_rows = not by_keys or (i + 1) * block_m <= rows * heads
        most = 0
        for r in range(depth):
            begin[r], end[r] = count_seen(planes[r], first, last, block_n, seen[r])
            most += max(end[r] - begin[r], 0)
        if used + most > len(tiles):
            more = np.empty((2 * (used + most), 3), np.int32)
            more[:used] = tiles[:used]
            tiles = more
        for r in range(depth):
            for j in range(begin[r], end[r]):
                if seen[r, j] > 0:
                    pairs, lowest = 0, r
                    for other in range(depth - 1, -1, -1):
                        pairs += seen[other, j]
                        if seen[other, j] > 0:
                            lowest = min(lowest, other)
                    width = min((j + 1) * block_n, keys) - j * block_n
                    is_full = whole_rows and (by_keys or width == block_n) and pairs == (last - first) * width
                    if not is_full or lowest == r:
                        tiles[used, 0], tiles[used, 1], tiles[used, 2] = i, j, FULL if is_full else r
                        used += 1
        for r in range(depth):
            seen[r, begin[r] : end[r]] = 0
    return tiles[:used]


@part
def count_seen(plane: Ints, first: int, last: int, block_n: int, seen: Ints) -> tuple[int, int]:
    """Count the pairs of rows `[first, last)` that a plane leaves in each tile; `seen` is 0 before. Returns the bounds
    of the tiles that are not."""
    begin, end = len(seen), 0
    for row in range(first, last):
        lo, hi = plane[0, row], plane[1, row]
        if lo >= hi:
            continue
        j, stop = lo // block_n, (hi - 1) // block_n + 1
        begin, end = min(begin, j), max(end, stop)
        # As differences from tile to tile: those between the first and the last have all keys.
        seen[j] += min(hi, (j + 1) * block_n) - lo
        if stop - j > 1:
            seen[j + 1] += lo - j * block_n
            seen[stop - 1] -= stop * block_n - hi
            seen[stop] -= hi - (stop - 1) * block_n
        else:
            seen[stop] -= hi - lo
    for j in range(begin + 1, end):
        seen[j] += seen[j - 1]
    if begin < end:
        seen[end] = 0
    return begin, end


@part
def by_line(tiles: Ints, lines: int, column: int) -> tuple[Ints, Ints]:
    """Visits sorted by line, as they were within one; and the bounds of the lines."""
    ptr = np.zeros(lines + 1, np.int64)
    for visit in range(len(tiles)):
        ptr[tiles[visit, column] + 1] += 1
    ptr = np.cumsum(ptr)
    order, at = np.empty(len(tiles), np.int64), ptr[:-1].copy()
    for visit in range(len(tiles)):
        line = tiles[visit, column]
        order[at[line]] = visit
        at[line] += 1
    return order, ptr


@part
def write_runs(tiles: Ints, of_line: Ints, column: int, plane: int, runs: Ints, at: int) -> int:
    """Find the runs of one plane, or the full ones, among the visits of a line; returns how many there are."""
    found = 0
    for visit in of_line:
        if tiles[visit, 2] == plane:
            tile = tiles[visit, column]
            if found > 0 and tile == runs[at + found - 1, 0] + runs[at + found - 1, 1]:
                runs[at + found - 1, 1] += 1
            else:
                runs[at + found, 0], runs[at + found, 1], runs[at + found, 2] = tile, 1, plane
                found += 1
    return found
