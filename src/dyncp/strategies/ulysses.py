"""DeepSpeed-Ulysses: heads are exchanged, and each rank computes a part of the heads for whole sequences."""

from __future__ import annotations

from math import gcd

import numpy as np

from dyncp.ir.batch import Batch
from dyncp.ir.cluster import Cluster
from dyncp.ir.shape import AttentionShape
from dyncp.strategies.api import Layout, Options
from dyncp.strategies.deal import deal
from dyncp.strategies.exchange import Teams, spread


def ulysses(batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options) -> Layout:
    """All-to-all over heads, in groups of as many neighbouring ranks as divide the ranks and the head groups.

    The unit of heads that can be placed is a head group (a KV head and its query heads), so no more ranks than there
    are head groups can share a sequence. With more ranks, the groups take whole sequences: the longest first, to the
    group with the fewest tokens so far.

    Modelled: all of Q and KV moves before anything is computed, outputs and gradients come back after. Not modelled:
    padding to a multiple of the ranks, and KV heads repeated so that more ranks can share them.
    """
    heads = gcd(shape.groups, cluster.ranks)
    lengths = np.array([max(sequence.length, sequence.keys) for sequence in batch.sequences])
    first = deal(lengths, cluster.ranks // heads) * heads
    alone = np.ones_like(first)
    return spread(batch, shape.groups, Teams(first, alone, alone, heads))
