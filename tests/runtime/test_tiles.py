"""Masks in tiles: the runs of a line cover what is seen, and nothing else is visited."""

from __future__ import annotations

import numpy as np
import pytest
from builders import random_mask
from hypothesis import given
from hypothesis import strategies as st

from dyncp import masks
from dyncp.ir.mask import Mask
from dyncp.runtime.kernels.tiles import FULL, Patterns, Tiling, cut

tilings = st.builds(Tiling, st.integers(1, 5), st.sampled_from([4, 16]), st.sampled_from([4, 8]), st.booleans())


def patterns_of(*some: Mask) -> Patterns:
    return Patterns.of([(mask.rows(0, mask.q_length), mask.k_length) for mask in some])


def visited(patterns: Patterns, number: int, tiling: Tiling) -> tuple[np.ndarray, np.ndarray]:
    """How often runs show each pair of a pattern, and which of them they call full."""
    pieces = cut(patterns, tiling)
    rows, keys = patterns.rows[number], patterns.keys[number]
    shown, full = np.zeros((rows * tiling.heads, keys), int), np.zeros((rows * tiling.heads, keys), bool)
    lines = range(pieces.line_ptr[number], pieces.line_ptr[number + 1])
    for line, at in enumerate(lines):
        runs = pieces.runs[pieces.run_ptr[at] : pieces.run_ptr[at + 1]]
        assert (np.diff((runs[:, 2] == FULL).astype(int)) <= 0).all(), "full ones first"
        for first, count, plane in runs.tolist():
            for tile in range(first, first + count):
                i, j = (tile, line) if tiling.by_keys else (line, tile)
                m = slice(i * tiling.block_m, (i + 1) * tiling.block_m)
                n = slice(j * tiling.block_n, (j + 1) * tiling.block_n)
                seen = np.ones_like(shown[m, n], bool)
                if plane == FULL:
                    full[m, n] = True
                else:
                    lo, hi = planes_of(patterns, number, plane, tiling.heads)
                    key = np.arange(keys)[n]
                    seen = (key >= lo[m, None]) & (key < hi[m, None])
                    assert seen.any(), "a tile that sees nothing is not visited"
                shown[m, n] += seen
    return shown, full


def planes_of(patterns: Patterns, number: int, plane: int, heads: int) -> tuple[np.ndarray, np.ndarray]:
    rows, base = patterns.rows[number], patterns.base[number]
    lo, hi = patterns.planes[base + 2 * plane * rows :][: 2 * rows].reshape(2, rows)
    return np.repeat(lo, heads), np.repeat(hi, heads)


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 40), keys=st.integers(1, 40), tiling=tilings)
def test_runs_show_each_visible_pair_once(seed, rows, keys, tiling):
    some = [random_mask(np.random.default_rng(seed + i), rows + i, keys) for i in range(2)]
    patterns = patterns_of(*some)
    for number, mask in enumerate(some):
        shown, _ = visited(patterns, number, tiling)
        assert (shown == np.repeat(mask.dense(), tiling.heads, 0)).all()


@given(rows=st.integers(1, 60), keys=st.integers(1, 60), tiling=tilings)
def test_all_tiles_of_a_full_block_are_full_but_those_that_reach_beyond_it(rows, keys, tiling):
    _, full = visited(patterns_of(masks.full(rows, keys)), 0, tiling)
    if tiling.by_keys:  # along its line: what lies beyond is nobody's gradient, and its own affair across
        want = np.arange(rows * tiling.heads) < rows * tiling.heads // tiling.block_m * tiling.block_m
        assert (full == want[:, None]).all()
    else:
        assert (full == (np.arange(keys) < keys // tiling.block_n * tiling.block_n)).all()


@pytest.mark.parametrize("by_keys", [False, True])
def test_runs_of_a_causal_block(by_keys):
    pieces = cut(patterns_of(masks.causal(32)), Tiling(1, 8, 8, by_keys))
    per_line = [pieces.runs[a:b].tolist() for a, b in zip(pieces.run_ptr[:-1], pieces.run_ptr[1:], strict=True)]
    whole = [[[0, count, FULL], [count, 1, 0]] for count in (1, 2, 3)]
    mirrored = [[[line + 1, 3 - line, FULL], [line, 1, 0]] for line in range(3)]
    assert per_line == ([*mirrored, [[3, 1, 0]]] if by_keys else [[[0, 1, 0]], *whole])


def test_two_planes_in_one_tile_are_two_runs():
    mask = masks.from_dense(np.array([[1, 0, 1, 0], [1, 0, 0, 0]], bool))
    pieces = cut(patterns_of(mask), Tiling(1, 4, 4, False))
    assert pieces.runs.tolist() == [[0, 1, 0], [0, 1, 1]]


def test_nothing_to_cut():
    pieces = cut(patterns_of(), Tiling(1, 4, 4, False))
    assert (pieces.line_ptr.tolist(), pieces.run_ptr.tolist(), len(pieces.runs)) == ([0], [0], 0)
    pieces = cut(patterns_of(masks.from_slices(5, 5, [])), Tiling(1, 4, 4, True))
    assert (pieces.line_ptr.tolist(), pieces.run_ptr.tolist()) == ([0, 2], [0, 0, 0])
