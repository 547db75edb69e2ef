from __future__ import annotations

import itertools
import tracemalloc

import numpy as np
import pytest
from builders import random_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.blocks import HAS_KV, HAS_Q
from dyncp.ir.mask import Mask
from dyncp.planner.blockgen import (
    blocks_of_bounds,
    equal_cut,
    even_cut,
    make_all_comps,
    make_blocks,
    make_comps,
    uniform_cut,
)

SEEDS = st.integers(0, 10**9)


def random_bounds(rng: np.random.Generator, length: int) -> np.ndarray:
    """Bounds of blocks of any sizes, often of one token."""
    some = rng.random(max(0, length - 1)) < rng.choice([0.05, 0.3, 1.0])
    return np.concatenate([[0], np.flatnonzero(some) + 1, [length]])


def cut_at_random(seed: int):
    """A batch of two masks in which some rows see nothing, and blocks of uneven sizes."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, names=("a", "b"), cross=seed % 2 == 0)
    bounds = []
    for sequence in batch.sequences:
        q_bounds = random_bounds(rng, sequence.length)
        bounds.append((q_bounds, q_bounds if sequence.kv_length is None else random_bounds(rng, sequence.keys)))
    return rng, batch, bounds, blocks_of_bounds(batch, 2, bounds)


@settings(max_examples=150)
@given(SEEDS)
def test_blocks_cover_the_mask_exactly(seed):
    rng, batch, bounds, blocks = cut_at_random(seed)
    tokens = blocks.tokens
    expected = []
    for index, (sequence, (q_bounds, kv_bounds)) in enumerate(zip(batch.sequences, bounds, strict=True)):
        sides = [(q_bounds, HAS_Q), (kv_bounds, HAS_KV)] if sequence.kv_length else [(q_bounds, HAS_Q | HAS_KV)]
        expected += [(index, *edges, role) for side, role in sides for edges in itertools.pairwise(side.tolist())]
    assert np.stack([tokens.sequence, tokens.start, tokens.stop, tokens.role]).T.tolist() == [list(e) for e in expected]
    for mask, name in enumerate(batch.mask_names):
        part = blocks.of_mask(mask)
        found = {}
        for q, kv, pairs in zip(blocks.q_block[part], blocks.kv_block[part], blocks.pairs[part], strict=True):
            assert tokens.sequence[q] == tokens.sequence[kv]
            assert tokens.role[q] & HAS_Q and tokens.role[kv] & HAS_KV
            found[int(q), int(kv)] = int(pairs)
        for index, sequence in enumerate(batch.sequences):
            dense = sequence.masks[name].dense()
            for q in np.flatnonzero((tokens.sequence == index) & (tokens.role & HAS_Q > 0)):
                for kv in np.flatnonzero((tokens.sequence == index) & (tokens.role & HAS_KV > 0)):
                    pairs = dense[tokens.start[q] : tokens.stop[q], tokens.start[kv] : tokens.stop[kv]].sum()
                    assert found.pop((int(q), int(kv)), 0) == pairs
        assert not found
    order = np.stack([blocks.mask, blocks.q_block, blocks.kv_block]).T.tolist()
    assert order == sorted(order)
    cut = uniform_cut(int(rng.integers(1, 12)))
    same = blocks_of_bounds(batch, 2, [(cut(s.length), cut(s.keys)) for s in batch.sequences])
    made = make_blocks(batch, 2, cut)
    for name in ("q_block", "kv_block", "mask", "pairs"):
        np.testing.assert_array_equal(getattr(made, name), getattr(same, name))


@settings(max_examples=150)
@given(SEEDS)
def test_comps_have_the_slices_of_a_crop(seed):
    rng, batch, _, blocks = cut_at_random(seed)
    tokens = blocks.tokens
    for mask, name in enumerate(batch.mask_names):
        part = blocks.of_mask(mask)
        index = np.flatnonzero(rng.random(part.stop - part.start) < rng.choice([0.3, 1.0])) + part.start
        comps = make_comps(batch, blocks, mask, index)
        np.testing.assert_array_equal(comps.index, index)
        np.testing.assert_array_equal(comps.q_block, blocks.q_block[index])
        np.testing.assert_array_equal(comps.kv_block, blocks.kv_block[index])
        assert len(comps.slice_ptr) == len(index) + 1 and comps.slice_ptr[-1] == len(comps.slices)
        for at, (q, kv) in enumerate(zip(comps.q_block, comps.kv_block, strict=True)):
            whole = batch.sequences[tokens.sequence[q]].masks[name]
            rectangle = (*(int(edge[block]) for block in (q, kv) for edge in (tokens.start, tokens.stop)),)
            rows, keys = rectangle[1] - rectangle[0], rectangle[3] - rectangle[2]
            full = blocks.pairs[index[at]] == rows * keys
            expected = np.array([[0, rows, 0, 0, keys, 0]]) if full else whole.crop_slices(*rectangle)
            np.testing.assert_array_equal(comps.slices[comps.slice_ptr[at] : comps.slice_ptr[at + 1]], expected)


@given(SEEDS)
def test_comps_of_all_ranks_are_those_of_each(seed):
    """Ranks share blocks, which differ in the head group, or have none."""
    rng, batch, _, blocks = cut_at_random(seed)
    for mask in range(2):
        part = blocks.of_mask(mask)
        some = [rng.random(part.stop - part.start) < share for share in (0.5, 0.0, 0.7, 1.0, 0.0)]
        per_rank = [np.flatnonzero(mine) + part.start for mine in some]
        ptr = np.cumsum([0] + [len(index) for index in per_rank])
        tables = make_all_comps(batch, blocks, mask, ptr, np.concatenate(per_rank))
        for index, comps in zip(per_rank, tables, strict=True):
            alone = make_comps(batch, blocks, mask, index)
            for name in ("index", "q_block", "kv_block", "slice_ptr", "slices"):
                np.testing.assert_array_equal(getattr(comps, name), getattr(alone, name))


def test_comps_of_many_slices():
    """Blocks of a long sequence that see several slices each, and full ones made of several."""
    edges = np.arange(0, 4097, 8)
    few = masks.causal(4096)
    rows = np.stack([edges[:-1], edges[1:], 0 * edges[1:], 0 * edges[1:], edges[:-1] + 1, 0 * edges[1:] + 1], axis=1)
    many = Mask(4096, 4096, rows)
    short = masks.causal(3)
    batch = Batch([Sequence(3, short), Sequence(4096, many), Sequence(3, short)])
    blocks = make_blocks(batch, 1, even_cut(100))
    comps = make_comps(batch, blocks, 0, np.arange(len(blocks)))
    alike = make_blocks(Batch([Sequence(3, short), Sequence(4096, few), Sequence(3, short)]), 1, even_cut(100))
    np.testing.assert_array_equal(blocks.pairs, alike.pairs)
    count = np.diff(comps.slice_ptr)
    diagonal = blocks.q_block == blocks.kv_block
    assert set(count[~diagonal].tolist()) == {1}
    assert set(count[diagonal].tolist()) == {1, 13, 14}


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([([0, 5], [0, 5]), ([0, 4, 4, 9], [0, 7])], r"sequence 1 has bounds \[0, 4, 4, 9\]; .* from 0 to 9"),
        ([([0, 5], [0, 5]), ([0, 9], [0, 6])], r"sequence 1 has bounds \[0, 6\]; .* from 0 to 7"),
        ([([1, 5], [1, 5]), ([0, 9], [0, 7])], r"sequence 0 has bounds \[1, 5\]"),
        ([([0, 3, 2, 5], [0, 3, 2, 5]), ([0, 9], [0, 7])], r"sequence 0 has bounds \[0, 3, 2, 5\]"),
        ([([0, 5], [0, 2, 5]), ([0, 9], [0, 7])], r"sequence 0: .* differ: \[0, 5\] and \[0, 2, 5\]"),
        ([([0], [0]), ([0, 9], [0, 7])], r"sequence 0 has bounds \[0\]"),
    ],
)
def test_bad_bounds_are_refused(bounds, message):
    batch = Batch([Sequence(5, masks.causal(5)), Sequence(9, masks.full(9, 7), kv_length=7)])
    with pytest.raises(ValueError, match=message):
        blocks_of_bounds(batch, 1, bounds)


def test_sequences_of_one_block_are_in_order_with_the_others():
    """A mask without pairs gives no computation block."""
    lengths = (5, 20, 8, 3, 9)
    batch = Batch(
        [
            Sequence(n, {"a": masks.causal(n), "b": masks.from_slices(n, n, []) if n == 3 else masks.full(n)})
            for n in lengths
        ]
    )
    blocks = make_blocks(batch, 1, uniform_cut(8))
    rows = np.stack([blocks.mask, blocks.q_block, blocks.kv_block]).T.tolist()
    assert rows == sorted(rows)
    assert [int(blocks.pairs[blocks.of_mask(mask)].sum()) for mask in (0, 1)] == [
        sum(n * (n + 1) // 2 for n in lengths),
        sum(n * n for n in lengths if n != 3),
    ]
    assert blocks.pairs.min() > 0


def test_a_long_band_costs_its_blocks_not_its_square():
    """A grid over all blocks would have 244 million cells of 8 bytes."""
    length, block = 250_000, 16
    batch = Batch([Sequence(length, masks.sliding_window(length, 10))])
    blocks = make_blocks(batch, 1, uniform_cut(block))
    count = length // block
    assert len(blocks) == 2 * count - 1
    assert int(blocks.pairs.sum()) == batch.sequences[0].masks["default"].pairs()
    tracemalloc.start()
    make_blocks(batch, 1, uniform_cut(block))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * 2**20


@pytest.mark.parametrize("cut", [uniform_cut(7), even_cut(7), equal_cut(4)])
@pytest.mark.parametrize("length", [1, 3, 7, 8, 29])
def test_cuts_have_no_empty_block(cut, length):
    bounds = cut(length)
    assert bounds[0] == 0 and bounds[-1] == length and (np.diff(bounds) > 0).all()


def test_an_even_cut_has_no_short_tail():
    assert [np.diff(even_cut(1024)(length)).tolist() for length in (100, 1024, 1025, 3000)] == [
        [100],
        [1024],
        [512, 513],
        [1000, 1000, 1000],
    ]


def test_equal_lengths_are_cut_once():
    asked = []

    def cut(length: int) -> np.ndarray:
        asked.append(length)
        return uniform_cut(4)(length)

    make_blocks(Batch([Sequence(n, masks.causal(n)) for n in (9, 5, 9, 5, 9)]), 1, cut)
    assert sorted(asked) == [5, 9]
