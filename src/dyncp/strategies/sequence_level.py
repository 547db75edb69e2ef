"""A degree of context parallelism for each sequence: FlexSP, ByteScale, Megatron's dynamic context parallelism."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import PASSES, both_passes_bytes
from dyncp.ir.schedule import Side
from dyncp.ir.shape import AttentionShape
from dyncp.planner.partition.estimate import compute_seconds
from dyncp.strategies.api import Layout, Options
from dyncp.strategies.exchange import Teams, spread

NARROWEST, STEP = 0.02, 1.5  # limits on loads are 1 + NARROWEST * STEP**n
GAIN = 0.01  # of a rank's mean load, by which a wider group must be better where none keeps the limit
HIDDEN = 4  # all but one part of so many of transfers, or of computation, is assumed to overlap


def sequence_level(batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options) -> Layout:
    """A zigzag ring for each sequence, on a group of neighbouring ranks that is only as wide as balance needs.

    Widths are powers of two (or all ranks), and groups are aligned to them; those that fit in a node lie in one. The
    heaviest sequence is placed first, each on the narrowest group on which it keeps both limits, on the computation and
    on the tokens of a rank, as multiples of their means, and there where the load is least. This is done for limits
    from near 1 to the number of ranks, and the result is the one with the least estimated time: of attention (of its
    computation or of its rings, whichever is longer) and of everything else, which goes by the tokens of the fullest
    rank and counts as much as attention does if both are even.

    Modelled: all sequences of the batch at once, KV in full inside each group, nothing between groups. Not modelled:
    micro-batches, the groups' cost to make, and (FlexSP) Ulysses in place of a ring inside a group. FlexSP finds groups
    by integer programming and Megatron by buckets; the search here is a greedy one over the same choices.
    """
    first, width = choose_groups(Demand.of(batch, shape, cluster, options), cluster)
    return spread(batch, shape.groups, Teams(first, width, width))


class Demand(NamedTuple):
    """What each sequence takes, forward and backward, of all layers."""

    compute_s: Ints  # float64[S], on one rank
    tokens: Ints  # int64[S]
    ring_bytes: Ints  # float64[S], of its KV and their gradients
    layers: float  # of all masks

    @classmethod
    def of(cls, batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options) -> Demand:
        """The demand of each sequence of a batch."""
        weights = batch.weights or {}
        pairs = [sum(weights[name] * mask.pairs() for name, mask in one.masks.items()) for one in batch.sequences]
        sides = both_passes_bytes(shape, options.keep, options.wire)
        layers = sum(weights.values())
        per_key = float(sides[Side.KV_IN] + sides[Side.KV_OUT]) * shape.groups * layers
        return cls(
            np.array([compute_seconds(shape.groups * count, shape, cluster) for count in pairs]),
            np.array([sequence.length + (sequence.kv_length or 0) for sequence in batch.sequences]),
            np.array([sequence.keys * per_key for sequence in batch.sequences]),
            layers,
        )


def choose_groups(demand: Demand, cluster: Cluster) -> tuple[Ints, Ints]:
    """int64[S] each: the first rank and the width of each sequence's group."""
    ranks = cluster.ranks
    shares = [column * ranks / max(column.sum(), 1e-300) for column in (demand.compute_s, demand.tokens)]
    share = np.stack(shares, axis=1)  # float64[S, 2], in multiples of a rank's mean
    widths = [1 << bit for bit in range(ranks.bit_length()) if 1 << bit < ranks] + [ranks]
    groups = {width: groups_of(width, cluster) for width in widths}
    trials = [place(share, groups, limit) for limit in limits(ranks)]
    even_s = demand.compute_s.sum() / ranks
    costs = [seconds(demand, found, cluster) + even_s * found.load[:, 1].max() for found in trials]
    best = trials[int(np.argmin(costs))]
    return best.first, best.width


class Found(NamedTuple):
    """Groups of all sequences."""

    first: Ints  # int64[S], rank
    width: Ints  # int64[S]
    load: Ints  # float64[R, 2], computation and tokens of each rank, in multiples of the mean


def limits(ranks: int) -> Ints:
    """float64[n]: limits on loads that are worth a trial, closer together near 1; the last is above all loads."""
    steps = int(np.ceil(np.log(max(ranks, 2) / NARROWEST) / np.log(STEP)))
    return 1 + NARROWEST * STEP ** np.arange(steps + 1)


def groups_of(width: int, cluster: Cluster) -> Ints:
    """int64[n, width]: the ranks of the groups of a width, aligned in their node or, if wider than one, in all."""
    span = cluster.ranks_per_node if width <= cluster.ranks_per_node else cluster.ranks
    starts = np.arange(0, span - width + 1, width)
    first = (np.arange(0, cluster.ranks, span)[:, None] + starts).ravel()
    return first[:, None] + np.arange(width)


def place(share: Ints, groups: dict[int, Ints], limit: float) -> Found:
    """Each sequence, the heaviest first, on the narrowest group on which it keeps the limit, of these where the load is
    least; without any, where it is least of all."""
    load = np.zeros((max(groups), 2))
    first, width = np.empty(len(share), "int64"), np.empty(len(share), "int64")
    for sequence in np.argsort(-share.max(axis=1), kind="stable"):
        least = np.inf
        for size, members in groups.items():
            most = (load + share[sequence] / size).max(axis=1)[members].max(axis=1)
            at = int(most.argmin())
            if most[at] < least - GAIN:
                least, chosen = most[at], members[at]
            if least <= limit:
                break
        first[sequence], width[sequence] = chosen[0], len(chosen)
        load[chosen] += share[sequence] / len(chosen)
    return Found(first, width, load)


def seconds(demand: Demand, found: Found, cluster: Cluster) -> float:
    """A rough time of attention: of the rank whose computation or whose rings take longest. The rings that enter a node
    share its bandwidth, and each hop of a ring takes its latency, in both passes."""
    per_node = cluster.ranks_per_node
    received = demand.ring_bytes * (found.width - 1) / found.width  # by each rank of a ring
    stop = found.first + found.width
    nodes = found.first // per_node, -(-stop // per_node)
    between = nodes[1] - nodes[0] > 1
    entered = np.where(between, received, 0)  # each node that a ring goes through
    latency = np.where(between, cluster.inter_latency_s, cluster.intra_latency_s)
    compute_s = found.load[:, 0].max() * demand.compute_s.sum() / cluster.ranks
    transfer_s = max(
        covered(found.first, stop, received, cluster.ranks).max() / cluster.intra_bytes_per_s,
        covered(*nodes, entered, cluster.nodes).max() / cluster.inter_bytes_per_s,
        (latency * (found.width - 1)).max() * len(PASSES) * demand.layers,
    )
    shorter, longer = sorted((compute_s, transfer_s))
    return float(longer + shorter / HIDDEN)


def covered(start: Ints, stop: Ints, value: Ints, count: int) -> Ints:
    """float64[count]: at each place the sum of the values whose range [start, stop) covers it."""
    return np.cumsum(np.bincount(start, value, count + 1) - np.bincount(stop, value, count + 1))[:count]
