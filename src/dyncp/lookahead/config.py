"""What a loader is told: how to batch, how to plan, how far ahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dyncp.ir.cluster import Cluster
from dyncp.ir.mask import Mask
from dyncp.ir.shape import AttentionShape
from dyncp.masks import causal
from dyncp.strategies.api import Options

# (index in the dataset, length after the cut) -> the sample's mask, or its masks by name
MaskFunction = Callable[[int, int], "Mask | Mapping[str, Mask]"]


def causal_mask(index: int, length: int) -> Mask:
    """The default `MaskFunction`: every sample is causal."""
    return causal(length)


@dataclass(frozen=True, slots=True)
class Planning:
    """How batches are planned.

    Args:
        shape: heads, dimensions and dtype of the attention layers.
        cluster: the ranks that share every batch.
        strategy: a key of `strategies.STRATEGIES`.
        options: block size, tolerances, what the forward keeps for the backward.
    """

    shape: AttentionShape
    cluster: Cluster
    strategy: str = "dynamic"
    options: Options = field(default_factory=Options)


@dataclass(frozen=True, slots=True)
class Batching:
    """What a global batch is made of.

    Args:
        tokens: most tokens of a global batch, over all ranks.
        max_length: longer samples are cut to this; `tokens` when left out.
        seed: of the shuffle.
        mask: masks of a sample, from its index and its length after the cut. It runs on a background thread of the rank
            that plans the batch, so it must depend on its arguments alone.
        weights: how many layers use each mask name; 1 for a name left out.
        lengths: length of every sample. When left out, the dataset's attribute or method `lengths` is used; failing
            that, every sample is read once to measure it.

    Raises:
        ValueError: a budget or a length below 1, or samples longer than the budget.
    """

    tokens: int
    max_length: int | None = None
    seed: int = 0
    mask: MaskFunction = causal_mask
    weights: Mapping[str, float] | None = None
    lengths: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens is {self.tokens}; a batch needs room for at least 1")
        if self.max_length is None:
            object.__setattr__(self, "max_length", self.tokens)
        if not 1 <= self.longest <= self.tokens:
            raise ValueError(
                f"max_length is {self.max_length}; it must lie in [1, {self.tokens}], so that every sample fits into a "
                "batch: lower max_length or raise tokens"
            )

    @property
    def longest(self) -> int:
        """`max_length`, never None."""
        assert self.max_length is not None
        return self.max_length


@dataclass(frozen=True, slots=True)
class LookAhead:
    """How far ahead of training plans are made, and by how many processes.

    Args:
        kappa: when iteration i runs, the plans of i .. i + kappa are ready or under way (paper, 6.1).
        workers: planner processes of this rank; with 0 a thread of the training process plans.
        timeout_s: how long a plan is waited for.

    Raises:
        ValueError: a negative number, or no time to wait.
    """

    kappa: int = 4
    workers: int = 1
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("kappa", "workers"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s is {self.timeout_s}; it must be positive")
