import json

import numpy as np
import pytest
from builders import SHAPE, causal_batch, planned, random_batch
from hypothesis import given
from hypothesis import strategies as st

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.plan import PASSES, PlanHeader, side_token_bytes
from dyncp.ir.schedule import Schedule, Side, Transfers
from dyncp.ir.shape import AttentionShape
from dyncp.planner.blockgen import make_blocks, uniform_cut
from dyncp.planner.lower import lower
from dyncp.report.summary import plan_figures, summarize, summary_text
from dyncp.strategies import Planned, build
from dyncp.strategies.api import Layout, Options

# of one token under SHAPE (2 KV heads of dimension 8, fp32): K and V, or their gradients
KV_BYTES = 2 * 2 * 8 * 4
KEYS = {
    *("strategy", "ranks", "nodes", "tokens", "pairs", "block_tokens", "total_bytes", "inter_node_bytes"),
    *("max_recv_bytes", "messages", "compute_imbalance", "token_imbalance", "planning_s", "peak_buffer_bytes"),
    "backward",
}


def test_ring_in_numbers():
    made = build(causal_batch(40), SHAPE, Cluster(2, 2), "ring", Options(block_tokens=8))
    figures = summarize(made)
    assert figures.keys() >= KEYS
    hops = 40 * KV_BYTES * 3
    assert figures["pairs"] == 820
    assert (figures["sequences"], figures["tokens"]) == (1, 40)
    assert (figures["block_tokens"], figures["token_blocks"]) == (10, 4), "the ring's, not the option's"
    assert figures["shape"] == {"q_heads": 4, "kv_heads": 2, "head_dim": 8, "v_head_dim": 8, "dtype": "float32"}
    assert figures["total_bytes"] == figures["bytes_by_kind"]["kv"] == hops
    assert figures["inter_node_bytes"] == hops // 2, "two of the ring's four links join the nodes"
    assert figures["max_recv_bytes"] == hops // 4
    assert figures["messages"] == 4 * 3
    assert figures["backward"]["bytes_by_kind"] == {"kv": hops, "dkv": hops}
    # rank r computes rows 10r .. 10r + 9: 55 pairs and 100 r more
    assert figures["compute_imbalance"] == pytest.approx((55 + 300) / (820 / 4))
    assert figures["token_imbalance"] == 1
    assert figures["idle_ranks"] == []
    assert figures["planning_s"]["total"] == pytest.approx(sum(made.seconds.values()))


def test_what_the_forward_keeps_is_not_sent_again():
    figures = summarize(planned(causal_batch(40), ranks=4, keep="kv"))
    assert figures["backward"]["bytes_by_kind"] == {"dkv": 40 * KV_BYTES * 3}
    assert figures["peak_buffer_bytes"] >= 30 * KV_BYTES, "a rank keeps the keys and values of the three others"


@pytest.mark.parametrize(("wire", "itemsize"), [("model", 2), ("float32", 4)])
def test_partial_outputs_count_with_their_log_sum_exp(wire, itemsize):
    """One sequence on rank 0, computed by rank 1: queries and keys go there, output and log-sum-exp come back."""
    shape = AttentionShape(4, 2, 8, 6, "bfloat16")
    batch = causal_batch(10)
    blocks = make_blocks(batch, shape.groups, uniform_cut(16))
    sides = [Side.Q_IN, Side.KV_IN, Side.Q_OUT, Side.KV_OUT] * 2
    away, home = np.array([0, 0, 1, 1] * 2), np.array([1, 1, 0, 0] * 2)
    zeros, group = np.zeros(8), np.repeat([0, 1], 4)
    transfers = Transfers(zeros, sides, zeros, group, away, home, np.array([1, 1, 3, 3] * 2))
    layout = Layout(
        blocks, Placement(np.zeros(1), np.ones((2, 1))), Schedule(np.ones((2, 1)), transfers), ("cannot balance",)
    )
    header = PlanHeader(
        "by hand", shape, 1, 2, "none", wire, blocks.mask_names, blocks.mask_weights, blocks.tokens, np.zeros(1)
    )
    plan = lower(header, batch, blocks, layout.placement, layout.schedule)
    figures = summarize(
        Planned(plan, batch, Cluster(2, 2), layout, Options(block_tokens=16, wire=wire), {"layout": 0.0})
    )
    assert figures["bytes_by_kind"] == {
        "q": 10 * 4 * 8 * 2,
        "kv": 10 * 2 * (8 + 6) * 2,
        "out": 10 * 4 * (6 * itemsize + 4),
    }
    assert figures["backward"]["bytes_by_kind"] == {
        "q": 10 * 4 * 8 * 2,
        "kv": 10 * 2 * (8 + 6) * 2,
        "do": 10 * 4 * 6 * 2,
        "stats": 10 * 4 * 2 * 4,
        "dq": 10 * 4 * 8 * itemsize,
        "dkv": 10 * 2 * (8 + 6) * itemsize,
    }
    assert figures["idle_ranks"] == [0]
    assert figures["compute_imbalance"] == 2
    assert "note: cannot balance" in summary_text(figures)


def test_several_masks_are_a_weighted_sum():
    mask = {"window": masks.sliding_window(40, 4), "global": masks.causal(40)}
    batch = Batch((Sequence(40, mask),), {"window": 5, "global": 1})
    figures = summarize(planned(batch, ranks=4))
    assert figures["pairs"] == 5 * 154 + 820
    assert {name: part["pairs"] for name, part in figures["masks"].items()} == {"window": 154, "global": 820}
    for key in ("total_bytes", "messages"):
        parts = [figures["masks"][name][key] for name in ("window", "global")]
        assert figures[key] == 5 * parts[0] + parts[1]
    assert figures["masks"]["window"]["compute_imbalance"] < figures["masks"]["global"]["compute_imbalance"]
    text = summary_text(figures)
    assert "window fwd" in text and "global bwd" in text
    assert "1,590 pairs (5 x window + 1 x global)" in text


def test_blocks_are_described_as_they_are():
    text = summary_text(summarize(planned(causal_batch(20, 5), strategy="data_parallel", block_tokens=16)))
    assert "up to 16 tokens (3 blocks)" in text
    text = summary_text(summarize(planned(causal_batch(1), 1, "data_parallel", block_tokens=16)))
    assert "1 sequence, 1 token, 1 pair\n" in text and "up to 1 token (1 block)" in text


def test_values_of_another_dimension_are_told():
    figures = summarize(planned(causal_batch(20), shape=AttentionShape(4, 1, 8, 6, "bfloat16")))
    assert "4 query heads and 1 KV head of 8 (values of 6), bfloat16" in summary_text(figures)


@given(
    st.integers(0, 1000), st.sampled_from(["ring", "zigzag", "data_parallel"]), st.sampled_from(["none", "kv", "all"])
)
def test_a_plan_sends_what_its_schedule_says(seed, strategy, keep):
    rng = np.random.default_rng(seed)
    made = planned(random_batch(rng, names=("a", "b")), int(rng.integers(1, 6)), strategy, keep=keep)
    header, transfers = made.plan.header, made.layout.schedule.transfers
    figures = summarize(made)
    assert json.loads(json.dumps(figures)) == figures
    assert plan_figures(made.plan).items() <= figures.items(), "the plan alone tells the same"
    assert figures["tokens"] == made.batch.tokens
    pairs = {name: sum(one.masks[name].pairs() for one in made.batch.sequences) for name in made.batch.mask_names}
    assert figures["pairs"] == sum(made.batch.weights[name] * count for name, count in pairs.items())
    for pass_, part in zip(PASSES, (figures, figures["backward"]), strict=True):
        of_side = np.array(side_token_bytes(header.shape, pass_, keep, header.wire))
        weight = np.array(header.mask_weights)[transfers.mask]
        expected = (weight * of_side[transfers.side] * header.tokens.tokens[transfers.block]).sum()
        assert part["total_bytes"] == pytest.approx(expected)
