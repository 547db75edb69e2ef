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
        way = _cheapest_way(pieces, surplus, room)
        if not way:
            break
        givers = list(pairwise(way))
        most = min(int(room[way[-1]]), *(pieces.tokens[pieces.offer(here)[1][there]] for here, there in givers))
        count = min(most, -(-int(surplus[way[0]]) // ROUND) * ROUND)
        if len(givers) == 1 and most - count < ROUND and most == pieces.tokens[pieces.offer(way[0])[1][way[1]]]:
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
        self.offers: dict[int, tuple[Ints, Ints]] = {}

    def offer(self, rank: int) -> tuple[Ints, Ints]:
        """float64[R] and int64[R]: what giving away costs a rank per token, and the piece to give from, by who
        receives."""
        if rank not in self.offers:
            own = np.array(sorted(self.owned[rank]), "int64")
            value = self.value[[self.block[piece] for piece in own.tolist()]]
            loss = value[:, rank, None] - value
            if len(own):
                cheapest = loss.argmin(axis=0)
                cost, best = loss[cheapest, np.arange(loss.shape[1])], own[cheapest]
            else:
                cost, best = np.full(loss.shape[1], np.inf), np.zeros(loss.shape[1], "int64")
            cost[rank] = np.inf
            # what gains is as good as what costs nothing, or ways would go in circles
            self.offers[rank] = np.maximum(cost, 0.0), best
        return self.offers[rank]

    def give(self, here: int, there: int, count: int) -> None:
        """Give tokens away: a whole piece, or the end of one."""
        piece = int(self.offer(here)[1][there])
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
        self.offers.pop(here, None)
        self.offers.pop(there, None)

    def in_order(self) -> tuple[Ints, Ints, Ints]:
        """Block, tokens and rank of each piece, by block; neighbours of one rank as one."""
        order = np.lexsort((self.rank, self.block))
        block, tokens, rank = (np.array(column, "int64")[order] for column in (self.block, self.tokens, self.rank))
        first = np.flatnonzero(np.append(True, (block[1:] != block[:-1]) | (rank[1:] != rank[:-1])))
        return block[first], np.add.reduceat(tokens, first), rank[first]


def _cheapest_way(pieces: _Pieces, surplus: Ints, room: Ints) -> list[int]:
    """Ranks from one with a surplus to one with room, each of which gives to the next; empty where there is no way."""
    ranks = len(room)
    if ranks > MANY:
        source = int(np.argmax(surplus))
        ends = np.where(room > 0, pieces.offer(source)[0], np.inf)
        target = int(np.argmin(ends))
        return [] if np.isinf(ends[target]) else [source, target]
    steps = np.stack([pieces.offer(rank)[0] for rank in range(ranks)])
    spent = np.where(surplus > 0, 0.0, np.inf)
    before: list[Ints] = []
    for _ in range(HOPS):
        reached = spent[:, None] + steps
        giver = reached.argmin(axis=0)
        cheaper = reached[giver, np.arange(ranks)] < spent
        before.append(np.where(cheaper, giver, -1))
        spent = np.where(cheaper, reached[giver, np.arange(ranks)], spent)
    ends = np.where(room > 0, spent, np.inf)
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
