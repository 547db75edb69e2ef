"""Placement by hypergraph partitioning (paper, section 4.2): first over the nodes, then over the ranks of each node.

Computation and tokens must both be balanced, but the solver knows one weight per vertex. So a split goes in steps:
1. computation and token blocks are partitioned together, by the sum of both weights, to see what belongs together;
2. token blocks are given to parts by a local search under the limit on tokens, with the computation where it is;
3. computation blocks are partitioned under the limit on computation, with the token blocks where they are. The masks
   do not touch each other here, and each is balanced on its own: layers of different masks run one after the other;
4. step 2 again, from where the token blocks are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.shape import AttentionShape
from dyncp.planner.partition.balance import Limits, repair, unmet
from dyncp.planner.partition.estimate import Estimate, estimate
from dyncp.planner.partition.nets import Nets, loads
from dyncp.planner.partition.ownership import even_load, give_tokens
from dyncp.planner.partition.solver import Hypergraph, Partition, partition

TOKEN_EPSILON_NODES = 0.01  # how far above the mean the tokens of a node may lie
TOKEN_EPSILON_RANKS = 0.05  # the same of a rank
TIGHT = 0.04  # a tolerance between nodes that costs little time, tried besides the one asked for
# What step 1 is tried with: the weight of all tokens against all computation, and whether the seed shuffles the blocks
# (their order in the batch guides the solver well, but not always). Each wins on some of the batches that we measured.
TRIES = ((6.0, False), (12.0, False), (1.0, False), (3.0, True))
TRIES_RANKS = 2  # within a node there is less to gain
SMALL_TOKENS = 4096  # below, one try is enough
LARGE = 16000  # computation blocks towards which there is time for fewer tries
LEAST_WEIGHT = 2.0**-30  # of a mask next to the largest; the solver's integers cannot tell less from nothing


class Tolerances(Protocol):
    """The options that placement reads, see `strategies.api.Options`."""

    @property
    def divisions(self) -> int: ...
    @property
    def epsilon_nodes(self) -> float: ...
    @property
    def epsilon_ranks(self) -> float: ...
    @property
    def keep(self) -> str: ...
    @property
    def wire(self) -> str: ...
    @property
    def seed(self) -> int: ...


class Split(NamedTuple):
    """Where the blocks of a hypergraph go."""

    block_part: Ints  # int64[B]
    comp_part: Ints  # int64[C]
    failures: frozenset[str] = frozenset()  # what the solver said where it gave up


@dataclass(frozen=True, slots=True)
class Goal:
    """What one split aims at."""

    parts: int
    epsilon: float  # how far the computation of a part may lie above the mean
    token_limit: float  # most tokens of a part
    tries: int
    seed: int


def place(
    blocks: Blocks, shape: AttentionShape, cluster: Cluster, options: Tolerances
) -> tuple[Placement, tuple[str, ...]]:
    """Where the blocks of a batch go, such that few bytes cross ranks, and the constraints that are not met, in words.

    The same arguments give the same placement, in every process.
    """
    nets = Nets.of_batch(even_weights(blocks), shape, options.keep, options.wire)
    block_node, comp_node, failures = over_nodes(nets, shape, cluster, options)
    per_node = cluster.ranks_per_node
    block_rank, comp_rank = block_node * per_node, comp_node * per_node
    limit = even_load(nets.tokens, cluster.ranks, TOKEN_EPSILON_RANKS)
    for node in range(cluster.nodes):
        own_blocks, own_comps = np.flatnonzero(block_node == node), np.flatnonzero(comp_node == node)
        goal = Goal(per_node, min(options.epsilon_ranks, per_node), limit, TRIES_RANKS, options.seed)
        block_part, comp_part, failed = over_ranks(nets.restrict(own_blocks, own_comps), goal)
        failures |= failed
        block_rank[own_blocks] += block_part
        comp_rank[own_comps] += comp_part
    if loads(nets.tokens, block_rank, cluster.ranks).max() > limit:  # blocks may have to change their node
        block_rank = give_tokens(nets, comp_rank, cluster.ranks, limit, block_rank)
    placement = Placement(block_rank, comp_rank.reshape(blocks.groups, len(blocks)))
    limits = Limits(options.epsilon_nodes, options.epsilon_ranks, TOKEN_EPSILON_RANKS)
    notes = tuple(f"the partitioner gave up and blocks were dealt out evenly: {text}" for text in sorted(failures))
    return placement, unmet(blocks, placement, cluster, limits) + notes


def even_weights(blocks: Blocks) -> Blocks:
    """The blocks with mask weights of at most 2, and none lost next to another. Scaled by a power of two, which rounds
    nothing."""
    weights = np.asarray(blocks.mask_weights)
    scaled = np.ldexp(weights, 1 - int(np.frexp(weights.max())[1]))
    return replace(blocks, mask_weights=tuple(np.maximum(scaled, LEAST_WEIGHT).tolist()))


def all_in_one(nets: Nets) -> Split:
    """Everything in part 0."""
    return Split(np.zeros(len(nets.tokens), "int64"), np.zeros(len(nets), "int64"))


def over_nodes(nets: Nets, shape: AttentionShape, cluster: Cluster, options: Tolerances) -> Split:
    """The node of each token block and of each computation block, by the least estimated time.

    All ranks wait for the fullest node, so a tight tolerance is tried besides the one asked for, and the latter not at
    all where computation takes most of the time.
    """
    if cluster.nodes == 1:
        return all_in_one(nets)
    # no rank has more than its node, no node more than all
    slack, wide = min(options.epsilon_ranks, cluster.ranks_per_node), min(options.epsilon_nodes, cluster.nodes)
    machines = replace(
        cluster,
        ranks_per_node=1,
        flops_per_s=cluster.flops_per_s * cluster.ranks_per_node / (1 + slack),
        intra_bytes_per_s=np.inf,  # unknown yet
    )
    token_limit = even_load(nets.tokens, cluster.nodes, TOKEN_EPSILON_NODES)
    least, time, best = (np.inf, np.inf), Estimate(0.0, np.inf), all_in_one(nets)
    for epsilon in sorted({min(TIGHT, wide), wide}):
        if time.transfer_s < time.compute_s / 2:
            break
        for over, split in tries(nets, Goal(cluster.nodes, epsilon, token_limit, len(TRIES), options.seed)):
            spent = estimate(nets, split.block_part, split.comp_part, shape, machines)
            cost = over, spent.total_s(options.divisions)
            if cost < least:
                least, time, best = cost, spent, split
    return best


def over_ranks(nets: Nets, goal: Goal) -> Split:
    """A split with the least bytes."""
    least, best = (np.inf, np.inf), all_in_one(nets)
    if goal.parts > 1 and len(nets.tokens) + len(nets) > 0:
        for over, split in tries(nets, goal):
            cost = over, nets.cut_bytes(split.block_part, split.comp_part, goal.parts)
            if cost < least:
                least, best = cost, split
    return best


def tries(nets: Nets, goal: Goal) -> Iterator[tuple[float, Split]]:
    """Several splits, and how far the fullest part of each is above its limit (as a fraction, 0 when none is)."""
    masks = np.unique(nets.mask).tolist()
    limits = {mask: even_load(nets.work[nets.mask == mask], goal.parts, goal.epsilon) for mask in masks}
    number = 1 if nets.tokens.sum() < SMALL_TOKENS else max(1, min(goal.tries, LARGE // max(1, len(nets))))
    for token_share, shuffled in TRIES[:number]:
        start = together(nets, goal, token_share, goal.seed if shuffled else None)
        block_part = give_tokens(nets, start.part, goal.parts, goal.token_limit)
        comp_part, failures = computation(nets, block_part, goal.parts, limits)
        block_part = give_tokens(nets, comp_part, goal.parts, goal.token_limit, block_part)
        failures |= {start.failure} - {""}
        yield excess(nets, block_part, comp_part, goal, limits), Split(block_part, comp_part, failures)


def excess(nets: Nets, block_part: Ints, comp_part: Ints, goal: Goal, limits: dict[int, float]) -> float:
    """How far the fullest part is above its limit, as a fraction; 0 when none is."""
    ratios = [loads(nets.tokens, block_part, goal.parts).max() / goal.token_limit]
    for mask, limit in limits.items():
        mine = nets.mask == mask
        ratios.append(loads(nets.work[mine], comp_part[mine], goal.parts).max() / limit)
    return max(0.0, round(max(ratios) - 1, 6))


def together(nets: Nets, goal: Goal, token_share: float, shuffle: int | None) -> Partition:
    """The part of each computation block when one weight stands for both computation and tokens."""
    blocks, comps = len(nets.tokens), len(nets.tokens) + np.arange(len(nets))
    owned = np.flatnonzero(nets.edge_token >= 0)
    weight = np.concatenate(
        [nets.tokens / max(1, nets.tokens.sum()) * token_share, nets.work / (float(nets.work.sum()) or 1.0)]
    )
    limit = max((1 + goal.epsilon) * weight.sum() / goal.parts, weight.max())
    graph = Hypergraph(
        np.concatenate([nets.q_edge, nets.kv_edge, owned]),
        np.concatenate([comps, comps, nets.edge_token[owned]]),
        nets.edge_bytes,
        weight,
        np.full(len(weight), -1),
    )
    found = partition(graph, np.full(goal.parts, limit), shuffle)
    return Partition(found.part[blocks:], found.failure)


def computation(nets: Nets, block_part: Ints, parts: int, limits: dict[int, float]) -> tuple[Ints, frozenset[str]]:
    """int64[C], the part of each computation block, with the token blocks where they are, and what the solver said
    where it gave up; `limits` are per mask."""
    comp_part = np.zeros(len(nets), "int64")
    failures: set[str] = set()
    for mask, limit in limits.items():
        part, comps = nets.of_mask(mask)
        vertices = parts + np.arange(len(part))  # behind one fixed vertex for the token blocks of each part
        owner = part.owner(block_part)
        owned = np.flatnonzero(owner >= 0)
        graph = Hypergraph(
            np.concatenate([part.q_edge, part.kv_edge, owned]),
            np.concatenate([vertices, vertices, owner[owned]]),
            part.edge_bytes,
            np.concatenate([np.zeros(parts), np.minimum(part.work, limit)]),  # a larger block has a part to itself
            np.concatenate([np.arange(parts), np.full(len(part), -1)]),
        )
        found = partition(graph, np.full(parts, limit))
        failures |= {found.failure} - {""}
        comp_part[comps] = repair(part, block_part, found.part[parts:], parts, limit)
    return comp_part, frozenset(failures)
