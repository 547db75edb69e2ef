"""Where sequences are cut: small enough blocks, not many more than even ones, along the edges of masks."""

from __future__ import annotations

import numpy as np
import pytest
from any_batch import any_batch, any_mask

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.planner.blockgen import even_cut
from dyncp.planner.cuts import LONG, NEAR, cut_along_masks

LENGTH, BLOCK = 4096, 512


def cut_of(mask, block_tokens=BLOCK):
    """The bounds of one sequence under one mask, or several by name."""
    first = mask if not isinstance(mask, dict) else next(iter(mask.values()))
    ((bounds, keys),) = cut_along_masks(Batch([Sequence(first.q_length, mask)]), block_tokens)
    assert keys is bounds
    return bounds.tolist()


@pytest.mark.parametrize("longest", [40, 200, 1000])
def test_bounds_are_valid_and_few(longest):
    """Of any batch: from 0 to the length, no block too large, at most one more than twice as many as even ones."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        batch, block_tokens = any_batch(rng, longest), int(rng.integers(1, 100))
        cuts = cut_along_masks(batch, block_tokens)
        assert len(cuts) == len(batch.sequences)
        for sequence, (queries, keys) in zip(batch.sequences, cuts, strict=True):
            assert sequence.kv_length is not None or keys is queries
            for length, bounds in ((sequence.length, queries), (sequence.keys, keys)):
                sizes = np.diff(bounds)
                assert (bounds[0], bounds[-1]) == (0, length)
                assert sizes.min() > 0
                assert sizes.max() <= block_tokens
                assert len(sizes) <= 2 * -(-length // block_tokens) + 1


@pytest.mark.parametrize("block_tokens", [100, 512, 1000, 4096, 5000])
def test_without_edges_the_cut_is_even(block_tokens):
    expected = even_cut(block_tokens)(LENGTH).tolist()
    for mask in (masks.causal(LENGTH), masks.full(LENGTH), masks.sliding_window(LENGTH, 700)):
        assert cut_of(mask, block_tokens) == expected
    assert cut_of(masks.from_dense(np.zeros((50, 50), bool)), 8) == even_cut(8)(50).tolist()


def test_the_edge_of_a_sink_is_a_bound():
    for sink in (64, 500, 777):
        assert sink in cut_of(masks.lambda_(LENGTH, sink, 512))
        assert 256 in cut_of(masks.causal_blockwise(LENGTH, 256, 1, 4))


def test_sequences_in_a_sequence_have_bounds_of_their_own():
    assert {1000, 3000} <= set(cut_of(masks.document([1000, 2000, 1096])))
    question, answers = masks.shared_question_split(LENGTH)
    starts = question + np.cumsum([0, *answers[:-1]])
    assert set(starts.tolist()) <= set(cut_of(masks.shared_question(question, answers)))
    assert 777 in cut_of(masks.prefix_lm(LENGTH, 777))


def test_what_lies_between_edges_is_cut_evenly():
    bounds = cut_of(masks.document([1000, 3096]), 512)
    sizes = np.diff(bounds)
    assert sizes.min() > BLOCK * NEAR
    assert len(sizes) <= 10


def test_short_edges_only_attract_what_is_near():
    """Documents of 60 tokens are worth no bound each, but every even cut lies near one of their ends."""
    bounds = np.array(cut_of(masks.document([60] * 70)))
    assert (bounds % 60 == 0).all()
    assert len(bounds) == len(even_cut(BLOCK)(4200))
    assert np.abs(bounds - even_cut(BLOCK)(4200)).max() <= 30


def test_an_edge_is_long_from_a_share_of_a_block_on():
    """A sink whose edge is as long as there are rows that see nothing else nearby; no even cut is near it."""
    for rows, is_bound in ((512 * LONG - 8, False), (512 * LONG + 8, True)):
        assert (700 in cut_of(masks.lambda_(LENGTH, 700, LENGTH - 700 - int(rows)))) == is_bound


def test_edges_of_all_masks_count():
    both = {"a": masks.lambda_(LENGTH, 64, 512), "b": masks.document([1300, LENGTH - 1300])}
    assert {64, 1300} <= set(cut_of(both))
    assert cut_of({"a": both["a"]}) != cut_of(both)


def test_short_sequences_stay_whole_whatever_their_mask():
    rng = np.random.default_rng(0)
    batch = Batch([Sequence(length, any_mask(rng, length, length)) for length in (1, 5, 64, 64, 63)])
    assert [bounds.tolist() for bounds, _ in cut_along_masks(batch, 64)] == [[0, n] for n in (1, 5, 64, 64, 63)]


def test_queries_and_keys_are_cut_each_at_their_own_edges():
    """Half of the queries see the first 200 keys, half the others."""
    dense = np.zeros((600, 1000), bool)
    dense[:290, :200] = dense[290:, 200:] = True
    batch = Batch([Sequence(600, masks.from_dense(dense), kv_length=1000)])
    ((queries, keys),) = cut_along_masks(batch, 128)
    assert 290 in queries
    assert 200 in keys
    assert 200 not in queries
    assert 290 not in keys
    # short as they are, both sides are still cut where the mask has an edge
    ((queries, keys),) = cut_along_masks(batch, 1000)
    assert queries.tolist() == [0, 290, 600]
    assert keys.tolist() == [0, 200, 1000]
