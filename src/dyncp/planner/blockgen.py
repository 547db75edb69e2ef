"""Batch -> Blocks: cut sequences into token blocks and find the computation blocks between them (paper, 4.1), and the
part of the mask inside each."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import HAS_KV, HAS_Q, Blocks, TokenBlocks
from dyncp.ir.plan import Comps

Cut = Callable[[int], Ints]  # a sequence's length -> int64[n + 1], ascending bounds of its blocks from 0 to the length


def uniform_cut(block_tokens: int) -> Cut:
    """Blocks of `block_tokens` tokens; the last one of a sequence may be shorter."""
    return lambda length: np.append(np.arange(0, length, block_tokens, dtype=np.int64), length)


def equal_cut(parts: int) -> Cut:
    """At most `parts` blocks of equal size, to within one token; fewer when the sequence has fewer tokens."""
    return lambda length: np.arange(min(parts, length) + 1, dtype=np.int64) * length // min(parts, length)


def make_blocks(batch: Batch, groups: int, cut: Cut) -> Blocks:
    """Cut every sequence of a batch and list its computation blocks: the (query block, KV block) rectangles in which
    the mask has pairs, with their exact number of pairs. Costs time in the number of mask slices and rectangles, not in
    the number of tokens.
    """
    tokens: list[tuple[int, int, int, int]] = []  # rows (sequence, start, stop, role)
    comps: list[Ints] = []  # int64[n, 4], rows (q_block, kv_block, mask, pairs)
    single: list[tuple[int, int, int, int]] = []  # such rows of sequences of one block; pairs may be 0

    def add_blocks(sequence: int, bounds: Ints, role: int) -> int:
        first = len(tokens)
        tokens.extend((sequence, a, b, role) for a, b in itertools.pairwise(bounds.tolist()))
        return first

    for index, sequence in enumerate(batch.sequences):
        q_bounds = kv_bounds = cut(sequence.length)
        if sequence.kv_length is None:
            q_first = kv_first = add_blocks(index, q_bounds, HAS_Q | HAS_KV)
        else:
            kv_bounds = cut(sequence.kv_length)
            q_first = add_blocks(index, q_bounds, HAS_Q)
            kv_first = add_blocks(index, kv_bounds, HAS_KV)
        for mask_index, name in enumerate(batch.mask_names):
            whole = sequence.masks[name]
            if len(q_bounds) == len(kv_bounds) == 2:  # a short sequence, of which there can be thousands
                single.append((q_first, kv_first, mask_index, whole.pairs()))
                continue
            rows, columns, pairs = whole.pairs_blocks(q_bounds, kv_bounds)
            mask = np.full(len(rows), mask_index)
            comps.append(np.stack([rows + q_first, columns + kv_first, mask, pairs], axis=1))
    token_rows = np.array(tokens, dtype=np.int64).reshape(-1, 4).T
    rows = np.concatenate([np.array(single, dtype=np.int64).reshape(-1, 4), *comps])
    rows = rows[rows[:, 3] > 0]
    rows = rows[np.lexsort((rows[:, 1], rows[:, 0], rows[:, 2]))]
    weights = batch.weights or {}
    return Blocks(
        TokenBlocks(*token_rows), groups, batch.mask_names, tuple(weights[name] for name in batch.mask_names), *rows.T
    )


def make_comps(batch: Batch, blocks: Blocks, mask: int, index: Ints) -> Comps:
    """The table of some computation blocks of a mask (ascending rows of `blocks`), each with its part of the mask."""
    q_block, kv_block = blocks.q_block[index], blocks.kv_block[index]
    sizes = blocks.tokens.tokens
    q_tokens, kv_tokens = sizes[q_block], sizes[kv_block]
    masked = blocks.pairs[index] != q_tokens * kv_tokens
    # where nothing is masked there is no need to look at the mask
    zeros = np.zeros(len(index), "int64")
    slices = list(np.stack([zeros, q_tokens, zeros, zeros, kv_tokens, zeros], axis=1)[:, None])
    columns = (q_block, blocks.tokens.start[q_block], q_tokens, blocks.tokens.start[kv_block], kv_tokens)
    name = blocks.mask_names[mask]
    sequences = blocks.tokens.sequence[q_block[masked]].tolist()
    rectangles = zip(*(column[masked].tolist() for column in columns[1:]), strict=True)
    for at, sequence, (q, rows, kv, keys) in zip(np.flatnonzero(masked).tolist(), sequences, rectangles, strict=True):
        slices[at] = batch.sequences[sequence].masks[name].crop_slices(q, q + rows, kv, kv + keys)
    ptr = np.cumsum([0] + [len(rows) for rows in slices])
    return Comps(index, q_block, kv_block, ptr, np.concatenate(slices) if slices else np.empty((0, 6)))
