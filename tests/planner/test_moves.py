"""Moves of the local search: what each of them changes, against an energy that is counted anew.

What `anneal_steps` does step by step is looked at in the interpreter, where single functions can be replaced; that the
machine code does the same is a test of its own.
"""

from __future__ import annotations

import numpy as np
import pytest
from any_batch import any_batch, any_cluster, any_places
from builders import SHAPE

from dyncp.planner.blockgen import make_blocks, uniform_cut
from dyncp.planner.partition import moves, refine
from dyncp.planner.partition.moves import Problem, State, add_node_energy, anneal_steps, count_pins, relieve_ranks
from dyncp.planner.partition.nets import Nets
from dyncp.planner.partition.refine import Costs, Limits, _state, make_problem

WORK_PRICE, TOKEN_PRICE = 700.0, 3000.0
COUNTS = ("pins", "node_pins", "touched", "prices", "load", "token_load")


def case(seed, priced=True):
    """(problem, state, generator): a batch placed at random."""
    rng = np.random.default_rng(seed)
    blocks = make_blocks(any_batch(rng, 40), SHAPE.groups, uniform_cut(int(rng.integers(2, 9))))
    nets = Nets.of_batch(blocks, SHAPE, "none", "model", (1.0, 1.0))
    cluster = any_cluster(rng, 8)
    price = rng.uniform(0.2, 3.0, cluster.ranks) if priced else None
    costs = Costs(float(rng.choice([1.0, 0.5])), float(rng.choice([0.0, 4.5])), price)
    problem = make_problem(nets, cluster.ranks, cluster.ranks_per_node, costs, Limits(0.05, 0.05))
    return problem, _state(problem, *any_places(rng, nets, cluster.ranks), seed), rng


def energy(p, s, work_price=WORK_PRICE, token_price=TOKEN_PRICE):
    """The formula of `refine`, counted from the ranks of blocks alone."""
    edges, ranks = np.arange(len(p.edge_token)), len(p.rank_price)
    owner = s.owner[p.edge_token]
    touched = np.zeros((len(edges), ranks), bool)
    touched[edges, owner] = touched[p.q_edge, s.comp_rank] = touched[p.kv_edge, s.comp_rank] = True
    away = touched.copy()
    away[edges, owner] = False
    nodes = touched.reshape(len(edges), -1, p.per_node).any(axis=2).sum(axis=1)
    total = p.in_cost @ (away @ p.rank_price)
    total += p.out_cost @ (p.rank_price[owner] * (touched.sum(axis=1) - 1))
    total += p.node_cost @ (nodes - 1)
    for mask, limit in enumerate(p.work_limit):
        work = np.bincount(s.comp_rank, p.work * (p.mask == mask), ranks)
        total += work_price * np.maximum(0, work - limit).sum()
    return total + token_price * np.maximum(0, np.bincount(s.owner, p.tokens, ranks) - p.token_limit).sum()


def recount(p, s):
    """A state of the same placement, counted anew."""
    fresh = State(
        s.comp_rank.copy(),
        s.owner.copy(),
        *(np.zeros_like(getattr(s, name)) for name in COUNTS),
        s.random.copy(),
        s.moved.copy(),
    )
    count_pins(tuple(p), tuple(fresh))
    return fresh


def assert_counts(p, s):
    fresh = recount(p, s)
    for name in COUNTS:
        assert np.allclose(getattr(s, name), getattr(fresh, name), rtol=1e-9, atol=1e-6), name


def copied(s):
    return State(*(field.copy() for field in s))


def test_counts_are_what_they_say():
    """Against sets of ranks, so that nothing else is tested against a wrong count."""
    for seed in range(12):
        p, s, _ = case(seed)
        for edge, token in enumerate(p.edge_token.tolist()):
            comps = p.edge_comps[p.edge_ptr[edge] : p.edge_ptr[edge + 1]]
            assert set(comps.tolist()) == set(np.flatnonzero((p.q_edge == edge) | (p.kv_edge == edge)).tolist())
            ranks = [*s.comp_rank[comps].tolist(), int(s.owner[token])]
            assert s.pins[edge].tolist() == np.bincount(ranks, minlength=len(p.rank_price)).tolist()
            assert s.touched[edge] == len(set(ranks))
            assert s.prices[edge] == pytest.approx(sum(p.rank_price[rank] for rank in set(ranks)))
            nodes = np.bincount([rank // p.per_node for rank in set(ranks)], minlength=s.node_pins.shape[1])
            assert s.node_pins[edge].tolist() == nodes.tolist()
        for token in range(len(p.tokens)):
            edges = p.token_edges[p.token_ptr[token] : p.token_ptr[token + 1]]
            assert set(edges.tolist()) == set(np.flatnonzero(p.edge_token == token).tolist())
        assert s.token_load.tolist() == np.bincount(s.owner, p.tokens, len(p.rank_price)).tolist()


class Judge:
    """In place of `_accepts`: notes what a move is said to change, and decides by itself."""

    def __init__(self, accept):
        self.accept, self.changes = accept, []

    def __call__(self, state, change, temperature):
        self.changes.append(float(change))
        return self.accept


KINDS = {"comp": (1024, 1024, 1024), "line": (0, 1024, 1024), "rows": (0, 0, 1024), "tokens": (0, 0, 0)}


def one_move(monkeypatch, kind, p, s):
    """One step of a kind."""
    for name, bound in zip(("COMP", "LINE", "ROWS"), KINDS[kind], strict=True):
        monkeypatch.setattr(moves, name, bound)
    prices = np.array([1.0, WORK_PRICE, TOKEN_PRICE])
    anneal_steps.py_func(tuple(p), tuple(s), 1, prices, np.ones(3))


@pytest.mark.parametrize("accept", [True, False], ids=["accepted", "refused"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_move_changes_the_energy_by_what_it_says(monkeypatch, kind, accept):
    judge = Judge(accept)
    monkeypatch.setattr(moves, "_accepts", judge)
    judged = 0
    for seed in range(20):
        p, s, _ = case(seed)
        if not len(p.work):
            continue
        before = energy(p, s)
        for _ in range(12):
            start = copied(s)
            judge.changes.clear()
            one_move(monkeypatch, kind, p, s)
            if not judge.changes:
                assert all(np.array_equal(getattr(s, name), getattr(start, name)) for name in ("owner", "comp_rank"))
                continue
            judged += 1
            after = energy(p, s)
            if accept:
                assert judge.changes == [pytest.approx(after - before, rel=1e-9, abs=1e-6 * before)]
            else:
                assert np.array_equal(s.owner, start.owner)
                assert np.array_equal(s.comp_rank, start.comp_rank)
            assert_counts(p, s)
            before = after
    assert judged > 80


def test_moves_do_what_their_names_say(monkeypatch):
    """A block, or two of an edge that change places; all of an edge's blocks at a rank; a token block, or two, with the
    rows there or without."""
    monkeypatch.setattr(moves, "_accepts", Judge(True))
    kinds = set()
    for seed in range(20):
        p, s, _ = case(seed)
        for kind in list(KINDS) * 4 * (len(p.work) > 0):
            start = copied(s)
            one_move(monkeypatch, kind, p, s)
            comps, tokens = np.flatnonzero(s.comp_rank != start.comp_rank), np.flatnonzero(s.owner != start.owner)
            kinds.add((kind, min(len(comps), 3), len(tokens)))
            if kind == "comp" and len(comps) == 2:
                assert s.comp_rank[comps].tolist() == start.comp_rank[comps[::-1]].tolist()
                assert min(len(set(edge[comps].tolist())) for edge in (p.q_edge, p.kv_edge)) == 1
            if kind == "line" and len(comps):
                here = start.comp_rank[comps[0]]
                edges = (set(p.q_edge[comps].tolist()), set(p.kv_edge[comps].tolist()))
                whole = [
                    set(np.flatnonzero((edge == min(found)) & (start.comp_rank == here)).tolist())
                    for edge, found in zip((p.q_edge, p.kv_edge), edges, strict=True)
                    if len(found) == 1
                ]
                assert set(comps.tolist()) in whole
            if kind == "rows" and len(tokens):
                here = start.owner[p.edge_token[p.q_edge]]
                assert set(comps.tolist()) == set(
                    np.flatnonzero(np.isin(p.edge_token[p.q_edge], tokens) & (start.comp_rank == here)).tolist()
                )
                assert (s.comp_rank[comps] == s.owner[p.edge_token[p.q_edge[comps]]]).all()
            if len(tokens) == 2:  # a swap
                assert s.owner[tokens].tolist() == start.owner[tokens[::-1]].tolist()
    assert {("comp", 1, 0), ("line", 3, 0), ("rows", 3, 1), ("rows", 3, 2), ("tokens", 0, 1), ("tokens", 0, 2)} <= kinds
    assert all(tokens == 0 for kind, _, tokens in kinds if kind in ("comp", "line"))
    assert all(comps == 0 for kind, comps, _ in kinds if kind == "tokens")
    assert ("comp", 3, 0) not in kinds


def test_counts_hold_after_many_steps():
    for seed in range(10):
        p, s, _ = case(100 + seed)
        if not len(p.work):
            continue
        start = copied(s)
        now = np.array([p.in_cost.mean() + 1, WORK_PRICE, TOKEN_PRICE])
        anneal_steps(tuple(p), tuple(s), 30_000, now, np.array([0.97, 1.01, 1.01]))
        assert_counts(p, s)
        if len(p.rank_price) > 1 and len(p.tokens) > 2:
            assert (s.owner != start.owner).any()
            assert (s.comp_rank != start.comp_rank).any()


def test_the_machine_code_does_what_the_source_says():
    for seed in range(4):
        p, s, _ = case(200 + seed)
        interpreted, ratio = copied(s), np.array([0.9, 1.1, 1.2])
        if not len(p.work):
            continue
        both = []
        for function, state in ((anneal_steps, s), (anneal_steps.py_func, interpreted)):
            now = np.array([5000.0, WORK_PRICE, TOKEN_PRICE])
            function(tuple(p), tuple(state), 1500, now, ratio)
            both.append((state.owner.tolist(), state.comp_rank.tolist(), int(state.random[0]), now.tolist()))
        assert both[0] == both[1]


def test_when_it_is_cold_the_energy_never_rises():
    """Step by step, with the compiled code and fixed prices."""
    for seed in range(6):
        p, s, _ = case(300 + seed)
        if not len(p.work):
            continue
        last = energy(p, s)
        first = last
        for _ in range(60):
            anneal_steps(tuple(p), tuple(s), 5, np.array([1e-9, WORK_PRICE, TOKEN_PRICE]), np.ones(3))
            now = energy(p, s)
            assert now <= last * (1 + 1e-9)
            last = now
        assert last < first or len(p.rank_price) == 1 or first == 0


def test_a_hot_search_takes_nearly_everything(monkeypatch):
    """And temperatures change every chunk of steps."""
    p, s, _ = case(2)
    taken = []
    accepts = moves._accepts
    monkeypatch.setattr(moves, "_accepts", lambda *args: taken.append(accepts(*args)) or taken[-1])
    now = np.array([1e15, 0.0, 0.0])
    anneal_steps.py_func(tuple(p), tuple(s), 2 * moves.CHUNK + 1, now, np.array([1.0, 2.0, 0.5]))
    assert np.mean(taken) > 0.999
    now = np.array([1.0, 1.0, 1.0])
    anneal_steps(tuple(p), tuple(s), 2 * moves.CHUNK + 1, now, np.array([1.0, 2.0, 0.5]))
    assert now.tolist() == [1.0, 8.0, 0.125]


def test_the_energy_of_all_nodes_is_the_energy():
    """Where no rank has a price; excess is not a part of it."""
    for seed in range(12):
        p, s, _ = case(400 + seed, priced=False)
        nodes = np.zeros(s.node_pins.shape[1])
        add_node_energy(tuple(p), tuple(s), nodes)
        assert nodes.sum() == pytest.approx(energy(p, s, 0.0, 0.0))
        assert (nodes >= 0).all()


def test_relief_keeps_counts(monkeypatch):
    states = []

    def watched(problem, state, *rest):
        relieve_ranks(problem, state, *rest)
        states.append((problem, state))

    monkeypatch.setattr(refine, "relieve_ranks", watched)
    for seed in range(8):
        p, s, _ = case(500 + seed)
        refine.relieve(p, s.owner, s.comp_rank, seed)
    assert len(states) > 4
    for problem, state in states:
        assert_counts(Problem(*problem), State(*state))
