"""LoongTrain's 2D-attention: heads exchanged in small groups, and over the rest rings in rings."""

from __future__ import annotations

from math import gcd

from dyncp.ir.batch import Batch
from dyncp.ir.cluster import Cluster
from dyncp.ir.shape import AttentionShape
from dyncp.strategies.api import Layout, Options
from dyncp.strategies.exchange import Teams, spread
from dyncp.strategies.head_ring import head_degree


def double_ring(batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options) -> Layout:
    """Groups of `head_degree` neighbours exchange heads; over the groups KV goes around in inner rings of `inner_ring`,
    and meanwhile crosses to the next inner ring. Zigzag over the groups.

    Modelled: heads first (the ranks that exchange heads are neighbours); a hop between inner rings overlaps with a
    whole round of an inner ring (its blocks are spread over these steps), the gradient's hop too. Not modelled: the hop
    of the owner's own contribution to the gradient of KV in each ring, and KV heads repeated where there are fewer of
    them than ranks that exchange heads. The original pads all sequences of a batch to the longest: see
    `padding.as_run`, which makes that batch; this function plans whatever it is given.
    """
    heads = head_degree(shape, cluster, options)
    ring = cluster.ranks // heads
    return spread(
        batch, shape.groups, Teams.of_all_ranks(batch, cluster.ranks, heads, inner_ring(ring, heads, cluster, options))
    )


def inner_ring(ring: int, heads: int, cluster: Cluster, options: Options) -> int:
    """How many of `ring` groups of `heads` ranks form an inner ring: the largest divisor of the option that divides
    them or, for `auto`, the largest power of two that does and with which each inner ring lies inside a node."""
    if options.inner_ring != "auto":
        return gcd(options.inner_ring, ring)
    per_node, rest = divmod(cluster.ranks_per_node, heads)
    common = 1 if rest else gcd(ring, per_node)
    return common & -common
