"""Local search over the owners of token blocks: looking only where something can be gained changes no result."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dyncp.planner.partition.nets import loads
from dyncp.planner.partition.ownership import _search, longest_first


def plain_search(value, tokens, limit, start):
    """Every move and every swap of every block, until none is left."""
    owner, count, parts = start.copy(), len(tokens), value.shape[1]
    load = loads(tokens, start, parts)
    limits, least = np.maximum(limit, tokens), 1e-9 * value.max(initial=0.0)
    changed = True
    while changed:
        changed = False
        for b in range(count):
            here = owner[b]
            over = load[here] > limits[b]
            best, to = -np.inf if over else least, -1
            for p in range(parts):
                after = load[p] + tokens[b]
                if p != here and (after <= limits[b] or (over and after < load[here])):
                    gain = value[b, p] - value[b, here]
                    if gain > best:
                        best, to = gain, p
            other, best = -1, -np.inf
            for o in range(count if to < 0 else 0):
                there, shift = owner[o], tokens[b] - tokens[o]
                if there == here:
                    continue
                fits = load[here] - shift <= limits[o] and load[there] + shift <= limits[b]
                relief = over and max(load[here] - shift, load[there] + shift) < max(load[here], load[there])
                gain = value[b, there] + value[o, here] - value[o, there] - value[b, here]
                if (relief or (fits and gain > least)) and gain > best:
                    best, other = gain, o
            moves = [(b, to)] if to >= 0 else [(b, owner[other]), (other, here)] if other >= 0 else []
            for block, part in moves:
                load[owner[block]] -= tokens[block]
                load[part] += tokens[block]
                owner[block] = part
                changed = True
    return owner


@settings(max_examples=150)
@given(seed=st.integers(0, 2**16), count=st.integers(0, 25), parts=st.integers(1, 5), epsilon=st.sampled_from([0, 0.3]))
def test_the_search_skips_only_what_gains_nothing(seed, count, parts, epsilon):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 9, count) * 16
    value = rng.integers(0, 4, (count, parts)) * tokens[:, None].astype("float64")
    value[rng.random(count) < 0.6] *= np.eye(parts)[0]  # many want the same part
    start = value.argmax(axis=1) if rng.random() < 0.5 else rng.integers(0, parts, count)
    reached = loads(tokens, longest_first(tokens, parts), parts).max()
    limit = max((1 + epsilon) * tokens.sum() / parts, reached * rng.integers(1, 3) / 2)  # or none can keep it
    assert _search(value, tokens, limit, start).tolist() == plain_search(value, tokens, limit, start).tolist()


@pytest.mark.parametrize("scale", [2.0**-1000, 1.0])
def test_small_gains_are_gains(scale):
    """Two blocks that each want the other's part, and no room to move."""
    value = np.array([[0.0, 1.0], [1.0, 0.0]]) * scale
    assert _search(value, np.array([8, 8]), 8.0, np.array([0, 1])).tolist() == [1, 0]
