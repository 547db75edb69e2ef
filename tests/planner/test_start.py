"""First placements: units that belong together, their shares, and how long ones are cut."""

from __future__ import annotations

import numpy as np
import pytest
from any_batch import any_batch, any_cluster
from builders import SHAPE, causal_batch

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.planner.blockgen import make_blocks, uniform_cut
from dyncp.planner.partition.nets import Nets, loads
from dyncp.planner.partition.refine import Costs, Limits, make_problem
from dyncp.planner.partition.start import Units, anywhere, components, share_out, start


def prepared(batch, cluster, block_tokens=8, token_epsilon=0.1, shape=SHAPE):
    """(blocks, nets, problem)"""
    blocks = make_blocks(batch, shape.groups, uniform_cut(block_tokens))
    nets = Nets.of_batch(blocks, shape, "none", "model", (1.0, 1.0))
    limits = Limits(0.1, token_epsilon)
    return blocks, nets, make_problem(nets, cluster.ranks, cluster.ranks_per_node, Costs(), limits)


def started(blocks, nets, problem):
    """With all ranks on one node."""
    return start(blocks, nets, problem, anywhere(nets), 1)


def sequences_of(blocks):
    """The sequence of each computation block."""
    return np.tile(blocks.tokens.sequence[blocks.q_block], blocks.groups)


def units_of(work, tokens, nodes=1):
    """Units as one node after the other has them, with nothing in them."""
    node = np.repeat(np.arange(nodes), len(work) // nodes)
    return Units(np.zeros(0, int), np.zeros(0, int), node, np.array(work, float), np.array(tokens, float))


@pytest.mark.parametrize("seed", range(20))
def test_everything_has_a_rank(seed):
    rng = np.random.default_rng(seed)
    cluster = any_cluster(rng)
    blocks, nets, problem = prepared(any_batch(rng), cluster, int(rng.integers(2, 12)))
    block_part, comp_part = started(blocks, nets, problem)
    assert (block_part.shape, comp_part.shape) == (nets.tokens.shape, nets.work.shape)
    for part in (block_part, comp_part):
        assert not len(part) or (part.min() >= 0 and part.max() < cluster.ranks)


@pytest.mark.parametrize("seed", range(20))
def test_everything_stays_on_its_node(seed):
    rng = np.random.default_rng(seed)
    cluster = Cluster(int(rng.integers(2, 4)), int(rng.integers(1, 5)))
    blocks, nets, problem = prepared(any_batch(rng), cluster, int(rng.integers(2, 12)))
    given = rng.integers(0, cluster.nodes, len(nets.tokens)), rng.integers(0, cluster.nodes, len(nets))
    found = start(blocks, nets, problem, given, cluster.nodes)
    for part, node in zip(found, given, strict=True):
        assert np.array_equal(part // cluster.ranks_per_node, node)


def test_components_are_what_computation_joins():
    """Against a search from every block."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        blocks = make_blocks(any_batch(rng), 1, uniform_cut(int(rng.integers(2, 9))))
        near = np.eye(len(blocks.tokens), dtype=bool)
        near[blocks.q_block, blocks.kv_block] = near[blocks.kv_block, blocks.q_block] = True
        while (wider := (near.astype(int) @ near) > 0).sum() > near.sum():
            near = wider
        first = near.argmax(axis=1)
        assert components(blocks).tolist() == np.unique(first, return_inverse=True)[1].tolist()


def test_documents_of_a_sequence_are_apart():
    blocks = make_blocks(Batch([Sequence(48, masks.document([16, 24, 8]))]), 1, uniform_cut(8))
    assert components(blocks).tolist() == [0, 0, 1, 1, 1, 2]
    nothing = Batch([Sequence(12, masks.from_dense(np.zeros((12, 12), bool)))])
    assert components(make_blocks(nothing, 1, uniform_cut(4))).tolist() == [0, 1, 2]


def assert_shares(shares, units, parts):
    """That they are all of every unit, in pieces one after the other, on parts of its node."""
    count, per_node = len(units.work), parts // (int(units.node.max()) + 1)
    assert np.array_equal(np.bincount(shares.unit, minlength=count), shares.pieces)
    some = units.work + units.tokens > 0
    assert np.bincount(shares.unit, shares.share, count)[some] == pytest.approx(1.0)
    assert (shares.pieces[~some] == 0).all()
    for unit in np.flatnonzero(some).tolist():
        pieces = np.flatnonzero(shares.unit == unit)
        assert pieces.tolist() == list(range(shares.first[unit], shares.first[unit] + shares.pieces[unit]))
        assert len(set(shares.part[pieces].tolist())) == len(pieces)
    assert (shares.part // per_node == units.node[shares.unit]).all()


def test_units_that_fit_stay_whole_and_others_are_shared_by_few():
    _, _, problem = prepared(causal_batch(400), Cluster(1, 4), 8)
    units = units_of(np.array([0.45, 0.2, 0.15, 0.1, 0.1]) * float(problem.work.sum()), [200, 80, 50, 40, 30])
    shares = share_out(units, problem, 1)
    assert_shares(shares, units, 4)
    assert shares.pieces[:4].tolist() == [2, 1, 1, 1]
    load = loads(units.work[shares.unit] * shares.share, shares.part, 4)
    assert load.max() <= 1.1 * load.mean()


def test_a_unit_with_too_many_tokens_is_shared_out_though_its_work_is_little():
    _, _, problem = prepared(causal_batch(400), Cluster(1, 4), 8)
    units = units_of([1.0, float(problem.work.sum())], [320, 80])
    shares = share_out(units, problem, 1)
    assert_shares(shares, units, 4)
    tokens = loads(units.tokens[shares.unit] * shares.share, shares.part, 4)
    assert tokens.max() <= problem.token_limit * (1 + 1e-9)


@pytest.mark.parametrize("nodes", [1, 3])
def test_shares_are_all_of_every_unit(nodes):
    for seed in range(15):
        rng = np.random.default_rng(seed)
        _, _, problem = prepared(causal_batch(600), Cluster(nodes, 6 // nodes), 20)
        work, tokens = (rng.dirichlet(np.ones(12) * spread) for spread in (0.3, 1.0))
        tokens[rng.integers(12)] = work[rng.integers(12)] = 0.0
        units = units_of(work * float(problem.work.sum()), np.round(tokens * 600), nodes)
        assert_shares(share_out(units, problem, nodes), units, 6)


def test_short_sequences_stay_whole():
    """One for each rank: nothing moves."""
    blocks, nets, problem = prepared(causal_batch(*[40] * 6), Cluster(1, 6), token_epsilon=0.0)
    block_part, comp_part = started(blocks, nets, problem)
    assert nets.cut_bytes(block_part, comp_part, 6) == 0
    assert loads(nets.tokens, block_part, 6).tolist() == [40] * 6


def test_short_sequences_keep_work_and_tokens_even():
    rng = np.random.default_rng(2)
    batch = causal_batch(*rng.integers(4, 90, 40).tolist())
    blocks, nets, problem = prepared(batch, Cluster(1, 5), 16)
    block_part, comp_part = started(blocks, nets, problem)
    sequence = sequences_of(blocks)
    assert all(len(set(comp_part[sequence == one].tolist())) == 1 for one in range(40))
    assert np.array_equal(block_part[nets.edge_token[nets.q_edge]], comp_part)
    for load in (loads(nets.work, comp_part, 5), loads(nets.tokens, block_part, 5)):
        assert load.max() <= 1.15 * load.mean()


def test_long_sequences_are_shared_by_few_ranks():
    """Roughly: work and tokens are not even at once, as ranks with a long sequence's work have few of its tokens."""
    blocks, nets, problem = prepared(causal_batch(240, *[64] * 24), Cluster(1, 8), 8)
    block_part, comp_part = started(blocks, nets, problem)
    sequence = sequences_of(blocks)
    assert np.mean([len(set(comp_part[sequence == one].tolist())) == 1 for one in range(1, 25)]) > 0.8
    assert 2 <= len(set(comp_part[sequence == 0].tolist())) <= 5
    for load in (loads(nets.work, comp_part, 8), loads(nets.tokens, block_part, 8)):
        assert load.max() < 1.4 * load.mean()


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_a_causal_sequence_is_balanced(ranks):
    """Whether in tiles or in runs of rows from both ends."""
    blocks, nets, problem = prepared(causal_batch(384), Cluster(1, ranks), 4)
    block_part, comp_part = started(blocks, nets, problem)
    work, tokens = loads(nets.work, comp_part, ranks), loads(nets.tokens, block_part, ranks)
    assert work.max() < 1.25 * work.mean()
    assert tokens.max() <= 1.1 * tokens.mean()


def test_runs_of_rows_trade_with_their_neighbours_only():
    """A window reaches into the run before, and everyone fetches the sink."""
    mask = masks.lambda_(320, 8, 24)
    blocks, nets, problem = prepared(Batch([Sequence(320, mask)]), Cluster(1, 5), 8)
    block_part, comp_part = started(blocks, nets, problem)
    assert block_part.tolist() == np.repeat(np.arange(5), 8).tolist()
    assert np.array_equal(comp_part, block_part[nets.edge_token[nets.q_edge]])
    owner, sink = block_part[nets.edge_token[nets.kv_edge]], nets.edge_token[nets.kv_edge] == 0
    assert set((comp_part - owner)[~sink].tolist()) == {0, 1}
    assert set(comp_part[sink].tolist()) == set(range(5))


def test_each_sequence_is_cut_in_the_way_that_suits_it():
    """A window in runs of rows, which no causal sequence is cut in."""
    batch = Batch([Sequence(320, masks.sliding_window(320, 24)), Sequence(160, masks.causal(160))])
    blocks, nets, problem = prepared(batch, Cluster(1, 8), 4)
    block_part, comp_part = started(blocks, nets, problem)
    window = blocks.tokens.sequence == 0
    assert (np.diff(block_part[window]) >= 0).all()
    of_window = sequences_of(blocks) == 0
    assert np.array_equal(block_part[nets.edge_token[nets.q_edge]][of_window], comp_part[of_window])
    assert (np.diff(block_part[~window]) < 0).any()


def test_several_masks_are_cut_each_on_its_own():
    both = {"a": masks.causal(256), "b": masks.sliding_window(256, 32)}
    blocks, nets, problem = prepared(Batch([Sequence(256, both)]), Cluster(1, 4), 8)
    _, comp_part = started(blocks, nets, problem)
    for mask in range(2):
        work = loads(nets.work * (nets.mask == mask), comp_part, 4)
        assert work.max() < 1.3 * work.mean()
