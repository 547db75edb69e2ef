"""Sequence-level degrees: as wide as balance needs, and no wider."""

from __future__ import annotations

import time

import numpy as np
import pytest
from builders import SHAPE, causal_batch

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.ir.shape import AttentionShape
from dyncp.strategies import build
from dyncp.strategies.api import Options
from dyncp.strategies.sequence_level import Demand, choose_groups, covered, groups_of, limits

LARGE = AttentionShape(32, 8, 128)


def chosen(batch, cluster, shape=LARGE):
    """First ranks, widths, and max / mean of computation and of tokens."""
    demand = Demand.of(batch, shape, cluster, Options())
    first, width = choose_groups(demand, cluster)
    loads = [
        covered(first, first + width, np.asarray(column) / width, cluster.ranks)
        for column in (demand.compute_s, demand.tokens)
    ]
    return first.tolist(), width.tolist(), [load.max() / load.mean() for load in loads]


def test_one_short_sequence_moves_nothing():
    planned = build(causal_batch(100), SHAPE, Cluster(1, 8), "sequence_level")
    assert len(planned.layout.schedule.transfers) == 0
    assert len(set(planned.plan.header.owner.tolist())) == 1


def test_one_long_sequence_goes_over_all_ranks():
    for cluster in (Cluster(1, 8), Cluster(4, 8), Cluster(1, 6), Cluster(2, 3)):
        assert chosen(causal_batch(131072), cluster)[:2] == ([0], [cluster.ranks])


def test_equal_sequences_have_equal_groups():
    for count, width in ((4, 8), (32, 1), (8, 4)):
        first, widths, ratios = chosen(causal_batch(*[131072 // count] * count), Cluster(4, 8))
        assert sorted(first) == list(range(0, 32, width))
        assert widths == [width] * count
        assert ratios == [1.0, 1.0]


def test_short_sequences_stay_whole_beside_a_long_one():
    planned = build(causal_batch(65536, *[1024] * 64), LARGE, Cluster(4, 8), "sequence_level")
    moves, tokens = planned.layout.schedule.transfers, planned.layout.blocks.tokens
    assert set(tokens.sequence[moves.block].tolist()) == {0}
    assert len(np.unique(planned.layout.placement.block_rank[tokens.sequence == 0])) == 32


@pytest.mark.parametrize("seed", range(5))
def test_long_tailed_batches_are_nearly_even(seed):
    """Both in computation and in tokens."""
    lengths = np.random.default_rng(seed).lognormal(0, 1.3, 45)
    lengths = np.maximum(lengths / lengths.sum() * 131072, 16).astype(int).tolist()
    _, width, ratios = chosen(causal_batch(*lengths), Cluster.preset("p4de", 4))
    assert max(ratios) <= 1.12
    order = np.argsort(lengths)
    assert np.mean(np.array(width)[order[:20]]) < np.mean(np.array(width)[order[-5:]])


def test_a_group_lies_in_one_node_if_it_fits():
    assert groups_of(4, Cluster(2, 6)).tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert groups_of(8, Cluster(2, 6))[:, 0].tolist() == [0]
    assert groups_of(16, Cluster(4, 8))[:, 0].tolist() == [0, 16]
    assert groups_of(1, Cluster(2, 3))[:, 0].tolist() == list(range(6))


def test_work_counts_and_not_only_tokens():
    """Of sequences as long as each other the one with eight times the pairs has a wider group than most."""
    full, window = (Sequence(16384, mask) for mask in (masks.causal(16384), masks.sliding_window(16384, 1000)))
    _, width, ratios = chosen(Batch([full, *[window] * 7]), Cluster(1, 8))
    assert width[0] >= 2 * np.mean(width[1:])
    assert max(ratios) < 1.25


def test_slow_links_make_narrow_groups():
    """And fast ones buy balance."""
    batch, narrow, wide = causal_batch(9000, 5000, 3000, 3000), 1e5, 1e15
    widths = [sum(chosen(batch, Cluster(1, 4, rate, rate, 0, 0))[1]) for rate in (narrow, wide)]
    assert widths[0] == 4 < widths[1]


def test_no_work_at_all():
    nothing = Sequence(8, masks.from_dense(np.zeros((8, 8), bool)))
    planned = build(Batch([nothing] * 4), SHAPE, Cluster(1, 4), "sequence_level")
    assert sorted(planned.plan.header.owner.tolist()) == [0, 1, 2, 3]


def test_limits_end_above_every_load():
    for ranks in (1, 2, 32, 1000):
        assert limits(ranks)[0] == pytest.approx(1.02)
        assert limits(ranks)[-1] >= ranks


def test_thousands_of_sequences_take_little_time():
    lengths = np.random.default_rng(0).integers(1, 3000, 1000).tolist()
    batch = causal_batch(*lengths)
    started = time.process_time()
    ratios = chosen(batch, Cluster(4, 8))[2]
    assert time.process_time() - started < 5
    assert max(ratios) <= 1.03
