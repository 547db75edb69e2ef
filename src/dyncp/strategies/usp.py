"""USP: Ulysses inside nodes, a zigzag ring over the rest."""

from __future__ import annotations

from math import gcd

from dyncp.ir.batch import Batch
from dyncp.ir.cluster import Cluster
from dyncp.ir.shape import AttentionShape
from dyncp.strategies.api import Layout, Options
from dyncp.strategies.exchange import Teams, spread


def usp(batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options) -> Layout:
    """As many neighbours of a node exchange heads as divide the ranks of a node and the head groups; KV travels around
    the groups.

    Modelled and not modelled as in `head_ring`, which differs in the degree alone; where there are fewer KV heads than
    ranks in a node, the original can repeat them.
    """
    heads = gcd(shape.groups, cluster.ranks_per_node)
    return spread(batch, shape.groups, Teams.of_all_ranks(batch, cluster.ranks, heads))
