"""The local search as a whole: what its energy means, which limits it keeps, and that it depends on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from any_batch import any_batch, any_cluster, any_places
from builders import SHAPE, assert_same_elsewhere, causal_batch

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.planner.blockgen import make_blocks, uniform_cut
from dyncp.planner.partition.estimate import received_bytes
from dyncp.planner.partition.nets import Nets, loads
from dyncp.planner.partition.refine import (
    LAST_PRICE,
    Cooling,
    Costs,
    Limits,
    anneal,
    cost_scale,
    fit_tokens,
    make_problem,
    node_energy,
    relieve,
)

COOLING = Cooling(40_000, (0.3, 0.03), (5.0, 50.0))
FREE, TIGHT = Limits(1e6, 1e6), Limits(0.1, 0.1)


def nets_of(batch, block_tokens=6, keep="none"):
    return Nets.of_batch(make_blocks(batch, SHAPE.groups, uniform_cut(block_tokens)), SHAPE, keep, "model", (1.0, 1.0))


def some_case(seed, longest=50):
    """(nets, cluster, places at random)"""
    rng = np.random.default_rng(seed)
    nets, cluster = nets_of(any_batch(rng, longest), int(rng.integers(2, 9))), any_cluster(rng, 9)
    return nets, cluster, any_places(rng, nets, cluster.ranks)


def problem_of(nets, cluster, limits=TIGHT, **costs):
    return make_problem(nets, cluster.ranks, cluster.ranks_per_node, Costs(**costs), limits)


def two_masks(length=96):
    """Two masks whose work lies at opposite ends of the sequence, so that one sum of both would say nothing of each."""
    upside_down = masks.from_dense(np.tri(length, dtype=bool).T)
    return Batch([Sequence(length, {"a": masks.causal(length), "b": upside_down})], {"a": 2.0, "b": 1.0})


def work_loads(nets, comp_rank, ranks):
    """float64[M, R]"""
    return np.stack(
        [loads(nets.work * (nets.mask == mask), comp_rank, ranks) for mask in range(int(nets.mask.max(initial=0)) + 1)]
    )


@pytest.mark.parametrize("seed", range(10))
def test_energy_is_the_bytes_that_are_received(seed):
    nets, cluster, places = some_case(seed)
    received, entered = received_bytes(nets, *places, cluster)
    total = float(node_energy(problem_of(nets, cluster, FREE), *places).sum())
    assert total == pytest.approx(received.sum())
    assert total == pytest.approx(nets.cut_bytes(*places, cluster.ranks))
    crossing = problem_of(nets, cluster, FREE, moved=0.0, crossed=1.0)
    assert node_energy(crossing, *places).sum() == pytest.approx(entered.sum())
    both = problem_of(nets, cluster, FREE, moved=2.0, crossed=3.0)
    assert node_energy(both, *places).sum() == pytest.approx(2 * received.sum() + 3 * entered.sum())


def test_energy_counts_what_is_above_the_limits():
    nets, cluster, places = some_case(3)
    free, held = (problem_of(nets, cluster, limits) for limits in (FREE, TIGHT))
    work = work_loads(nets, places[1], cluster.ranks)
    over = np.maximum(0, work - held.work_limit[:, None]).sum() / nets.work.sum()
    over += np.maximum(0, loads(nets.tokens, places[0], cluster.ranks) - held.token_limit).sum() / nets.tokens.sum()
    assert over > 0
    excess = node_energy(held, *places).sum() - node_energy(free, *places).sum()
    assert excess == pytest.approx(LAST_PRICE * cost_scale(held) * over)


def test_limits_are_of_each_mask_and_at_least_the_largest_block():
    nets, cluster = nets_of(two_masks()), Cluster(1, 4)
    problem = problem_of(nets, cluster, Limits(0.25, 0.5))
    of_mask = np.bincount(nets.mask, nets.work)
    assert problem.work_limit == pytest.approx(1.25 * of_mask / 4)
    assert problem.token_limit == pytest.approx(1.5 * 96 / 4)
    coarse = problem_of(nets_of(two_masks(), 48), Cluster(1, 8), Limits(0.01, 0.01))
    assert coarse.work_limit.tolist() == [2 * 48 * 48, 48 * 48]
    assert coarse.token_limit == 48


def test_a_search_ends_below_the_limit_of_every_mask():
    for seed, batch in enumerate((two_masks(), causal_batch(60, 41, 20), causal_batch(120))):
        nets, cluster = nets_of(batch, 4), Cluster(2, 3)
        problem = problem_of(nets, cluster, Limits(0.05, 0.15))
        start = any_places(np.random.default_rng(seed), nets, cluster.ranks)
        block_rank, comp_rank = anneal(problem, *start, COOLING, seed)
        assert (work_loads(nets, comp_rank, cluster.ranks) <= problem.work_limit[:, None] * (1 + 1e-9)).all()
        assert loads(nets.tokens, block_rank, cluster.ranks).max() <= problem.token_limit
        before, after = (float(node_energy(problem, *places).sum()) for places in (start, (block_rank, comp_rank)))
        assert after < before / 2


def test_a_price_of_a_rank_keeps_bytes_away():
    nets, cluster = nets_of(causal_batch(120), 5), Cluster(1, 4)
    start = any_places(np.random.default_rng(0), nets, 4)
    received = []
    for price in (None, np.array([20.0, 1.0, 1.0, 1.0])):
        found = anneal(problem_of(nets, cluster, rank_price=price), *start, COOLING, 0)
        received.append(received_bytes(nets, *found, cluster)[0][0])
    assert received[1] < received[0] * 0.8


def test_a_price_of_crossing_keeps_bytes_on_their_node():
    nets, cluster = nets_of(causal_batch(150), 5), Cluster(2, 3)
    start = any_places(np.random.default_rng(0), nets, 6)
    entered = []
    for crossed in (0.0, 20.0):
        found = anneal(problem_of(nets, cluster, crossed=crossed), *start, COOLING, 0)
        entered.append(received_bytes(nets, *found, cluster)[1].sum())
    assert entered[1] < entered[0] * 0.8


def digest():
    """Of a search, which another process must find again."""
    nets, cluster = nets_of(causal_batch(90, 33), 5), Cluster(2, 2)
    found = anneal(problem_of(nets, cluster, crossed=2.0), *any_places(np.random.default_rng(5), nets, 4), COOLING, 7)
    return [part.tolist() for part in found]


def test_the_same_arguments_give_the_same_in_another_process():
    assert_same_elsewhere(digest)


def test_other_seeds_give_other_placements():
    nets, cluster = nets_of(causal_batch(90, 33), 5), Cluster(2, 2)
    start = any_places(np.random.default_rng(5), nets, 4)
    found = {tuple(anneal(problem_of(nets, cluster), *start, COOLING, seed)[1].tolist()) for seed in range(5)}
    assert len(found) == 5


def test_arguments_are_left_as_they_are():
    nets, cluster, places = some_case(1)
    copies = [part.copy() for part in places]
    for part in places:
        part.flags.writeable = False
    problem = problem_of(nets, cluster)
    anneal(problem, *places, COOLING, 0)
    relieve(problem, *places, 0)
    fit_tokens(problem, np.full(len(nets.tokens), -1), np.full(len(nets.tokens), -1), places[1])
    assert all(np.array_equal(part, copy) for part, copy in zip(places, copies, strict=True))


def test_searches_with_nothing_to_do():
    """No computation, one rank, no steps."""
    nothing = nets_of(Batch([Sequence(20, masks.from_dense(np.zeros((20, 20), bool)))]))
    places = np.zeros(len(nothing.tokens), int), np.zeros(0, int)
    found = anneal(problem_of(nothing, Cluster(1, 3)), *places, COOLING, 0)
    assert [part.tolist() for part in found] == [[0] * len(nothing.tokens), []]
    assert relieve(problem_of(nothing, Cluster(1, 3)), *places, 0).tolist() == []
    nets, _, _ = some_case(0)
    one = anneal(problem_of(nets, Cluster(1, 1)), np.zeros(len(nets.tokens)), np.zeros(len(nets)), COOLING, 0)
    assert not any(part.any() for part in one)
    nets, cluster, places = some_case(4)
    found = anneal(problem_of(nets, cluster), *places, Cooling(0, (0.3, 0.1), (5.0, 50.0)), 0)
    assert all(np.array_equal(part, before) for part, before in zip(found, places, strict=True))


@pytest.mark.parametrize("skew", [1.0, 3.0])
def test_relief_goes_as_far_as_single_moves_allow(skew):
    """No rank ends above its limit that was not, none higher than before, and what is still above has no block that
    fits anywhere."""
    relieved = stuck = 0
    for seed in range(40):
        nets, cluster, places = some_case(1000 + seed)
        ranks = cluster.ranks
        if not len(nets):
            continue
        comp_rank = np.minimum((places[1] / ranks) ** skew * ranks, ranks - 1).astype("int32")
        problem = problem_of(nets, cluster, Limits(float(np.random.default_rng(seed).choice([0.02, 0.2])), 0.1))
        before = work_loads(nets, comp_rank, ranks)
        found = relieve(problem, places[0], comp_rank, seed)
        after = work_loads(nets, found, ranks)
        for mask, limit in enumerate(problem.work_limit * (1 + 1e-9)):
            was, above = before[mask] > limit, after[mask] > limit
            assert (after[mask] <= np.where(was, before[mask] * (1 + 1e-9), limit)).all()
            relieved += int((was & ~above).sum())
            stuck += int(above.sum())
            for rank in np.flatnonzero(above):
                smallest = nets.work[(found == rank) & (nets.mask == mask)].min()
                assert after[mask].min() + smallest > limit / (1 + 2e-9), "a block would fit on the emptiest rank"
            untouched = ~was[comp_rank] & (nets.mask == mask)
            assert (found[untouched] == comp_rank[untouched]).all()
    assert relieved > 60


def test_relief_finds_the_few_blocks_of_a_mask_among_the_many_of_another():
    few = np.zeros((120, 120), bool)
    few[np.arange(8), np.arange(8)] = True
    nets = nets_of(Batch([Sequence(120, {"a": masks.full(120), "b": masks.from_dense(few)})]), 1)
    comp_rank = np.where(nets.mask == 1, 0, np.arange(len(nets)) % 4)
    problem = problem_of(nets, Cluster(1, 4))
    for seed in range(5):
        found = relieve(problem, np.zeros(120, int), comp_rank, seed)
        assert work_loads(nets, found, 4)[1].tolist() == [4.0] * 4


def test_relief_of_what_is_within_its_limits_changes_nothing():
    for seed in range(5):
        nets, cluster, places = some_case(seed)
        assert np.array_equal(relieve(problem_of(nets, cluster, FREE), *places, seed), places[1])


def test_tokens_go_to_ranks_with_room_largest_first():
    """Replayed: a rank may only be filled above the limit if none of the node had room, and then the emptiest."""
    overfull = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        nets, cluster, places = some_case(seed)
        problem = problem_of(nets, cluster, Limits(0.1, float(rng.choice([0.02, 0.3]))))
        node = places[0] // cluster.ranks_per_node
        node[rng.random(len(node)) < 0.3] = -1
        known = np.where(rng.random(len(node)) < 0.3, places[0], -1)
        owner = fit_tokens(problem, node, known, places[1])
        assert (owner >= 0).all()
        assert (owner < cluster.ranks).all()
        assert (owner[known >= 0] == known[known >= 0]).all()
        free = np.flatnonzero(known < 0)
        assert ((node[free] < 0) | (owner[free] // cluster.ranks_per_node == node[free])).all()
        load = np.bincount(known[known >= 0], nets.tokens[known >= 0], cluster.ranks)
        for token in free[np.argsort(-nets.tokens[free], kind="stable")]:
            ranks = np.arange(cluster.ranks)
            if node[token] >= 0:
                ranks = ranks[ranks // cluster.ranks_per_node == node[token]]
            room = load[ranks] + nets.tokens[token] <= problem.token_limit
            if room.any():
                assert room[ranks == owner[token]].all()
            else:
                overfull += 1
                assert load[owner[token]] == load[ranks].min()
            load[owner[token]] += nets.tokens[token]
    assert overfull > 5


def test_tokens_go_where_they_are_used():
    """Four sequences, each computed by one rank, and room for all."""
    nets = nets_of(causal_batch(24, 24, 24, 24))
    nobody = np.full(16, -1)
    sequence = np.repeat([2, 0, 3, 1], 4)
    comp_rank = sequence[nets.edge_token[nets.q_edge]]
    problem = problem_of(nets, Cluster(1, 4), Limits(0.1, 0.0))
    assert np.array_equal(fit_tokens(problem, nobody, nobody, comp_rank), sequence)
    # and on the node that they are given to, if not there
    problem = make_problem(nets, 4, 2, Costs(), Limits(0.1, 0.0))
    owner = fit_tokens(problem, 1 - sequence // 2, nobody, comp_rank)
    assert np.array_equal(owner // 2, 1 - sequence // 2)
    assert np.bincount(owner).tolist() == [4, 4, 4, 4]
