"""How large the blocks of a batch should be.

Large blocks are uneven pieces of work, and are fetched for the sake of a part; small ones take time to plan, to look up
and to launch. Both are put into one number, as fractions of the time that the batch's computation takes:

    heaviest block / mean work of a rank                          ranks wait for the one that has a block more
    + WASTE x (area of the blocks / pairs in them - 1)            what is fetched or multiplied in vain
    + OVERHEAD x blocks of a rank                                 planning and launching

The weights are of one layer of the batches measured by `make bench-planner`; they need not be exact, as neighbouring
sizes differ little.
"""

from __future__ import annotations

import numpy as np

from dyncp.ir.batch import Batch
from dyncp.ir.blocks import Blocks
from dyncp.planner.blockgen import blocks_of_bounds
from dyncp.planner.cuts import cut_along_masks

SIZES = (4096, 2048, 1024, 512)  # the paper's
WASTE = 0.25
OVERHEAD = 0.001
FAR = 2.0  # times the least cost, from where smaller sizes are not tried


def cut_batch(batch: Batch, groups: int, ranks: int, block_tokens: int | None, epsilon: float) -> Blocks:
    """The blocks of a batch, of about `block_tokens` tokens or, where that is None, of the best of `SIZES`.

    No block has more than an even share of the tokens, as it could have no owner. `epsilon` is how far above the mean
    the computation of a rank may lie.
    """
    tokens = sum(sequence.length + (sequence.kv_length or 0) for sequence in batch.sequences)
    most = max(1, tokens // ranks)
    sizes = SIZES if block_tokens is None else (block_tokens,)
    best, least = None, np.inf
    for size in sorted({min(size, most) for size in sizes}, reverse=True):
        blocks = blocks_of_bounds(batch, groups, cut_along_masks(batch, size))
        cost = size_cost(blocks, ranks, epsilon)
        if best is None or cost < least or not np.isfinite(least):
            best, least = blocks, cost
        elif cost > FAR * least:
            break  # it only rises from there
    assert best is not None
    return best


def size_cost(blocks: Blocks, ranks: int, epsilon: float) -> float:
    """The number that the module describes, infinite where one block of the heaviest is more than a rank may have above
    the mean; of several masks, weighted as their layers are."""
    if not len(blocks):
        return 0.0
    tokens = blocks.tokens.tokens
    work = blocks.work
    mean = float(work.sum()) * blocks.groups / ranks
    area = tokens[blocks.q_block] * tokens[blocks.kv_block]
    masks = len(blocks.mask_names)
    of_mask = np.bincount(blocks.mask, blocks.pairs, masks)  # each counts as its layers do: bytes are not as work
    weights = np.asarray(blocks.mask_weights) * (of_mask > 0)
    vain = float(np.bincount(blocks.mask, area, masks) / np.maximum(of_mask, 1) @ weights / weights.sum()) - 1
    heaviest = float(work.max()) / mean
    if heaviest > epsilon:
        return np.inf
    return heaviest + WASTE * vain + OVERHEAD * len(blocks) * blocks.groups / ranks
