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
    """int64[K, 3]: the runs of all lines; fills in `run_ptr`."""
    planes, base, depth, rows, keys = patterns
    heads, block_m, block_n, by_keys = tiling
    runs, used = np.empty((1024, 3), np.int64), 0
    for p in range(len(base)):
        high, wide = -(-rows[p] * heads // block_m), -(-keys[p] // block_n)
        lines, tiles = (wide, high) if by_keys else (high, wide)
        seen = np.zeros((depth[p], lines, tiles), np.int32)  # pairs that each plane leaves in each tile
        line = np.zeros(wide + 1, np.int32)
        for r in range(depth[p]):
            of_plane = planes[base[p] + 2 * r * rows[p] :]
            for i in range(high):
                first, last = i * block_m // heads, min(-(-(i + 1) * block_m // heads), rows[p])
                begin, end = count_seen(of_plane, rows[p], first, last, block_n, line)
                for j in range(begin, end):
                    if by_keys:
                        seen[r, j, i] = line[j]
                    else:
                        seen[r, i, j] = line[j]
                    line[j] = 0
        is_full = np.empty(tiles, np.bool_)
        for n in range(lines):
            for tile in range(tiles):
                i, j = (tile, n) if by_keys else (n, tile)
                width = min((j + 1) * block_n, keys[p]) - j * block_n
                height = min(-(-(i + 1) * block_m // heads), rows[p]) - i * block_m // heads
                # A tile that reaches beyond the block along its line is left to the loop that looks where it ends.
                whole = (i + 1) * block_m <= rows[p] * heads if by_keys else width == block_n
                pairs = 0
                for r in range(depth[p]):
                    pairs += seen[r, n, tile]
                is_full[tile] = whole and pairs == height * width
            if used + (depth[p] + 1) * tiles > len(runs):
                more = np.empty((2 * len(runs) + (depth[p] + 1) * tiles, 3), np.int64)
                more[:used] = runs[:used]
                runs = more
            for plane in range(FULL, depth[p]):
                used += write_runs(seen[max(plane, 0), n], is_full, plane, runs, used)
            run_ptr[line_ptr[p] + n + 1] = used
    return runs[:used]


@part
def count_seen(planes: Ints, rows: int, first: int, last: int, block_n: int, line: Ints) -> tuple[int, int]:
    """Count the pairs of rows `[first, last)` that a plane leaves in each tile of a line, which is 0 before. Returns
    the bounds of the tiles that are not."""
    begin, end = len(line), 0
    for row in range(first, last):
        lo, hi = planes[row], planes[rows + row]
        if lo >= hi:
            continue
        j, stop = lo // block_n, (hi - 1) // block_n + 1
        begin, end = min(begin, j), max(end, stop)
        # As differences from tile to tile: the tiles between the first and the last have all keys.
        line[j] += min(hi, (j + 1) * block_n) - lo
        if stop - j > 1:
            line[j + 1] += block_n - ((j + 1) * block_n - lo)
            line[stop - 1] -= stop * block_n - hi
            line[stop] -= block_n - (stop * block_n - hi)
        else:
            line[stop] -= hi - lo
    for j in range(begin + 1, end):
        line[j] += line[j - 1]
    if begin < end:
        line[end] = 0
    return begin, end


@part
def write_runs(seen: Ints, is_full: Ints, plane: int, runs: Ints, at: int) -> int:
    """Find the runs of one plane, or the full ones, in a line; returns how many there are."""
    found = length = 0
    for tile in range(len(is_full) + 1):
        if tile < len(is_full) and (is_full[tile] if plane == FULL else seen[tile] > 0 and not is_full[tile]):
            length += 1
        elif length > 0:
            runs[at + found, 0], runs[at + found, 1], runs[at + found, 2] = tile - length, length, plane
            found, length = found + 1, 0
    return found
