"""Even tokens: cut token blocks of ranks that own too many, and give what is cut off to ranks that own too few."""

from __future__ import annotations

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.planner.partition.nets import Nets

ROUND = 32  # tokens: pieces are cut at multiples of it where the limits leave room


def even_tokens(
    nets: Nets, block_rank: Ints, comp_rank: Ints, per_node: int, limit: float, ranks: int, crossed: float
) -> tuple[Ints, Ints, Ints]:
    """How to cut token blocks so that no rank owns more than `limit` tokens (at least the mean), at little cost.

    A rank that owns too much gives from one block at a time, to the rank that saves most bytes for it, until it does
    not. So there are fewer than two cuts for each rank.

    Args:
        nets: the hypergraph.
        block_rank: int[B], the rank of each token block.
        comp_rank: int[C], the rank of each computation block.
        per_node: ranks of a node.
        limit: tokens that no rank is to exceed.
        ranks: how many there are.
        crossed: what a byte between nodes costs on top of one that moves.

    Returns:
        (int64[P] block, int64[P] tokens, int64[P] rank): the pieces of all blocks, each block's in order.
    """
    value = own_value(nets, comp_rank, ranks, per_node, crossed) / np.maximum(nets.tokens, 1)[:, None]
    size = nets.tokens.astype("int64")
    load = np.bincount(block_rank, size, ranks)
    pieces = [[(int(rank), int(tokens))] for rank, tokens in zip(block_rank, size, strict=True)]
    room = np.maximum(np.floor(limit) - load, 0)
    for source in np.argsort(-load, kind="stable").tolist():
        surplus = int(np.ceil(load[source] - limit))
        if surplus <= 0:
            break
        own = np.flatnonzero(block_rank == source)
        loss = value[own, source][:, None] - value[own]
        while surplus > 0 and room.max() > 0:
            loss[:, room <= 0] = np.inf
            at, target = divmod(int(np.argmin(loss)), ranks)
            if np.isinf(loss[at, target]):
                break
            rank, left = pieces[own[at]][0]
            wanted = min(-(-surplus // ROUND) * ROUND, int(room[target]), left)
            if left - wanted < ROUND and left <= room[target]:
                wanted = left  # rather the whole block than a crumb
            pieces[own[at]].append((target, wanted))
            pieces[own[at]][0] = (rank, left - wanted)
            surplus -= wanted
            room[target] -= wanted
            if left == wanted:
                loss[at] = np.inf
        room[source] = max(0, -surplus)  # for others, where it gave more than it had to
    rows = [(block, tokens, rank) for block, parts in enumerate(pieces) for rank, tokens in parts if tokens]
    block, tokens, rank = np.array(rows, "int64").reshape(-1, 3).T
    return block, tokens, rank


def own_value(nets: Nets, comp_rank: Ints, ranks: int, per_node: int, crossed: float) -> Ints:
    """float64[B, R]: what need not move if a rank owns a token block."""
    value = np.zeros((len(nets.tokens), ranks))
    here = nets.pin_counts(comp_rank, ranks) > 0
    nodes = here.reshape(len(here), ranks // per_node, per_node).any(axis=2)
    here = here + crossed * np.repeat(nodes, per_node, axis=1)
    np.add.at(value, nets.edge_token, here * nets.edge_bytes[:, None])
    return value
