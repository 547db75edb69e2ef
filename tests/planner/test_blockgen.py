from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from builders import random_batch

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.blocks import HAS_KV, HAS_Q
from dyncp.planner.blockgen import equal_cut, make_blocks, uniform_cut


@pytest.mark.parametrize("seed", range(20))
def test_blocks_cover_the_mask_exactly(seed):
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, names=("a", "b"), cross=seed % 2 == 0)
    cut = uniform_cut(int(rng.integers(1, 12))) if seed % 3 else equal_cut(int(rng.integers(1, 5)))
    blocks = make_blocks(batch, 2, cut)
    tokens = blocks.tokens
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


def test_sequences_of_one_block_are_in_order_with_the_others():
    """Short ones take a shorter way; a mask without pairs gives no computation block."""
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


@pytest.mark.parametrize("cut", [uniform_cut(7), equal_cut(4)])
@pytest.mark.parametrize("length", [1, 3, 7, 8, 29])
def test_cuts_have_no_empty_block(cut, length):
    bounds = cut(length)
    assert bounds[0] == 0 and bounds[-1] == length and (np.diff(bounds) > 0).all()
