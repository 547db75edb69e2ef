"""The yardstick: the same training in one process, every mask written out in full."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from dyncp.demo.config import DemoConfig
from dyncp.demo.data import DocumentMasks, TextFiles
from dyncp.demo.train import Trainer
from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch, Sequence
from dyncp.lookahead.local_batch import IGNORE_LABEL
from dyncp.lookahead.sampler import TokenBudgetSampler


def global_batches(config: DemoConfig, lengths: Ints) -> Iterator[Ints]:
    """The samples of every step, int64[n]: epoch after epoch of what the loader's ranks share."""
    sampler = TokenBudgetSampler(lengths, config.tokens, config.max_length, config.seed)
    steps, epoch = 0, 0
    while steps < config.steps:
        for samples in sampler.batches(epoch)[: config.steps - steps]:
            steps += 1
            yield samples
        epoch += 1


def planner_batch(samples: Ints, lengths: Ints, masks: DocumentMasks) -> Batch:
    """A global batch as planners see it."""
    return Batch(tuple(Sequence(int(lengths[i]), {"default": masks(int(i), int(lengths[i]))}) for i in samples))


class DenseAttention:
    """Attention over whole sequences that lie one behind the other, each under a dense mask.

    Args:
        masks: bool[L, L] of each sequence.
    """

    def __init__(self, masks: list[Tensor]) -> None:
        # as torch's kernel takes them: it would convert a boolean mask anew in every layer
        self.masks = [torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf) for mask in masks]

    def __call__(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        lengths = [len(mask) for mask in self.masks]
        parts = []
        split = (torch.split(tensor, lengths) for tensor in (q_THD, k_TGD, v_TGD))
        for mask, *qkv in zip(self.masks, *split, strict=True):
            q_1HLD, k_1GLD, v_1GLD = (x.transpose(0, 1)[None] for x in qkv)
            out_1HLD = scaled_dot_product_attention(q_1HLD, k_1GLD, v_1GLD, attn_mask=mask, enable_gqa=True)
            parts.append(out_1HLD[0].transpose(0, 1))
        return torch.cat(parts)


def train_dense(config: DemoConfig, dataset: TextFiles) -> list[float]:
    """The loss of every step."""
    masks = DocumentMasks(config.masks, config.seed)
    trainer = Trainer(config.steps, config.seed, lambda tensor: None)
    losses = []
    steps = tqdm(global_batches(config, dataset.lengths), "dense", config.steps, unit="step")
    for samples in steps:
        documents = [dataset[int(i)].astype(np.int64) for i in samples]
        dense = [torch.from_numpy(masks(int(i), len(d)).dense()) for i, d in zip(samples, documents, strict=True)]
        loss = trainer.step(
            torch.from_numpy(np.concatenate(documents)),
            torch.from_numpy(np.concatenate([np.arange(len(document)) for document in documents])),
            torch.from_numpy(np.concatenate([np.append(document[1:], IGNORE_LABEL) for document in documents])),
            sum(len(document) - 1 for document in documents),
            DenseAttention(dense),
        )
        losses.append(loss)
        steps.set_postfix(loss=f"{loss:.3f}")
    return losses
