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


def even_load(sizes: Ints, parts: int, epsilon: float) -> float:
    """The load that no part needs to exceed: `1 + epsilon` times the mean, or what longest-first reaches where items
    are too coarse for that. An item that is larger on its own has a part to itself and does not count."""
    limit = (1 + epsilon) * float(sizes.sum()) / parts
    rest = sizes[sizes <= limit]
    if not len(rest) or rest.max() <= epsilon * float(sizes.sum()) / parts:
        return limit  # longest-first stays below mean + largest
    others = parts - (len(sizes) - len(rest))
    return max(limit, float(loads(rest, longest_first(rest, others), others).max()))


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
    owner, load = start.copy(), loads(tokens, start, value.shape[1])
    kept = value[np.arange(len(tokens)), owner]
    limits = np.maximum(limit, tokens)
    least = 1e-9 * float(value.max(initial=1.0))
    changed = True
    while changed:
        changed = False
        for block in range(len(tokens)):
            here = owner[block]
            over = load[here] > limits[block]
            after = load + tokens[block]
            gain = np.where(
                (after <= limits[block]) | (over & (after < load[here])), value[block] - kept[block], -np.inf
            )
            gain[here] = -np.inf
            to = int(np.argmax(gain))
            if gain[to] > (-np.inf if over else least):
                load[here] -= tokens[block]
                load[to] += tokens[block]
                owner[block], kept[block] = to, value[block, to]
                changed = True
                continue
            other = _best_swap(value, tokens, limits, (owner, load, kept), block)
            if other >= 0:
                there = owner[other]
                load[here] += tokens[other] - tokens[block]
                load[there] += tokens[block] - tokens[other]
                owner[block], owner[other] = there, here
                kept[block], kept[other] = value[block, there], value[other, here]
                changed = True
    return owner


def _best_swap(value: Ints, tokens: Ints, limits: Ints, state: tuple[Ints, Ints, Ints], block: int) -> int:
    """The block to change owners with, -1 for none."""
    owner, load, kept = state
    here = owner[block]
    shift = tokens[block] - tokens
    load_here, load_there = load[here] - shift, load[owner] + shift
    fits = (load_here <= limits) & (load_there <= limits[block])
    relief = (load[here] > limits[block]) & (np.maximum(load_here, load_there) < np.maximum(load[here], load[owner]))
    gain = value[block, owner] + value[:, here] - kept - kept[block]
    least = 1e-9 * float(value.max(initial=1.0))
    gain[(owner == here) | ~(relief | (fits & (gain > least)))] = -np.inf
    other = int(np.argmax(gain))
    return other if gain[other] > -np.inf else -1
