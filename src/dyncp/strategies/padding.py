"""Batches as the originals of the strategies run them: some pad."""

from __future__ import annotations

from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.mask import Mask
from dyncp.masks import causal
from dyncp.strategies import get_strategy

PADDED = ("double_ring",)  # strategies whose originals pad every sequence to the longest of its batch


def as_run(batch: Batch, strategy: str) -> Batch:
    """The batch as a strategy's original runs it: for `double_ring` with every sequence as long as the longest, for all
    other strategies the batch itself. A plan of it counts padding, its bytes and its computation.

    The causal mask of a sequence becomes that of the padded one, as that is what a kernel without lengths computes.
    Under other masks padding sees nothing and nothing sees it. In cross-attention keys are padded to the most. The
    results of the real tokens stay the same, their gradients too if none enters at padding.

    Raises:
        ValueError: an unknown strategy.
    """
    get_strategy(strategy)
    if strategy not in PADDED:
        return batch
    length = max(sequence.length for sequence in batch.sequences)
    keys = max((sequence.kv_length or 0) for sequence in batch.sequences)
    return Batch([_padded(sequence, length, keys) for sequence in batch.sequences], batch.weights)


def _padded(sequence: Sequence, length: int, keys: int) -> Sequence:
    if sequence.kv_length is not None:
        wider = {name: Mask(length, keys, mask.slices) for name, mask in sequence.masks.items()}
        return Sequence(length, wider, keys)
    own = causal(sequence.length)
    longer = {
        name: causal(length) if mask == own else Mask(length, length, mask.slices)
        for name, mask in sequence.masks.items()
    }
    return Sequence(length, longer)
