"""Which part owns which token block, when it is known where the computation is."""

from __future__ import annotations

import heapq

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.planner.partition.nets import Nets, loads


def longest_first(sizes: Ints, parts: int) -> Ints:
    """int64[n]: the part of each item when the largest is always given to the emptiest part."""
    part = np.zeros(len(sizes), "int64")
    heap = [(0.0, number) for number in range(parts)]
    for item in np.argsort(-sizes, kind="stable").tolist():
        load, number = heap[0]
        part[item] = number
        heapq.heapreplace(heap, (load + float(sizes[item]), number))
    return part


def give_tokens(nets: Nets, comp_part: Ints, parts: int, limit: float, start: Ints | None = None) -> Ints:
    """int64[B]: an owner for each token block such that few bytes move and no part has more than `limit` tokens.

    Local search with moves and swaps, from `start` or from the best fitting part for each block, largest first.
    """
    value = np.zeros((len(nets.tokens), parts))  # bytes that need not move if a part owns a block
    owned = np.flatnonzero(nets.edge_token >= 0)
    here = (nets.pin_counts(comp_part, parts) > 0)[owned]
    np.add.at(value, nets.edge_token[owned], here * nets.edge_bytes[owned, None])
    if start is None:
        start = _best_fit(value, nets.tokens, limit)
    owner = _search(value, nets.tokens, limit, start)
    if loads(nets.tokens, owner, parts).max() > limit:
        again = _search(value, nets.tokens, limit, longest_first(nets.tokens, parts))
        if loads(nets.tokens, again, parts).max() < loads(nets.tokens, owner, parts).max():
            return again
    return owner


def _best_fit(value: Ints, tokens: Ints, limit: float) -> Ints:
    owner = np.zeros(len(tokens), "int64")
    load = np.zeros(value.shape[1])
    for block in np.argsort(-tokens, kind="stable"):
        room = load + tokens[block] <= max(limit, tokens[block])
        best = np.where(room, value[block], -1.0).max()
        ties = room & (value[block] == best) if room.any() else np.ones(len(load), bool)
        owner[block] = np.argmin(np.where(ties, load, np.inf))
        load[owner[block]] += tokens[block]
    return owner


def _search(value: Ints, tokens: Ints, limit: float, start: Ints) -> Ints:
    """Moves and swaps while one lowers an overload, or gains bytes and makes no overload worse. A block that is larger
    than the limit may be where nothing else is."""
    search = _Search(value, tokens, limit, start)
    changed = True
    while changed:
        changed = False
        for block in range(len(tokens)):
            if not search.may_gain(block):
                continue
            to = search.best_move(block)
            if to >= 0:
                search.move(block, to)
                changed = True
                continue
            other = search.best_swap(block)
            if other >= 0:
                here, there = search.owner[block], search.owner[other]
                search.move(block, there)
                search.move(other, here)
                changed = True
    return search.owner


class _Search:
    """Owners of token blocks while they change."""

    def __init__(self, value: Ints, tokens: Ints, limit: float, start: Ints) -> None:
        self.value, self.tokens, self.owner = value, tokens, start.copy()
        self.limits = np.maximum(limit, tokens)
        self.load = loads(tokens, start, value.shape[1])
        self.kept = value[np.arange(len(tokens)), start]  # bytes that need not move
        self.most = value.max(axis=1)
        self.least = 1e-9 * float(value.max(initial=1e-300))  # a smaller gain is none
        # Blocks that would gain elsewhere; half of what gives a swap its gain, and half of that for rounding.
        self.wanting = self.most - self.kept > self.least / 4

    def over(self, block: int) -> bool:
        return bool(self.load[self.owner[block]] > self.limits[block])

    def may_gain(self, block: int) -> bool:
        """Whether a move or a swap of a block can be worth it: most blocks are where they should be."""
        return bool(self.wanting[block] or self.over(block) or self.wanting.any())

    def move(self, block: int, to: int) -> None:
        self.load[self.owner[block]] -= self.tokens[block]
        self.load[to] += self.tokens[block]
        self.owner[block], self.kept[block] = to, self.value[block, to]
        self.wanting[block] = self.most[block] - self.kept[block] > self.least / 4

    def best_move(self, block: int) -> int:
        """The part to move to, -1 for none."""
        here, over = self.owner[block], self.over(block)
        after = self.load + self.tokens[block]
        fits = (after <= self.limits[block]) | (over & (after < self.load[here]))
        gain = np.where(fits, self.value[block] - self.kept[block], -np.inf)
        gain[here] = -np.inf
        to = int(np.argmax(gain))
        return to if gain[to] > (-np.inf if over else self.least) else -1

    def best_swap(self, block: int) -> int:
        """The block to change owners with, -1 for none."""
        here = self.owner[block]
        # One of the two must gain, unless the swap lowers an overload.
        among = slice(None) if self.wanting[block] or self.over(block) else np.flatnonzero(self.wanting)
        owner, tokens = self.owner[among], self.tokens[among]
        shift = self.tokens[block] - tokens
        load_here, load_there = self.load[here] - shift, self.load[owner] + shift
        fits = (load_here <= self.limits[among]) & (load_there <= self.limits[block])
        relief = self.over(block) & (np.maximum(load_here, load_there) < np.maximum(self.load[here], self.load[owner]))
        gain = self.value[block, owner] + self.value[among, here] - self.kept[among] - self.kept[block]
        gain[(owner == here) | ~(relief | (fits & (gain > self.least)))] = -np.inf
        other = int(np.argmax(gain))
        if gain[other] == -np.inf:
            return -1
        return other if isinstance(among, slice) else int(among[other])
