"""Placement by tiling and local search: over nodes before ranks, on coarse blocks before those asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isinf
from typing import NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import HAS_KV, HAS_Q, Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.shape import AttentionShape
from dyncp.planner.blockgen import blocks_of_bounds
from dyncp.planner.partition.aims import Aims
from dyncp.planner.partition.balance import asked_epsilon, balanced_work
from dyncp.planner.partition.coarsen import coarsen, gather, parents, project
from dyncp.planner.partition.estimate import received_bytes
from dyncp.planner.partition.even import even_tokens
from dyncp.planner.partition.moves import Problem
from dyncp.planner.partition.nets import Nets, loads
from dyncp.planner.partition.refine import (
    Cooling,
    Costs,
    Limits,
    anneal,
    fit_tokens,
    make_problem,
    node_energy,
    relieve,
)
from dyncp.planner.partition.start import Places, anywhere, by_heads, components, in_a_line, start

ENOUGH = 1000  # steps per computation block, where there are few
COARSE = 160  # computation blocks per rank above which coarser blocks are searched first
LEVELS = 2  # of finer blocks that a placement is searched on
LARGE = 1 << 27  # edges x ranks: above, memory is too dear for a search
NODE_TOKENS = 0.05  # how far above the mean the tokens of a node may lie at first
NODE_SHARE = 0.7  # of the tolerance of ranks, for nodes
ROUGH_CROSSED = 2.0  # what a byte between nodes costs on top at first, at most: ground between placements is less steep
SLACK = 0.95  # of a tolerance, for the search: its prices of excess are not walls
FEW = 24  # computation blocks per rank up to which coarser ones would be too coarse
# temperatures, first and last: a start is kept at low ones, and melts at high ones
COOL, COLD, MILD, WARM = (0.1, 0.03), (0.15, 0.03), (0.5, 0.05), (1.5, 0.1)
PRICES = (5.0, 50.0)  # of excess
CHEAP = (0.5, 1.0)  # of too many tokens, where cuts can even them out afterwards: about what they cost
ROUNDS = 6  # of new prices for ranks that receive much


class Found(NamedTuple):
    """A placement, and the blocks that it places."""

    blocks: Blocks
    placement: Placement


@dataclass(frozen=True, slots=True)
class Search:
    """What all stages of one placement share."""

    shape: AttentionShape
    cluster: Cluster
    aims: Aims

    @property
    def crossed(self) -> float:
        """What a byte between nodes costs on top of one that moves at all: by the time it takes, with the network of a
        node shared by its ranks."""
        if self.aims.objective != "time" or self.cluster.nodes == 1 or isinf(self.cluster.between_bytes_per_s):
            return 0.0
        slower = self.cluster.ranks_per_node * self.cluster.intra_bytes_per_s / self.cluster.between_bytes_per_s
        return float(np.clip(slower, 0.0, 1e6))

    @property
    def strict(self) -> tuple[float, float]:
        """Prices of excess that nothing else outweighs, not even a byte between nodes."""
        return 20.0 * (1 + self.crossed), 200.0 * (1 + self.crossed)

    def nets(self, blocks: Blocks) -> Nets:
        """The hypergraph of blocks, weighted as asked for."""
        work = balanced_work(blocks, self.shape, self.cluster, self.aims)
        return Nets.of_batch(blocks, self.shape, self.aims.keep, self.aims.wire, self.aims.pass_weights, work)

    def problem(
        self, nets: Nets, most_crossed: float = inf, rank_price: Ints | None = None, slack: float = SLACK
    ) -> Problem:
        """The search over all ranks, within a part of the tolerance for computation; a byte between nodes costs
        `most_crossed` on top at most."""
        limits = Limits(asked_epsilon(self.aims) * slack, self.aims.token_epsilon)
        costs = Costs(1.0, min(self.crossed, most_crossed), rank_price)
        return make_problem(nets, self.cluster.ranks, self.cluster.ranks_per_node, costs, limits)

    def steps(self, nets: Nets, per_block: float, more: float, most: float) -> int:
        """How many steps a stage takes: so many per computation block and `more`, `most` at most, and few for few
        blocks."""
        return max(1, int(self.aims.effort * min(most, per_block * len(nets) + min(more, ENOUGH * len(nets)))))

    def anneal(self, problem: Problem, start: Places, cooling: Cooling) -> Places:
        """What a search finds."""
        return anneal(problem, *start, cooling, self.aims.seed)

    def too_large(self, blocks: Blocks) -> bool:
        """Whether a search takes too much memory."""
        edges = 2 * len(blocks.tokens) * blocks.groups * len(blocks.mask_names)
        return edges * self.cluster.ranks > LARGE


def place(batch: Batch, blocks: Blocks, shape: AttentionShape, cluster: Cluster, aims: Aims) -> Found:
    """Where the blocks of a batch go, such that little moves and no limit is broken; some token blocks are cut for
    that.

    The same arguments give the same placement, in every process.
    """
    search = Search(shape, cluster, aims)
    levels = [blocks]
    while len(levels[-1]) * blocks.groups > COARSE * cluster.ranks:
        coarse = coarsen(levels[-1], 2)
        if len(coarse) == len(levels[-1]):
            break
        levels.append(coarse)
    found = Found(levels[-1], first(levels[-1], search))
    for finer in levels[-2::-1][-LEVELS:]:
        found = onto(found, finer, search)
    return finished(batch, found, search)


def finished(batch: Batch, found: Found, search: Search) -> Found:
    """A placement with even tokens, without overload where that can be, and for the objective asked for."""
    found = evened(batch, found, search)
    if search.aims.objective == "largest" and not search.too_large(found.blocks):
        found = Found(found.blocks, spread(found, search))
    return Found(found.blocks, repaired(found, search))


def first(blocks: Blocks, search: Search) -> Placement:
    """A placement of coarse blocks, found in several ways that are tried for a short time; the best is searched
    further. From tiles, or whole head groups, at low temperatures that keep them (for sequences cut among many ranks)
    or higher ones; from runs of rows (for masks that see near by); and on blocks twice as coarse at temperatures where
    all melts (for batches of many sequences).
    """
    nets = search.nets(blocks)
    problem = search.problem(nets, ROUGH_CROSSED)
    if search.too_large(blocks):
        return _placement(blocks, in_a_line(blocks, nets, problem))
    nodes = over_nodes(blocks, search)
    begin = started(blocks, nets, problem, nodes, search)
    steps = search.steps(nets, 100, 470_000, 5e6)

    together = np.bincount(components(blocks), blocks.tokens.tokens)  # of many, cuts part few
    token_price = CHEAP if together.max() < together.sum() / 2 else PRICES

    def energy(found: Places) -> float:
        return float(node_energy(problem, *found, token_price[1]).sum())

    def anneal(begin: Places, share: float, course: tuple[float, float]) -> Places:
        return search.anneal(problem, begin, Cooling(int(share * steps), course, PRICES, token_price))

    def melt(share: float) -> Places:
        warm = Cooling(int(share * steps), WARM, PRICES, token_price)
        return anneal(melted(coarse, blocks, problem, nodes, search, warm), share / 2, MILD)

    coarse = coarsen(blocks, 2) if len(nets) > FEW * search.cluster.ranks else blocks
    begin = min(begin, by_heads(blocks, nets, problem), key=energy)
    ways = ((begin, COLD), (begin, MILD), (in_a_line(blocks, nets, problem), MILD))
    probes = [anneal(way, 0.1, course) for way, course in ways]
    probes.append(melt(0.12))
    winner = int(np.argmin([energy(probe) for probe in probes]))
    if winner < len(ways):
        found = anneal(probes[winner], 1.0 if winner == 0 else 0.6, ways[winner][1])
    else:
        found = anneal(melt(0.4), 0.1, COLD)
    return _placement(blocks, min([begin, *probes, found], key=energy))


def melted(
    coarse: Blocks, blocks: Blocks, problem: Problem, nodes: Found | None, search: Search, cooling: Cooling
) -> Places:
    """A placement of blocks found on coarse ones."""
    nets = search.nets(coarse)
    coarse_problem = search.problem(nets, ROUGH_CROSSED)
    begin = started(coarse, nets, coarse_problem, nodes, search)
    found = search.anneal(coarse_problem, begin, cooling)
    return projected(Found(coarse, _placement(coarse, found)), blocks, problem)


def started(blocks: Blocks, nets: Nets, problem: Problem, nodes: Found | None, search: Search) -> Places:
    """A first placement of blocks, on the nodes found for them or for finer ones (anywhere with None)."""
    if nodes is None:
        return start(blocks, nets, problem, anywhere(nets), 1)
    places = gather(nodes.placement, nodes.blocks, blocks, search.cluster.nodes)
    node_of = places.block_rank.astype("int64"), places.comp_rank.ravel().astype("int64")
    return start(blocks, nets, problem, node_of, search.cluster.nodes)


def over_nodes(blocks: Blocks, search: Search) -> Found | None:
    """The node of each block, in place of its rank; None where nodes make no difference."""
    cluster = search.cluster
    if not search.crossed or cluster.ranks_per_node == 1:
        return None
    nets = search.nets(blocks)
    limits = Limits(asked_epsilon(search.aims) * NODE_SHARE, NODE_TOKENS)
    problem = make_problem(nets, cluster.nodes, 1, Costs(), limits)
    begin = started(blocks, nets, problem, None, search)
    steps = search.steps(nets, 25, 60_000, 2e6)
    ways = [begin, *(search.anneal(problem, begin, Cooling(steps, course, PRICES)) for course in (COLD, MILD))]
    energies = [float(node_energy(problem, *found).sum()) for found in ways]
    return Found(blocks, _placement(blocks, ways[int(np.argmin(energies))]))


def projected(found: Found, finer: Blocks, problem: Problem) -> Places:
    """A placement on finer blocks, with new owners of tokens where the coarse blocks were too large to have any."""
    placement = project(found.placement, found.blocks, finer, parents(found.blocks.tokens, finer.tokens))
    block_rank, comp_rank = placement.block_rank, placement.comp_rank.ravel()
    if found.blocks.tokens.tokens.max() > problem.token_limit:
        nobody = np.full(len(finer.tokens), -1)
        block_rank = fit_tokens(problem, nobody, nobody, comp_rank)
    return block_rank, comp_rank


def onto(found: Found, finer: Blocks, search: Search) -> Found:
    """A placement on finer blocks, searched further."""
    nets = search.nets(finer)
    problem = search.problem(nets)
    places = projected(found, finer, problem)
    if not search.too_large(finer):
        places = search.anneal(problem, places, Cooling(search.steps(nets, 20, 50_000, 5e5), COOL, search.strict))
    return Found(finer, _placement(finer, places))


def evened(batch: Batch, found: Found, search: Search) -> Found:
    """A placement in which no rank owns too many tokens: blocks are cut where no other way is left. Cut blocks are
    searched once more; what that leaves above the limit is cut again."""
    for searched in (True, False):
        load = loads(found.blocks.tokens.tokens, found.placement.block_rank, search.cluster.ranks)
        mean = float(load.mean())
        if load.max() <= max((1 + search.aims.token_epsilon) * mean, np.ceil(mean)) or search.too_large(found.blocks):
            break
        found = cut_tokens(batch, found, search)
        if searched:
            nets = search.nets(found.blocks)
            cooling = Cooling(search.steps(nets, 50, 100_000, 1e6), COLD, search.strict)
            places = found.placement.block_rank, found.placement.comp_rank.ravel()
            found = Found(found.blocks, _placement(found.blocks, search.anneal(search.problem(nets), places, cooling)))
    return found


def cut_tokens(batch: Batch, found: Found, search: Search) -> Found:
    """Token blocks of ranks that own too much, cut and given away."""
    blocks, placement = found
    ranks, per_node = search.cluster.ranks, search.cluster.ranks_per_node
    mean = float(blocks.tokens.tokens.sum()) / ranks
    limit = np.floor(max((1 + search.aims.token_epsilon / 2) * mean, np.ceil(mean)))
    places = placement.block_rank, placement.comp_rank.ravel()
    block, tokens, rank = even_tokens(search.nets(blocks), *places, per_node, limit, ranks, search.crossed)
    finer = blocks_of_bounds(batch, blocks.groups, bounds_of(blocks, block, tokens))
    finer = replace(finer, mask_weights=blocks.mask_weights)
    return Found(finer, Placement(rank, project(placement, blocks, finer, block).comp_rank))


def bounds_of(blocks: Blocks, block: Ints, tokens: Ints) -> list[tuple[Ints, Ints]]:
    """The bounds of each sequence's blocks of queries and of keys, once token blocks are cut into pieces."""
    before = np.cumsum(tokens) - tokens
    start = blocks.tokens.start[block] + before - before[np.searchsorted(block, block)]
    sequence, role = blocks.tokens.sequence[block], blocks.tokens.role[block]
    bounds: list[tuple[Ints, Ints]] = []
    lows = np.searchsorted(sequence, np.arange(int(sequence.max()) + 2))
    for low, high in zip(lows[:-1].tolist(), lows[1:].tolist(), strict=True):
        stop = np.append(start[low:high], start[high - 1] + tokens[high - 1])
        if (role[low:high] == HAS_Q | HAS_KV).all():
            bounds.append((stop, stop))
            continue
        middle = low + int(np.searchsorted(role[low:high], HAS_KV))  # queries come first
        queries = np.append(start[low:middle], start[middle - 1] + tokens[middle - 1])
        bounds.append((queries, np.append(start[middle:high], stop[-1])))
    return bounds


def spread(found: Found, search: Search) -> Placement:
    """A placement in which the rank that receives most receives less: bytes have prices, which rise where most
    arrives."""
    nets, ranks = search.nets(found.blocks), search.cluster.ranks
    places = found.placement.block_rank, found.placement.comp_rank.ravel()
    best, price = places, np.ones(ranks)
    received = received_bytes(nets, *places, search.cluster)[0]
    least = float(received.max())
    tokens = loads(nets.tokens, places[0], ranks)
    limit = max((1 + search.aims.token_epsilon) * float(tokens.mean()), float(tokens.max()))
    for _ in range(ROUNDS if least > 0 else 0):
        price = price * np.sqrt(np.maximum(received, received.mean() / 4) / max(1.0, float(received.mean())))
        price = np.clip(price / price.mean(), 0.1, 10.0)
        cooling = Cooling(search.steps(nets, 20, 50_000, 1e6), COOL, search.strict)
        places = search.anneal(search.problem(nets, rank_price=price), places, cooling)
        received = received_bytes(nets, *places, search.cluster)[0]
        if received.max() < least and loads(nets.tokens, places[0], ranks).max() <= limit:
            best, least = places, float(received.max())
        if not received.any():
            break
    return _placement(found.blocks, best)


def repaired(found: Found, search: Search) -> Placement:
    """A placement without ranks that compute too much, if moves of single blocks can reach one."""
    blocks, placement = found
    if search.too_large(blocks):
        return placement
    problem = search.problem(search.nets(blocks), slack=1.0)
    comp_rank = relieve(problem, placement.block_rank, placement.comp_rank.ravel(), search.aims.seed)
    return _placement(blocks, (placement.block_rank, comp_rank))


def _placement(blocks: Blocks, places: Places) -> Placement:
    return Placement(places[0], places[1].reshape(blocks.groups, len(blocks)))
