"""Dense masks written pair by pair, straight from the definitions: slow, and what constructors are tested against."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
from numpy.typing import NDArray

Dense = NDArray[np.bool_]


def by_pairs(q_length: int, k_length: int, sees: Callable[[int, int], bool]) -> Dense:
    return np.array([[sees(q, k) for k in range(k_length)] for q in range(q_length)], bool).reshape(q_length, k_length)


def owner(lengths: list[int]) -> list[int]:
    """The part that each token is in."""
    return [part for part, length in enumerate(lengths) for _ in range(length)]


def causal(length: int, k_length: int) -> Dense:
    return by_pairs(length, k_length, lambda q, k: k <= q + k_length - length)


def lambda_(length: int, sink: int, window: int) -> Dense:
    return by_pairs(length, length, lambda q, k: k <= q and (k < sink or q - k < window))


def causal_blockwise(length: int, block: int, sink_blocks: int, window_blocks: int) -> Dense:
    def sees(q: int, k: int) -> bool:
        in_last_block = q // block == (length - 1) // block
        return k <= q and (in_last_block or k // block < sink_blocks or q - k <= window_blocks * block)

    return by_pairs(length, length, sees)


def prefix_lm(length: int, prefix: int) -> Dense:
    return by_pairs(length, length, lambda q, k: k <= q or max(q, k) < prefix)


def document(lengths: list[int]) -> Dense:
    of = owner(lengths)
    return by_pairs(len(of), len(of), lambda q, k: k <= q and of[q] == of[k])


def shared_question(question: int, answers: list[int]) -> Dense:
    of = owner([question, *answers])
    return by_pairs(len(of), len(of), lambda q, k: k <= q and of[k] in (0, of[q]))


def tree(parents: list[int], lengths: list[int]) -> Dense:
    of = owner(lengths)

    def is_ancestor(above: int, node: int) -> bool:
        while node >= 0 and node != above:
            node = parents[node]
        return node == above

    return by_pairs(len(of), len(of), lambda q, k: k <= q and is_ancestor(of[k], of[q]))


def rectangle(q_length: int, k_length: int, piece: list) -> Dense:
    q_start, q_stop, k_start, k_stop, kind = piece

    def sees(q: int, k: int) -> bool:
        inside = q_start <= q < q_stop and k_start <= k < k_stop
        below_diagonal = k_stop - k >= q_stop - q or kind not in ("causal", "bi_causal")
        above_diagonal = k - k_start >= q - q_start or kind not in ("inv_causal", "bi_causal")
        return inside and below_diagonal and above_diagonal

    return by_pairs(q_length, k_length, sees)


@st.composite
def spans(draw: st.DrawFn, length: int) -> tuple[int, int]:
    """A non-empty `[start, stop)` inside `[0, length)`."""
    start = draw(st.integers(0, length - 1))
    return start, draw(st.integers(start + 1, length))


@st.composite
def rectangles(draw: st.DrawFn, q_length: int, k_length: int) -> list:
    kind = draw(st.sampled_from(["full", "causal", "inv_causal", "bi_causal"]))
    return [*draw(spans(q_length)), *draw(spans(k_length)), kind]


@st.composite
def dense_masks(draw: st.DrawFn, most: int = 14) -> Dense:
    """Rectangles with straight edges, with some pairs flipped: long slices and single pairs."""
    q_length, k_length = draw(st.integers(1, most)), draw(st.integers(1, most))
    dense = np.zeros((q_length, k_length), bool)
    for piece in draw(st.lists(rectangles(q_length, k_length), max_size=4)):
        dense |= rectangle(q_length, k_length, piece)
    for q, k in draw(st.lists(st.tuples(st.integers(0, q_length - 1), st.integers(0, k_length - 1)), max_size=4)):
        dense[q, k] ^= True
    return dense
