"""What the classical rings move, in closed form: building their plans takes long where ranks and sequences are many.

The numbers are those of the plans of `strategies/ring.py`. KV makes R - 1 hops, and in the backward so does its
gradient; a hop from the last rank of a node crosses to the next node. KV misses the one hop that would bring it home;
its gradient sets out one rank later, and misses its owner's own.
"""

from __future__ import annotations

import numpy as np

from dyncp.bench.results import Figures
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.blocks import HAS_Q, Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import PASSES, side_token_bytes
from dyncp.ir.schedule import Side
from dyncp.ir.shape import AttentionShape
from dyncp.planner.blockgen import blocks_of_bounds, equal_cut
from dyncp.planner.partition.coarsen import place_in_sequence
from dyncp.strategies.api import Options


def ring_figures(batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options, zigzag: bool) -> Figures:
    """Bytes and balance of the strategy `ring` or `zigzag`, of a batch without cross-attention."""
    ranks, per_node = cluster.ranks, cluster.ranks_per_node
    blocks = rows_of(batch, 2 * ranks if zigzag else ranks)
    place = place_in_sequence(blocks.tokens)
    rank = np.where(place < ranks, place, 2 * ranks - 1 - place) if zigzag else place
    queries = (blocks.tokens.role & HAS_Q) > 0
    tokens = np.bincount(rank[queries], blocks.tokens.tokens[queries], ranks)
    compute = 1.0
    for mask in range(len(blocks.mask_names)):
        part = blocks.of_mask(mask)
        work = np.bincount(rank[blocks.q_block[part]], blocks.pairs[part], ranks)
        compute = max(compute, float(work.max() / work.mean()))
    at = np.arange(ranks) % per_node
    edges = cluster.nodes if cluster.nodes > 1 else 0
    total = between = 0.0
    for pass_, weight in zip(PASSES, options.pass_weights, strict=True):
        token_bytes = side_token_bytes(shape, pass_, options.keep, options.wire)
        for side, missing in ((Side.KV_IN, at == 0), (Side.KV_OUT, at == per_node - 1)):
            size = weight * token_bytes[side] * shape.groups * sum(blocks.mask_weights)
            total += size * float(tokens.sum()) * (ranks - 1)
            between += size * float(tokens @ (edges - missing)) if edges else 0.0
    return Figures(total, between, compute, float(tokens.max() / tokens.mean()))


def rows_of(batch: Batch, parts: int) -> Blocks:
    """A batch cut as a ring cuts it, but into whole rows: each query block has one computation block with all keys."""
    sequences = [Sequence(sequence.length, sequence.masks, sequence.keys) for sequence in batch.sequences]
    bounds = [(equal_cut(parts)(sequence.length), np.array([0, sequence.keys])) for sequence in sequences]
    return blocks_of_bounds(Batch(sequences, batch.weights), 1, bounds)
