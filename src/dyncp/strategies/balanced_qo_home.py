"""MagiAttention's default: chunks of the whole batch dealt out evenly; Q and O stay at home, and KV comes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import HAS_Q
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.shape import AttentionShape
from dyncp.planner.blockgen import blocks_of_bounds, equal_cut
from dyncp.planner.scheduling.greedy import greedy_schedule
from dyncp.strategies.api import Layout, Options
from dyncp.strategies.deal import deal

LEAST_CHUNKS = 16  # of each rank
MOST_TOKENS = 2048  # of a chunk


def balanced_qo_home(batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options) -> Layout:
    """Uniform chunks, as many on each rank, dealt out by the work of their queries: the heaviest first, to the rank
    with the least work so far. All sequences one behind the other are cut as one, so a chunk can have the end of one
    sequence and the beginning of the next.

    Modelled: queries are computed where they are, only KV moves, and only where a mask needs it; gradients of KV come
    back. Both cross to a node once (its hierarchical communication), in as many stages as the option `divisions` says,
    those of the paper's greedy schedule.
    Chunks have at most `block_tokens` tokens; with `auto` there are 16 on each rank or more, of at most 2048. Not
    modelled: padding to whole chunks, and a search for the best number of stages. Keys of cross-attention are dealt out
    evenly, whatever the mask.
    """
    ranks = cluster.ranks
    lengths = np.array([sequence.length for sequence in batch.sequences])
    others = np.array([sequence.kv_length or 0 for sequence in batch.sequences])
    (q_cuts, q_bounds), (kv_cuts, kv_bounds) = (cut_as_one(side, ranks, options) for side in (lengths, others))
    bounds = [
        (q, q if sequence.kv_length is None else kv)
        for sequence, q, kv in zip(batch.sequences, q_bounds, kv_bounds, strict=True)
    ]
    blocks = blocks_of_bounds(batch, shape.groups, bounds)
    tokens = blocks.tokens
    q_chunk, kv_chunk = (
        np.searchsorted(cuts, (np.cumsum(side) - side)[tokens.sequence] + tokens.start, "right") - 1
        for cuts, side in ((q_cuts, lengths), (kv_cuts, others))
    )
    chunks = len(q_cuts) - 1
    work = np.bincount(q_chunk[blocks.q_block], blocks.work, chunks)
    q_rank = deal(work, ranks, -(-chunks // ranks))[np.minimum(q_chunk, chunks - 1)]
    block_rank = np.where(tokens.role & HAS_Q, q_rank, kv_chunk * ranks // max(len(kv_cuts) - 1, 1))
    comp_rank = np.broadcast_to(block_rank[blocks.q_block], (blocks.groups, len(blocks)))
    placement = Placement(block_rank, comp_rank)
    return Layout(blocks, placement, greedy_schedule(blocks, placement, shape, cluster, options))


def cut_as_one(lengths: Ints, ranks: int, options: Options) -> tuple[Ints, list[Ints]]:
    """int64[n + 1], the bounds of chunks of sequences that lie one behind the other, and int64[m + 1], the bounds of
    blocks in each sequence: those of chunks and its own."""
    total = int(lengths.sum())
    least, most = (LEAST_CHUNKS, MOST_TOKENS) if options.block_tokens == "auto" else (1, options.block_tokens)
    chunks = min(total, ranks * max(least, -(-total // (ranks * most))))
    cuts = equal_cut(chunks)(total) if chunks else np.zeros(1, "int64")
    ends = np.append(0, np.cumsum(lengths))
    line = np.union1d(cuts, ends)
    return cuts, [line[start : stop + 1] - line[start] for start, stop in pairwise(np.searchsorted(line, ends))]
