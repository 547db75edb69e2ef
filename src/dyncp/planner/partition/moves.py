"""The compiled loops of the local search: what a placement costs, counted, and moves that change it.

All of them are in this file, because numba looks only at the file of the function that is called to see whether what it
has on disk is out of date.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.jit import lean_jit, lean_part

CHUNK = 256  # steps between two changes of temperature
COMP, LINE, ROWS = 800, 900, 960  # of 1,024 steps: up to COMP move one computation block, and so on, the rest tokens
DRAWS = 4  # ranks drawn for a move before it is given up
SAMPLES = 64  # moves among which the cheapest relieves a rank of too much work
HOPELESS = 22.0  # temperatures by which the energy may grow: the chance is less than one in 31 bits
GIVE_UP = 100  # rounds of samples without one
ROUNDING = 1e-9  # of limits

Fields = tuple[Any, ...]  # the fields of a Problem or State


class Problem(NamedTuple):
    """What is given, for the compiled loops."""

    q_edge: Ints  # int32[C]; the edges of query sides come first
    kv_edge: Ints  # int32[C]
    work: Ints  # float64[C]
    mask: Ints  # int32[C]
    edge_ptr: Ints  # int64[E + 1]
    edge_comps: Ints  # int32[2 C], the computation blocks of each edge
    edge_token: Ints  # int32[E]
    q_edges: int  # how many edges are of query sides
    in_cost: Ints  # float64[E]
    out_cost: Ints  # float64[E]
    node_cost: Ints  # float64[E]
    tokens: Ints  # float64[B]
    token_ptr: Ints  # int64[B + 1]
    token_edges: Ints  # int32[E], the edges of each token block
    rank_price: Ints  # float64[R]
    node: Ints  # int32[R], node of each rank: a look-up is faster than a division
    per_node: int
    work_limit: Ints  # float64[M]
    token_limit: float


class State(NamedTuple):
    """A placement, and what is counted on it."""

    comp_rank: Ints  # int32[C]
    owner: Ints  # int32[B]
    pins: Ints  # int32[E, R], computation blocks of an edge at a rank, plus one at the owner
    node_pins: Ints  # int32[E, nodes], ranks of the node that the edge touches
    touched: Ints  # int32[E], ranks that the edge touches
    prices: Ints  # float64[E], the sum of their prices
    load: Ints  # float64[M, R]
    token_load: Ints  # float64[R]
    random: Ints  # uint64[1]
    moved: Ints  # int32[C], scratch


@lean_jit
def count_pins(problem: Fields, state: Fields) -> None:
    """Fill in what a state counts."""
    p, s = Problem(*problem), State(*state)
    for token in range(len(p.tokens)):
        s.token_load[s.owner[token]] += p.tokens[token]
    for edge in range(len(p.edge_token)):
        s.pins[edge, s.owner[p.edge_token[edge]]] += 1
    for comp in range(len(p.work)):
        rank = s.comp_rank[comp]
        s.load[p.mask[comp], rank] += p.work[comp]
        s.pins[p.q_edge[comp], rank] += 1
        s.pins[p.kv_edge[comp], rank] += 1
    for edge in range(len(p.edge_token)):
        for rank in range(len(p.rank_price)):
            if s.pins[edge, rank] > 0:
                s.node_pins[edge, p.node[rank]] += 1
                s.touched[edge] += 1
                s.prices[edge] += p.rank_price[rank]


@lean_part
def _random(s: State) -> Any:
    """31 random bits."""
    x = s.random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    s.random[0] = x
    return np.int64(x >> np.uint64(33))


@lean_part
def _below(s: State, count: int) -> int:
    """A random number in `[0, count)`, for counts of less than 32 bits."""
    return (_random(s) * count) >> 31


@lean_part
def _accepts(s: State, change: float, temperature: float) -> bool:
    if change <= 0:
        return True
    return change < HOPELESS * temperature and _random(s) < np.exp(-change / temperature) * 2147483648.0


@lean_part
def _excess_change(here: float, there: float, amount: float, limit: float) -> float:
    """By how much excess grows when an amount moves between two loads."""
    after = max(0.0, here - amount - limit) + max(0.0, there + amount - limit)
    return after - max(0.0, here - limit) - max(0.0, there - limit)


@lean_part
def _change(p: Problem, s: State, edge: int, here: int, there: int, count: int) -> float:
    """By how much the energy grows when some pins of an edge, but not its owner, move."""
    leaves, enters = s.pins[edge, here] == count, s.pins[edge, there] == 0
    out = p.out_cost[edge] * p.rank_price[s.owner[p.edge_token[edge]]]
    change = 0.0
    if leaves:
        change -= p.in_cost[edge] * p.rank_price[here] + out
    if enters:
        change += p.in_cost[edge] * p.rank_price[there] + out
    node, other = p.node[here], p.node[there]
    if node != other:
        if leaves and s.node_pins[edge, node] == 1:
            change -= p.node_cost[edge]
        if enters and s.node_pins[edge, other] == 0:
            change += p.node_cost[edge]
    return change


@lean_part
def _shift(p: Problem, s: State, edge: int, here: int, there: int, count: int) -> None:
    """Move pins of an edge."""
    s.pins[edge, here] -= count
    if s.pins[edge, here] == 0:
        s.node_pins[edge, p.node[here]] -= 1
        s.touched[edge] -= 1
        s.prices[edge] -= p.rank_price[here]
    if s.pins[edge, there] == 0:
        s.node_pins[edge, p.node[there]] += 1
        s.touched[edge] += 1
        s.prices[edge] += p.rank_price[there]
    s.pins[edge, there] += count


@lean_part
def _edge_energy(p: Problem, s: State, edge: int, owner: int) -> float:
    price = p.rank_price[owner]
    nodes = 1
    if p.node_cost[edge] > 0:
        nodes = 0
        for node in range(s.node_pins.shape[1]):
            nodes += s.node_pins[edge, node] > 0
    moved = p.in_cost[edge] * (s.prices[edge] - price) + p.out_cost[edge] * price * (s.touched[edge] - 1)
    return moved + p.node_cost[edge] * (nodes - 1)


@lean_part
def _draw_rank(p: Problem, s: State, edge: int, here: int) -> int:
    """A rank that an edge touches, other than `here`; -1 where none is found."""
    first, count = p.edge_ptr[edge], p.edge_ptr[edge + 1] - p.edge_ptr[edge]
    for _ in range(DRAWS):
        at = _below(s, count + 1)
        rank = s.comp_rank[p.edge_comps[first + at]] if at < count else s.owner[p.edge_token[edge]]
        if rank != here:
            return rank
    return -1


@lean_part
def _move_comp(p: Problem, s: State, comp: int, there: int) -> float:
    """Move a computation block, and return by how much the energy of its edges grows."""
    here = s.comp_rank[comp]
    change = 0.0
    for edge in (p.q_edge[comp], p.kv_edge[comp]):
        change += _change(p, s, edge, here, there, 1)
        _shift(p, s, edge, here, there, 1)
    s.comp_rank[comp] = there
    return change


@lean_part
def _move_token(p: Problem, s: State, token: int, there: int) -> float:
    """Give a token block to another rank, and return by how much the energy of its edges grows."""
    here = s.owner[token]
    change = 0.0
    for at in range(p.token_ptr[token], p.token_ptr[token + 1]):
        edge = p.token_edges[at]
        change -= _edge_energy(p, s, edge, here)
        _shift(p, s, edge, here, there, 1)
        change += _edge_energy(p, s, edge, there)
    s.owner[token] = there
    return change


@lean_part
def _try_comp(p: Problem, s: State, comp: int, edge: int, temperature: float, price: float) -> None:
    """Perhaps move a computation block to a rank that one of its edges touches."""
    here = s.comp_rank[comp]
    there = _draw_rank(p, s, edge, here)
    if there < 0:
        return
    mask, work = p.mask[comp], p.work[comp]
    change = _change(p, s, p.q_edge[comp], here, there, 1) + _change(p, s, p.kv_edge[comp], here, there, 1)
    change += price * _excess_change(s.load[mask, here], s.load[mask, there], work, p.work_limit[mask])
    if _accepts(s, change, temperature):
        _move_comp(p, s, comp, there)
        s.load[mask, here] -= work
        s.load[mask, there] += work


@lean_part
def _move_line(p: Problem, s: State, edge: int, here: int, there: int, count: int) -> tuple[float, int]:
    """Move all computation blocks of an edge that are `here`. Notes them in `s.moved` from `count` on; returns by how
    much the energy of all edges grows, and the new count."""
    change = 0.0
    for at in range(p.edge_ptr[edge], p.edge_ptr[edge + 1]):
        comp = p.edge_comps[at]
        if s.comp_rank[comp] == here:
            change += _move_comp(p, s, comp, there)
            s.moved[count] = comp
            count += 1
    return change, count


@lean_part
def _load_change(p: Problem, s: State, first: int, last: int, here: int, there: int, sign: float) -> float:
    """Add what `s.moved[first:last]` carries from one rank to another, times `sign`, to the loads; the growth of
    excess."""
    change = 0.0
    for at in range(first, last):
        comp = s.moved[at]
        mask, work = p.mask[comp], sign * p.work[comp]
        change += _excess_change(s.load[mask, here], s.load[mask, there], work, p.work_limit[mask])
        s.load[mask, here] -= work
        s.load[mask, there] += work
    return change


@lean_part
def _try_line(p: Problem, s: State, comp: int, edge: int, temperature: float, price: float) -> None:
    """Perhaps move all computation blocks that an edge has at a rank."""
    here = s.comp_rank[comp]
    there = _draw_rank(p, s, edge, here)
    if there < 0:
        return
    change, count = _move_line(p, s, edge, here, there, 0)
    change += price * _load_change(p, s, 0, count, here, there, 1.0)
    if not _accepts(s, change, temperature):
        for at in range(count):
            _move_comp(p, s, s.moved[at], here)
        _load_change(p, s, 0, count, here, there, -1.0)


@lean_part
def _draw_tokens(p: Problem, s: State) -> tuple[int, int, int]:
    """A token block, a rank to give it to (-1 for none), and a block of that rank to take for it (-1 for none)."""
    token = _below(s, len(p.tokens))
    here, first, count = s.owner[token], p.token_ptr[token], p.token_ptr[token + 1] - p.token_ptr[token]
    way = _random(s) & 3
    if way == 0 or count == 0:  # any two blocks
        other = _below(s, len(p.tokens))
        there = s.owner[other]
        if there == here:
            return token, -1, -1
        return token, there, other
    if way == 1:  # any rank
        there = _below(s, len(p.rank_price))
        return token, -1 if there == here else there, -1
    there = _draw_rank(p, s, p.token_edges[first + _below(s, count)], here)
    if there >= 0 and way == 2:
        for _ in range(4 * DRAWS):
            other = _below(s, len(p.tokens))
            if s.owner[other] == there:
                return token, there, other
    return token, there, -1


@lean_part
def _move_rows(p: Problem, s: State, token: int, here: int, there: int, count: int) -> tuple[float, int]:
    """Move a token block's computation blocks, those of its queries, that are `here`; as `_move_line`."""
    change = 0.0
    for at in range(p.token_ptr[token], p.token_ptr[token + 1]):
        if p.token_edges[at] < p.q_edges:
            more, count = _move_line(p, s, p.token_edges[at], here, there, count)
            change += more
    return change, count


@lean_part
def _try_tokens(p: Problem, s: State, rows: bool, now: Ints) -> None:
    """Perhaps give a token block to another rank, or swap two, with the computation of their queries or without."""
    token, there, other = _draw_tokens(p, s)
    if there < 0:
        return
    here = s.owner[token]
    tokens = p.tokens[token] - (p.tokens[other] if other >= 0 else 0.0)
    change = now[2] * _excess_change(s.token_load[here], s.token_load[there], tokens, p.token_limit)
    first = last = 0
    if rows and other >= 0:
        more, first = _move_rows(p, s, other, there, here, 0)
        change += more
        last = first
    if rows:
        more, last = _move_rows(p, s, token, here, there, first)
        change += more
    change += _move_token(p, s, token, there)
    if other >= 0:
        change += _move_token(p, s, other, here)
    change += now[1] * (
        _load_change(p, s, 0, first, there, here, 1.0) + _load_change(p, s, first, last, here, there, 1.0)
    )
    if _accepts(s, change, now[0]):
        s.token_load[here] -= tokens
        s.token_load[there] += tokens
        return
    _move_token(p, s, token, here)
    if other >= 0:
        _move_token(p, s, other, there)
    for at in range(first):
        _move_comp(p, s, s.moved[at], there)
    for at in range(first, last):
        _move_comp(p, s, s.moved[at], here)
    _load_change(p, s, 0, first, there, here, -1.0)
    _load_change(p, s, first, last, here, there, -1.0)


@lean_jit
def anneal_steps(problem: Fields, state: Fields, steps: int, now: Ints, ratio: Ints) -> None:
    """All steps; `now` has temperature, work price and token price, which are multiplied by `ratio` every chunk."""
    p, s = Problem(*problem), State(*state)
    for step in range(steps):
        if step % CHUNK == 0:
            for which in range(3):
                now[which] *= ratio[which]
        kind = _random(s) & 1023
        if kind >= LINE:
            _try_tokens(p, s, kind < ROWS, now)
            continue
        comp = _below(s, len(p.work))
        edge = p.q_edge[comp] if _random(s) & 1 else p.kv_edge[comp]
        if kind < COMP:
            _try_comp(p, s, comp, edge, now[0], now[1])
        else:
            _try_line(p, s, comp, edge, now[0], now[1])


@lean_jit
def relieve_ranks(problem: Fields, state: Fields, rank_ptr: Ints, rank_comps: Ints) -> None:
    """Move computation blocks away from ranks above the limit on work; `rank_comps` are those of each
    mask and rank at first."""
    p, s = Problem(*problem), State(*state)
    for here in range(len(p.rank_price)):
        for mask in range(len(p.work_limit)):
            failures, at = 0, mask * len(p.rank_price) + here
            while s.load[mask, here] > p.work_limit[mask] * (1 + ROUNDING) and failures < GIVE_UP:
                comp, there = _cheapest(p, s, mask, here, rank_ptr[at], rank_ptr[at + 1], rank_comps)
                if comp < 0:
                    failures += 1
                    continue
                _move_comp(p, s, comp, there)
                s.load[mask, here] -= p.work[comp]
                s.load[mask, there] += p.work[comp]


@lean_part
def _cheapest(p: Problem, s: State, mask: int, here: int, first: int, stop: int, rank_comps: Ints) -> tuple[int, int]:
    """Of some moves away from a rank, the one that costs least for the relief it gives; -1 where none is allowed."""
    emptiest = 0
    for rank in range(len(p.rank_price)):
        if s.load[mask, rank] < s.load[mask, emptiest]:
            emptiest = rank
    best, target, least = -1, -1, np.inf
    for _ in range(SAMPLES):
        comp = rank_comps[first + _below(s, stop - first)]
        if s.comp_rank[comp] != here:
            continue
        there = _draw_rank(p, s, p.q_edge[comp] if _random(s) & 1 else p.kv_edge[comp], here)
        if there < 0 or _random(s) & 7 == 0:
            there = emptiest
        if there == here or s.load[mask, there] + p.work[comp] > p.work_limit[mask]:
            continue
        cost = _change(p, s, p.q_edge[comp], here, there, 1) + _change(p, s, p.kv_edge[comp], here, there, 1)
        relief = min(p.work[comp], s.load[mask, here] - p.work_limit[mask])
        rate = cost / relief if cost > 0 else cost
        if rate < least:
            best, target, least = comp, there, rate
    return best, target


@lean_jit
def add_node_energy(problem: Fields, state: Fields, energy: Ints) -> None:
    """Add to `energy`, float64[nodes], what each edge costs at each node."""
    p, s = Problem(*problem), State(*state)
    for edge in range(len(p.edge_token)):
        home = p.node[s.owner[p.edge_token[edge]]]
        for node in range(len(energy)):
            if s.node_pins[edge, node] == 0:
                continue
            count = 0
            for rank in range(node * p.per_node, (node + 1) * p.per_node):
                count += s.pins[edge, rank] > 0
            energy[node] += (p.in_cost[edge] + p.out_cost[edge]) * (count - (node == home))
            if node != home:
                energy[node] += p.node_cost[edge]


@lean_jit
def add_edge_energy(problem: Fields, state: Fields, energy: Ints) -> None:
    """Add to `energy`, float64[E], what each edge costs."""
    p, s = Problem(*problem), State(*state)
    for edge in range(len(energy)):
        energy[edge] += _edge_energy(p, s, edge, s.owner[p.edge_token[edge]])


@lean_jit
def fit_largest_first(
    problem: Fields, order: Ints, block_node: Ints, comp_rank: Ints, owner: Ints, load: Ints, value: Ints
) -> None:
    """Give the token blocks in `order` to ranks with room; fills in `owner` and `load`, `value` is scratch."""
    p = Problem(*problem)
    for token in order:
        _own_values(p, token, comp_rank, value)
        first, last = 0, len(load)
        if block_node[token] >= 0:
            first, last = block_node[token] * p.per_node, (block_node[token] + 1) * p.per_node
        best, emptiest = -1, first
        for rank in range(first, last):
            if load[rank] < load[emptiest]:
                emptiest = rank
            if load[rank] + p.tokens[token] > p.token_limit:
                continue
            if best < 0 or value[rank] > value[best] or (value[rank] == value[best] and load[rank] < load[best]):
                best = rank
        owner[token] = best if best >= 0 else emptiest
        load[owner[token]] += p.tokens[token]


@lean_part
def _own_values(p: Problem, token: int, comp_rank: Ints, value: Ints) -> None:
    """Fill in, for each rank, the bytes that need not move if it owns a token block."""
    value[:] = 0.0
    for at in range(p.token_ptr[token], p.token_ptr[token + 1]):
        edge = p.token_edges[at]
        last = -1
        for at_comp in range(p.edge_ptr[edge], p.edge_ptr[edge + 1]):
            rank = comp_rank[p.edge_comps[at_comp]]
            if rank != last:  # counts a rank more than once where its blocks are apart: it has more of the edge
                value[rank] += p.in_cost[edge] + p.out_cost[edge]
                last = rank
