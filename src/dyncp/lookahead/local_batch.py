"""What a rank trains on: its tokens of a batch, in the order that its plan says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dyncp.ir.plan import RankPlan
from dyncp.lookahead.source import Draw, Source

if TYPE_CHECKING:
    from torch import Tensor

IGNORE_LABEL = -100  # what torch's cross_entropy ignores by default


@dataclass(frozen=True, slots=True, eq=False)
class LocalBatch:
    """What one rank trains on in one iteration: the T tokens it owns, in the order of its attention tensors. T differs
    from rank to rank and from batch to batch, and may be 0. Tensors are on the CPU.

    Args:
        epoch: of the pass, see `DynamicLoader.set_epoch`.
        iteration: number of the batch within the epoch, from 0.
        step: optimiser step that it belongs to, from 0; that is `iteration` unless `Batching.accumulate` is above 1.
        ends_step: whether it is the last batch of its step, after which the optimiser goes on.
        samples: dataset indices of the global batch's sequences; their places in the epoch's stream, for a stream.
        lengths: tokens of the global batch's sequences, after the cut.
        sequence_ids: int64[T], index into `samples` of each token.
        input_ids: int64[T], the tokens.
        position_ids: int64[T], position of each token within its sequence, for learned or rotary positions.
        labels: int64[T], the next token of the same sequence, so they are shifted already; -100 (`IGNORE_LABEL`, which
            `cross_entropy` leaves out) for a sequence's last token.
        plan: this rank's part of the plan, for `attention`.
        num_label_tokens: labels of the whole step: of all its batches, over all ranks. `cross_entropy(logits, labels,
            reduction="sum") / num_label_tokens` is this rank's and batch's share of the step's mean loss: sum it, and
            the gradients, over ranks and batches. It is 0 where every sequence has a single token; divide by
            `max(1, num_label_tokens)` if the dataset has such.
    """

    epoch: int
    iteration: int
    step: int
    ends_step: bool
    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    sequence_ids: Tensor
    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    plan: RankPlan
    num_label_tokens: int


def local_batch(source: Source, rank: int, epoch: int, draw: Draw, plan: RankPlan) -> LocalBatch:
    """Read the samples of which a rank owns tokens, and take these.

    Raises:
        ValueError: a sample is not as long as its length says.
    """
    import torch  # late, so that planners can import this module without it

    sequence, position = plan.header.local_tokens(rank)
    input_ids = np.empty(len(sequence), np.int64)
    labels = np.empty(len(sequence), np.int64)
    for number in np.unique(sequence):
        tokens = source.tokens(int(draw.samples[number]))
        here = sequence == number
        input_ids[here] = tokens[position[here]]
        labels[here] = np.append(tokens[1:], IGNORE_LABEL)[position[here]]
    return LocalBatch(
        epoch,
        draw.iteration,
        draw.step,
        draw.ends_step,
        tuple(draw.samples.tolist()),
        tuple(draw.lengths.tolist()),
        torch.from_numpy(sequence.astype(np.int64)),
        torch.from_numpy(input_ids),
        torch.from_numpy(position.astype(np.int64)),
        torch.from_numpy(labels),
        plan,
        draw.num_label_tokens,
    )
