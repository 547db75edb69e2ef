"""Placement by hypergraph partitioning (paper, section 4.2): over the nodes, and then over the ranks of each; or over
all ranks at once, where it does not matter what crosses between nodes.

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
from typing import NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.shape import AttentionShape
from dyncp.planner.partition.aims import Aims
from dyncp.planner.partition.balance import asked_epsilon, balanced_work, repair
from dyncp.planner.partition.estimate import received_bytes
from dyncp.planner.partition.nets import Nets, loads
from dyncp.planner.partition.ownership import give_tokens
from dyncp.planner.partition.solver import Hypergraph, Partition, partition

NODE_TOKENS = 0.01  # how far above the mean the tokens of a node may lie
# What step 1 is tried with: the weight of all tokens against all computation, and whether the seed shuffles the blocks
# (their order in the batch guides the solver well, but not always). Each wins on some of the batches that we measured.
TRIES = ((6.0, False), (12.0, False), (1.0, False), (3.0, True))
TRIES_RANKS = 2  # within a node there is less to gain
SMALL_TOKENS = 4096  # below, one try is enough
LARGE = 16000  # computation blocks towards which there is time for fewer tries


class Split(NamedTuple):
    """Where the blocks of a hypergraph go."""

    block_part: Ints  # int64[B]
    comp_part: Ints  # int64[C]
    failures: frozenset[str] = frozenset()  # what the solver said where it gave up


@dataclass(frozen=True, slots=True)
class Goal:
    """What one split aims at."""

    parts: int
    work_limits: Ints  # float64[M], most computation of a part, of each mask
    token_limit: float  # most tokens of a part
    tries: int
    seed: int
    preset: str
    largest: bool  # whether what counts is the most that a part receives, or else the bytes of all


def place(
    blocks: Blocks, shape: AttentionShape, cluster: Cluster, options: Aims, preset: str = "deterministic"
) -> tuple[Placement, tuple[str, ...]]:
    """Where the blocks of a batch go, such that few bytes cross ranks, and what the solver said where it gave up.

    Limits are kept as far as blocks are fine enough for them. With the preset "deterministic" the same arguments give
    the same placement, in every process. The others of `solver.PRESETS`, "default" and "highest_quality", are
    yardsticks: their placements differ from call to call.

    Raises:
        ValueError: Mt-KaHyPar is not installed.
    """
    work = balanced_work(blocks, shape, cluster, options)
    nets = Nets.of_batch(blocks, shape, options.keep, options.wire, options.pass_weights, work)
    ranks = cluster.ranks
    most, most_tokens = (1 + min(epsilon, ranks) for epsilon in (asked_epsilon(options), options.token_epsilon))
    goal = Goal(
        ranks,
        most * np.bincount(nets.mask, nets.work, len(blocks.mask_names)) / ranks,
        most_tokens * float(nets.tokens.sum()) / ranks,
        len(TRIES),
        options.seed,
        preset,
        options.objective == "largest",
    )
    nested = options.objective == "time" and cluster.nodes > 1 and cluster.ranks_per_node > 1
    split = over_nodes(nets, cluster, goal, most**0.5) if nested else best_split(nets, goal)
    placement = Placement(split.block_part, split.comp_part.reshape(blocks.groups, len(blocks)))
    notes = (f"the partitioner gave up and blocks were dealt out evenly: {text}" for text in sorted(split.failures))
    return placement, tuple(notes)


def over_nodes(nets: Nets, cluster: Cluster, goal: Goal, slack: float) -> Split:
    """A split over the nodes, and then of each node over its ranks. `goal` is that of the ranks; nodes must be more
    even, by the factor `slack`."""
    per_node = cluster.ranks_per_node
    work_limits = goal.work_limits * (per_node / slack)
    token_limit = min((1 + NODE_TOKENS) * float(nets.tokens.sum()) / cluster.nodes, goal.token_limit * per_node)
    outer = best_split(nets, replace(goal, parts=cluster.nodes, work_limits=work_limits, token_limit=token_limit))
    block_rank, comp_rank, failures = outer.block_part * per_node, outer.comp_part * per_node, outer.failures
    inner_goal = replace(goal, parts=per_node, tries=TRIES_RANKS)
    for node in range(cluster.nodes):
        own_blocks, own_comps = np.flatnonzero(outer.block_part == node), np.flatnonzero(outer.comp_part == node)
        inner = best_split(nets.restrict(own_blocks, own_comps), inner_goal)
        block_rank[own_blocks] += inner.block_part
        comp_rank[own_comps] += inner.comp_part
        failures |= inner.failures
    if loads(nets.tokens, block_rank, cluster.ranks).max() > goal.token_limit:  # blocks may have to change their node
        block_rank = give_tokens(nets, comp_rank, cluster.ranks, goal.token_limit, block_rank)
    return Split(block_rank, comp_rank, failures)


def best_split(nets: Nets, goal: Goal) -> Split:
    """The split, of several, that is least above its limits, and of those the one that moves least."""
    if goal.parts == 1 or len(nets.tokens) + len(nets) == 0:
        return Split(np.zeros(len(nets.tokens), "int64"), np.zeros(len(nets), "int64"))
    return min(tries(nets, goal), key=lambda found: found[0])[1]


def tries(nets: Nets, goal: Goal) -> Iterator[tuple[tuple[float, float], Split]]:
    """Several splits. The cost of each is how far its fullest part is above its limit (as a fraction, 0 when none is),
    and what it moves."""
    number = 1 if nets.tokens.sum() < SMALL_TOKENS else max(1, min(goal.tries, LARGE // max(1, len(nets))))
    for token_share, shuffled in TRIES[:number]:
        start = together(nets, goal, token_share, goal.seed if shuffled else None)
        block_part = give_tokens(nets, start.part, goal.parts, goal.token_limit)
        comp_part, failures = computation(nets, block_part, goal)
        block_part = give_tokens(nets, comp_part, goal.parts, goal.token_limit, block_part)
        cost = excess(nets, block_part, comp_part, goal), moved(nets, block_part, comp_part, goal)
        yield cost, Split(block_part, comp_part, failures | ({start.failure} - {""}))


def moved(nets: Nets, block_part: Ints, comp_part: Ints, goal: Goal) -> float:
    """Bytes that a split moves in all, or to the part that receives most."""
    if not goal.largest:
        return nets.cut_bytes(block_part, comp_part, goal.parts)
    return float(received_bytes(nets, block_part, comp_part, Cluster(1, goal.parts))[0].max())


def excess(nets: Nets, block_part: Ints, comp_part: Ints, goal: Goal) -> float:
    """How far the fullest part is above its limit, as a fraction; 0 when none is."""
    ratios = [loads(nets.tokens, block_part, goal.parts).max() / goal.token_limit]
    for mask in np.unique(nets.mask):
        mine = nets.mask == mask
        ratios.append(loads(nets.work[mine], comp_part[mine], goal.parts).max() / goal.work_limits[mask])
    return max(0.0, round(max(ratios) - 1, 6))


def together(nets: Nets, goal: Goal, token_share: float, shuffle: int | None) -> Partition:
    """The part of each computation block when one weight stands for both computation and tokens."""
    blocks, comps = len(nets.tokens), len(nets.tokens) + np.arange(len(nets))
    owned = np.flatnonzero(nets.edge_token >= 0)
    weight = np.concatenate(
        [nets.tokens / max(1, nets.tokens.sum()) * token_share, nets.work / (float(nets.work.sum()) or 1.0)]
    )
    work_limit = float(goal.work_limits[np.unique(nets.mask)].sum())
    slack = max(1.0, work_limit * goal.parts / (float(nets.work.sum()) or 1.0))
    limit = max(slack * weight.sum() / goal.parts, weight.max())
    graph = Hypergraph(
        np.concatenate([nets.q_edge, nets.kv_edge, owned]),
        np.concatenate([comps, comps, nets.edge_token[owned]]),
        nets.edge_bytes,
        weight,
        np.full(len(weight), -1),
    )
    found = partition(graph, np.full(goal.parts, limit), shuffle, goal.preset)
    return Partition(found.part[blocks:], found.failure)


def computation(nets: Nets, block_part: Ints, goal: Goal) -> tuple[Ints, frozenset[str]]:
    """int64[C], the part of each computation block, with the token blocks where they are, and what the solver said
    where it gave up."""
    parts, comp_part = goal.parts, np.zeros(len(nets), "int64")
    failures: set[str] = set()
    for mask in np.unique(nets.mask).tolist():
        part, comps = nets.of_mask(mask)
        limit = goal.work_limits[mask]
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
        found = partition(graph, np.full(parts, limit), preset=goal.preset)
        failures |= {found.failure} - {""}
        comp_part[comps] = repair(part, block_part, found.part[parts:], parts, limit)
    return comp_part, frozenset(failures)
