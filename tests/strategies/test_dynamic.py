"""The dynamic strategy from batch to checked plan."""

from __future__ import annotations

import numpy as np
from builders import SHAPE, causal_batch, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.check import check_plan
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import FORWARD, KEEP, WIRE, side_token_bytes
from dyncp.ir.shape import AttentionShape
from dyncp.strategies import build, make_plan
from dyncp.strategies.api import Options


@given(
    seed=st.integers(0, 2**16),
    nodes=st.integers(1, 3),
    per_node=st.integers(1, 3),
    block_tokens=st.integers(2, 30),
    divisions=st.integers(1, 5),
    keep=st.sampled_from(sorted(KEEP)),
    wire=st.sampled_from(WIRE),
)
@settings(max_examples=60)
def test_plans_of_any_batch_pass_the_check(seed, nodes, per_node, block_tokens, divisions, keep, wire):
    batch = random_batch(np.random.default_rng(seed), ("a", "b") if seed % 2 else ("default",), cross=seed % 3 == 0)
    options = Options(block_tokens=block_tokens, divisions=divisions, keep=keep, wire=wire, seed=seed)
    made = build(batch, SHAPE, Cluster(nodes, per_node), "dynamic", options)
    check_plan(made.plan, made.layout.blocks)


def forward_bytes(made):
    moves = made.layout.schedule.transfers
    sides = np.array(side_token_bytes(made.plan.header.shape, FORWARD, "none", "model"))
    return int((sides[moves.side] * made.layout.blocks.tokens.tokens[moves.block]).sum())


def test_short_sequences_stay_whole():
    """Four equal sequences on four ranks: nothing moves."""
    made = build(causal_batch(96, 96, 96, 96), SHAPE, Cluster(2, 2), "dynamic", Options(block_tokens=32))
    assert made.layout.notes == ()
    assert len(made.layout.schedule.transfers) == 0
    assert sorted(made.plan.header.owner[::3].tolist()) == [0, 1, 2, 3]


def test_a_sparse_mask_moves_less_than_a_dense_one():
    """What a ring cannot use."""
    shape, options = AttentionShape(8, 2, 64), Options(block_tokens=128)
    moved = {}
    for mask in (masks.causal(4096), masks.sliding_window(4096, 256)):
        made = build(Batch([Sequence(4096, mask)]), shape, Cluster(1, 8), "dynamic", options)
        moved[mask.pairs()] = forward_bytes(made)
    few, many = (moved[pairs] for pairs in sorted(moved))
    ring = forward_bytes(build(Batch([Sequence(4096, masks.causal(4096))]), shape, Cluster(1, 8), "ring", options))
    assert few < many / 3
    assert many < ring


def test_same_arguments_same_plan():
    batch, cluster = causal_batch(300, 170, 41), Cluster(2, 2)
    assert make_plan(batch, SHAPE, cluster) == make_plan(batch, SHAPE, cluster)


def test_what_cannot_be_balanced_is_in_the_notes():
    made = build(causal_batch(64, 8), SHAPE, Cluster(1, 4), "dynamic", Options(block_tokens=64))
    assert any("use smaller block_tokens" in note for note in made.layout.notes)
