"""The classical rings: every sequence is cut over all ranks, and KV travels around (RingFlashAttention's two kinds).

Modelled: KV and, in the backward, the gradient of KV move from neighbour to neighbour, in full and whatever the mask;
masked computation is skipped (the paper's extended baseline). Not modelled: padding to a common length (sequences need
not divide here), and the hop of the owner's own contribution to the gradient of KV, which here stays at home.
"""

from __future__ import annotations

from dyncp.ir.batch import Batch
from dyncp.ir.cluster import Cluster
from dyncp.ir.shape import AttentionShape
from dyncp.strategies.api import Layout, Options
from dyncp.strategies.exchange import Teams, spread


def ring(batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options) -> Layout:
    """One run of neighbouring tokens per rank. With a causal mask the last rank computes most."""
    return spread(batch, shape.groups, Teams.of_all_ranks(batch, cluster.ranks, zigzag=False))


def zigzag(batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options) -> Layout:
    """Two runs per rank, one from each end of the sequence, which balances a causal mask."""
    return spread(batch, shape.groups, Teams.of_all_ranks(batch, cluster.ranks))
