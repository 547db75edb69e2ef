"""Parameters and work of transformers, by hand, and clusters as context parallelism sees them."""

import pytest

from dyncp.cost.layer import (
    MODELS,
    PEAK_FLOPS_PER_S,
    Model,
    all_reduce_s,
    context_cluster,
    head_s,
    layer_s,
    tensor_parallel_s,
)
from dyncp.ir.cluster import PRESETS, Cluster

SMALL = Model(layers=2, hidden=8, q_heads=4, kv_heads=2, head_dim=4, ffn=16, gated=False, vocabulary=10)


def test_parameters_by_hand():
    # q and o: 8 x 16 each; k and v: 8 x 8 each; up and down: 8 x 16 each
    assert SMALL.layer_parameters == 2 * 128 + 2 * 64 + 2 * 128
    assert SMALL.head_parameters == 80
    assert SMALL.parameters == 2 * 640 + 160
    assert Model(2, 8, 4, 2, 4, 16, vocabulary=10).layer_parameters == 640 + 128, "a gate is a third matrix"


@pytest.mark.parametrize(("name", "billions"), [("1b", 1.5), ("8b", 8.03), ("70b", 70.6)])
def test_models_have_the_size_of_their_name(name, billions):
    assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_work_by_hand():
    assert layer_s(SMALL, 100, 1e6) == pytest.approx(2 * 640 * 100 / 1e6)
    assert head_s(SMALL, 100, 1e6) == pytest.approx(2 * 80 * 100 / 1e6)


def test_heads_are_split():
    shape = Model().shape(4)
    assert (shape.q_heads, shape.kv_heads, shape.head_dim, shape.dtype) == (8, 2, 128, "bfloat16")
    with pytest.raises(ValueError, match="cannot be split over tp = 16"):
        Model().shape(16)
    with pytest.raises(ValueError, match="layers is 0"):
        Model(layers=0)


def test_a_group_has_links_of_its_own_and_a_share_of_the_nodes():
    seen = context_cluster(Cluster.preset("p4de", 8), 4)
    assert (seen.nodes, seen.ranks_per_node, seen.inter_bytes_per_s) == (8, 2, 12.5e9)
    assert seen.intra_bytes_per_s == Cluster.preset("p4de").intra_bytes_per_s
    assert context_cluster(Cluster.preset("p5", 2), 1) == Cluster.preset("p5", 2)
    for tp in (3, 16):
        with pytest.raises(ValueError, match=f"tp is {tp}; it must divide the 8 devices"):
            context_cluster(Cluster.preset("p4de"), tp)


def test_all_reduces_by_hand():
    assert all_reduce_s(400.0, 4, 100.0, 0.5) == pytest.approx(6 * (1.0 + 0.5))
    assert all_reduce_s(400.0, 1, 100.0, 0.5) == 0.0
    cluster = Cluster(1, 4, intra_bytes_per_s=100.0, intra_latency_s=0.0)
    assert tensor_parallel_s(SMALL, 10, 2, cluster) == pytest.approx(2 * (10 * 8 * 2) / 100.0)
    assert tensor_parallel_s(SMALL, 10, 1, cluster) == 0.0


def test_every_preset_has_a_peak():
    assert PEAK_FLOPS_PER_S.keys() == PRESETS.keys()
