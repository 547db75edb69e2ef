"""Batch -> Blocks: cut sequences into token blocks and find the computation blocks between them (paper, 4.1)."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import HAS_KV, HAS_Q, Blocks, TokenBlocks

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

    def add_blocks(sequence: int, bounds: Ints, role: int) -> int:
        first = len(tokens)
        tokens.extend((sequence, int(a), int(b), role) for a, b in itertools.pairwise(bounds))
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
            grid = sequence.masks[name].pairs_grid(q_bounds, kv_bounds)
            rows, columns = np.nonzero(grid)
            mask = np.full(len(rows), mask_index)
            comps.append(np.stack([rows + q_first, columns + kv_first, mask, grid[rows, columns]], axis=1))
    token_rows = np.array(tokens, dtype=np.int64).reshape(-1, 4).T
    rows = np.concatenate(comps)
    rows = rows[np.argsort(rows[:, 2], kind="stable")]
    weights = batch.weights or {}
    return Blocks(
        TokenBlocks(*token_rows), groups, batch.mask_names, tuple(weights[name] for name in batch.mask_names), *rows.T
    )
