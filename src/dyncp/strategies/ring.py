"""The classical rings: every sequence is cut over all ranks, and KV travels around (RingFlashAttention's two kinds).

Modelled: KV and, in the backward, the gradient of KV move from neighbour to neighbour, in full and whatever the mask;
masked computation is skipped (the paper's extended baseline). Not modelled: padding to a common length (sequences need
not divide here), and the hop of the owner's own contribution to the gradient of KV, which here stays at home.
"""

from __future__ import annotations

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import HAS_KV, Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.schedule import Schedule, Side, Transfers
from dyncp.ir.shape import AttentionShape
from dyncp.planner.blockgen import equal_cut, make_blocks
from dyncp.planner.partition.coarsen import place_in_sequence
from dyncp.strategies.api import Layout, Options


def ring(batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options) -> Layout:
    """One run of neighbouring tokens per rank. With a causal mask the last rank computes most."""
    blocks = make_blocks(batch, shape.groups, equal_cut(cluster.ranks))
    return around(blocks, place_in_sequence(blocks.tokens), cluster.ranks)


def zigzag(batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options) -> Layout:
    """Two runs per rank, one from each end of the sequence, which balances a causal mask."""
    ranks = cluster.ranks
    blocks = make_blocks(batch, shape.groups, equal_cut(2 * ranks))
    place = place_in_sequence(blocks.tokens)
    return around(blocks, np.where(place < ranks, place, 2 * ranks - 1 - place), ranks)


def around(blocks: Blocks, block_rank: Ints, ranks: int) -> Layout:
    """Compute where the queries are; let KV travel over all ranks, one hop a step.

    The KV of rank o reaches rank o + s at step s and is used there at step s. Its gradient sets out from rank o + 1 at
    step 3, follows one hop a step, gathering each rank's share, and comes home from rank o - 1.
    """
    comp_rank = np.broadcast_to(block_rank[blocks.q_block], (blocks.groups, len(blocks)))
    comp_step = (comp_rank - block_rank[blocks.kv_block]) % ranks
    # every (mask, KV block, head group) makes each hop s = 1 .. ranks - 1
    keys = np.flatnonzero(blocks.tokens.role & HAS_KV)
    axes = np.meshgrid(
        np.arange(len(blocks.mask_names)), keys, np.arange(blocks.groups), np.arange(1, ranks), indexing="ij"
    )
    mask, block, group, hop = (axis.ravel() for axis in axes)
    owner = block_rank[block]
    near, far = (owner + hop - 1) % ranks, (owner + hop) % ranks
    side = np.full(len(mask), Side.KV_IN)
    inputs = Transfers(mask, side, block, group, near, far, hop)
    after = (owner + hop + 1) % ranks
    outputs = Transfers(mask, np.full(len(mask), Side.KV_OUT), block, group, far, after, hop + 2)
    return Layout(
        blocks, Placement(block_rank, comp_rank), Schedule(comp_step, Transfers.concatenate([inputs, outputs]))
    )
