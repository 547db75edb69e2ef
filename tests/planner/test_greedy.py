"""The greedy schedule: what is where at which step, the budgets of divisions, and how often nodes are crossed."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pytest
from builders import SHAPE, causal_batch, random_batch, random_layout
from hypothesis import given
from hypothesis import strategies as st

from dyncp.ir.check import check_plan
from dyncp.ir.cluster import MAX_RANKS, Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.plan import KEEP, PASSES, WIRE, side_token_bytes
from dyncp.ir.schedule import Side
from dyncp.planner.blockgen import make_blocks, uniform_cut
from dyncp.planner.scheduling.greedy import greedy_schedule
from dyncp.report.summary import plan_figures
from dyncp.strategies import lower_layout
from dyncp.strategies.api import Options

OUT_OF = {Side.Q_IN: Side.Q_OUT, Side.KV_IN: Side.KV_OUT}
SIDE_BYTES = np.sum([side_token_bytes(SHAPE, pass_, "none", "model") for pass_ in PASSES], axis=0)


def scheduled(seed, cluster, divisions, batch=None):
    rng = np.random.default_rng(seed)
    batch = batch or random_batch(rng, ("a", "b") if seed % 2 else ("default",), cross=seed % 3 == 0)
    blocks = make_blocks(batch, SHAPE.groups, uniform_cut(6))
    placement = Placement(
        rng.integers(0, cluster.ranks, len(blocks.tokens)), rng.integers(0, cluster.ranks, (2, len(blocks)))
    )
    return blocks, placement, greedy_schedule(blocks, placement, SHAPE, cluster, Options(divisions=divisions))


def needs_of(blocks, placement, group, n):
    """(mask, side, block, group, rank) of what a computation block needs of another owner."""
    rank = int(placement.comp_rank[group, n])
    ends = ((Side.Q_IN, int(blocks.q_block[n])), (Side.KV_IN, int(blocks.kv_block[n])))
    mask = int(blocks.mask[n])
    return [(mask, side, end, group, rank) for side, end in ends if placement.block_rank[end] != rank]


def uses(blocks, placement, schedule):
    """(mask, side, block, group, rank) -> steps of the computation that needs it there and of another owner."""
    found = defaultdict(list)
    for group in range(blocks.groups):
        for n in range(len(blocks)):
            for need in needs_of(blocks, placement, group, n):
                found[need].append(int(schedule.comp_step[group, n]))
    return found


def rows(moves):
    columns = (moves.mask, moves.side, moves.block, moves.group, moves.src, moves.dst, moves.step)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def last_step(blocks, schedule, mask):
    return int(schedule.comp_step[:, blocks.of_mask(mask)].max(initial=0))


CASES = {"seed": st.integers(0, 2**16), "nodes": st.integers(1, 3), "per_node": st.integers(1, 4)}


@given(**CASES, divisions=st.integers(1, 6))
def test_everything_is_there_before_it_is_used(seed, nodes, per_node, divisions):
    cluster = Cluster(nodes, per_node)
    blocks, placement, schedule = scheduled(seed, cluster, divisions)
    assert schedule.comp_step.shape == (2, len(blocks))
    assert schedule.comp_step.max(initial=0) <= max(2 if nodes > 1 and per_node > 1 else 1, divisions - 1)
    needed = uses(blocks, placement, schedule)
    arrived = {}
    for mask, side, block, group, src, dst, step in rows(schedule.transfers):
        if side in OUT_OF:
            assert (mask, side, block, group, dst) not in arrived
            arrived[mask, side, block, group, dst] = src, step
    assert arrived.keys() == needed.keys()  # nothing else moves
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


@given(**CASES, divisions=st.integers(1, 6))
def test_partial_results_are_merged_on_each_node_before_they_leave_it(seed, nodes, per_node, divisions):
    cluster = Cluster(nodes, per_node)
    blocks, placement, schedule = scheduled(seed, cluster, divisions)
    needed = uses(blocks, placement, schedule)
    sent, computed = defaultdict(dict), defaultdict(set)
    for mask, side, block, group, src, dst, step in rows(schedule.transfers):
        if side not in OUT_OF:
            assert src not in sent[mask, side, block, group]
            sent[mask, side, block, group][src] = dst, step
    for mask, side, block, group, rank in needed:
        computed[mask, OUT_OF[side], block, group].add(rank)
    assert {piece: set(moves) for piece, moves in sent.items()} == computed
    for (mask, _, block, _), moves in sent.items():
        owner, first = int(placement.block_rank[block]), last_step(blocks, schedule, mask) + 2
        for src, (dst, step) in moves.items():
            mates = {rank for rank in moves if cluster.node_of(rank) == cluster.node_of(src)}
            if cluster.node_of(src) == cluster.node_of(owner) or len(mates) == 1:
                assert (dst, step) == (owner, first)
            elif dst == owner:
                assert step == first + 1
                assert all(moves[mate] == (src, first) for mate in mates - {src})
            else:
                assert dst in mates and moves[dst][0] == owner


@given(**CASES, divisions=st.integers(1, 6))
def test_the_boundary_of_a_node_is_crossed_once(seed, nodes, per_node, divisions):
    """By each input inwards and by each partial result outwards, whatever the number of divisions."""
    cluster = Cluster(nodes, per_node)
    blocks, placement, schedule = scheduled(seed, cluster, divisions)
    inwards, outwards = (
        Counter(
            (mask, side, block, group, cluster.node_of(dst if side in OUT_OF else src))
            for mask, side, block, group, src, dst, _ in rows(schedule.transfers)
            if (side in OUT_OF) == inward and cluster.node_of(src) != cluster.node_of(dst)
        )
        for inward in (True, False)
    )
    touched = {
        (mask, side, block, group, cluster.node_of(rank))
        for mask, side, block, group, rank in uses(blocks, placement, schedule)
        if cluster.node_of(rank) != cluster.node_of(placement.block_rank[block])
    }
    assert inwards == Counter(touched)
    assert outwards == Counter((mask, OUT_OF[side], *rest) for mask, side, *rest in touched)


@given(**CASES, divisions=st.integers(1, 6), keep=st.sampled_from(list(KEEP)), wire=st.sampled_from(WIRE))
def test_plans_are_correct_and_move_what_the_planner_counts(seed, nodes, per_node, divisions, keep, wire):
    """Of each piece bytes x (ranks that touch it - 1), and of these between nodes bytes x (nodes that touch it - 1)."""
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, ("a", "b") if seed % 2 else ("default",), cross=seed % 3 == 0)
    cluster = Cluster(nodes, per_node)
    options = Options(block_tokens=6, divisions=divisions, keep=keep, wire=wire)
    layout = random_layout(rng, batch, cluster, options)
    blocks, placement = layout.blocks, layout.placement
    plan = lower_layout(layout, batch, SHAPE, cluster, "dynamic", options)
    check_plan(plan, blocks, batch)
    figures = plan_figures(plan, blocks)
    touched = defaultdict(set)
    for mask, side, block, group, rank in uses(blocks, placement, layout.schedule):
        for of_side in (side, OUT_OF[side]):
            touched[mask, of_side, block, group] |= {rank, int(placement.block_rank[block])}
    for pass_, got in zip(PASSES, (figures, figures["backward"]), strict=True):
        per_token = side_token_bytes(SHAPE, pass_, keep, wire)
        total = between = 0
        for (mask, side, block, _), ranks in touched.items():
            size = per_token[side] * int(blocks.tokens.tokens[block]) * blocks.mask_weights[mask]
            total += size * (len(ranks) - 1)
            between += size * (len({cluster.node_of(rank) for rank in ranks}) - 1)
        assert (got["total_bytes"], got["inter_node_bytes"]) == (total, between)


@given(**CASES, divisions=st.integers(1, 6))
def test_divisions_are_those_of_the_listing(seed, nodes, per_node, divisions):
    """Against a slow model of the listing, one computation block at a time, with all budgets in dictionaries."""
    cluster = Cluster(nodes, per_node)
    blocks, placement, schedule = scheduled(seed, cluster, divisions)
    for mask in range(len(blocks.mask_names)):
        part = blocks.of_mask(mask)
        comps = [(group, n) for group in range(2) for n in range(part.start, part.stop)]
        found = {comp: int(schedule.comp_step[comp]) for comp in comps}
        assert found == divided(blocks, placement, cluster, divisions, comps)


def divided(blocks, placement, cluster, divisions, comps):
    """The division of each of the computation blocks `comps` (of one mask)."""

    def size(need):
        return int(SIDE_BYTES[need[1]] * blocks.tokens.tokens[need[2]])

    def owner(need):
        return int(placement.block_rank[need[2]])

    def crosses(need):
        return cluster.node_of(owner(need)) != cluster.node_of(need[4])

    def entry(need):
        return (*need[:4], cluster.node_of(need[4]))

    def costs(needs):
        """By (owner, rank), and by (rank,) what comes from another node."""
        return sum((Counter({(owner(need), need[4]): size(need)}) for need in needs), Counter()) + sum(
            (Counter({(need[4],): size(need)}) for need in needs if crosses(need)), Counter()
        )

    needs = {comp: needs_of(blocks, placement, *comp) for comp in comps}
    away = [comp for comp in comps if needs[comp]]
    every = {need for comp in comps for need in needs[comp]}
    entries = {entry(need): size(need) for need in every if crosses(need)}
    budget = {pair: total / divisions for pair, total in costs(every).items() if len(pair) == 2}
    left = {}
    for rank in {need[4] for need in every if crosses(need)}:
        node = cluster.node_of(rank)
        ranks = {need[4] for need in every if crosses(need) and cluster.node_of(need[4]) == node}
        left[(rank,)] = sum(entries[key] for key in entries if key[4] == node) / len(ranks)
        budget[(rank,)] = 0
    for comp in away:
        for pair, cost in costs(needs[comp]).items():
            budget[pair] = max(budget[pair], cost)
    passed_on = len(entries) < sum(map(crosses, every))
    last = max(1 + passed_on, min(divisions - 1, len(away)))
    step, met, entered = {comp: 0 if comp not in away else last for comp in comps}, set(), {}
    load = Counter()
    for comp in comps:
        load[int(placement.comp_rank[comp])] += int(blocks.pairs[comp[1]]) * (comp not in away)
    for division in range(1, last):
        left = {pair: max(budget[pair], left[pair]) if len(pair) == 1 else budget[pair] for pair in budget}
        waiting = [comp for comp in away if step[comp] == last]
        turns = {rank: [c for c in waiting if placement.comp_rank[c] == rank] for rank in range(cluster.ranks)}
        while turns:
            rank = min(turns, key=lambda rank: (load[rank], rank))
            if not turns[rank]:
                del turns[rank]
                continue
            comp = turns[rank].pop(0)
            missing = [need for need in needs[comp] if need not in met]
            inside = [need for need in missing if entry(need) in entered]  # to be had on the node by the next division
            cost = costs(missing)
            cost[(rank,)] -= sum(map(size, inside))
            late = any(entered[entry(need)] == division for need in inside)
            if not late and all(size <= left.get(pair, 0) for pair, size in cost.items()):
                for pair in cost.keys() & left.keys():
                    left[pair] -= cost[pair]
                met.update(missing)
                for need in filter(crosses, missing):
                    entered.setdefault(entry(need), division)
                step[comp] = division
                load[rank] += int(blocks.pairs[comp[1]])
    return step


@pytest.mark.parametrize("divisions", [1, 2, 3, 6])
def test_all_ranks_of_a_node_have_a_part_in_its_traffic(divisions):
    """Every rank of node 1 computes one row of keys for each of 4 query blocks: 4 pieces that all four of them need."""
    cluster = Cluster(2, 4)
    blocks = make_blocks(causal_batch(96), 1, uniform_cut(6))  # 16 x 16 blocks
    late = blocks.q_block >= 12
    comp_rank = np.where(late, 4 + blocks.kv_block % 4, 0)[None]
    placement = Placement(np.where(np.arange(16) < 12, 0, 3), comp_rank)
    moves = greedy_schedule(blocks, placement, SHAPE, cluster, Options(divisions=divisions)).transfers
    crosses = moves.src // 4 != moves.dst // 4
    assert Counter(moves.dst[crosses & (moves.side == Side.Q_IN)].tolist()) == dict.fromkeys(range(4, 8), 1)
    assert Counter(moves.src[crosses & (moves.side == Side.Q_OUT)].tolist()) == dict.fromkeys(range(4, 8), 1)


def test_what_must_leave_by_way_of_one_rank_counts_for_the_choice_of_others():
    """Rank 2 has partial results of its own to send from node 1; so that of both ranks leaves from rank 3."""
    blocks = make_blocks(causal_batch(18), 1, uniform_cut(6))
    place = {(1, 0): 2, (1, 1): 3, (2, 2): 2}  # computation on node 1; the rest is with its owner
    ends = zip(blocks.q_block.tolist(), blocks.kv_block.tolist(), strict=True)
    placement = Placement([0, 0, 0], [[place.get(end, 0) for end in ends]])
    moves = rows(greedy_schedule(blocks, placement, SHAPE, Cluster(2, 2), Options()).transfers)
    out = [(src, dst) for _, side, block, _, src, dst, _ in moves if (side, block) == (Side.Q_OUT, 1)]
    assert out == [(2, 3), (3, 0)]


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


@pytest.mark.parametrize("divisions", [1, 2])
def test_few_divisions_still_compute_local_blocks_first(divisions):
    _, _, schedule = scheduled(2, Cluster(1, 4), divisions)
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


@pytest.mark.parametrize("cluster", [Cluster(1, 1), Cluster(1, 5), Cluster(5, 1), Cluster(MAX_RANKS // 8, 8)])
def test_nothing_moves_when_all_is_local(cluster):
    blocks = make_blocks(causal_batch(20, 20), 2, uniform_cut(4))
    owner = np.where(blocks.tokens.sequence, cluster.ranks - 1, 0)
    place = Placement(owner, np.tile(owner[blocks.q_block], (2, 1)))
    schedule = greedy_schedule(blocks, place, SHAPE, cluster, Options())
    assert schedule.comp_step.max() == 0
    assert len(schedule.transfers) == 0


def test_as_many_ranks_as_there_can_be():
    """What it costs goes with the blocks and the ranks, not with pairs of ranks."""
    cluster = Cluster(MAX_RANKS // 8, 8)
    _, _, schedule = scheduled(1, cluster, 4, causal_batch(120))
    assert schedule.comp_step.max() > 0
    assert schedule.transfers.dst.max() > MAX_RANKS // 2


@pytest.mark.parametrize("seed", range(4))
def test_transfers_are_in_order_and_the_same_every_time(seed):
    _, _, schedule = scheduled(seed, Cluster(2, 2), 4)
    moves = schedule.transfers
    columns = (moves.mask, moves.step, moves.src, moves.dst, moves.side, moves.block, moves.group)
    order = list(zip(*(column.tolist() for column in columns), strict=True))
    assert order == sorted(order)
    assert len(set(order)) == len(order)
    again = scheduled(seed, Cluster(2, 2), 4)[2]
    assert rows(again.transfers) == rows(moves)
    assert np.array_equal(again.comp_step, schedule.comp_step)
