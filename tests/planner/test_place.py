"""Placement as a whole: of any batch, within its limits, for the objective asked for, and the same every time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from any_batch import any_batch, any_cluster
from builders import SHAPE, assert_same_elsewhere, causal_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import FORWARD, KEEP, WIRE, side_token_bytes
from dyncp.ir.shape import AttentionShape
from dyncp.planner.partition import place as stages
from dyncp.planner.partition.bounds import lower_bound
from dyncp.planner.partition.estimate import received_bytes
from dyncp.planner.partition.nets import Nets, loads
from dyncp.planner.partition.place import place
from dyncp.planner.partition.size import cut_batch
from dyncp.strategies import build
from dyncp.strategies.api import OBJECTIVES, Options

LAYER = AttentionShape(8, 2, 64)


def placed(batch, cluster, shape=SHAPE, **options):
    """(blocks, placement) with little effort, unless told otherwise."""
    defaults = {"effort": 0.05, "block_tokens": 8, "epsilon": 0.02, "balance": "pairs"}
    options = Options(**(defaults | options))
    size = None if options.block_tokens == "auto" else options.block_tokens
    blocks = cut_batch(batch, shape.groups, cluster.ranks, size, options.epsilon)
    return place(batch, blocks, shape, cluster, options)


def work_loads(blocks, placement, ranks):
    """float64[M, R], pairs"""
    return np.stack(
        [
            loads(
                np.tile(blocks.pairs[blocks.of_mask(mask)], blocks.groups),
                placement.comp_rank[:, blocks.of_mask(mask)].ravel(),
                ranks,
            )
            for mask in range(len(blocks.mask_names))
        ]
    )


def moved(found, shape, cluster, weights=(1.0, 1.0), wire="model"):
    """(bytes received by each rank, bytes received by each node from others)"""
    nets = Nets.of_batch(found.blocks, shape, "none", wire, weights)
    return received_bytes(nets, found.placement.block_rank, found.placement.comp_rank.ravel(), cluster)


def assert_covers(found, batch, cluster):
    """That the blocks are the batch's, and everything has a rank."""
    blocks, placement = found
    for index, sequence in enumerate(batch.sequences):
        of = blocks.tokens.sequence == index
        assert blocks.tokens.tokens[of].sum() == sequence.length + (sequence.kv_length or 0)
    for mask, name in enumerate(batch.mask_names):
        pairs = sum(sequence.masks[name].pairs() for sequence in batch.sequences)
        assert blocks.pairs[blocks.of_mask(mask)].sum() == pairs
    assert placement.block_rank.shape == (len(blocks.tokens),)
    assert placement.comp_rank.shape == (blocks.groups, len(blocks))
    for part in (placement.block_rank, placement.comp_rank):
        assert not part.size or (part.min() >= 0 and part.max() < cluster.ranks)


def assert_limits(found, cluster, epsilon, token_epsilon):
    """Tokens always keep to theirs, as blocks are cut for that. Where work is above its limit, and above the largest
    block, no block fits anywhere else."""
    blocks, placement = found
    tokens = loads(blocks.tokens.tokens, placement.block_rank, cluster.ranks)
    assert tokens.max() <= max(np.floor((1 + token_epsilon) * tokens.mean()), np.ceil(tokens.mean()))
    for mask, load in enumerate(work_loads(blocks, placement, cluster.ranks)):
        part = blocks.of_mask(mask)
        limit = max((1 + epsilon) * load.mean(), blocks.pairs[part].max(initial=0)) * (1 + 1e-6)
        for rank in np.flatnonzero(load > limit):
            here = (placement.comp_rank[:, part] == rank).any(axis=0)
            assert load.min() + blocks.pairs[part][here].min() > limit


@given(
    seed=st.integers(0, 2**20),
    block_tokens=st.sampled_from(["auto", 3, 8, 30]),
    objective=st.sampled_from(OBJECTIVES),
    epsilons=st.tuples(st.sampled_from([0.02, 0.2, 1.0]), st.sampled_from([1e-6, 0.02, 0.5])),
    effort=st.sampled_from([1e-9, 0.01, 0.1]),
    weights=st.sampled_from([(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (1e300, 1e-300), (1e-300, 1e-300), (1e300, 1e300)]),
    traffic=st.tuples(st.sampled_from(sorted(KEEP)), st.sampled_from(WIRE)),
)
@settings(max_examples=250)
def test_any_batch_is_placed_within_its_limits(seed, block_tokens, objective, epsilons, effort, weights, traffic):
    rng = np.random.default_rng(seed)
    batch, cluster = any_batch(rng, int(rng.choice([20, 60, 200]))), any_cluster(rng, 16)
    options = {"block_tokens": block_tokens, "objective": objective, "effort": effort, "seed": seed}
    options |= {"epsilon": epsilons[0], "token_epsilon": epsilons[1], "keep": traffic[0], "wire": traffic[1]}
    found = placed(batch, cluster, forward_weight=weights[0], backward_weight=weights[1], **options)
    assert_covers(found, batch, cluster)
    assert_limits(found, cluster, *epsilons)


@pytest.mark.parametrize("name", ["COARSE", "LARGE"])
def test_batches_too_fine_or_too_large_for_one_search(monkeypatch, name):
    """Coarser blocks first; and where even these take too much memory, tiles alone."""
    monkeypatch.setattr(stages, name, 5)
    for seed in range(25):
        rng = np.random.default_rng(seed)
        batch, cluster = any_batch(rng), any_cluster(rng, 9)
        found = placed(batch, cluster, block_tokens=3, objective=OBJECTIVES[seed % 3])
        assert_covers(found, batch, cluster)
        if name == "COARSE":
            assert_limits(found, cluster, 0.02, 0.02)


def test_few_tokens_on_many_ranks():
    for batch in (causal_batch(1), causal_batch(1, 1), causal_batch(3, 2, 1)):
        for cluster in (Cluster(1, 1), Cluster(1, 16), Cluster(3, 5)):
            for objective in OBJECTIVES:
                found = placed(batch, cluster, block_tokens="auto", objective=objective)
                assert_covers(found, batch, cluster)
                assert loads(found.blocks.tokens.tokens, found.placement.block_rank, cluster.ranks).max() <= max(
                    1, np.ceil(batch.tokens / cluster.ranks)
                )


def test_batches_whose_rows_see_nothing():
    """All of them, or all but one sequence's: tokens are even all the same."""
    nothing = Sequence(70, masks.from_dense(np.zeros((70, 70), bool)))
    for sequences in ([nothing], [nothing, nothing], [nothing, Sequence(30, masks.causal(30))]):
        for objective in OBJECTIVES:
            found = placed(Batch(sequences), Cluster(2, 3), objective=objective, block_tokens="auto")
            assert_covers(found, Batch(sequences), Cluster(2, 3))
            assert_limits(found, Cluster(2, 3), 0.02, 0.02)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_nothing_moves_where_nothing_has_to(objective):
    """And no number is divided by no bytes."""
    for cluster in (Cluster(1, 1), Cluster(1, 4), Cluster(2, 2)):
        found = placed(causal_batch(*[40] * 4), cluster, objective=objective)
        assert moved(found, SHAPE, cluster)[0].sum() == 0


def digest():
    """Of placements of several kinds, which another process must find again."""
    names = ("a", "b")
    batches = [any_batch(np.random.default_rng(seed), 120, names=names) for seed in (3, 4, 7)]
    found = [
        placed(batch, Cluster(2, 3), objective=objective) for batch in batches for objective in ("time", "largest")
    ]
    return [
        [part.tolist() for part in (blocks.tokens.start, placement.block_rank, placement.comp_rank)]
        for blocks, placement in found
    ]


def test_the_same_arguments_give_the_same_in_another_process():
    assert_same_elsewhere(digest)


def test_the_unit_of_weights_does_not_matter():
    """Of those of passes and of masks: powers of two, which round nothing."""
    both = {"a": masks.causal(150), "b": masks.sliding_window(150, 20)}
    layouts = []
    for passes, layers in ((1.0, 1.0), (4.0, 1.0), (2.0**-600, 1.0), (1.0, 8.0), (2.0**600, 2.0**-20)):
        batch = Batch([Sequence(150, both)], {"a": 3.0 * layers, "b": 1.0 * layers})
        options = Options(block_tokens=8, effort=0.05, forward_weight=passes, backward_weight=passes, portfolio=False)
        layout = build(batch, SHAPE, Cluster(2, 2), "dynamic", options).layout
        layouts.append((layout.placement.block_rank.tolist(), layout.placement.comp_rank.tolist()))
    assert all(layout == layouts[0] for layout in layouts)


def test_blocks_keep_the_weights_that_they_came_with():
    """And not those of the batch, where token blocks are cut: weights are scaled before."""
    both = {"a": masks.causal(61), "b": masks.full(61)}
    batch = Batch([Sequence(61, both)], {"a": 4.0, "b": 8.0})
    blocks = replace(cut_batch(batch, SHAPE.groups, 5, 30, 0.1), mask_weights=(0.5, 1.0))
    found = place(batch, blocks, SHAPE, Cluster(1, 5), Options(effort=0.01))
    assert len(found.blocks.tokens) > len(blocks.tokens)
    assert found.blocks.mask_weights == (0.5, 1.0)


def test_more_effort_moves_no_more():
    totals = []
    for effort in (0.001, 0.05, 1.0):
        found = [placed(batch, Cluster(1, 6), LAYER, effort=effort, block_tokens=16) for batch in CASES]
        totals.append(sum(moved(each, LAYER, Cluster(1, 6))[0].sum() for each in found))
    assert totals[0] > totals[1] > totals[2] * 0.99


CASES = (
    causal_batch(512),
    causal_batch(300, 120, 60, 32),
    causal_batch(200, 180, 150),
    Batch([Sequence(500, masks.lambda_(500, 16, 60)), Sequence(120, masks.causal(120))]),
    Batch([Sequence(400, masks.shared_question(*masks.shared_question_split(400)))]),
)


def test_every_objective_is_the_best_at_what_it_asks_for():
    """On average over the batches."""
    cluster = Cluster(2, 3)
    sums = {}
    for objective in OBJECTIVES:
        found = [
            placed(batch, cluster, LAYER, objective=objective, block_tokens=16, effort=0.5, epsilon=0.1)
            for batch in CASES
        ]
        received = [moved(each, LAYER, cluster) for each in found]
        sums[objective] = (
            sum(entered.sum() for _, entered in received),
            sum(ranks.sum() for ranks, _ in received),
            sum(ranks.max() for ranks, _ in received),
        )
    assert sums["time"][0] < sums["total"][0]
    assert sums["total"][1] < sums["time"][1]
    assert sums["largest"][2] < sums["total"][2]
    assert sums["largest"][2] < sums["time"][2]


def test_a_pass_that_counts_alone_moves_less():
    """Of wide values in float32, of which the forward moves the outputs, the backward gradients of both sides."""
    cluster, shape, sums = Cluster(1, 6), AttentionShape(4, 4, 16, 128), []
    passes = ((1.0, 0.0), (0.0, 1.0))
    for forward, backward in passes:
        options = {"forward_weight": forward, "backward_weight": backward, "effort": 0.5, "block_tokens": 16}
        found = [placed(batch, cluster, shape, wire="float32", **options) for batch in CASES]
        sums.append([sum(moved(each, shape, cluster, count, "float32")[0].sum() for each in found) for count in passes])
    (forward, backward_then), (forward_then, backward) = sums
    assert forward < 0.85 * forward_then
    assert backward < 0.85 * backward_then


@pytest.mark.parametrize("seed", range(12))
def test_no_placement_is_below_the_lower_bound(seed):
    """Which is that of its own imbalance, of the mask where it is largest."""
    rng = np.random.default_rng(seed)
    batch, cluster = any_batch(rng, 150), Cluster(int(rng.integers(1, 3)), int(rng.integers(1, 4)))
    found = placed(batch, cluster, epsilon=float(rng.choice([0.05, 0.5])), effort=0.2)
    tokens = loads(found.blocks.tokens.tokens, found.placement.block_rank, cluster.ranks)
    work = work_loads(found.blocks, found.placement, cluster.ranks)
    uneven = max(load.max() / max(load.mean(), 1e-9) for load in work)
    args = max(uneven - 1, 1e-9), max(float(tokens.max() / tokens.mean()) - 1, 1e-9), "none", "model"
    bound = lower_bound(batch, SHAPE, cluster, *args)
    for passes, weights in ((bound.both, (1.0, 1.0)), (bound.forward, (1.0, 0.0))):
        nets = Nets.of_batch(found.blocks, SHAPE, "none", "model")
        scale = nets.edge_bytes.sum()
        received, entered = moved(found, SHAPE, cluster, weights)
        assert received.sum() >= passes.total_bytes - 1e-9 * scale
        assert entered.sum() >= passes.inter_node_bytes - 1e-9 * scale


def test_one_long_sequence_comes_near_the_lower_bound():
    """Within a factor that a ring is far beyond."""
    batch, cluster = causal_batch(2048), Cluster(1, 8)
    found = placed(batch, cluster, LAYER, block_tokens=64, effort=1.0, epsilon=0.05)
    forward = moved(found, LAYER, cluster, (1.0, 0.0))[0].sum()
    bound = lower_bound(batch, LAYER, cluster, 0.05, 0.02, "none", "model").forward.total_bytes
    kv = 2048 * LAYER.groups * side_token_bytes(LAYER, FORWARD, "none", "model")[1]
    assert bound <= forward < 2.0 * bound
    assert forward < 0.7 * kv * 7


def test_nodes_of_one_rank_and_networks_without_limits():
    """Endless bandwidth everywhere is like no price on nodes."""
    endless, batch = float("inf"), causal_batch(200, 60)
    for cluster in (Cluster(4, 1), Cluster(2, 2, 1.0, endless), Cluster(2, 2, 1.0, 1e18), Cluster(2, 2, endless, 1.0)):
        assert_limits(placed(batch, cluster), cluster, 0.02, 0.02)
    total = placed(batch, Cluster(2, 2), objective="total")
    found = placed(batch, Cluster(2, 2, endless, endless))
    assert np.array_equal(found.placement.comp_rank, total.placement.comp_rank)
