"""Coarser blocks: the same pairs in fewer rectangles, and placements that go from one size to the other."""

from __future__ import annotations

import numpy as np
import pytest
from any_batch import any_batch
from builders import SHAPE, causal_batch, random_batch

from dyncp.ir.blocks import HAS_KV, HAS_Q
from dyncp.ir.placement import Placement
from dyncp.planner.blockgen import make_blocks, uniform_cut
from dyncp.planner.partition.coarsen import coarsen, parents, place_in_sequence, project
from dyncp.planner.partition.nets import Nets, loads


def some_blocks(seed):
    """Of batches with several masks and cross-attention among them."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, ("a", "b"), cross=True) if seed % 2 else any_batch(rng)
    return batch, make_blocks(batch, SHAPE.groups, uniform_cut(int(rng.integers(1, 7))))


def columns(blocks):
    """Everything in blocks, for comparisons."""
    tokens = blocks.tokens
    parts = [tokens.sequence, tokens.start, tokens.stop, tokens.role]
    parts += [blocks.mask, blocks.q_block, blocks.kv_block, blocks.pairs]
    return [part.tolist() for part in parts]


@pytest.mark.parametrize("factor", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_coarse_blocks_are_those_of_a_coarser_cut(seed, factor):
    """Block by block the same as from the masks themselves."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, ("a", "b")[: 1 + seed % 2], cross=seed % 3 == 0)
    size = int(rng.integers(1, 7))
    fine, expected = (make_blocks(batch, 2, uniform_cut(each)) for each in (size, size * factor))
    coarse = coarsen(fine, factor)
    assert columns(coarse) == columns(expected)
    assert (coarse.groups, coarse.mask_names, coarse.mask_weights) == (2, fine.mask_names, fine.mask_weights)
    first = place_in_sequence(fine.tokens) % factor == 0
    assert np.array_equal(parents(coarse.tokens, fine.tokens), np.cumsum(first) - 1)


@pytest.mark.parametrize("seed", range(10))
def test_pairs_are_preserved(seed):
    _, fine = some_blocks(seed)
    coarse = coarsen(fine, 2)
    parent = parents(coarse.tokens, fine.tokens)
    for mask in range(len(fine.mask_names)):
        for end in ("q_block", "kv_block"):
            of_fine, of_coarse = fine.of_mask(mask), coarse.of_mask(mask)
            into = np.bincount(parent[getattr(fine, end)[of_fine]], fine.pairs[of_fine], len(coarse.tokens))
            here = np.bincount(getattr(coarse, end)[of_coarse], coarse.pairs[of_coarse], len(coarse.tokens))
            assert np.array_equal(into, here)


@pytest.mark.parametrize("seed", range(10))
def test_every_fine_block_is_inside_its_parent(seed):
    _, fine = some_blocks(seed)
    coarse = coarsen(fine, 3)
    parent = parents(coarse.tokens, fine.tokens)
    for field in ("sequence", "role"):
        assert np.array_equal(getattr(coarse.tokens, field)[parent], getattr(fine.tokens, field))
    assert (coarse.tokens.start[parent] <= fine.tokens.start).all()
    assert (coarse.tokens.stop[parent] >= fine.tokens.stop).all()
    assert np.bincount(parent, fine.tokens.tokens).tolist() == coarse.tokens.tokens.tolist()


def test_parents_of_cuts_that_do_not_nest_by_number():
    """Any refinement, not only twice as fine; queries and keys of a sequence are told apart."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        batch = any_batch(rng)
        lengths = {length for sequence in batch.sequences for length in (sequence.length, sequence.keys)}
        cuts = {length: np.unique([0, length, *rng.integers(0, length + 1, 6)]) for length in lengths}
        every_third = {length: np.unique([*cut[::3], length]) for length, cut in cuts.items()}
        fine, coarse = make_blocks(batch, 1, cuts.__getitem__), make_blocks(batch, 1, every_third.__getitem__)
        parent = parents(coarse.tokens, fine.tokens)
        for field in ("sequence", "role"):
            assert np.array_equal(getattr(coarse.tokens, field)[parent], getattr(fine.tokens, field))
        assert (coarse.tokens.start[parent] <= fine.tokens.start).all()
        assert (coarse.tokens.stop[parent] >= fine.tokens.stop).all()


@pytest.mark.parametrize("seed", range(10))
def test_a_projected_placement_is_the_same_placement(seed):
    """Loads and bytes are those of the coarse blocks, but for edges that fewer tokens need."""
    _, fine = some_blocks(seed)
    coarse = coarsen(fine, 2)
    parent = parents(coarse.tokens, fine.tokens)
    rng = np.random.default_rng(seed)
    given = Placement(rng.integers(0, 5, len(coarse.tokens)), rng.integers(0, 5, (2, len(coarse))))
    found = project(given, coarse, fine, parent)
    assert found.comp_rank.shape == (2, len(fine))
    assert np.array_equal(found.block_rank, given.block_rank[parent])
    keys = np.stack([coarse.mask, coarse.q_block, coarse.kv_block], axis=1).tolist()
    where = {tuple(key): number for number, key in enumerate(keys)}
    for n in range(len(fine)):
        key = int(fine.mask[n]), int(parent[fine.q_block[n]]), int(parent[fine.kv_block[n]])
        assert found.comp_rank[:, n].tolist() == given.comp_rank[:, where[key]].tolist()
    of_fine, of_coarse = (
        (Nets.of_batch(blocks, SHAPE, "none", "model", (1.0, 1.0)), placement)
        for blocks, placement in ((fine, found), (coarse, given))
    )
    work, cut = [], []
    for nets, placement in (of_fine, of_coarse):
        work.append(loads(nets.work, placement.comp_rank.ravel(), 5).tolist())
        cut.append(nets.cut_bytes(placement.block_rank, placement.comp_rank.ravel(), 5))
    assert work[0] == pytest.approx(work[1])
    assert cut[0] <= cut[1] * (1 + 1e-9)


def test_a_dense_mask_costs_the_same_coarse_and_fine():
    fine = make_blocks(causal_batch(64, 33), 2, uniform_cut(4))
    coarse = coarsen(fine, 4)
    parent = parents(coarse.tokens, fine.tokens)
    rng = np.random.default_rng(0)
    by_row = rng.integers(0, 4, len(coarse.tokens))
    given = Placement(by_row, np.tile(by_row[coarse.q_block], (2, 1)))
    cuts = [
        Nets.of_batch(blocks, SHAPE, "none", "model", (1.0, 1.0)).cut_bytes(
            placement.block_rank, placement.comp_rank.ravel(), 4
        )
        for blocks, placement in ((coarse, given), (fine, project(given, coarse, fine, parent)))
    ]
    assert cuts[0] == pytest.approx(cuts[1])


def test_nothing_is_coarser_than_whole_sequences():
    fine = make_blocks(causal_batch(20, 3, 9), 2, uniform_cut(4))
    coarse = coarsen(fine, 100)
    assert coarse.tokens.tokens.tolist() == [20, 3, 9]
    assert coarse.pairs.tolist() == [210, 6, 45]
    again = coarsen(coarse, 2)
    parent = parents(again.tokens, coarse.tokens)
    assert columns(again) == columns(coarse)
    assert parent.tolist() == [0, 1, 2]


def test_places_begin_anew_with_every_sequence_and_role():
    batch, blocks = some_blocks(1)
    tokens, expected = blocks.tokens, []
    for sequence in range(len(batch.sequences)):
        for role in (HAS_Q, HAS_KV, HAS_Q | HAS_KV):
            expected += range(int(((tokens.sequence == sequence) & (tokens.role == role)).sum()))
    assert place_in_sequence(tokens).tolist() == expected
