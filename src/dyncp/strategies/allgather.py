"""Llama 3's context parallelism: all of KV is gathered, then everything is computed."""

from __future__ import annotations

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import HAS_KV, Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.schedule import Schedule, Side
from dyncp.ir.shape import AttentionShape
from dyncp.strategies.api import Layout, Options
from dyncp.strategies.exchange import Teams, for_all_masks, pieces, seat


def allgather(batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options) -> Layout:
    """Zigzag chunks; every rank has all of KV before it computes anything, so that nothing overlaps.

    Modelled: gathering in two levels. KV crosses to each other node once, to the rank at its owner's place there (so
    that all ranks of a node have an even part in that), which passes it on inside; gradients of KV take the same ways
    back, and what several ranks of a node add is merged before it leaves the node. All of it moves, whatever the mask;
    masked computation is skipped. Not modelled: padding to a multiple of twice the ranks.
    """
    blocks, seats = seat(batch, shape.groups, Teams.of_all_ranks(batch, cluster.ranks))
    passed_on = cluster.nodes > 1 and cluster.ranks_per_node > 1
    last = 2 if passed_on else int(cluster.ranks > 1)
    comp_rank = np.broadcast_to(seats.owner[blocks.q_block], (blocks.groups, len(blocks)))
    comp_step = np.full_like(comp_rank, last)
    transfers = for_all_masks(gather_moves(blocks, seats.owner, cluster, last), blocks)
    return Layout(blocks, Placement(seats.owner, comp_rank), Schedule(comp_step, transfers))


def gather_moves(blocks: Blocks, owner: Ints, cluster: Cluster, last: int) -> Ints:
    """Rows, see `exchange.py`, of KV from its owner to all other ranks by step `last`, and of its gradient back."""
    per_node = cluster.ranks_per_node
    block, group = (np.repeat(column, cluster.ranks) for column in pieces(blocks, HAS_KV))
    rank = np.tile(np.arange(cluster.ranks), len(block) // cluster.ranks)
    home = owner[block]
    gate = rank // per_node * per_node + home % per_node  # on the owner's node this is the owner
    source = np.where(rank == gate, home, gate)
    crosses = (rank == gate).astype("int64")
    away = rank != home
    onward = (source != home).astype("int64")  # received from a gate, a step later
    merged = int(per_node > 1) * crosses  # what a gate has merged sets out a step later
    into, out = np.full(len(rank), Side.KV_IN), np.full(len(rank), Side.KV_OUT)
    rows = [
        np.stack([into, block, group, source, rank, 1 + onward])[:, away],
        np.stack([out, block, group, rank, source, last + 2 + merged])[:, away],
    ]
    return np.concatenate(rows, axis=1)
