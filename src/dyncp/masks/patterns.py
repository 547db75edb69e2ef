"""Masks with a name: each is a few slices in closed form, whatever its length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dyncp.ir.arguments import whole_number, whole_numbers
from dyncp.ir.mask import Mask

MAX_SLICES = 1 << 22  # about 2 GB while they are built
Slice = Sequence[int]  # q_start, q_stop, lo, lo_step, hi, hi_step, as in Mask


def full(length: int, k_length: int | None = None) -> Mask:
    """Every query sees every key.

    Args:
        length: queries, at least 1.
        k_length: keys, if they are not the queries' tokens.

    Raises:
        ValueError: a length below 1.
    """
    length, keys = _lengths(length, k_length)
    return _mask(length, [(0, length, 0, 0, keys, 0)], keys)


def causal(length: int, k_length: int | None = None) -> Mask:
    """Query q sees the keys up to its own, or with another number of keys up to `q + k_length - length`: the last query
    sees all keys, and where there are fewer keys than queries the first queries see nothing.

    Args:
        length: queries, at least 1.
        k_length: keys, if they are not the queries' tokens.

    Raises:
        ValueError: a length below 1.
    """
    length, keys = _lengths(length, k_length)
    start = max(0, length - keys)
    return _mask(length, [(start, length, 0, 0, start + keys - length + 1, 1)], keys)


def sliding_window(length: int, window: int) -> Mask:
    """Each token sees itself and the `window - 1` before it.

    Args:
        length: tokens, at least 1.
        window: tokens that each sees, itself among them, at least 1.

    Raises:
        ValueError: a length or a window below 1.
    """
    return lambda_(length, 0, window)


def lambda_(length: int, sink: int, window: int) -> Mask:
    """Each token sees the first `sink` tokens (the attention sink) and a causal sliding window that counts the token
    itself (paper, section 7: sink 64, window 4096).

    Args:
        length: tokens, at least 1.
        sink: tokens at the start that all see, at least 0.
        window: tokens up to and with itself that each sees, at least 1.

    Raises:
        ValueError: a length or a window below 1, or a sink below 0.
    """
    length, sink = whole_number("length", length, 1), whole_number("sink", sink, 0)
    window = whole_number("window", window, 1)
    return _mask(length, _lambda_slices(length, sink, window, last=length))


def causal_blockwise(length: int, block: int, sink_blocks: int, window_blocks: int) -> Mask:
    """In-context learning: blocks of `block` tokens, the last one possibly shorter. A token sees the sink blocks, the
    `window_blocks * block` tokens before it and itself; a token of the last block (the test example) sees everything
    before it (paper, section 7: block 256, one sink block, window of two blocks).

    Args:
        length: tokens, at least 1.
        block: tokens of a block, at least 1.
        sink_blocks: blocks at the start that all see, at least 0.
        window_blocks: blocks' worth of tokens before its own that each token sees, at least 1.

    Raises:
        ValueError: a length, block or window below 1, or sink blocks below 0.
    """
    length, block = whole_number("length", length, 1), whole_number("block", block, 1)
    sink = whole_number("sink_blocks", sink_blocks, 0) * block
    window = whole_number("window_blocks", window_blocks, 1) * block + 1
    last = (length - 1) // block * block
    return _mask(length, _lambda_slices(length, sink, window, last))


def prefix_lm(length: int, prefix: int) -> Mask:
    """Causal, but the first `prefix` tokens all see each other.

    Args:
        length: tokens, at least 1.
        prefix: tokens of the prefix, in `[0, length]`.

    Raises:
        ValueError: a length below 1, or a prefix outside `[0, length]`.
    """
    length, prefix = whole_number("length", length, 1), whole_number("prefix", prefix, 0)
    if prefix > length:
        raise ValueError(f"prefix is {prefix}, but the sequence has {length} tokens; give a prefix of at most {length}")
    if prefix <= 1:
        return causal(length)
    return _mask(length, [(0, prefix, 0, 0, prefix, 0), (prefix, length, 0, 0, prefix + 1, 1)])


def document(lengths: Sequence[int]) -> Mask:
    """Documents packed one after another, each causal and blind to the others.

    Args:
        lengths: tokens of each document, at least 1 each.

    Raises:
        ValueError: no documents, or a length below 1.
    """
    lengths = whole_numbers("lengths", lengths, 1)
    return tree([-1] * len(lengths), lengths)


def shared_question(question: int, answers: Sequence[int]) -> Mask:
    """One question and several answers to it: all causal, and an answer sees the question and itself, not the other
    answers (paper, section 7). `shared_question_split` cuts a length into the two.

    Args:
        question: tokens of the question, at least 1.
        answers: tokens of each answer, at least 1 each; none at all leaves the question.

    Raises:
        ValueError: a part below 1.
    """
    question, answers = whole_number("question", question, 1), whole_numbers("answers", answers, 1)
    return tree([-1] + [0] * len(answers), [question, *answers])


def shared_question_split(length: int, fraction: float = 0.2, answers: int = 4) -> tuple[int, list[int]]:
    """The question's length and the answers', of a sequence of `length` tokens.

    The question is `fraction` of the length, rounded down but at least 1 token. Answers share the rest equally, rounded
    down, and the last takes what remains; those that would be empty, in a very short sequence, are left out. So
    `shared_question(*shared_question_split(1000))` is a mask of 1,000 tokens.

    Args:
        length: tokens, at least 1.
        fraction: the question's part of them, between 0 and 1.
        answers: number of answers, at least 1.

    Raises:
        ValueError: a length or number of answers below 1, a fraction not between 0 and 1, or millions of answers.
    """
    length, answers = whole_number("length", length, 1), whole_number("answers", answers, 1)
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction < 1:
        raise ValueError(f"fraction is {fraction!r}; expected a number between 0 and 1, the question's part")
    question = max(1, int(length * fraction + 1e-9))  # 100 * 0.29 is 28.999..., and means 29
    each, rest = divmod(length - question, answers)
    if not each:
        return question, [rest] if rest else []
    _check_count(answers, "answers")
    return question, [each] * (answers - 1) + [each + rest]


def tree(parents: Sequence[int], lengths: Sequence[int]) -> Mask:
    """A prefix tree: the tokens of a node see all tokens of the node's ancestors and, causally, those of the node.

    Args:
        parents: the parent of each node, an earlier one, or -1 for a root; there may be several roots.
        lengths: tokens of each node, at least 1; nodes lie one after another in the sequence.

    Raises:
        ValueError: no nodes, lists of different lengths, a parent that is not earlier, or a length below 1; or millions
            of slices, as when many chains of nodes are interleaved.
    """
    parents, lengths = whole_numbers("parents", parents, -1), whole_numbers("lengths", lengths, 1)
    if not lengths:
        raise ValueError("lengths is empty; give at least one")
    if len(parents) != len(lengths):
        raise ValueError(f"{len(parents)} parents but {len(lengths)} lengths; give every node one of each")
    last_child = {parent: node for node, parent in enumerate(parents)}
    slices: list[list[int]] = []
    seen: dict[int, list[tuple[int, int]]] = {}  # of nodes with children to come: their ancestors' and own keys
    shared: dict[tuple[int, int], list[int]] = {}  # ranges the node before sees in full, and their slices
    own = [0, 0, -1, 0, 0, 1]  # the slice that the node before is in with its own tokens
    start = 0
    for node, (parent, length) in enumerate(zip(parents, lengths, strict=True)):
        if parent >= node:
            raise ValueError(f"node {node} has parent {parent}; a parent comes before its children (-1: a root)")
        stop = start + length
        ancestors = list(seen[parent]) if parent >= 0 else []
        if last_child[parent] == node:
            seen.pop(parent, None)
        # An ancestor right before the node is one range with it.
        lo = ancestors.pop()[0] if ancestors and ancestors[-1][1] == start else start
        if node in last_child:
            seen[node] = [*ancestors, (lo, stop)]
        # What the node before sees too goes on in the slices begun there.
        if own[2] == lo:
            own[1] = stop
        else:
            own = [start, stop, lo, 0, start + 1, 1]
            slices.append(own)
        shared = {keys: shared.get(keys, [start, stop, keys[0], 0, keys[1], 0]) for keys in ancestors}
        for piece in shared.values():
            piece[1] = stop
            if piece[0] == start:
                slices.append(piece)
        _check_count(len(slices), "slices")
        start = stop
    return _mask(start, slices)


def _check_count(count: int, what: str) -> None:
    if count > MAX_SLICES:
        raise ValueError(
            f"the mask has {count} {what} or more, and at most {MAX_SLICES} fit into memory; give it fewer and longer "
            "parts, and in a tree put each node next to its parent, so that both are one range of keys"
        )


def _lengths(length: int, k_length: int | None) -> tuple[int, int]:
    length = whole_number("length", length, 1)
    return length, length if k_length is None else whole_number("k_length", k_length, 1)


def _lambda_slices(length: int, sink: int, window: int, last: int) -> list[Slice]:
    """Sink and window for the rows before `last`, causal from there; the window of a row counts the row's token."""
    # In the first sink + window rows nothing lies between the two: those rows are causal.
    apart = sink + window
    if apart >= last:
        return [(0, length, 0, 0, 1, 1)]
    return [
        (0, apart, 0, 0, 1, 1),
        (apart, last, 0, 0, sink, 0),
        (apart, last, sink + 1, 1, apart + 1, 1),
        (last, length, 0, 0, last + 1, 1),
    ]


def _mask(length: int, slices: Sequence[Slice], k_length: int | None = None) -> Mask:
    """A mask of those slices that have rows and keys."""
    kept = [piece for piece in slices if piece[0] < piece[1] and piece[2] < piece[4]]
    return Mask(length, length if k_length is None else k_length, np.array(kept, np.int64).reshape(-1, 6))
