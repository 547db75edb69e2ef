"""Local search on a placement: simulated annealing over moves of computation blocks and token blocks.

The energy is what the placement costs to carry out, plus what it is above its limits:

    energy = sum over edges of  in  x prices of the ranks touched, without the owner's
                              + out x the owner's price x (ranks touched - 1)
                              + node x (nodes touched - 1)
           + sum over ranks of  work_price x work above the limit  (each mask on its own)
                              + token_price x tokens above the limit

Edges, and what touching means, are those of `nets.Nets`; with all prices 1 the first two lines are the bytes that move.
Pin counts per (edge, rank) and (edge, node) make the change of energy of a move a matter of a few additions. The prices
of excess grow while the temperature falls, so that the search can cross ground that is out of balance but ends on
ground that is not.

Everything here depends on the seed and the number of steps alone, not on time or the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.planner.partition.moves import (
    CHUNK,
    ROUNDING,
    Problem,
    State,
    add_edge_energy,
    add_node_energy,
    anneal_steps,
    count_pins,
    fit_largest_first,
    relieve_ranks,
)
from dyncp.planner.partition.nets import Nets
from dyncp.planner.sorting import pointers

LAST_PRICE = 50.0  # of excess, in `cost_scale` per unit of work and per token, when placements are compared


@dataclass(frozen=True, slots=True)
class Limits:
    """How far above the mean the computation and the tokens of a part may lie, as fractions."""

    work: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Costs:
    """What a problem's energy counts, besides excess."""

    moved: float = 1.0  # of a byte that moves
    crossed: float = 0.0  # of a byte that moves to another node, on top of that
    rank_price: Ints | None = None  # float64[R], of a byte that a rank receives; 1 when left out


@dataclass(frozen=True, slots=True)
class Cooling:
    """How a search goes: temperatures and prices of excess change geometrically from the first to the second.

    The unit of temperatures is the bytes of a small edge, that of prices `cost_scale` per unit of work and per token.
    """

    steps: int
    temperature: tuple[float, float]
    price: tuple[float, float]
    token_price: tuple[float, float] | None = None  # the same as that of work when left out


def make_problem(nets: Nets, ranks: int, per_node: int, costs: Costs, limits: Limits) -> Problem:
    """The search for a placement of a hypergraph on `ranks` parts, each `per_node` of which are a node.

    A limit is never below the largest block: with coarse blocks, only finer ones can do better.
    """
    edges = len(nets.edge_token)
    ends = np.concatenate([nets.q_edge, nets.kv_edge]).astype("int32")
    comps = np.tile(np.arange(len(nets), dtype="int32"), 2)
    masks = int(nets.mask.max(initial=0)) + 1
    of_mask = np.bincount(nets.mask, nets.work, masks)
    largest = np.zeros(masks)
    np.maximum.at(largest, nets.mask, nets.work)
    mean_tokens = float(nets.tokens.sum()) / ranks
    return Problem(
        nets.q_edge.astype("int32"),
        nets.kv_edge.astype("int32"),
        nets.work,
        nets.mask.astype("int32"),
        pointers(ends, edges),
        comps[np.argsort(ends, kind="stable")],
        nets.edge_token.astype("int32"),
        int(nets.q_edge.max(initial=-1)) + 1,
        nets.in_bytes * costs.moved,
        nets.out_bytes * costs.moved,
        nets.edge_bytes * costs.crossed,
        nets.tokens.astype("float64"),
        pointers(nets.edge_token, len(nets.tokens)),
        np.argsort(nets.edge_token, kind="stable").astype("int32"),
        np.ones(ranks) if costs.rank_price is None else costs.rank_price,
        (np.arange(ranks) // per_node).astype("int32"),
        per_node,
        np.maximum((1 + min(limits.work, ranks)) * of_mask / ranks, largest),
        max((1 + min(limits.tokens, ranks)) * mean_tokens, float(nets.tokens.max(initial=0))),
    )


def anneal(problem: Problem, block_rank: Ints, comp_rank: Ints, cooling: Cooling, seed: int) -> tuple[Ints, Ints]:
    """(int32[B], int32[C]): the ranks of token blocks and computation blocks after a search from the ones given."""
    state = _state(problem, block_rank, comp_rank, seed)
    if len(problem.work) and len(problem.rank_price) > 1:
        moved = problem.in_cost + problem.out_cost
        unit = float(np.partition(moved, len(moved) // 4)[len(moved) // 4])
        scale = cost_scale(problem)
        of_work, of_tokens = scale / problem.work.sum(), scale / problem.tokens.sum()
        prices = [np.multiply(of_work, cooling.price), np.multiply(of_tokens, cooling.token_price or cooling.price)]
        course = np.concatenate([[np.multiply(unit, cooling.temperature)], prices])
        ratio = (course[:, 1] / course[:, 0]) ** (1.0 / max(1, cooling.steps // CHUNK))
        anneal_steps(tuple(problem), tuple(state), cooling.steps, course[:, 0].copy(), ratio)
    return state.owner, state.comp_rank


def cost_scale(problem: Problem) -> float:
    """Roughly what all of a problem costs: of all edges once, or of square tiles on every part if that is more. Prices
    of excess are in terms of it."""
    moved = problem.in_cost + problem.out_cost
    tokens = problem.tokens[problem.edge_token]
    sides = [slice(0, problem.q_edges), slice(problem.q_edges, len(moved))]
    per_token = [float(moved[side].sum()) / max(float(tokens[side].sum()), 1.0) for side in sides]
    tiles = 2 * np.sqrt(len(problem.rank_price) * per_token[0] * per_token[1] * float(problem.work.sum()))
    return max(float(moved.sum()), float(tiles), 1e-30)


def relieve(problem: Problem, block_rank: Ints, comp_rank: Ints, seed: int) -> Ints:
    """int32[C]: `comp_rank`, with computation blocks moved away from ranks above the limit on work, at little cost for
    the relief; a rank may stay above it where no block fits elsewhere."""
    state = _state(problem, block_rank, comp_rank, seed)
    if (state.load > problem.work_limit[:, None] * (1 + ROUNDING)).any():
        group = problem.mask.astype("int64") * len(problem.rank_price) + comp_rank
        bounds = pointers(group, state.load.size)
        relieve_ranks(tuple(problem), tuple(state), bounds, np.argsort(group, kind="stable").astype("int32"))
    return state.comp_rank


def node_energy(problem: Problem, block_rank: Ints, comp_rank: Ints, token_price: float = LAST_PRICE) -> Ints:
    """float64[nodes]: the energy of a placement, without prices of ranks, shared out to the nodes where it arises."""
    state = _state(problem, block_rank, comp_rank, 0)
    energy = np.zeros(state.node_pins.shape[1])
    add_node_energy(tuple(problem), tuple(state), energy)
    over = np.maximum(state.load - problem.work_limit[:, None], 0).sum(axis=0) / max(1e-30, float(problem.work.sum()))
    tokens = np.maximum(state.token_load - problem.token_limit, 0) / max(1e-30, float(problem.tokens.sum()))
    excess = (LAST_PRICE * over + token_price * tokens).reshape(len(energy), -1).sum(axis=1)
    nodes: Ints = energy + cost_scale(problem) * excess
    return nodes


def edge_energy(problem: Problem, block_rank: Ints, comp_rank: Ints) -> Ints:
    """float64[E]: the energy of each edge."""
    state = _state(problem, block_rank, comp_rank, 0)
    energy = np.zeros(len(problem.edge_token))
    add_edge_energy(tuple(problem), tuple(state), energy)
    return energy


def fit_tokens(problem: Problem, block_node: Ints, block_rank: Ints, comp_rank: Ints) -> Ints:
    """int32[B]: an owner for each token block that has none (-1 in `block_rank`), largest first: the rank, of those of
    its node that have room, that saves most. `block_node` is -1 where any node will do."""
    owner = block_rank.astype("int32")
    owned = owner >= 0
    load = np.zeros(len(problem.rank_price))  # not what bincount returns: of nothing, it counts integers
    np.add.at(load, owner[owned], problem.tokens[owned])
    order = np.flatnonzero(~owned)
    order = order[np.argsort(-problem.tokens[order], kind="stable")]
    fit_largest_first(
        tuple(problem), order, block_node.astype("int64"), comp_rank.astype("int32"), owner, load, np.zeros(len(load))
    )
    return owner


def _state(problem: Problem, block_rank: Ints, comp_rank: Ints, seed: int) -> State:
    edges, ranks = len(problem.edge_token), len(problem.rank_price)
    state = State(
        comp_rank.astype("int32"),
        block_rank.astype("int32"),
        np.zeros((edges, ranks), "int32"),
        np.zeros((edges, ranks // problem.per_node), "int32"),
        np.zeros(edges, "int32"),
        np.zeros(edges),
        np.zeros((len(problem.work_limit), ranks)),
        np.zeros(ranks),
        np.array([seed * 2654435761 + 88172645463325252], "uint64"),
        np.zeros(len(problem.work), "int32"),
    )
    count_pins(tuple(problem), tuple(state))
    return state
