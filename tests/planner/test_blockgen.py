from __future__ import annotations

import numpy as np
import pytest
from builders import random_batch

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


@pytest.mark.parametrize("cut", [uniform_cut(7), equal_cut(4)])
@pytest.mark.parametrize("length", [1, 3, 7, 8, 29])
def test_cuts_have_no_empty_block(cut, length):
    bounds = cut(length)
    assert bounds[0] == 0 and bounds[-1] == length and (np.diff(bounds) > 0).all()
