"""Plain data parallelism: whole sequences, nothing moves."""

from __future__ import annotations

import numpy as np

from dyncp.ir.batch import Batch
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.schedule import Schedule, Transfers
from dyncp.ir.shape import AttentionShape
from dyncp.planner.blockgen import make_blocks, uniform_cut
from dyncp.strategies.api import Layout, Options
from dyncp.strategies.deal import deal

DEFAULT_TOKENS = 2048  # of a block: it makes little difference where nothing moves


def data_parallel(batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options) -> Layout:
    """Give each sequence whole to the rank with the fewest tokens so far, the longest first."""
    block_tokens = DEFAULT_TOKENS if options.block_tokens == "auto" else options.block_tokens
    blocks = make_blocks(batch, shape.groups, uniform_cut(block_tokens))
    lengths = np.array([max(sequence.length, sequence.keys) for sequence in batch.sequences])
    sequence_rank = deal(lengths, cluster.ranks)
    block_rank = sequence_rank[blocks.tokens.sequence]
    comp_rank = np.broadcast_to(block_rank[blocks.q_block], (blocks.groups, len(blocks)))
    return Layout(
        blocks, Placement(block_rank, comp_rank), Schedule(np.zeros_like(comp_rank), Transfers.concatenate([]))
    )
