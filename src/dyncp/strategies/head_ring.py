"""TransformerEngine's `a2a+p2p`: heads exchanged in small groups, a zigzag ring over the rest."""

from __future__ import annotations

from math import gcd

from dyncp.ir.batch import Batch
from dyncp.ir.cluster import Cluster
from dyncp.ir.shape import AttentionShape
from dyncp.strategies.api import Layout, Options
from dyncp.strategies.exchange import Teams, spread


def head_ring(batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options) -> Layout:
    """Groups of `head_degree` neighbours exchange heads (in pairs by default); KV of a group's head groups travels
    around all groups.

    Modelled: Q and KV go to the ranks that compute on them before anything is computed, outputs and gradients come back
    after; KV and its gradient travel in full, whatever the mask. Not modelled: padding to a multiple of twice the ranks
    (sequences need not divide here), and the hop of the owner's own contribution to the gradient of KV, which
    TransformerEngine sends around with the rest, R hops in place of R - 1.
    """
    heads = head_degree(shape, cluster, options)
    return spread(batch, shape.groups, Teams.of_all_ranks(batch, cluster.ranks, heads))


def head_degree(shape: AttentionShape, cluster: Cluster, options: Options) -> int:
    """How many ranks exchange heads: the largest divisor of the option that divides the head groups and the ranks."""
    return gcd(options.head_degree, shape.groups, cluster.ranks)
