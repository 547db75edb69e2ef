"""Fixed schemes in place of what was planned: where they are estimated to be faster, and only there."""

from __future__ import annotations

import numpy as np
import pytest
from builders import SHAPE, causal_batch

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.check import check_plan
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import PASSES, side_token_bytes
from dyncp.planner.partition.nets import loads
from dyncp.strategies import build, portfolio
from dyncp.strategies.api import Options
from dyncp.strategies.data_parallel import data_parallel
from dyncp.strategies.portfolio import faster_rival, ring_seconds
from dyncp.strategies.ring import zigzag

FAST, SLOW = 1e18, 1e5  # bytes a second


def cluster_of(ranks, bytes_per_s, nodes=1):
    return Cluster(nodes, ranks // nodes, intra_bytes_per_s=bytes_per_s, inter_bytes_per_s=bytes_per_s)


def planned(batch, cluster, **options):
    made = build(batch, SHAPE, cluster, "dynamic", Options(**({"block_tokens": 64} | options)))
    check_plan(made.plan, made.layout.blocks, batch)
    return made.layout


def arrays(layout):
    """What a layout says, for comparisons."""
    blocks, transfers = layout.blocks, layout.schedule.transfers
    parts = [blocks.tokens.start, blocks.tokens.stop, blocks.q_block, blocks.kv_block, blocks.pairs]
    parts += [layout.placement.block_rank, layout.placement.comp_rank, layout.schedule.comp_step]
    parts += [transfers.side, transfers.block, transfers.group, transfers.src, transfers.dst, transfers.step]
    return [part.tolist() for part in parts]


def compute_ratio(layout, ranks):
    """max / mean"""
    work = loads(np.tile(layout.blocks.work, layout.blocks.groups), layout.placement.comp_rank.ravel(), ranks)
    return work.max() / work.mean()


@pytest.mark.parametrize("portfolio", [True, False])
def test_equal_sequences_on_as_many_ranks_move_nothing(portfolio):
    for nodes in (1, 2):
        layout = planned(causal_batch(*[96] * 6), cluster_of(6, 1e11, nodes), portfolio=portfolio)
        assert len(layout.schedule.transfers) == 0
        assert layout.notes == ()
        assert compute_ratio(layout, 6) == 1.0


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_zigzag_ring_wins_where_bytes_cost_nothing(nodes):
    """A wide tolerance for computation saves bytes, which here buys no time; the ring is balanced."""
    batch, cluster = causal_batch(1024), cluster_of(8, FAST, nodes)
    layout = planned(batch, cluster, epsilon=1.0)
    assert arrays(layout) == arrays(zigzag(batch, SHAPE, cluster, Options()))
    assert layout.notes == ("the layout is that of zigzag, which is estimated to be faster",)
    own = planned(batch, cluster, epsilon=1.0, portfolio=False)
    assert compute_ratio(own, 8) > 1.2
    assert arrays(own) != arrays(layout)


def test_whole_sequences_win_where_bytes_cost_everything():
    batch, cluster = causal_batch(64, 30, 34, 32, 32), cluster_of(3, SLOW)
    layout = planned(batch, cluster, token_epsilon=0.1)
    assert len(layout.schedule.transfers) == 0
    assert arrays(layout) == arrays(data_parallel(batch, SHAPE, cluster, Options(block_tokens=64)))
    own = planned(batch, cluster, token_epsilon=0.1, portfolio=False)
    assert len(own.schedule.transfers) > 0
    assert compute_ratio(own, 3) < 1.2


def test_what_a_rival_does_not_balance_is_in_the_notes():
    layout = planned(causal_batch(64, 30, 34, 32, 32), cluster_of(3, SLOW), token_epsilon=0.1)
    assert compute_ratio(layout, 3) > 1.4
    assert any(note.startswith("computation of rank") for note in layout.notes)


def test_a_rival_must_keep_the_tolerance_on_tokens():
    batch, cluster = causal_batch(64, 30, 34, 32, 32, 10), cluster_of(3, SLOW)
    for token_epsilon, whole in ((0.02, False), (0.2, True)):
        layout = planned(batch, cluster, token_epsilon=token_epsilon)
        assert (len(layout.schedule.transfers) == 0) == whole
        tokens = loads(layout.blocks.tokens.tokens, layout.placement.block_rank, 3)
        assert tokens.max() <= (1 + token_epsilon) * tokens.mean()


def test_rivals_that_cannot_win_are_not_built(monkeypatch):
    def refuse(*_):
        raise AssertionError("a rival was built")

    monkeypatch.setattr(portfolio, "zigzag", refuse)
    planned(causal_batch(600, 200, 100), cluster_of(4, 1e8))
    with pytest.raises(AssertionError, match="a rival was built"):
        planned(causal_batch(1024), cluster_of(8, FAST), epsilon=1.0)


def test_without_a_portfolio_no_rival_is_looked_for(monkeypatch):
    def refuse(*_):
        raise AssertionError("a rival was built")

    monkeypatch.setattr(portfolio, "zigzag", refuse)
    monkeypatch.setattr(portfolio, "data_parallel", refuse)
    for rate in (FAST, SLOW):
        planned(causal_batch(512, 60), cluster_of(4, rate), epsilon=1.0, portfolio=False)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("keep", ["none", "kv"])
def test_the_time_of_a_ring_is_that_of_its_transfers(nodes, keep):
    """Whose bytes are equal for all ranks, of sequences that divide."""
    both = {"a": masks.causal(160), "b": masks.sliding_window(160, 10)}
    batch = Batch([Sequence(160, both), Sequence(80, {"a": masks.causal(80), "b": masks.full(80)})], {"a": 3.0})
    cluster, options = Cluster(nodes, 4 // nodes, 3e6, 1e6), Options(keep=keep)
    layout = zigzag(batch, SHAPE, cluster, options)
    moves = layout.schedule.transfers
    sides = np.sum([side_token_bytes(SHAPE, pass_, keep, options.wire) for pass_ in PASSES], axis=0)
    size = sides[moves.side] * layout.blocks.tokens.tokens[moves.block]
    size = size * np.asarray(layout.blocks.mask_weights)[moves.mask]
    received = np.bincount(moves.dst, size, 4)
    crosses = moves.src // cluster.ranks_per_node != moves.dst // cluster.ranks_per_node
    entered = np.bincount(moves.dst[crosses] // cluster.ranks_per_node, size[crosses], nodes)
    expected = max(received.max() / 3e6, entered.max() / 1e6)
    assert ring_seconds(layout.blocks, SHAPE, cluster, options) == pytest.approx(expected)


def test_a_layout_of_one_rank_has_no_rival():
    batch, cluster = causal_batch(100), Cluster(1, 1)
    layout = planned(batch, cluster)
    assert faster_rival(layout, batch, SHAPE, cluster, Options()) is None


def test_a_batch_without_computation_has_no_rival():
    batch = Batch([Sequence(40, masks.from_dense(np.zeros((40, 40), bool)))])
    layout = planned(batch, cluster_of(4, FAST), block_tokens=5)
    assert faster_rival(layout, batch, SHAPE, cluster_of(4, FAST), Options()) is None
    assert loads(layout.blocks.tokens.tokens, layout.placement.block_rank, 4).tolist() == [10.0] * 4
