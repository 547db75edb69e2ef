"""Coarser and finer blocks of one batch, and how a placement goes from one to the other."""

from __future__ import annotations

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import Blocks, TokenBlocks
from dyncp.ir.placement import Placement


def place_in_sequence(tokens: TokenBlocks) -> Ints:
    """int64[B]: the number of each token block among those of its sequence and role."""
    key = np.stack([tokens.sequence, tokens.role])
    new = np.any(key[:, 1:] != key[:, :-1], axis=0)
    first = np.concatenate([[0], np.where(new, np.arange(1, len(tokens)), 0)])
    place: Ints = np.arange(len(tokens)) - np.maximum.accumulate(first)
    return place


def coarsen(blocks: Blocks, factor: int) -> Blocks:
    """Blocks of which each is `factor` neighbours in one, fewer at the end of a sequence; `parents` says which."""
    tokens = blocks.tokens
    first = np.flatnonzero(place_in_sequence(tokens) % factor == 0)
    parent = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(tokens))))
    last = np.append(first[1:], len(tokens)) - 1
    coarse = TokenBlocks(tokens.sequence[first], tokens.start[first], tokens.stop[last], tokens.role[first])
    key = _comp_keys(blocks.mask, parent[blocks.q_block], parent[blocks.kv_block], len(first))
    keys, of_comp = np.unique(key, return_inverse=True)
    pairs = np.zeros(len(keys), "int64")
    np.add.at(pairs, of_comp, blocks.pairs)
    mask, q_block, kv_block = keys // len(first) ** 2, keys // len(first) % len(first), keys % len(first)
    return Blocks(coarse, blocks.groups, blocks.mask_names, blocks.mask_weights, q_block, kv_block, mask, pairs)


def project(placement: Placement, coarse: Blocks, fine: Blocks, parent: Ints) -> Placement:
    """The placement of coarse blocks on the finer ones that they are made of; `parent`, int[B], is the coarse token
    block of each fine one."""
    count = len(coarse.tokens)
    keys = _comp_keys(coarse.mask, coarse.q_block, coarse.kv_block, count)  # ascending, as Blocks are sorted
    wanted = _comp_keys(fine.mask, parent[fine.q_block], parent[fine.kv_block], count)
    return Placement(placement.block_rank[parent], placement.comp_rank[:, np.searchsorted(keys, wanted)])


def gather(placement: Placement, fine: Blocks, coarse: Blocks, parts: int) -> Placement:
    """The placement on coarser blocks, each where most of it is: of its tokens, of its pairs. The way back of
    `project`."""
    parent = parents(coarse.tokens, fine.tokens)
    count = len(coarse.tokens)
    tokens = np.bincount(parent * parts + placement.block_rank, fine.tokens.tokens, count * parts).reshape(count, parts)
    keys = _comp_keys(coarse.mask, coarse.q_block, coarse.kv_block, count)
    of_comp = np.searchsorted(keys, _comp_keys(fine.mask, parent[fine.q_block], parent[fine.kv_block], count))
    comp_rank = [
        np.bincount(of_comp * parts + ranks, fine.pairs, len(coarse) * parts).reshape(-1, parts).argmax(axis=1)
        for ranks in placement.comp_rank
    ]
    return Placement(tokens.argmax(axis=1), np.stack(comp_rank))


def parents(coarse: TokenBlocks, fine: TokenBlocks) -> Ints:
    """int64[B]: the block of `coarse` that each block of `fine` is a part of."""
    stride = int(coarse.stop.max(initial=0)) + 1
    lines = [(tokens.sequence.astype("int64") * 4 + tokens.role) * stride + tokens.start for tokens in (coarse, fine)]
    order = np.argsort(lines[0], kind="stable")
    return order[np.searchsorted(lines[0][order], lines[1], "right") - 1]


def _comp_keys(mask: Ints, q_block: Ints, kv_block: Ints, count: int) -> Ints:
    key: Ints = (mask.astype("int64") * count + q_block) * count + kv_block
    return key
