"""Ring, zigzag and data parallel: what moves, and where things are."""

from __future__ import annotations

import numpy as np
import pytest
from builders import causal_batch, planned

from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import FORWARD, side_token_bytes
from dyncp.ir.schedule import Side
from dyncp.ir.shape import AttentionShape
from dyncp.strategies import STRATEGIES, build, get_strategy


def forward_bytes(made, side=None) -> int:
    moves = made.layout.schedule.transfers
    sides = np.array(side_token_bytes(made.plan.header.shape, FORWARD, "none", "model"))
    size = sides[moves.side] * made.layout.blocks.tokens.tokens[moves.block]
    return int(size[moves.side == side].sum() if side is not None else size.sum())


def test_ring_bytes_are_the_published_ones():
    """131,072 tokens, 32 ranks, 8/2 heads of 128, bf16: 4,161 MB, G (R - 1) times the KV of all tokens."""
    for strategy in ("ring", "zigzag"):
        made = build(causal_batch(131072), AttentionShape(8, 2, 128), Cluster(4, 8), strategy)
        assert forward_bytes(made) == 31 * 131072 * 2 * 2 * 128 * 2
        assert forward_bytes(made) == forward_bytes(made, Side.KV_IN)


def test_ring_moves_between_neighbours_only():
    for strategy in ("ring", "zigzag"):
        moves = planned(causal_batch(50, 3), ranks=5, strategy=strategy).layout.schedule.transfers
        assert set(((moves.dst - moves.src) % 5).tolist()) == {1}


def test_ring_tokens_are_balanced_and_zigzag_computation_too():
    for strategy, most in (("ring", 1.9), ("zigzag", 1.01)):
        made = planned(causal_batch(1600), ranks=8, strategy=strategy)
        blocks, place = made.layout.blocks, made.layout.placement
        tokens = np.bincount(place.block_rank, weights=blocks.tokens.tokens, minlength=8)
        work = np.bincount(place.comp_rank[0], weights=blocks.pairs, minlength=8)
        assert tokens.max() == tokens.min()
        assert work.max() / work.mean() <= most
        assert strategy == "zigzag" or work.max() / work.mean() > 1.8


def test_zigzag_pairs_the_ends():
    made = planned(causal_batch(64), ranks=4, strategy="zigzag")
    assert made.layout.placement.block_rank.tolist() == [0, 1, 2, 3, 3, 2, 1, 0]


def test_data_parallel_moves_nothing_and_deals_longest_first():
    made = planned(causal_batch(30, 10, 9, 9), ranks=2, strategy="data_parallel")
    owner = made.layout.placement.block_rank
    sequence = made.layout.blocks.tokens.sequence
    assert len(made.layout.schedule.transfers) == 0
    assert len(set(owner[sequence == 0].tolist())) == 1
    assert {int(owner[sequence == s][0]) for s in (1, 2, 3)} == {1 - int(owner[sequence == 0][0])}


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "dynamic"])
def test_more_ranks_than_tokens(strategy):
    made = planned(causal_batch(3, 1), ranks=8, strategy=strategy)
    assert len(set(made.layout.placement.block_rank.tolist())) <= 4


def test_unknown_strategy():
    with pytest.raises(ValueError, match="unknown strategy 'spiral'; choose one of dynamic, ring"):
        get_strategy("spiral")
