"""What the small types accept, refuse and derive."""

from __future__ import annotations

import numpy as np
import pytest

from dyncp import masks
from dyncp.ir.arrays import frozen, ragged_ranges
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import PRESETS, Cluster
from dyncp.ir.plan import BACKWARD, FORWARD, side_token_bytes
from dyncp.ir.shape import AttentionShape
from dyncp.strategies.api import Options


def test_shape():
    shape = AttentionShape(8, 2, 128)
    assert (shape.groups, shape.group_heads, shape.value_dim) == (2, 4, 128)
    assert AttentionShape(8, 2, 192, 128).value_dim == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 3, 64), "8 query heads cannot be shared by 3 KV heads"),
        ((0, 1, 64), "q_heads is 0"),
        ((8, 2, 0), "head_dim is 0"),
        ((8, 2, 63), "head_dim is 63; it must be even"),
        ((8, 2, 64, 64, "int8"), "unknown dtype 'int8'; choose one of float32"),
    ],
)
def test_bad_shapes(arguments, message):
    with pytest.raises(ValueError, match=message):
        AttentionShape(*arguments)


def test_token_bytes_of_a_transfer():
    """One head group of 8/2 heads of 128 in bf16: Q 1024, KV 512, O 1024 and LSE 16 bytes a token."""
    shape = AttentionShape(8, 2, 128)
    assert side_token_bytes(shape, FORWARD, "none", "model") == [1024, 512, 1024 + 16, 0]
    assert side_token_bytes(shape, FORWARD, "all", "float32") == [1024, 512, 2048 + 16, 0]
    assert side_token_bytes(shape, BACKWARD, "none", "model") == [1024 + 1024 + 32, 512, 1024, 512]
    assert side_token_bytes(shape, BACKWARD, "kv", "model") == [1024 + 1024 + 32, 0, 1024, 512]
    assert side_token_bytes(shape, BACKWARD, "all", "model") == [1024 + 32, 0, 1024, 512]


def test_cluster():
    cluster = Cluster.preset("p4de", nodes=4)
    assert (cluster.ranks, cluster.ranks_per_node, cluster.node_of(17)) == (32, 8, 2)
    assert Cluster.preset("cpu", ranks_per_node=2).ranks == 2
    assert set(PRESETS) == {"p4de", "p5", "dgx-h200", "cpu"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cluster(0, 8), "nodes is 0"),
        (lambda: Cluster(1, -1), "ranks_per_node is -1"),
        (lambda: Cluster.preset("abacus"), "unknown cluster preset 'abacus'; choose one of p4de"),
        (lambda: Cluster.preset("p4de", ranks_per_node=0), "ranks_per_node is 0"),
        (lambda: Sequence(0, masks.causal(1)), "length is 0"),
        (lambda: Sequence(4, masks.causal(4), kv_length=0), "kv_length is 0; expected a whole number from 1"),
        (lambda: Sequence(4, {}), "masks are {}"),
        (lambda: Sequence(4, masks.causal(5)), "5 queries by 5 keys, but its sequence has 4 by 4"),
        (lambda: Batch([]), "no sequences"),
        (lambda: Batch([Sequence(2, {"a": masks.full(2)}), Sequence(2, {"b": masks.full(2)})]), "the same mask names"),
        (lambda: Batch([Sequence(2, masks.full(2))], {"deep": 2}), "unknown mask 'deep'"),
        (lambda: Batch([Sequence(2, masks.full(2))], {"default": 0}), "expected a positive, finite number"),
        (lambda: Batch([Sequence(2, masks.full(2))], {"default": float("inf")}), "expected a positive, finite number"),
        (lambda: Batch([Sequence(2, masks.full(2))], {"default": 1e10}), "a number of layers, at most 1e9"),
        (lambda: Batch([1]), "sequence 0 of the batch is 1"),
        (lambda: Sequence(2.0, masks.full(2)), "length is 2.0; expected a whole number"),
        (lambda: Sequence(True, masks.full(1)), "length is True; expected a whole number"),
        (lambda: Sequence(2, {"a": None}), "mask 'a' is None; expected a Mask"),
        (lambda: Sequence(2, {1: masks.full(2)}), "name is 1; expected a string"),
        (lambda: Sequence(2, {"\ud800": masks.full(2)}), "printable"),
        (lambda: Cluster(True, 2), "nodes is True"),
        (lambda: Cluster(1, 2, flops_per_s=float("nan")), "flops_per_s is nan"),
        (lambda: Cluster(1, 2, inter_bytes_per_s=0), "inter_bytes_per_s is 0"),
        (lambda: Cluster(2**16, 2), "more than 65536 ranks"),
        (lambda: Options(block_tokens=1.5), "block_tokens is 1.5; expected a whole number"),
        (lambda: Options(seed=True), "seed is True"),
        (lambda: Options(epsilon=float("inf")), "epsilon is inf; expected a positive, finite"),
        (lambda: Options(token_epsilon=0), "token_epsilon is 0; expected a positive, finite"),
        (lambda: Options(effort=-1), "effort is -1; expected a positive, finite"),
        (lambda: Options(block_tokens="small"), "block_tokens is 'small'; expected a whole number"),
        (lambda: Options(forward_weight=0, backward_weight=0), "one of the passes must count"),
        (lambda: Options(objective="least"), "unknown objective 'least'; choose one of time, total, largest"),
        (lambda: Options(partitioner="metis"), "unknown partitioner 'metis'; choose one of tiling, hypergraph"),
        (lambda: AttentionShape(4.0, 2, 8), "q_heads is 4.0"),
        (lambda: AttentionShape(4, 2, 10**12), "head_dim is 1000000000000; expected a whole number from 1 to 1048576"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_batch():
    batch = Batch(
        [
            Sequence(3, {"a": masks.full(3), "b": masks.causal(3)}),
            Sequence(4, {"b": masks.causal(4), "a": masks.full(4)}),
        ],
        {"b": 5},
    )
    assert batch.mask_names == ("a", "b") and batch.weights == {"a": 1.0, "b": 5} and batch.tokens == 7


def test_frozen_arrays_cannot_be_written_through():
    mine = np.arange(3, dtype=np.int32)
    kept = frozen(mine, "int32")
    mine[0] = 7
    assert kept[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1
    assert frozen(kept, "int32") is kept


def test_ragged_ranges():
    assert ragged_ranges(np.array([2, 0, 3])).tolist() == [0, 1, 0, 1, 2]


def test_presets_take_values_of_ones_own():
    found = Cluster.preset("p5:inter_bytes_per_s=1e11,launch_s=0", nodes=2)
    assert (found.nodes, found.inter_bytes_per_s, found.launch_s) == (2, 1e11, 0.0)
    assert found.flops_per_s == Cluster.preset("p5").flops_per_s


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("p9:launch_s=1", "unknown cluster preset 'p9'"),
        ("p5:nodes=3", "unknown value 'nodes'"),
        ("p5:launch_s", "launch_s of a cluster is ''"),
        ("p5:launch_s=-1", "launch_s"),
        ("p5:,", "unknown value ''"),
    ],
)
def test_bad_values_of_presets(name, message):
    with pytest.raises(ValueError, match=message):
        Cluster.preset(name)
