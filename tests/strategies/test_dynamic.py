"""The dynamic strategy from batch to checked plan."""

from __future__ import annotations

import numpy as np
import pytest
from any_batch import any_batch
from builders import SHAPE, causal_batch, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from dyncp import masks
from dyncp.cost.roofline import Roofline
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.check import check_plan
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import FORWARD, KEEP, WIRE, side_token_bytes
from dyncp.ir.shape import AttentionShape
from dyncp.planner.partition.balance import balanced_work, chosen_epsilon
from dyncp.planner.scheduling.clock import schedule_seconds
from dyncp.simulator import simulate
from dyncp.strategies import build, make_plan
from dyncp.strategies.api import BALANCES, OBJECTIVES, Options


def loads_of(layout, cluster, options):
    """(work of each mask on each rank, tokens of each rank), max / mean; 1 where there is nothing."""
    blocks, placement = layout.blocks, layout.placement
    works, ratios = balanced_work(blocks, SHAPE, cluster, options), []
    for mask in range(len(blocks.mask_names)):
        part = blocks.of_mask(mask)
        work = np.tile(works[part] / blocks.mask_weights[mask], blocks.groups)
        load = np.bincount(placement.comp_rank[:, part].ravel(), work, cluster.ranks)
        ratios.append(load.max() / load.mean() if load.any() else 1.0)
    tokens = np.bincount(placement.block_rank, blocks.tokens.tokens, cluster.ranks)
    return ratios, tokens.max() / tokens.mean()


def assert_met_or_noted(made, cluster, options):
    layout = made.layout
    work, tokens = loads_of(layout, cluster, options)
    epsilon = chosen_epsilon(made.batch, SHAPE, cluster, options)
    over = sum(ratio > 1 + epsilon + 1e-6 for ratio in work)
    assert sum("computation of rank" in note for note in layout.notes) == over
    assert any("tokens of rank" in note for note in layout.notes) == (tokens > 1 + options.token_epsilon + 1e-6)


@given(
    seed=st.integers(0, 2**16),
    nodes=st.integers(1, 3),
    per_node=st.integers(1, 3),
    block_tokens=st.one_of(st.just("auto"), st.integers(2, 30)),
    divisions=st.integers(1, 5),
    keep=st.sampled_from(sorted(KEEP)),
    wire=st.sampled_from(WIRE),
    objective=st.sampled_from(OBJECTIVES),
    balance=st.sampled_from(BALANCES),
    token_epsilon=st.sampled_from([0.02, 0.3]),
)
@settings(max_examples=70)
def test_plans_of_any_batch_pass_the_check(seed, nodes, per_node, block_tokens, divisions, **words):
    rng = np.random.default_rng(seed)
    batch = any_batch(rng, 50, 4) if seed % 2 else random_batch(rng, ("a", "b"), cross=True)
    options = Options(block_tokens=block_tokens, divisions=divisions, seed=seed, effort=0.1, **words)
    made = build(batch, SHAPE, Cluster(nodes, per_node), "dynamic", options)
    check_plan(made.plan, made.layout.blocks, batch)
    assert_met_or_noted(made, Cluster(nodes, per_node), options)


@pytest.mark.parametrize("seed", range(8))
def test_plans_of_the_paper_s_partitioner_pass_the_check(seed):
    """Mt-KaHyPar's placement, its tokens evened and its computation repaired."""
    pytest.importorskip("mtkahypar")
    batch, cluster = any_batch(np.random.default_rng(seed), 60, 4), Cluster(2, 2)
    options = Options(block_tokens=8, partitioner="hypergraph", effort=0.1, objective=OBJECTIVES[seed % 3])
    made = build(batch, SHAPE, cluster, "dynamic", options)
    check_plan(made.plan, made.layout.blocks, batch)
    assert_met_or_noted(made, cluster, options)
    tokens = np.bincount(made.layout.placement.block_rank, made.layout.blocks.tokens.tokens, 4)
    assert tokens.max() <= max(np.floor(1.02 * tokens.mean()), np.ceil(tokens.mean()))


@pytest.mark.parametrize("weights", [{"a": 1e9, "b": 1e-300}, {"a": 5e-324, "b": 5e-324}, {"a": 0.3, "b": 7.0}])
def test_plans_have_the_weights_of_the_batch(weights):
    """Whatever the search makes of them."""
    both = {"a": masks.causal(90), "b": masks.sliding_window(90, 9)}
    batch = Batch([Sequence(90, both), Sequence(20, {name: masks.full(20) for name in both})], weights)
    for portfolio in (True, False):
        options = Options(block_tokens=10, portfolio=portfolio, forward_weight=1e300, backward_weight=1e-300)
        made = build(batch, SHAPE, Cluster(2, 2), "dynamic", options)
        check_plan(made.plan, made.layout.blocks, batch)
        assert made.plan.header.mask_weights == made.layout.blocks.mask_weights == tuple(weights.values())
        assert_met_or_noted(made, Cluster(2, 2), options)


def test_every_stage_has_a_time():
    made = build(causal_batch(100), SHAPE, Cluster(1, 2), "dynamic", Options(block_tokens=20))
    assert list(made.seconds) == ["blocks", "place", "schedule", "lower"]
    assert all(seconds >= 0 for seconds in made.seconds.values())


def test_fewer_tokens_than_ranks():
    for length in (1, 2, 5):
        batch = causal_batch(length)
        made = build(batch, SHAPE, Cluster(2, 4), "dynamic")
        check_plan(made.plan, made.layout.blocks, batch)
        assert np.bincount(made.layout.placement.block_rank, made.layout.blocks.tokens.tokens).max() == 1


def forward_bytes(made):
    moves = made.layout.schedule.transfers
    sides = np.array(side_token_bytes(made.plan.header.shape, FORWARD, "none", "model"))
    return int((sides[moves.side] * made.layout.blocks.tokens.tokens[moves.block]).sum())


def test_short_sequences_stay_whole():
    """Four equal sequences on four ranks: nothing moves."""
    made = build(
        causal_batch(96, 96, 96, 96), SHAPE, Cluster(2, 2), "dynamic", Options(block_tokens=32, portfolio=False)
    )
    assert made.layout.notes == ()
    assert len(made.layout.schedule.transfers) == 0
    assert sorted(made.plan.header.owner[::3].tolist()) == [0, 1, 2, 3]


def test_a_sparse_mask_moves_less_than_a_dense_one():
    """What a ring cannot use."""
    shape, options = AttentionShape(8, 2, 64), Options(block_tokens=128, portfolio=False)
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
    """All work of a head group in one block."""
    dense = np.zeros((64, 64), bool)
    dense[:16, :16] = True
    batch = Batch([Sequence(64, masks.from_dense(dense))])
    made = build(batch, SHAPE, Cluster(1, 4), "dynamic", Options(block_tokens=64, portfolio=False))
    assert any("use smaller block_tokens" in note for note in made.layout.notes)
    made = build(batch, SHAPE, Cluster(1, 4), "dynamic", Options(block_tokens=4, portfolio=False))
    assert made.layout.notes == ()


def test_the_tolerance_that_is_chosen():
    """A message between nodes against a rank's computation: none on one node, little on many tokens, most on few."""
    shape, options = AttentionShape(8, 2, 128), Options()
    chosen = [
        chosen_epsilon(causal_batch(length), shape, Cluster.preset("p4de", nodes), options)
        for nodes, length in ((1, 4096), (4, 4096), (4, 65536), (4, 131072))
    ]
    assert chosen[0] == 0.02 and chosen[1] == 0.25 and 0.02 < chosen[2] < 0.1 and chosen[3] == 0.02
    assert chosen_epsilon(causal_batch(4096), shape, Cluster(4, 8), Options(epsilon=0.3)) == 0.3


def test_computation_is_balanced_by_time():
    """Many short sequences take longer than their pairs say: they fill no tiles."""
    shape, cluster = AttentionShape(8, 2, 128), Cluster.preset("p4de", 1)
    batch = causal_batch(8192, *[65] * 600)
    spans = {}
    for balance in BALANCES:
        made = build(batch, shape, cluster, "dynamic", Options(balance=balance, portfolio=False))
        spans[balance] = simulate(made.plan, cluster, Roofline.of(cluster)).forward.slowest_attention_s
    assert spans["time"] < 0.98 * spans["pairs"]


def test_of_several_tries_the_first_to_end_is_taken():
    shape, cluster = AttentionShape(8, 2, 128), Cluster.preset("p4de", 2, 4)
    batch, cost = causal_batch(9000, 7000, 3000, 900, 400), Roofline.of(cluster)

    def seconds(**options):
        layout = build(batch, shape, cluster, "dynamic", Options(portfolio=False, effort=0.1, **options)).layout
        parts = layout.blocks, layout.placement, layout.schedule
        return schedule_seconds(*parts, shape, cluster, cost, ("none", "model"))

    alone = [seconds(seed=seed) for seed in (5, 6, 7)]
    assert len(set(alone)) > 1
    assert seconds(seed=5, tries=3) == min(alone)
