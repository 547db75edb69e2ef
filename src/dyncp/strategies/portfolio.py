"""Whether a fixed scheme would do better than what was planned, by the clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dyncp.cost.model import CostModel, Work
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import HAS_KV, Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import PASSES, both_passes_bytes
from dyncp.ir.schedule import Side
from dyncp.ir.shape import AttentionShape
from dyncp.planner.partition.nets import loads
from dyncp.planner.scheduling.clock import schedule_seconds
from dyncp.strategies.allgather import allgather
from dyncp.strategies.api import Layout, Options, Strategy
from dyncp.strategies.balanced_qo_home import balanced_qo_home
from dyncp.strategies.data_parallel import data_parallel
from dyncp.strategies.double_ring import double_ring
from dyncp.strategies.head_ring import head_ring
from dyncp.strategies.ring import ring, zigzag
from dyncp.strategies.sequence_level import sequence_level
from dyncp.strategies.ulysses import ulysses
from dyncp.strategies.usp import usp

MARGIN = 0.999  # of the time: what a rival must be below
LARGE = 8192  # tokens
MOST_TRANSFERS = 15_000  # of the layout: it is then large enough for the search to be better, and takes long to time
MOST_MOVES = 400_000  # of a rival: more take longer to lay out and to time than planning may


def faster_rival(
    layout: Layout, batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options, cost: CostModel
) -> Layout | None:
    """The fixed scheme that ends first, if it ends before the layout and keeps the tolerance on tokens; None if there
    is none. Rivals that would lose even if all went well are not built."""

    def seconds_of(layout: Layout) -> float:
        parts = layout.blocks, layout.placement, layout.schedule
        return schedule_seconds(*parts, shape, cluster, cost, (options.keep, options.wire))

    if len(layout.schedule.transfers) > MOST_TRANSFERS:
        return None
    best, least = None, seconds_of(layout) * MARGIN
    moves = most_moves(batch, shape, cluster)
    for strategy, floor_s in sorted(floors(layout, shape, cluster, options, cost).items(), key=lambda item: item[1]):
        if floor_s >= least:
            break
        if moves.get(strategy, 0) > MOST_MOVES:
            continue
        rival = FAST[strategy](batch, shape, cluster, options)
        tokens = loads(rival.blocks.tokens.tokens, rival.placement.block_rank, cluster.ranks)
        if tokens.max() > (1 + options.token_epsilon) * tokens.mean():
            continue
        seconds = seconds_of(rival)
        if seconds < least:
            note = f"the layout is that of {strategy}, which is estimated to be faster"
            best, least = replace(rival, notes=(note,)), seconds
    return best


FAST: dict[str, Strategy] = {
    "data_parallel": data_parallel,
    "ulysses": ulysses,
    "sequence_level": sequence_level,
    "allgather": allgather,
    "double_ring": double_ring,
    "head_ring": head_ring,
    "usp": usp,
    "balanced_qo_home": balanced_qo_home,
    "zigzag": zigzag,
    "ring": ring,
}


def most_moves(batch: Batch, shape: AttentionShape, cluster: Cluster) -> dict[str, float]:
    """About how many transfers rivals have, or what takes as long: in rings, two blocks of each rank go around all
    ranks."""
    lengths, ranks = np.array([sequence.length for sequence in batch.sequences]), cluster.ranks
    needed = np.minimum(2 * np.ceil(lengths * ranks / lengths.sum()), ranks)
    of_all = 4.0 * len(lengths) * ranks**2 * shape.groups
    of_each = 4.0 * float((needed**2).sum()) * shape.groups
    rings = ("zigzag", "ring", "allgather", "double_ring", "head_ring", "usp")
    searched = 8.0 * len(lengths) * ranks  # groups for each sequence
    chunks = 1000.0 * ranks**2 * shape.groups
    return {
        **dict.fromkeys(rings, of_all),
        "sequence_level": max(of_each, searched),
        "balanced_qo_home": chunks,
    }


def floors(
    layout: Layout, shape: AttentionShape, cluster: Cluster, options: Options, cost: CostModel
) -> dict[str, float]:
    """What each rival takes at least, in seconds forward and backward of all layers: even computation, of a sequence
    that is not cut all of it; and all of KV past every node."""
    blocks = layout.blocks
    even_s, longest_s = compute_floors(blocks, shape, cluster, cost)
    node_s, ring_s = kv_seconds(blocks, shape, cluster, options)
    return {
        "data_parallel": max(even_s, longest_s),
        "ulysses": max(even_s, longest_s / shape.groups),
        "sequence_level": even_s,
        "allgather": even_s + node_s,
        "double_ring": max(even_s, node_s),
        "head_ring": max(even_s, node_s),
        "usp": max(even_s, node_s),
        "balanced_qo_home": even_s,
        "ring": max(even_s, ring_s),
        "zigzag": max(even_s, ring_s),
    }


def compute_floors(blocks: Blocks, shape: AttentionShape, cluster: Cluster, cost: CostModel) -> tuple[float, float]:
    """Seconds of computation of a rank if all have the same, and of the longest sequence: of its pairs, at the rate of
    large blocks without a mask."""
    block = Work(*np.array([[0], [0], [LARGE], [LARGE], [LARGE**2]]))
    pair_s = sum(float(cost.attention_s(pass_, shape, block, 1)[0]) for pass_ in PASSES) / LARGE**2
    of_sequence = np.bincount(blocks.tokens.sequence[blocks.q_block], pair_s * blocks.work, 1) * shape.groups
    return float(of_sequence.sum()) / cluster.ranks, float(of_sequence.max())


def kv_seconds(blocks: Blocks, shape: AttentionShape, cluster: Cluster, options: Options) -> tuple[float, float]:
    """How long all of KV, and the way back of its gradient, takes past every node, in both passes and of all layers:
    over all of a node's links, and in a ring of all ranks, by one message at a time (past every rank on one node)."""
    keys = int(blocks.tokens.tokens[(blocks.tokens.role & HAS_KV) > 0].sum())
    sides = both_passes_bytes(shape, options.keep, options.wire)
    size = float(keys * shape.groups * (sides[Side.KV_IN] + sides[Side.KV_OUT]) * sum(blocks.mask_weights))
    past_rank = size * (cluster.ranks - 1) / cluster.ranks
    inside_s = past_rank / cluster.intra_bytes_per_s
    if cluster.nodes == 1:
        return 0.0, inside_s
    node_rate = min(cluster.inter_bytes_per_s, cluster.ranks_per_node * cluster.rank_bytes_per_s)
    node_s = size * (cluster.nodes - 1) / cluster.nodes / node_rate
    return node_s, max(past_rank / cluster.message_bytes_per_s, inside_s)
