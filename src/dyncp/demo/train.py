"""One way to train, whatever computes the attention: the model, its optimiser, and a step of it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from dyncp.demo.model import GPT, Attend, ModelSize

PEAK_RATE = 4e-3
WARM_UP_STEPS = 5
LAST_RATE = 0.1  # of the peak


class Trainer:
    """The model in training. Trainers of the same arguments start equal and stay equal.

    Args:
        steps: how many there will be, for the learning rate.
        seed: of the weights.
        sum_over_ranks: adds up a tensor over all processes in place; does nothing in a single one.
    """

    def __init__(self, steps: int, seed: int, sum_over_ranks: Callable[[Tensor], None]) -> None:
        self.model = GPT(ModelSize(), seed)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimiser, lambda step: rate(step, steps))
        self.sum_over_ranks = sum_over_ranks

    def step(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor, num_labels: int, attend: Attend) -> float:
        """One optimiser step on the tokens of this process.

        Args:
            input_ids: int64[T].
            position_ids: int64[T], within each sequence.
            labels: int64[T].
            num_labels: labels of the global batch, so that the sum over ranks is the global batch's mean. May be 0.
            attend: attention over these tokens.

        Returns:
            The mean loss of the global batch, in nats per byte.
        """
        logits = self.model(input_ids, position_ids, attend)
        loss = cross_entropy(logits, labels, reduction="sum") / max(1, num_labels)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        # One message for everything: the gradients, and the loss behind them.
        flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), loss.detach().reshape(1)])
        self.sum_over_ranks(flat)
        start = 0
        for gradient in gradients:
            gradient.copy_(flat[start : start + gradient.numel()].view_as(gradient))
            start += gradient.numel()
        self.optimiser.step()
        self.schedule.step()
        self.optimiser.zero_grad()
        return float(flat[-1])


def rate(step: int, steps: int) -> float:
    """The learning rate of a step, as a part of the peak: a linear warm-up, then half a cosine down to `LAST_RATE`."""
    warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
    return warm_up * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps))))
