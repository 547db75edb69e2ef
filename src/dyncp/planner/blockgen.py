"""Batch -> Blocks: cut sequences into token blocks and find the computation blocks between them (paper, 4.1), and the
part of the mask inside each.

All sequences of a batch are looked at in one go: laid one behind the other, their masks are one mask, whose rectangles
`ir/slices.py` counts and crops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import HAS_KV, HAS_Q, Blocks, TokenBlocks
from dyncp.ir.plan import Comps
from dyncp.ir.slices import HI, LO, Q_START, Q_STOP, Grid, grid_pairs, grid_slices

Cut = Callable[[int], Ints]  # a sequence's length -> int64[n + 1], ascending bounds of its blocks from 0 to the length
Bounds = tuple[Ints, Ints]  # bounds, as of a Cut, of a sequence's query blocks and of its KV blocks


def uniform_cut(block_tokens: int) -> Cut:
    """Blocks of `block_tokens` tokens; the last one of a sequence may be shorter."""
    return lambda length: np.append(np.arange(0, length, block_tokens, dtype=np.int64), length)


def even_cut(block_tokens: int) -> Cut:
    """As many blocks as `uniform_cut` makes, but of equal size, to within one token."""
    return lambda length: equal_cut(-(-length // block_tokens))(length)


def equal_cut(parts: int) -> Cut:
    """At most `parts` blocks of equal size, to within one token; fewer when the sequence has fewer tokens."""
    return lambda length: np.arange(min(parts, length) + 1, dtype=np.int64) * length // min(parts, length)


def make_blocks(batch: Batch, groups: int, cut: Cut) -> Blocks:
    """Cut every sequence of a batch by the same rule, see `blocks_of_bounds`; `cut` is called once per length."""
    bounds = {length: cut(length) for length in {n for s in batch.sequences for n in (s.length, s.keys)}}
    return blocks_of_bounds(batch, groups, [(bounds[s.length], bounds[s.keys]) for s in batch.sequences])


def blocks_of_bounds(batch: Batch, groups: int, bounds: Sequence[Bounds]) -> Blocks:
    """The token blocks between given bounds and their computation blocks: the (query block, KV block) rectangles in
    which a mask has pairs, with their exact number of pairs. Costs time in the number of mask slices and rectangles,
    not in the number of tokens.

    Args:
        batch: S sequences.
        groups: number of head groups.
        bounds: of each sequence, the bounds of its query blocks and of its KV blocks; in self-attention these are the
            same blocks, so both have the same values.

    Raises:
        ValueError: bounds that do not ascend from 0 to the sequence's length, or differ in self-attention.
    """
    tokens = _token_blocks(batch, bounds)
    line = _Line(batch, tokens)
    parts = []
    for name in batch.mask_names:
        i, j, pairs = grid_pairs(line.slices(name), line.grid)
        parts.append((line.q_block[i], line.kv_block[j], pairs))
    mask = np.repeat(np.arange(len(parts), dtype=np.int32), [len(pairs) for _, _, pairs in parts])
    q_block, kv_block, pairs = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    for column in (q_block, kv_block, mask, pairs):
        column.flags.writeable = False  # so that Blocks need not copy it
    weights = batch.weights or {}
    mask_weights = tuple(weights[name] for name in batch.mask_names)
    return Blocks(tokens, groups, batch.mask_names, mask_weights, q_block, kv_block, mask, pairs)


def make_comps(batch: Batch, blocks: Blocks, mask: int, index: Ints) -> Comps:
    """The table of some computation blocks of a mask (ascending rows of `blocks`), each with its part of the mask.

    A call looks at the whole batch: for the tables of many ranks call `make_all_comps` once.
    """
    return make_all_comps(batch, blocks, mask, np.array([0, len(index)]), index)[0]


def make_all_comps(batch: Batch, blocks: Blocks, mask: int, rank_ptr: Ints, index: Ints) -> list[Comps]:
    """The tables of all ranks under one mask; what ranks share is cropped once.

    Args:
        batch: what `blocks` were made of.
        blocks: the computation blocks.
        mask: index into `blocks.mask_names`.
        rank_ptr: int[R + 1], from 0 to N: rank r computes the blocks `index[rank_ptr[r]:rank_ptr[r + 1]]`.
        index: int[N], rows of `blocks` under this mask, ascending within a rank.

    Returns:
        R tables, whose arrays are parts of a few large ones.
    """
    index = np.asarray(index, np.int64)
    part = blocks.of_mask(mask)
    used = np.zeros(part.stop - part.start, np.bool_)
    used[index - part.start] = True
    ptr, slices = _crop(batch, blocks, mask, np.flatnonzero(used) + part.start)
    at = (np.cumsum(used) - 1)[index - part.start]
    sizes = ptr[at + 1] - ptr[at]
    ends = np.append(0, np.cumsum(sizes))
    slices = slices[np.repeat(ptr[at] - ends[:-1], sizes) + np.arange(ends[-1])]
    row, q_block, kv_block = index.astype(np.int32), blocks.q_block[index], blocks.kv_block[index]
    for column in (row, q_block, kv_block, slices):
        column.flags.writeable = False  # so that parts of it are not copied
    tables = []
    for first, stop in pairwise(np.asarray(rank_ptr).tolist()):
        mine, bounds = slice(first, stop), ends[first : stop + 1]
        of_mine = slices[bounds[0] : bounds[-1]]
        tables.append(Comps(row[mine], q_block[mine], kv_block[mine], bounds - bounds[0], of_mine))
    return tables


def _crop(batch: Batch, blocks: Blocks, mask: int, rows: Ints) -> tuple[Ints, Ints]:
    """Bounds, int64[M + 1], and slices, int32[K, 6], of M computation blocks: ascending rows of one mask."""
    q_block, kv_block = blocks.q_block[rows], blocks.kv_block[rows]
    tokens = blocks.tokens.tokens
    q_tokens, kv_tokens = tokens[q_block], tokens[kv_block]
    # where nothing is masked there is no need to look at the mask
    masked = blocks.pairs[rows] != q_tokens * kv_tokens
    line = _Line(batch, blocks.tokens)
    i, j = np.searchsorted(line.q_block, q_block[masked]), np.searchsorted(line.kv_block, kv_block[masked])
    cropped_ptr, cropped = grid_slices(line.slices(blocks.mask_names[mask]), line.grid, i, j)
    sizes = np.ones(len(rows), np.int64)
    sizes[masked] = np.diff(cropped_ptr)
    slices = np.zeros((int(sizes.sum()), 6), np.int32)
    of_masked = np.repeat(masked, sizes)
    slices[of_masked] = cropped
    slices[~of_masked, Q_STOP], slices[~of_masked, HI] = q_tokens[~masked], kv_tokens[~masked]
    return np.append(0, np.cumsum(sizes)), slices


class _Line:
    """The sequences of a batch one behind the other, queries and keys alike, so that their masks are one mask."""

    def __init__(self, batch: Batch, tokens: TokenBlocks) -> None:
        lengths = np.array([max(sequence.length, sequence.keys) for sequence in batch.sequences])
        self.batch = batch
        self.first = np.cumsum(lengths) - lengths  # int64[S], where each sequence begins
        q_block, kv_block = (np.flatnonzero(tokens.role & role) for role in (HAS_Q, HAS_KV))
        shift = self.first[tokens.sequence]
        start, stop = tokens.start + shift, tokens.stop + shift
        self.grid = Grid(start[q_block], stop[q_block], start[kv_block], stop[kv_block])
        # the token blocks of the grid's ranges
        self.q_block, self.kv_block = q_block.astype(np.int32), kv_block.astype(np.int32)

    def slices(self, name: str) -> Ints:
        """int64[N, 6]: the slices of the masks of that name, sorted as in a mask."""
        parts = [sequence.masks[name].slices for sequence in self.batch.sequences]
        slices = np.concatenate(parts)
        shift = np.repeat(self.first, np.fromiter(map(len, parts), np.int64, len(parts)))
        for column in (Q_START, Q_STOP, LO, HI):
            slices[:, column] += shift
        return slices


def _token_blocks(batch: Batch, bounds: Sequence[Bounds]) -> TokenBlocks:
    """The token blocks between bounds, sequence by sequence; in cross-attention first those of the queries."""
    sides: list[tuple[int, int, Ints, int]] = []  # sequence, length, bounds, role
    for index, (sequence, (q_bounds, kv_bounds)) in enumerate(zip(batch.sequences, bounds, strict=True)):
        if sequence.kv_length is not None:
            sides.append((index, sequence.length, q_bounds, HAS_Q))
            sides.append((index, sequence.kv_length, kv_bounds, HAS_KV))
            continue
        if q_bounds is not kv_bounds and not np.array_equal(q_bounds, kv_bounds):
            raise ValueError(
                f"sequence {index}: its queries and its keys are the same tokens, but the bounds of its query blocks "
                f"and of its KV blocks differ: {list(q_bounds)} and {list(kv_bounds)}"
            )
        sides.append((index, sequence.length, q_bounds, HAS_Q | HAS_KV))
    of, length, parts, role = zip(*sides, strict=True)
    sizes = np.fromiter(map(len, parts), np.int64, len(parts))
    line = np.concatenate(parts).astype(np.int64)
    last = np.cumsum(sizes) - 1
    first = last - sizes + 1
    begins, ends = np.ones(len(line), np.bool_), np.ones(len(line), np.bool_)
    begins[last] = ends[first] = False
    start, stop = line[begins], line[ends]
    side = np.repeat(np.arange(len(sides)), sizes - 1)
    wrong = np.append((line[first] != 0) | (line[last] != length), False)
    wrong[side[start >= stop]] = True
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"sequence {of[at]} has bounds {list(parts[at])}; expected ascending bounds from 0 to {length[at]}"
        )
    return TokenBlocks(np.array(of)[side], start, stop, np.array(role)[side])
