"""Whether a fixed scheme would do better than what was planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dyncp.ir.batch import Batch
from dyncp.ir.blocks import HAS_KV, Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import PASSES, side_token_bytes
from dyncp.ir.schedule import Side
from dyncp.ir.shape import AttentionShape
from dyncp.planner.partition.estimate import Estimate, compute_seconds, estimate
from dyncp.planner.partition.nets import Nets, even_weights, loads
from dyncp.strategies.api import Layout, Options
from dyncp.strategies.data_parallel import data_parallel
from dyncp.strategies.ring import zigzag

MARGIN = 0.98  # of the estimated time: what a rival must be below, as estimates are rough


def faster_rival(
    layout: Layout, batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options
) -> Layout | None:
    """The layout of whole sequences or of a zigzag ring, if it keeps the tolerance on tokens and is estimated to take
    less time; None if not. Rivals that would lose even with perfect balance are not built."""
    blocks = even_weights(layout.blocks)
    nets = Nets.of_batch(blocks, shape, options.keep, options.wire)
    places = layout.placement.block_rank, layout.placement.comp_rank.ravel()
    own = estimate(nets, *places, shape, cluster).total_s(options.divisions) * MARGIN
    even_s = compute_seconds(float(blocks.work.sum()) * shape.groups / cluster.ranks, shape, cluster)
    ring_s = ring_seconds(blocks, shape, cluster, options)
    rivals: tuple[tuple[Callable[..., Layout], float], ...] = ((data_parallel, 0.0), (zigzag, ring_s))
    for strategy, transfer_s in rivals:
        if Estimate(even_s, transfer_s).total_s(options.divisions) >= own:
            continue
        rival = strategy(batch, shape, cluster, options)
        tokens = loads(rival.blocks.tokens.tokens, rival.placement.block_rank, cluster.ranks)
        if tokens.max() > (1 + options.token_epsilon) * tokens.mean():
            continue
        compute_s = 0.0
        for mask in range(len(rival.blocks.mask_names)):
            part = rival.blocks.of_mask(mask)
            work = np.tile(rival.blocks.pairs[part] * blocks.mask_weights[mask], shape.groups)
            most = loads(work, rival.placement.comp_rank[:, part].ravel(), cluster.ranks).max()
            compute_s += compute_seconds(float(most), shape, cluster)
        if Estimate(compute_s, transfer_s).total_s(options.divisions) < own:
            return replace(
                rival, notes=(f"the layout is that of {strategy.__name__}, which is estimated to be faster",)
            )
    return None


def ring_seconds(blocks: Blocks, shape: AttentionShape, cluster: Cluster, options: Options) -> float:
    """How long a ring's transfers take, forward and backward, of all layers: all of KV goes past every rank, and past
    every node, whatever the mask."""
    keys = int(blocks.tokens.tokens[(blocks.tokens.role & HAS_KV) > 0].sum())
    sides = np.sum([side_token_bytes(shape, pass_, options.keep, options.wire) for pass_ in PASSES], axis=0)
    size = float(keys * shape.groups * (sides[Side.KV_IN] + sides[Side.KV_OUT]) * sum(blocks.mask_weights))
    share = size * (cluster.ranks - 1) / cluster.ranks
    between = share / cluster.inter_bytes_per_s if cluster.nodes > 1 else 0.0
    return max(share / cluster.intra_bytes_per_s, between)
