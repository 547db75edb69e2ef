"""The size of blocks: small enough for the limits, no smaller than is worth it."""

from __future__ import annotations

import numpy as np
import pytest
from any_batch import any_batch
from builders import causal_batch

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.planner.blockgen import blocks_of_bounds
from dyncp.planner.cuts import cut_along_masks
from dyncp.planner.partition.size import SIZES, cut_batch, size_cost

LONGTAIL = (14481, 8478, 5352, 3523, 2473, 2397, 1680, 917, 713, 307, 804, 63, 15904, 7941, 1689, 3470, 2358, 450)


def lambda_batch(*lengths):
    return Batch([Sequence(length, masks.lambda_(length, 64, min(length, 1024))) for length in lengths])


def sizes_of(batch, ranks, epsilon, block_tokens=None):
    return cut_batch(batch, 2, ranks, block_tokens, epsilon).tokens.tokens


@pytest.mark.parametrize("batch", [causal_batch(131072), causal_batch(*LONGTAIL), lambda_batch(*LONGTAIL)])
@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_the_best_size_of_all_is_taken(batch, ranks):
    for epsilon in (0.5, 0.1, 0.02):
        most = sum(sequence.length for sequence in batch.sequences) // ranks
        costs = [
            size_cost(blocks_of_bounds(batch, 2, cut_along_masks(batch, min(size, most))), ranks, epsilon)
            for size in SIZES
        ]
        blocks = cut_batch(batch, 2, ranks, None, epsilon)
        assert size_cost(blocks, ranks, epsilon) == min(costs)


def test_tighter_limits_take_smaller_blocks():
    for batch, ranks in ((causal_batch(131072), 32), (causal_batch(*LONGTAIL), 16), (lambda_batch(*LONGTAIL), 4)):
        largest = [int(sizes_of(batch, ranks, epsilon).max()) for epsilon in (0.5, 0.1, 0.02, 0.005)]
        assert largest == sorted(largest, reverse=True)
        assert largest[0] > largest[-1]


def test_no_block_is_heavier_than_the_tolerance_where_that_can_be():
    for batch in (causal_batch(131072), causal_batch(*LONGTAIL), lambda_batch(*LONGTAIL)):
        for epsilon in (0.3, 0.1, 0.03):
            blocks = cut_batch(batch, 8, 16, None, epsilon)
            assert blocks.work.max() <= epsilon * blocks.work.sum() * 8 / 16


def test_no_block_is_above_an_even_share():
    """Not even where that leaves single tokens, or fewer tokens than ranks."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        batch, ranks = any_batch(rng, 100), int(rng.integers(1, 70))
        tokens = sum(sequence.length + (sequence.kv_length or 0) for sequence in batch.sequences)
        for block_tokens in (None, 7, 4096):
            found = sizes_of(batch, ranks, 0.1, block_tokens)
            assert found.max() <= max(1, tokens // ranks)
            assert found.sum() == tokens


def test_a_size_that_is_asked_for_is_kept():
    """Whatever the limits; blocks may be smaller, along edges and to divide a sequence evenly."""
    for block_tokens in (100, 512, 3000):
        for epsilon in (1.0, 1e-6):
            found = sizes_of(causal_batch(6000, 700), 2, epsilon, block_tokens)
            assert block_tokens / 2 < found.max() <= block_tokens
    assert sizes_of(causal_batch(60, 50), 2, 0.1, 100).tolist() == [30, 30, 50]


def test_windows_are_worth_smaller_blocks_than_what_is_dense():
    """Half of a large block is fetched and multiplied in vain."""
    length = 65536
    largest = [
        int(sizes_of(Batch([Sequence(length, mask)]), 8, 0.5).max())
        for mask in (masks.causal(length), masks.sliding_window(length, 256))
    ]
    assert largest[1] < largest[0]


def test_the_cost_is_what_it_says():
    """Two blocks of four tokens, causal, for two head groups on two ranks."""
    blocks = blocks_of_bounds(causal_batch(8), 2, [(np.array([0, 4, 8]), np.array([0, 4, 8]))])
    mean = 36.0
    vain = (10 * 1.6 + 16 + 10 * 1.6) / 36 - 1
    assert size_cost(blocks, 2, 1.0) == pytest.approx(16 / mean + 0.25 * vain + 0.001 * 3)
    assert size_cost(blocks, 2, 16 / mean - 1e-9) == np.inf
    assert size_cost(blocks, 2, 16 / mean + 1e-9) < np.inf


def test_a_batch_without_computation_has_blocks():
    batch = Batch([Sequence(600, masks.from_dense(np.zeros((600, 600), bool)))])
    blocks = cut_batch(batch, 2, 4, None, 0.1)
    assert size_cost(blocks, 4, 0.1) == 0.0
    assert blocks.tokens.tokens.max() <= 150
    assert len(blocks) == 0
