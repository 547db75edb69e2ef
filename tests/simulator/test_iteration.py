"""Whole iterations, by hand, and beside published times."""

from dataclasses import replace

import pytest
from builders import causal_batch

from dyncp import masks
from dyncp.cost.layer import Model, context_cluster
from dyncp.cost.roofline import Roofline
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.simulator import simulate
from dyncp.simulator.iteration import Training, iteration, optimizer_s, tokens_per_rank
from dyncp.strategies import build

DEVICES = Cluster(2, 4, intra_bytes_per_s=1e9, inter_bytes_per_s=1e8, intra_latency_s=0.0, inter_latency_s=0.0)
MODEL = Model(layers=3, hidden=8, q_heads=4, kv_heads=2, head_dim=4, ffn=16, vocabulary=10)
TRAINING = Training(1e9, tp=2, efficiency=0.5, overhead_s=0.25)


def whole(training=TRAINING, devices=DEVICES, model=MODEL, strategy="zigzag", batch=None, tokens=None):
    seen = context_cluster(devices, training.tp)
    plan = build(batch or causal_batch(64), model.shape(training.tp), seen, strategy).plan
    simulation = simulate(plan, seen, Roofline.of(devices))
    return iteration(simulation, plan.header, model, devices, training, tokens), simulation


def test_every_part_by_hand():
    found, simulation = whole()
    rate = 1e9 * 0.5 * 2
    layer, head = MODEL.layer_parameters, MODEL.head_parameters
    assert found.attention_forward_s == pytest.approx(3 * simulation.forward.makespan_s)
    assert found.attention_backward_s == pytest.approx(3 * simulation.backward.makespan_s)
    assert found.linear_forward_s == pytest.approx(2 * 16 * (3 * layer + head) / rate)
    assert found.linear_backward_s == pytest.approx(2 * found.linear_forward_s)
    assert found.tensor_parallel_s == pytest.approx(2 * 3 * 2 * 2 * (16 * 8 * 2 / 2) / 1e9)
    share = MODEL.parameters / 2 * 2
    assert found.gradients_s == pytest.approx(2 * 3 / 4 * share / (1e8 / 2)), "four ranks, and two share a node's link"
    assert found.optimizer_s == pytest.approx(MODEL.parameters / 8 * 28 / DEVICES.memory_bytes_per_s)
    assert found.overhead_s == 0.25 and found.tokens == 64
    parts = found.figures()
    assert parts["iteration_s"] == pytest.approx(found.total_s) and parts["tokens_per_s"] == 64 / found.total_s


def test_recomputing_runs_the_forward_once_more():
    found, simulation = whole(replace(TRAINING, recompute="full"))
    plain, _ = whole()
    assert found.attention_backward_s == pytest.approx(3 * simulation.total_s)
    layers = 3 * 2 * 16 * MODEL.layer_parameters / 1e9
    assert found.linear_backward_s - plain.linear_backward_s == pytest.approx(layers)
    assert found.tensor_parallel_s == pytest.approx(1.5 * plain.tensor_parallel_s)
    assert found.linear_forward_s == plain.linear_forward_s


def test_gradients_in_fp32_take_twice_as_long():
    assert whole(replace(TRAINING, gradient_dtype="float32"))[0].gradients_s == pytest.approx(
        2 * whole()[0].gradients_s
    )
    alone = replace(DEVICES, nodes=1)
    assert whole(devices=alone)[0].gradients_s == pytest.approx(2 * 1 / 2 * MODEL.parameters / 1e9)
    assert optimizer_s(MODEL, DEVICES, replace(TRAINING, sharded_optimizer=False)) == pytest.approx(
        4 * optimizer_s(MODEL, DEVICES, TRAINING)
    )


def test_the_rank_with_most_tokens_decides():
    uneven, _ = whole(strategy="data_parallel")
    even, _ = whole()
    assert uneven.linear_forward_s == pytest.approx(4 * even.linear_forward_s)
    seen = context_cluster(DEVICES, 2)
    plan = build(causal_batch(64), MODEL.shape(2), seen, "data_parallel").plan
    assert sorted(tokens_per_rank(plan.header).tolist()) == [0, 0, 0, 64]


def test_weights_of_masks_count_relative_to_one_another():
    def weighted(a, b):
        named = {"a": masks.causal(64), "b": masks.sliding_window(64, 4)}
        return whole(batch=Batch([Sequence(64, named)], {"a": a, "b": b}))[0]

    assert weighted(1, 2).attention_forward_s == pytest.approx(weighted(10, 20).attention_forward_s)
    assert weighted(5, 1).attention_forward_s > 0


def test_padding_is_not_trained_on():
    found, _ = whole(tokens=50)
    assert found.tokens == 50 and found.tokens_per_s == 50 / found.total_s


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match="unknown recompute 'some'; choose one of none, full"):
        Training(1e9, recompute="some")
    with pytest.raises(ValueError, match="unknown gradient_dtype 'int8'"):
        Training(1e9, gradient_dtype="int8")
    with pytest.raises(ValueError, match="efficiency"):
        Training(1e9, efficiency=0.0)
    plan = build(causal_batch(64), MODEL.shape(2), Cluster(1, 2), "ring").plan
    simulation = simulate(plan, Cluster(1, 2), Roofline.of(Cluster(1, 2)))
    with pytest.raises(ValueError, match="the plan has 2 ranks; 8 devices at tp = 2 are 4"):
        iteration(simulation, plan.header, MODEL, DEVICES, TRAINING)


@pytest.mark.parametrize(("tokens", "published_s"), [(16384, 1.32), (32768, 1.45), (65536, 1.9), (131072, 2.9)])
def test_is_near_published_times(tokens, published_s):
    """8B on 8 nodes of 8 A100, TP 4, heads and a ring as in Megatron-LM's baseline (paper, section 7). The lengths of
    their batches are not known exactly; here sequences of a sixth of the batch."""
    lengths = [tokens // 6] * 5 + [tokens - 5 * (tokens // 6)]
    devices = Cluster.preset("p4de", 8)
    found, _ = whole(Training(312e12), devices, Model(), "head_ring", causal_batch(*lengths))
    assert found.total_s == pytest.approx(published_s, rel=0.08)
