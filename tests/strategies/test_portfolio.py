"""Fixed schemes in place of what was planned: where they are estimated to be faster, and only there."""

from __future__ import annotations

import re

import numpy as np
import pytest
from builders import SHAPE, causal_batch

from dyncp import masks
from dyncp.cost.roofline import Roofline
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.check import check_plan
from dyncp.ir.cluster import Cluster
from dyncp.planner.partition.nets import loads
from dyncp.planner.scheduling.clock import schedule_seconds
from dyncp.strategies import build, get_strategy, portfolio
from dyncp.strategies.api import Options
from dyncp.strategies.data_parallel import data_parallel
from dyncp.strategies.portfolio import faster_rival

FAST, SLOW = 1e18, 1e5  # bytes a second


def cluster_of(ranks, bytes_per_s, nodes=1):
    return Cluster(nodes, ranks // nodes, intra_bytes_per_s=bytes_per_s, inter_bytes_per_s=bytes_per_s)


def planned(batch, cluster, **options):
    made = build(batch, SHAPE, cluster, "dynamic", Options(**({"block_tokens": 64, "balance": "pairs"} | options)))
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
        layout = planned(causal_batch(*[96] * 6), cluster_of(6, 1e11, nodes), portfolio=portfolio, block_tokens=96)
        assert len(layout.schedule.transfers) == 0
        assert layout.notes == ()
        assert compute_ratio(layout, 6) == 1.0


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_balanced_scheme_wins_where_bytes_cost_nothing(nodes):
    """A wide tolerance for computation saves bytes, which here buys no time; rings and gathering are balanced."""
    batch, cluster = causal_batch(1024), cluster_of(8, FAST, nodes)
    layout = planned(batch, cluster, epsilon=1.0)
    own = planned(batch, cluster, epsilon=1.0, portfolio=False)
    assert compute_ratio(layout, 8) < 1.05
    assert compute_ratio(own, 8) > 1.2
    (note,) = layout.notes
    found = re.fullmatch("the layout is that of (\\w+), which is estimated to be faster", note)
    assert arrays(layout) == arrays(get_strategy(found[1])(batch, SHAPE, cluster, Options()))


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


def refused(monkeypatch):
    def refuse(*_):
        raise AssertionError("a rival was built")

    monkeypatch.setattr(portfolio, "FAST", dict.fromkeys(portfolio.FAST, refuse))


def test_rivals_that_cannot_win_are_not_built(monkeypatch):
    """On a slow network, those that move all of a long sequence."""
    built = []
    fast = {
        name: lambda *args, name=name, make=make: built.append(name) or make(*args)
        for name, make in portfolio.FAST.items()
    }
    monkeypatch.setattr(portfolio, "FAST", fast)
    layout = planned(
        Batch([Sequence(20000, masks.sliding_window(20000, 100))]), cluster_of(8, 1e8, 2), block_tokens=512
    )
    assert layout.notes == ()
    assert not {"zigzag", "allgather", "double_ring"} & set(built)


def test_without_a_portfolio_no_rival_is_looked_for(monkeypatch):
    refused(monkeypatch)
    for rate in (FAST, SLOW):
        planned(causal_batch(512, 60), cluster_of(4, rate), epsilon=1.0, portfolio=False)


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("keep", ["none", "kv"])
def test_no_rival_ends_before_its_floor(nodes, keep):
    """Floors are what make rivals not worth building."""
    both = {"a": masks.causal, "b": lambda n: masks.sliding_window(n, 10)}
    lengths = 1600, 800, 90
    batch = Batch([Sequence(n, {name: make(n) for name, make in both.items()}) for n in lengths], {"a": 3.0})
    cluster, options = Cluster(nodes, 4 // nodes, 3e6, 1e6, flow_bytes_per_s=7e5), Options(keep=keep)
    cost = Roofline.of(cluster)
    layout = planned(batch, cluster, portfolio=False, block_tokens=512, keep=keep)
    for name, floor_s in portfolio.floors(layout, SHAPE, cluster, options, cost).items():
        rival = portfolio.FAST[name](batch, SHAPE, cluster, options)
        seconds = schedule_seconds(
            rival.blocks, rival.placement, rival.schedule, SHAPE, cluster, cost, (keep, options.wire)
        )
        assert 0 < floor_s <= seconds * 1.001, name


def test_a_layout_of_one_rank_has_no_rival():
    batch, cluster = causal_batch(100), Cluster(1, 1)
    layout = planned(batch, cluster)
    assert faster_rival(layout, batch, SHAPE, cluster, Options(), Roofline.of(cluster)) is None


def test_a_batch_without_computation_has_no_rival():
    batch = Batch([Sequence(40, masks.from_dense(np.zeros((40, 40), bool)))])
    layout = planned(batch, cluster_of(4, FAST), block_tokens=5)
    cluster = cluster_of(4, FAST)
    assert faster_rival(layout, batch, SHAPE, cluster, Options(), Roofline.of(cluster)) is None
    assert loads(layout.blocks.tokens.tokens, layout.placement.block_rank, 4).tolist() == [10.0] * 4


@pytest.mark.parametrize("seed", range(6))
def test_the_first_to_end_of_all_that_keep_the_tolerance_is_taken(seed):
    rng = np.random.default_rng(seed)
    batch = causal_batch(*rng.integers(50, 900, rng.integers(1, 5)).tolist())
    cluster = cluster_of(int(rng.integers(1, 4)) * 2, float(10 ** rng.uniform(7, 12)), 1 + seed % 2)
    layout = planned(batch, cluster, portfolio=False, token_epsilon=0.5)
    options, cost = Options(token_epsilon=0.5), Roofline.of(cluster)

    def seconds(found):
        parts = found.blocks, found.placement, found.schedule
        return schedule_seconds(*parts, SHAPE, cluster, cost, ("none", "model"))

    rivals = [make(batch, SHAPE, cluster, options) for make in portfolio.FAST.values()]
    tokens = [loads(one.blocks.tokens.tokens, one.placement.block_rank, cluster.ranks) for one in rivals]
    best = min(seconds(one) for one, load in zip(rivals, tokens, strict=True) if load.max() <= 1.5 * load.mean())
    chosen = faster_rival(layout, batch, SHAPE, cluster, options, cost)
    if best < portfolio.MARGIN * seconds(layout):
        assert seconds(chosen) == pytest.approx(best, rel=2e-3)
    else:
        assert chosen is None
