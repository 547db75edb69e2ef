"""Even tokens: the limit holds once blocks are cut, with few cuts, and nothing is lost."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
from any_batch import any_batch, any_cluster, any_places
from builders import SHAPE, causal_batch

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.planner.blockgen import blocks_of_bounds, make_blocks, uniform_cut
from dyncp.planner.partition.even import ROUND, even_tokens, own_value
from dyncp.planner.partition.nets import Nets, loads
from dyncp.planner.partition.place import bounds_of


def nets_of(batch, block_tokens=64):
    blocks = make_blocks(batch, SHAPE.groups, uniform_cut(block_tokens))
    return blocks, Nets.of_batch(blocks, SHAPE, "none", "model", (1.0, 1.0))


def case(seed):
    """(blocks, nets, cluster, block_rank, comp_rank, limit), lopsided, of batches with blocks small and large."""
    rng = np.random.default_rng(seed)
    batch = any_batch(rng, 400 if seed % 2 else 40, 5)
    blocks, nets = nets_of(batch, int(rng.choice([5, 64, 400])))
    cluster = any_cluster(rng, 9)
    block_rank, comp_rank = any_places(rng, nets, cluster.ranks)
    block_rank = block_rank // int(rng.integers(1, cluster.ranks + 1))
    mean = float(nets.tokens.sum()) / cluster.ranks
    limit = max(ceil(mean), float(rng.choice([1.0, 1.02, 1.5])) * mean)
    return blocks, nets, cluster, block_rank, comp_rank, limit


def evened(nets, block_rank, comp_rank, limit, ranks, per_node=1, crossed=0.0):
    return even_tokens(nets, block_rank, comp_rank, per_node, limit, ranks, crossed)


@pytest.mark.parametrize("seed", range(40))
def test_the_limit_holds_and_nothing_is_lost(seed):
    _, nets, cluster, block_rank, comp_rank, limit = case(seed)
    ranks = cluster.ranks
    block, tokens, rank = evened(nets, block_rank, comp_rank, limit, ranks, cluster.ranks_per_node, seed % 3 * 2.0)
    assert loads(tokens, rank, ranks).max() <= limit
    assert (tokens > 0).all()
    assert (np.diff(block) >= 0).all()
    assert np.bincount(block, tokens, len(nets.tokens)).tolist() == nets.tokens.tolist()
    assert rank.min() >= 0
    assert rank.max() < ranks
    assert len(block) <= len(nets.tokens) + 2 * ranks


@pytest.mark.parametrize("seed", range(0, 40, 3))
def test_pieces_are_bounds_of_blocks(seed):
    """In self-attention and cross-attention: the pieces in their order are the token blocks of the new bounds."""
    rng = np.random.default_rng(seed)
    names = ("a", "b")[: 1 + seed % 2]
    batch = any_batch(rng, 150, 5, names)
    blocks, nets = nets_of(batch, int(rng.integers(3, 70)))
    block_rank, comp_rank = any_places(rng, nets, 5)
    limit = ceil(float(nets.tokens.sum()) / 5)
    block, tokens, _ = evened(nets, block_rank // 2, comp_rank, limit, 5)
    finer = blocks_of_bounds(batch, SHAPE.groups, bounds_of(blocks, block, tokens))
    assert np.array_equal(finer.tokens.tokens, tokens)
    for field in ("sequence", "role"):
        assert np.array_equal(getattr(finer.tokens, field), getattr(blocks.tokens, field)[block])
    assert (finer.tokens.start >= blocks.tokens.start[block]).all()
    assert (finer.tokens.stop <= blocks.tokens.stop[block]).all()
    assert finer.pairs.sum() == blocks.pairs.sum()


def test_cross_attention_has_pieces_of_both_sides():
    batch = Batch([Sequence(100, masks.full(100, 300), kv_length=300), Sequence(60, masks.causal(60))])
    blocks, nets = nets_of(batch, 512)
    assert blocks.tokens.role.tolist() == [1, 2, 3]
    block, tokens, rank = evened(nets, np.zeros(3, int), np.zeros(len(nets), int), 460 / 4, 4)
    assert loads(tokens, rank, 4).tolist() == [115] * 4
    assert bounds_of(blocks, block, tokens)[0][1][-1] == 300
    finer = blocks_of_bounds(batch, SHAPE.groups, bounds_of(blocks, block, tokens))
    assert set(finer.tokens.role.tolist()) == {1, 2, 3}


def test_what_ranks_give_beyond_their_surplus_is_room_for_others():
    """Cuts at multiples of `ROUND` make two ranks give too much; the third finds no room but theirs."""
    _, nets = nets_of(causal_batch(310, 309, 308, 33), 400)
    _, tokens, rank = evened(nets, np.array([0, 1, 2, 3]), np.zeros(len(nets), int), 240.0, 4)
    assert loads(tokens, rank, 4).tolist() == [240] * 4


def test_where_nothing_is_computed_tokens_are_even_all_the_same():
    _, nets = nets_of(Batch([Sequence(90, masks.from_dense(np.zeros((90, 90), bool)))]), 30)
    _, tokens, rank = evened(nets, np.zeros(3, int), np.zeros(0, int), 15.0, 6, per_node=3)
    assert loads(tokens, rank, 6).tolist() == [15] * 6


def test_what_is_within_the_limit_is_left_alone():
    blocks, nets = nets_of(causal_batch(100, 100))
    block_rank = blocks.tokens.sequence.astype("int64")
    block, tokens, rank = evened(nets, block_rank, np.zeros(len(nets), int), 100.0, 2)
    assert block.tolist() == list(range(len(nets.tokens)))
    assert tokens.tolist() == nets.tokens.tolist()
    assert rank.tolist() == block_rank.tolist()


def test_pieces_go_where_they_are_used():
    """Everything is owned by rank 0; each rank computes one sequence, and gets its tokens."""
    blocks, nets = nets_of(causal_batch(64, 64, 64, 64), 64)
    comp_rank = blocks.tokens.sequence[nets.edge_token[nets.q_edge]]
    block, tokens, rank = evened(nets, np.zeros(4, int), comp_rank, 64.0, 4)
    assert block.tolist() == [0, 1, 2, 3]
    assert rank.tolist() == [0, 1, 2, 3]
    assert tokens.tolist() == [64] * 4


def test_pieces_stay_on_the_node_that_has_use_for_them():
    """A rank of another node has no more use for a block than one of this node: a price of crossing decides."""
    _, nets = nets_of(causal_batch(256), 64)
    computes = np.where(np.arange(len(nets)) % 3 == 0, 2, 1)  # on nodes 1 and 0
    for crossed, ranks in ((0.0, {1, 2, 3}), (5.0, {1})):
        _, _, rank = evened(nets, np.zeros(4, int), computes, 160.0, 4, per_node=2, crossed=crossed)
        assert set(rank.tolist()) - {0} <= ranks


def test_cuts_lie_at_multiples_where_there_is_room():
    """Rather a whole block than a crumb of it, and rather a multiple than the least number."""
    for lengths, limit, expected in (
        ((1000, 1000), 1500, [(500 // ROUND + 1) * ROUND]),
        ((1000, 1000), 1510, [-(-490 // ROUND) * ROUND]),
        ((1000, 490), 1010, [490]),
        ((1000, 1000), 1000, [1000]),
    ):
        _, nets = nets_of(causal_batch(*lengths), 1000)
        second = nets.edge_token[nets.q_edge]  # rank 1 computes the second sequence
        _, tokens, rank = evened(nets, np.zeros(2, int), second, float(limit), 2)
        assert tokens[rank == 1].tolist() == expected


def test_values_are_the_bytes_that_owners_save():
    """Against the cut before and after a token block has another owner."""
    rng = np.random.default_rng(4)
    for seed in range(6):
        _, nets = nets_of(any_batch(np.random.default_rng(seed), 30), 6)
        block_rank, comp_rank = any_places(rng, nets, 6)
        value = own_value(nets, comp_rank, 6, 1, 0.0)
        token, there = int(rng.integers(len(nets.tokens))), int(rng.integers(6))
        other = block_rank.copy()
        other[token] = there
        saved = nets.cut_bytes(block_rank, comp_rank, 6) - nets.cut_bytes(other, comp_rank, 6)
        assert value[token, there] - value[token, block_rank[token]] == pytest.approx(saved)
        by_node = own_value(nets, comp_rank, 6, 3, 2.0) - value
        nodes = own_value(nets, comp_rank // 3, 2, 1, 0.0)
        assert by_node == pytest.approx(2.0 * np.repeat(nodes, 3, axis=1))
