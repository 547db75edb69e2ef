"""Rough times, and the bytes that a placement moves.

An input enters a node once and is passed on there; partial results are merged on a node before they leave it.
"""

from __future__ import annotations

import numpy as np

from dyncp.cost.roofline import PRODUCTS
from dyncp.ir.arrays import Ints
from dyncp.ir.cluster import Cluster
from dyncp.ir.shape import AttentionShape
from dyncp.planner.partition.nets import Nets


def compute_seconds(pairs: float, shape: AttentionShape, cluster: Cluster) -> float:
    """How long a rank computes on pairs of one head group, forward and backward."""
    forwards = sum(PRODUCTS.values())
    return pairs * forwards * 2 * shape.group_heads * (shape.head_dim + shape.value_dim) / cluster.flops_per_s


def received_bytes(nets: Nets, block_rank: Ints, comp_rank: Ints, cluster: Cluster) -> tuple[Ints, Ints]:
    """(float64[R], float64[nodes]): bytes that each rank receives, and that each node receives from other nodes."""
    edges = np.arange(len(nets.edge_token))
    owner = nets.owner(block_rank)
    away = nets.touched(block_rank, comp_rank, cluster.ranks)
    away[edges, owner] = False
    home = owner // cluster.ranks_per_node
    by_node = away.reshape(len(edges), cluster.nodes, cluster.ranks_per_node).sum(axis=2)
    at_home = by_node[edges, home]
    by_node[edges, home] = 0
    nodes = (by_node > 0).sum(axis=1)
    merged = np.maximum(by_node - 1, 0) / np.maximum(by_node, 1)  # received by each rank of another node, on average
    received = (
        nets.in_bytes @ away
        + nets.out_bytes @ (away * np.repeat(merged, cluster.ranks_per_node, axis=1))
        + np.bincount(owner, nets.out_bytes * (at_home + nodes), cluster.ranks)
    )
    entered = nets.in_bytes @ (by_node > 0) + np.bincount(home, nets.out_bytes * nodes, cluster.nodes)
    return received, entered
