"""The greedy schedule: what is where at which step, the budgets of divisions, and how often nodes are crossed."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from builders import SHAPE, causal_batch, random_batch
from hypothesis import given
from hypothesis import strategies as st

from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.plan import PASSES, side_token_bytes
from dyncp.ir.schedule import Side
from dyncp.planner.blockgen import make_blocks, uniform_cut
from dyncp.planner.scheduling.greedy import greedy_schedule
from dyncp.strategies.api import Options

OUT_OF = {Side.Q_IN: Side.Q_OUT, Side.KV_IN: Side.KV_OUT}


def scheduled(seed, cluster, divisions, batch=None):
    rng = np.random.default_rng(seed)
    batch = batch or random_batch(rng, ("a", "b") if seed % 2 else ("default",), cross=seed % 3 == 0)
    blocks = make_blocks(batch, SHAPE.groups, uniform_cut(6))
    placement = Placement(
        rng.integers(0, cluster.ranks, len(blocks.tokens)), rng.integers(0, cluster.ranks, (2, len(blocks)))
    )
    return blocks, placement, greedy_schedule(blocks, placement, SHAPE, cluster, Options(divisions=divisions))


def uses(blocks, placement, schedule):
    """(mask, side, block, group, rank) -> steps of the computation that needs it there and of another owner."""
    found = {}
    for group in range(blocks.groups):
        for n in range(len(blocks)):
            rank, step = int(placement.comp_rank[group, n]), int(schedule.comp_step[group, n])
            for side, end in ((Side.Q_IN, blocks.q_block), (Side.KV_IN, blocks.kv_block)):
                if placement.block_rank[end[n]] != rank:
                    found.setdefault((int(blocks.mask[n]), side, int(end[n]), group, rank), []).append(step)
    return found


def rows(moves):
    columns = (moves.mask, moves.side, moves.block, moves.group, moves.src, moves.dst, moves.step)
    return list(zip(*(column.tolist() for column in columns), strict=True))


CASES = {"seed": st.integers(0, 2**16), "nodes": st.integers(1, 3), "per_node": st.integers(1, 4)}


@given(**CASES, divisions=st.integers(1, 6))
def test_everything_is_there_before_it_is_used(seed, nodes, per_node, divisions):
    cluster = Cluster(nodes, per_node)
    blocks, placement, schedule = scheduled(seed, cluster, divisions)
    assert schedule.comp_step.shape == (2, len(blocks))
    assert schedule.comp_step.max(initial=0) <= max(1, divisions - 1)
    needed = uses(blocks, placement, schedule)
    arrived, sent_back = {}, []
    for mask, side, block, group, src, dst, step in rows(schedule.transfers):
        if side in OUT_OF:
            assert (mask, side, block, group, dst) not in arrived
            arrived[mask, side, block, group, dst] = src, step
        else:
            sent_back.append((mask, side, block, group, src))
            last = schedule.comp_step[:, blocks.of_mask(mask)].max(initial=0)
            assert (dst, step) == (placement.block_rank[block], last + 2)
    assert arrived.keys() == needed.keys()  # nothing else moves
    assert sorted(sent_back) == sorted((m, OUT_OF[side], b, g, r) for m, side, b, g, r in needed)
    for (mask, side, block, group, dst), (src, step) in arrived.items():
        assert 1 <= step <= min(needed[mask, side, block, group, dst])
        owner = int(placement.block_rank[block])
        if src != owner:  # passed on by a rank that has it already
            assert arrived[mask, side, block, group, src][1] < step
            assert cluster.node_of(src) == cluster.node_of(dst) != cluster.node_of(owner)
    local = np.ones((2, len(blocks)), bool)
    for end in (blocks.q_block, blocks.kv_block):
        local &= placement.block_rank[end] == placement.comp_rank
    assert np.array_equal(schedule.comp_step == 0, local)


@given(**CASES, divisions=st.integers(3, 6))
def test_inputs_cross_into_a_node_once(seed, nodes, per_node, divisions):
    cluster = Cluster(nodes, per_node)
    _, _, schedule = scheduled(seed, cluster, divisions)
    crossings = Counter(
        (mask, side, block, group, cluster.node_of(dst))
        for mask, side, block, group, src, dst, _ in rows(schedule.transfers)
        if side in OUT_OF and cluster.node_of(src) != cluster.node_of(dst)
    )
    assert set(crossings.values()) <= {1}


@given(**CASES, divisions=st.integers(2, 6))
def test_divisions_keep_the_budget_of_each_pair(seed, nodes, per_node, divisions):
    """All but the last division, and what is brought into a node for the last."""
    cluster = Cluster(nodes, per_node)
    blocks, placement, schedule = scheduled(seed, cluster, divisions)
    needed = uses(blocks, placement, schedule)
    sides = np.sum([side_token_bytes(SHAPE, pass_, "none", "model") for pass_ in PASSES], axis=0)
    total, floor, spent = Counter(), Counter(), Counter()
    for mask, side, block, group, _, dst, step in rows(schedule.transfers):
        if side in OUT_OF:
            pair = mask, int(placement.block_rank[block]), dst
            size = int(sides[side] * blocks.tokens.tokens[block])
            total[pair] += size
            if step < divisions - 1 and step == min(needed[mask, side, block, group, dst]):
                spent[*pair, step] += size
    for group in range(2):  # the largest need of one computation block
        for n in range(len(blocks)):
            need = Counter()
            for side, end in ((Side.Q_IN, blocks.q_block), (Side.KV_IN, blocks.kv_block)):
                owner, rank = int(placement.block_rank[end[n]]), int(placement.comp_rank[group, n])
                need[int(blocks.mask[n]), owner, rank] += int(sides[side] * blocks.tokens.tokens[end[n]])
            for pair, size in need.items():
                floor[pair] = max(floor[pair], size)
    for (*pair, _), size in spent.items():
        assert size <= max(total[tuple(pair)] / divisions, floor[tuple(pair)])


def test_no_division_of_a_busy_rank_is_empty():
    """Budgets are far below one block when each pair exchanges little; still every division gets something."""
    _, placement, schedule = scheduled(0, Cluster(1, 4), 4, causal_batch(120))
    for rank in range(4):
        assert set(schedule.comp_step[placement.comp_rank == rank].tolist()) == {0, 1, 2, 3}


def test_fetched_once_it_is_free_for_later_blocks():
    """One KV block that rank 1 needs for all its queries: all of them follow in the division that fetches it."""
    blocks = make_blocks(causal_batch(24), 1, uniform_cut(8))
    owner = np.array([0, 1, 1])
    place = Placement(owner, owner[blocks.q_block][None])
    schedule = greedy_schedule(blocks, place, SHAPE, Cluster(1, 2), Options(divisions=5))
    assert schedule.comp_step[0][(blocks.kv_block == 0) & (blocks.q_block > 0)].tolist() == [1, 1]
    assert sorted(rows(schedule.transfers)) == [(0, Side.KV_IN, 0, 0, 0, 1, 1), (0, Side.KV_OUT, 0, 0, 1, 0, 3)]


def test_one_division_still_computes_local_blocks_first():
    _, _, schedule = scheduled(2, Cluster(2, 2), 1)
    assert set(schedule.comp_step.ravel().tolist()) == {0, 1}
    inputs = schedule.transfers.side < Side.Q_OUT
    assert set(schedule.transfers.step[inputs].tolist()) == {1}
    assert set(schedule.transfers.step[~inputs].tolist()) == {3}


@pytest.mark.parametrize("divisions", [10**6, 2**31 - 1])
def test_no_more_divisions_than_blocks(divisions):
    """Every division has a block, so far more divisions than blocks are no more work, and change nothing."""
    for seed in range(8):
        cluster = Cluster(1 + seed % 2, 3)
        blocks, _, schedule = scheduled(seed, cluster, divisions)
        enough = scheduled(seed, cluster, 2 * len(blocks) + 2)[2]
        assert schedule.comp_step.max(initial=0) <= 2 * len(blocks)
        assert np.array_equal(schedule.comp_step, enough.comp_step)
        assert rows(schedule.transfers) == rows(enough.transfers)


@pytest.mark.parametrize("ranks", [1, 5])
def test_nothing_moves_when_all_is_local(ranks):
    blocks = make_blocks(causal_batch(20, 20), 2, uniform_cut(4))
    owner = np.minimum(blocks.tokens.sequence, ranks - 1)
    place = Placement(owner, np.tile(owner[blocks.q_block], (2, 1)))
    schedule = greedy_schedule(blocks, place, SHAPE, Cluster(1, ranks), Options())
    assert schedule.comp_step.max() == 0
    assert len(schedule.transfers) == 0


def test_transfers_are_in_order():
    _, _, schedule = scheduled(1, Cluster(2, 2), 4)
    moves = schedule.transfers
    columns = (moves.mask, moves.step, moves.src, moves.dst, moves.side, moves.block, moves.group)
    order = list(zip(*(column.tolist() for column in columns), strict=True))
    assert order == sorted(order)
    assert len(set(order)) == len(order)
