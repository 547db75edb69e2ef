"""Even tokens: cut token blocks of ranks that own too many, and give what is cut off to ranks that own too few."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.planner.partition.nets import Nets

ROUND = 32  # tokens: pieces are cut at multiples of it where the limits leave room
HOPS = 3  # ranks that tokens are passed on by, at most
MANY = 256  # ranks, above which they are given directly


def even_tokens(
    nets: Nets, block_rank: Ints, comp_rank: Ints, per_node: int, limit: float, ranks: int, crossed: float
) -> tuple[Ints, Ints, Ints]:
    """How to cut token blocks so that no rank owns more than `limit` tokens (at least the mean, rounded up), at little
    cost.

    A rank that owns too many gives some to one that has use for them; if that has no room, it gives as many of its own
    to a third, and so on to one with room: always along the way that costs least per token.

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
    pieces = _Pieces(nets.tokens, block_rank, value, ranks)
    load = np.bincount(block_rank, nets.tokens, ranks).astype("int64")
    room = np.maximum(int(np.floor(limit)) - load, 0)
    surplus = np.maximum(load - int(np.floor(limit)), 0)
    while surplus.any() and room.any():
        way = _cheapest_way(pieces.cost, surplus > 0, room > 0, HOPS if ranks <= MANY else 1)
        if not way:
            break
        givers = list(pairwise(way))
        most = min(int(room[way[-1]]), *(pieces.tokens[pieces.best[here, there]] for here, there in givers))
        count = min(most, -(-int(surplus[way[0]]) // ROUND) * ROUND)
        if len(givers) == 1 and most - count < ROUND and most == pieces.tokens[pieces.best[givers[0]]]:
            count = most  # rather the whole piece than leave a crumb
        for here, there in reversed(givers):  # before it receives, so that the pieces are those counted on
            pieces.give(here, there, count)
        room[way[0]] += max(0, count - surplus[way[0]])  # for others, where it gives more than it has to
        surplus[way[0]] = max(0, surplus[way[0]] - count)
        room[way[-1]] -= count
    return pieces.in_order()


class _Pieces:
    """Runs of tokens while they are given away."""

    def __init__(self, tokens: Ints, block_rank: Ints, value: Ints, ranks: int) -> None:
        self.block, self.tokens = list(range(len(tokens))), [int(count) for count in tokens]
        self.rank, self.value = [int(rank) for rank in block_rank], value
        self.owned: list[set[int]] = [set() for _ in range(ranks)]
        for piece, rank in enumerate(self.rank):
            self.owned[rank].add(piece)
        self.cost = np.full((ranks, ranks), np.inf)  # per token, of giving from one rank to another
        self.best = np.zeros((ranks, ranks), "int64")  # the piece to give from
        for rank in range(ranks):
            self.price(rank)

    def price(self, rank: int) -> None:
        """Find out what giving away costs a rank."""
        own = np.array(sorted(self.owned[rank]), "int64")
        if not len(own):
            self.cost[rank] = np.inf
            return
        value = self.value[np.array(self.block)[own]]
        loss = value[:, rank, None] - value
        cheapest = loss.argmin(axis=0)
        self.cost[rank], self.best[rank] = loss[cheapest, np.arange(loss.shape[1])], own[cheapest]
        self.cost[rank, rank] = np.inf

    def give(self, here: int, there: int, count: int) -> None:
        """Give tokens away: a whole piece, or the end of one."""
        piece = int(self.best[here, there])
        if count == self.tokens[piece]:
            self.owned[here].remove(piece)
            self.rank[piece] = there
            self.owned[there].add(piece)
        else:
            self.tokens[piece] -= count
            self.owned[there].add(len(self.block))
            self.block.append(self.block[piece])
            self.tokens.append(count)
            self.rank.append(there)
        self.price(here)
        self.price(there)

    def in_order(self) -> tuple[Ints, Ints, Ints]:
        """Block, tokens and rank of each piece, by block; neighbours of one rank as one."""
        order = np.lexsort((self.rank, self.block))
        block, tokens, rank = (np.array(column, "int64")[order] for column in (self.block, self.tokens, self.rank))
        first = np.flatnonzero(np.append(True, (block[1:] != block[:-1]) | (rank[1:] != rank[:-1])))
        return block[first], np.add.reduceat(tokens, first), rank[first]


def _cheapest_way(cost: Ints, sources: Ints, sinks: Ints, hops: int) -> list[int]:
    """Ranks from a source to a sink, each of which gives to the next; empty where there is no way."""
    steps = np.maximum(cost, 0.0)  # what gains is as good as what costs nothing, or ways would go in circles
    spent = np.where(sources, 0.0, np.inf)
    before: list[Ints] = []
    for _ in range(hops):
        reached = spent[:, None] + steps
        giver = reached.argmin(axis=0)
        cheaper = reached[giver, np.arange(len(giver))] < spent
        before.append(np.where(cheaper, giver, -1))
        spent = np.where(cheaper, reached[giver, np.arange(len(giver))], spent)
    ends = np.where(sinks, spent, np.inf)
    way = [int(np.argmin(ends))]
    if np.isinf(ends[way[0]]):
        return []
    for giver in reversed(before):
        if giver[way[0]] >= 0:
            way.insert(0, int(giver[way[0]]))
    return way


def own_value(nets: Nets, comp_rank: Ints, ranks: int, per_node: int, crossed: float) -> Ints:
    """float64[B, R]: what need not move if a rank owns a token block."""
    value = np.zeros((len(nets.tokens), ranks))
    here = nets.pin_counts(comp_rank, ranks) > 0
    nodes = here.reshape(len(here), ranks // per_node, per_node).any(axis=2)
    here = here + crossed * np.repeat(nodes, per_node, axis=1)
    np.add.at(value, nets.edge_token, here * nets.edge_bytes[:, None])
    return value
