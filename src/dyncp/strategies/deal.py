"""Things dealt out to hands, the heaviest first."""

from __future__ import annotations

import heapq

import numpy as np

from dyncp.ir.arrays import Ints


def deal(weights: Ints, hands: int, most: int | None = None) -> Ints:
    """int64[n]: the hand of each thing, of `hands`: the heaviest first, to the hand with the least weight so far that
    has fewer than `most` things."""
    heap = [(0.0, hand) for hand in range(hands)]
    count, result = [0] * hands, np.empty(len(weights), "int64")
    for thing in np.argsort(-weights, kind="stable").tolist():
        load, hand = heapq.heappop(heap)
        result[thing] = hand
        count[hand] += 1
        if count[hand] != most:  # a full hand does not come back
            heapq.heappush(heap, (load + float(weights[thing]), hand))
    return result
