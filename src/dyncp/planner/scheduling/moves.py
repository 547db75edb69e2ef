"""What moves, from where to where and when: needs and their steps -> Transfers."""

from __future__ import annotations

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.schedule import Transfers
from dyncp.planner.scheduling.fill import NONE, choose_ways
from dyncp.planner.scheduling.needs import Needs
from dyncp.planner.sorting import sort_by

# Rows (piece, src, dst, step) are int64[4, n]; a piece is `(side * B + block) * G + group` with all four sides here.


def input_moves(needs: Needs, arrival: Ints, way_in: Ints) -> Ints:
    """Rows of the arrivals of all needs that a rank does not own itself: from the owner or, on another node than the
    owner's, from the rank of the node where the piece arrives first."""
    gate = gates(needs, way_in)
    return np.stack([needs.piece, np.where(gate == NONE, needs.owner, gate), needs.rank, arrival])[:, needs.pair >= 0]


def output_moves(needs: Needs, piece_bytes: Ints, first: Ints, cluster: Cluster) -> Ints:
    """Rows of all partial results that were computed away from their owner; `first` is int64[M], the step at which that
    of each need can move first.

    Those of the ranks of one node, not the owner's, go to one of these ranks, which merges them and sends the sum on to
    the owner at the step after the last of them. The rest, and what only one rank of a node has, goes straight to the
    owner.
    """
    piece = needs.piece + len(piece_bytes) // 2  # Q_IN -> Q_OUT, KV_IN -> KV_OUT
    way_out = np.full(len(needs.entry_ptr) - 1, NONE, "int32")
    choose_ways(needs, piece_bytes[piece], way_out, np.zeros(cluster.ranks))
    gate = gates(needs, way_out)
    step = first.copy()
    chosen = np.repeat(way_out, np.diff(needs.entry_ptr))
    merged = chosen != needs.by_entry
    np.maximum.at(step, chosen[merged], first[needs.by_entry[merged]] + 1)
    return np.stack([piece, needs.rank, np.where(gate == NONE, needs.owner, gate), step])[:, needs.pair >= 0]


def gates(needs: Needs, way: Ints) -> Ints:
    """int32[M]: the rank of the chosen need of each need's entry; NONE for the chosen ones and without an entry."""
    gate = np.full(len(needs.piece), NONE, "int32")
    chosen = np.repeat(way, np.diff(needs.entry_ptr))
    gate[needs.by_entry] = np.where(chosen == needs.by_entry, NONE, needs.rank[chosen])
    return gate


def transfers_of(rows: Ints, mask: int, blocks: Blocks) -> Transfers:
    """The transfers of one mask, by step, source, destination and piece."""
    count, groups = len(blocks.tokens), blocks.groups
    piece, src, dst, step = rows
    order = sort_by(step, src, dst, piece)
    block, group = np.divmod(piece[order], groups)
    side, block = np.divmod(block, count)
    return Transfers(np.full(len(order), mask), side, block, group, src[order], dst[order], step[order])
