"""The roofline against numbers computed by hand, and its tiles against tiles that are counted."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp import masks
from dyncp.cost.model import CAUSAL, FULL, MASKED, Work
from dyncp.cost.roofline import TILE, Roofline, first_items, tiled_pairs
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import BACKWARD, FORWARD
from dyncp.ir.shape import AttentionShape

SHAPE = AttentionShape(8, 2, 128)  # four query heads in a group, bf16


def work(*rows):
    """Each (launch, comp, q_tokens, kv_tokens, pairs)."""
    return Work(*np.array(rows, "int64").reshape(-1, 5).T)


def test_computation_of_a_full_block():
    cost = Roofline(1e12, 1e30, backward=0.5, launch_s=0.0, block_s=0.0)
    item = work((0, 0, 1024, 2048, 1024 * 2048))
    flops = 1024 * 2048 * 4 * 2 * (128 + 128)
    assert cost.attention_s(FORWARD, SHAPE, item, 1)[0] == pytest.approx(flops / 1e12)
    assert cost.attention_s(BACKWARD, SHAPE, item, 1)[0] == pytest.approx(2.5 * flops / 0.5e12)


def test_memory_of_a_block():
    cost = Roofline(1e30, 1e9, launch_s=0.0, block_s=0.0)
    item = work((0, 0, 128, 256, 128 * 256))
    q, kv = 128 * 4 * 128 * 2, 256 * 2 * 128 * 2
    out = 128 * 4 * (128 * 4 + 4)  # fp32, with a log-sum-exp for each head
    assert cost.attention_s(FORWARD, SHAPE, item, 1)[0] == pytest.approx((q + kv + out) / 1e9)
    do, stats, dq, dkv = q, 128 * 4 * 8, 2 * q, 2 * kv
    assert cost.attention_s(BACKWARD, SHAPE, item, 1)[0] == pytest.approx((q + do + stats + kv + dq + dkv) / 1e9)


def test_fixed_costs_are_of_launches_and_of_blocks_not_of_items():
    cost = Roofline(1e30, 1e30, launch_s=1.0, block_s=0.25)
    # launch 0 has one block in two head groups and another block; launch 1 has nothing; launch 2 has one
    items = work((0, 5, 128, 128, 1), (0, 5, 128, 128, 1), (0, 6, 128, 128, 1), (2, 5, 128, 128, 1))
    assert cost.attention_s(FORWARD, SHAPE, items, 3).tolist() == pytest.approx([1.5, 0.0, 1.25])
    assert first_items(items).tolist() == [0, 2, 3]


def test_moves_and_the_cluster_it_comes_from():
    cluster = Cluster(1, 2, flops_per_s=2e12, memory_bytes_per_s=5e9, backward_rate=0.7, launch_s=0.0, block_s=1e-3)
    cost = Roofline.of(cluster)
    assert (cost.flops_per_s, cost.backward, cost.launch_s, cost.block_s) == (2e12, 0.7, 0.0, 1e-3)
    assert cost.cores == math.inf
    assert cost.move_s(np.array([1e9, 0.0])).tolist() == pytest.approx([0.2, 0.0])


@pytest.mark.parametrize("name", ["flops_per_s", "memory_bytes_per_s", "backward", "cores"])
def test_rates_are_positive(name):
    with pytest.raises(ValueError, match=name):
        Roofline(**({"flops_per_s": 1.0, "memory_bytes_per_s": 1.0} | {name: 0.0}))


@pytest.mark.parametrize("name", ["launch_s", "block_s", "instruction_s"])
def test_times_are_not_negative(name):
    with pytest.raises(ValueError, match=name):
        Roofline(1.0, 1.0, **{name: -1.0})


def test_forms_of_blocks():
    items = work((0, 0, 4, 4, 16), (0, 1, 4, 4, 10), (0, 2, 4, 4, 9), (0, 3, 4, 5, 10), (0, 4, 1, 1, 1))
    assert items.form.tolist() == [FULL, CAUSAL, MASKED, MASKED, FULL]


def counted(mask):
    """Pairs of the tiles in which a mask has any."""
    dense = mask.dense()
    rows, keys = (-(-size // TILE) * TILE for size in dense.shape)
    padded = np.zeros((rows, keys), bool)
    padded[: dense.shape[0], : dense.shape[1]] = dense
    tiles = padded.reshape(rows // TILE, TILE, keys // TILE, TILE).any(axis=(1, 3))
    return int(tiles.sum()) * TILE * TILE, int(dense.sum()), dense.shape


@pytest.mark.parametrize("length", [128, 256, 512, 1024])
def test_tiles_of_full_and_causal_blocks_are_exact(length):
    for mask in (masks.full(length), masks.causal(length)):
        tiles, pairs, (rows, keys) = counted(mask)
        found = tiled_pairs(work((0, 0, rows, keys, pairs)))[0]
        assert found == pytest.approx(tiles, rel=1 / TILE)


@given(st.integers(2, 8), st.integers(1, 700), st.sampled_from(["causal", "window", "full"]))
def test_tiles_are_about_right(blocks, odd, kind):
    length = blocks * TILE + odd % TILE
    mask = {
        "causal": masks.causal(length),
        "full": masks.full(length),
        "window": masks.sliding_window(length, max(1, min(length, odd))),
    }[kind]
    tiles, pairs, (rows, keys) = counted(mask)
    found = tiled_pairs(work((0, 0, rows, keys, pairs)))[0]
    # a band has two edges, where one is reckoned with; no row of tiles is off by more than two tiles
    assert abs(found - tiles) <= 2 * TILE * (-(-rows // TILE) * TILE)
    assert min(pairs, tiles) <= found <= (-(-rows // TILE) * TILE) * (-(-keys // TILE) * TILE)
    if kind == "full":
        assert found == tiles
    if kind == "causal":
        assert found == pytest.approx(tiles, rel=0.1)
