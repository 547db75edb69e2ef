"""What a loader is told: how to batch, how to plan, how far ahead."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Protocol

from dyncp.ir.batch import DEFAULT_MASK
from dyncp.ir.cluster import Cluster
from dyncp.ir.mask import Mask
from dyncp.ir.shape import AttentionShape
from dyncp.masks import causal
from dyncp.strategies import STRATEGIES
from dyncp.strategies.api import Options


class MaskFunction(Protocol):
    """A function that gives a sample its masks: what `Batching.mask` takes.

    It runs on a background thread of the rank that plans the batch, once for each sample of the batch, so it must
    depend on its arguments alone. It is not pickled: a lambda or a closure will do.
    """

    def __call__(self, index: int, length: int, /) -> Mask | Mapping[str, Mask]:
        """The mask of a sample, or its masks by name.

        Args:
            index: of the sample in the dataset.
            length: its tokens after the cut to `Batching.max_length`; the masks are `length` by `length`.
        """
        ...


def causal_mask(index: int, length: int) -> Mask:
    """The default `MaskFunction`: every sample is causal."""
    return causal(length)


@dataclass(frozen=True, slots=True)
class Planning:
    """How batches are planned.

    Args:
        shape: heads, dimensions and dtype of the attention layers; the dtype is that of q, k and v when `attention` is
            called, under autocast the one inside it.
        cluster: the ranks that share every batch.
        strategy: `dynamic`, `ring`, `zigzag` or `data_parallel`.
        options: block size, tolerances, what the forward keeps for the backward; see `dyncp.Options`.

    Raises:
        ValueError: an unknown strategy.
    """

    shape: AttentionShape
    cluster: Cluster
    strategy: str = "dynamic"
    options: Options = field(default_factory=Options)

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"unknown strategy {self.strategy!r}; choose one of {', '.join(STRATEGIES)}")


@dataclass(frozen=True, slots=True)
class Batching:
    """What a global batch is made of.

    Args:
        tokens: most tokens of a global batch, over all ranks. Batches are filled with whole samples in the order of the
            shuffle; every sample is in one batch of an epoch, and the last batch is smaller.
        max_length: longer samples are cut to this; `tokens` when left out.
        seed: of the shuffle, together with the epoch.
        mask: a function `mask(index, length)` that returns the `Mask` of a sample, or a mapping of several by name (the
            same names for every sample), from its index in the dataset and its length after the cut; causal when left
            out. It runs on a background thread of the rank that plans the batch, so it must depend on its arguments
            alone. See `MaskFunction`.
        weights: how many layers use each mask name; 1 for a name left out.
        lengths: tokens of every sample, before the cut. When left out, the dataset's attribute or method `lengths` is
            used; failing that, every sample is read once to measure it.

    Raises:
        ValueError: a budget or a length below 1, samples longer than the budget, a negative seed, or weights that are
            not positive or, where the mask is left out, name another.
    """

    tokens: int
    max_length: int | None = None
    seed: int = 0
    mask: MaskFunction = causal_mask
    weights: Mapping[str, float] | None = None
    lengths: Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_whole("tokens", self.tokens, 1)
        check_whole("seed", self.seed, 0)
        if self.max_length is None:
            object.__setattr__(self, "max_length", self.tokens)
        check_whole("max_length", self.max_length)
        if not 1 <= self.longest <= self.tokens:
            raise ValueError(
                f"max_length is {self.max_length}; it must lie in [1, {self.tokens}], so that every sample fits into a "
                "batch: lower max_length or raise tokens"
            )
        if not callable(self.mask):
            raise ValueError(f"mask is {self.mask!r}; give a function of a sample's index and length")
        for name, weight in (self.weights or {}).items():
            if self.mask is causal_mask and name != DEFAULT_MASK:
                raise ValueError(f"weight for mask {name!r}, but the only one without a function is {DEFAULT_MASK!r}")
            if not _is_positive(weight):
                raise ValueError(f"the weight of mask {name!r} is {weight!r}; it must be a positive number")

    @property
    def longest(self) -> int:
        """`max_length`, never None."""
        assert self.max_length is not None
        return self.max_length


@dataclass(frozen=True, slots=True)
class LookAhead:
    """How far ahead of training plans are made, and by how many processes.

    Args:
        kappa: when iteration i runs, the plans of i .. i + kappa are ready or under way (paper, 6.1). So a plan has the
            time of kappa steps to be made in; with 0 every step waits for its plan.
        workers: planner processes of this rank, each with one plan at a time; with 0 a thread of the training process
            plans, and slows it down.
        timeout_s: how long a step waits for its plan before it fails.

    Raises:
        ValueError: a negative or fractional number, or no time to wait, or no end of it.
    """

    kappa: int = 4
    workers: int = 1
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for name in ("kappa", "workers"):
            check_whole(name, getattr(self, name), 0)
        if not _is_positive(self.timeout_s):
            raise ValueError(f"timeout_s is {self.timeout_s!r}; it must be positive and finite: a large number will do")


def _is_positive(value: Any) -> bool:
    return isinstance(value, Real) and 0 < float(value) < math.inf


def check_whole(name: str, value: Any, least: int | None = None) -> None:
    """ValueError unless a value is a whole number of at least `least`."""
    if not isinstance(value, Integral) or (least is not None and int(value) < least):
        at_least = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} is {value!r}; it must be a whole number{at_least}")
