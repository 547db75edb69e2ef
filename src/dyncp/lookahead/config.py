"""What a loader is told: how to batch, how to plan, how far ahead."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from dyncp.ir.batch import DEFAULT_MASK
from dyncp.ir.cluster import Cluster
from dyncp.ir.mask import Mask
from dyncp.ir.shape import AttentionShape
from dyncp.masks import causal
from dyncp.strategies import STRATEGIES
from dyncp.strategies.api import Options

MOST_KAPPA = 10_000  # plans ahead
MOST_S = 1e6  # that anything may be waited for: twelve days
NO_CUT = sys.maxsize  # no sample has more tokens


class MaskFunction(Protocol):
    """A function that gives a sample its masks: what `Batching.mask` takes.

    It runs on a background thread of the rank that plans the batch, once for each sample of the batch, so it must
    depend on its arguments alone. It is not pickled: a lambda or a closure will do. Where masks depend on what is in a
    sample, see `Batching.sample_mask`.
    """

    def __call__(self, index: int, length: int, /) -> Mask | Mapping[str, Mask]:
        """The mask of a sample, or its masks by name.

        Args:
            index: of the sample in the dataset; its place in the epoch's stream, from 0, where the dataset is one.
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
    """What a global batch is made of, and how many make a step.

    Args:
        tokens: most tokens of a global batch, over all ranks. Batches are filled with whole samples in the order of the
            shuffle, or of the stream; every sample is in one batch of an epoch, and the last batch is smaller. May be
            left out where a `batch_sampler` says what is in a batch; where both are given, a larger batch is an error.
        max_length: longer samples are cut to this; `tokens` when left out, and nothing is cut when that is too.
        seed: of the shuffle, together with the epoch.
        mask: a function `mask(index, length)` that returns the `Mask` of a sample, or a mapping of several by name (the
            same names for every sample), from its index in the dataset and its length after the cut; causal when left
            out. It runs on a background thread of the rank that plans the batch, so it must depend on its arguments
            alone. See `MaskFunction`.
        weights: how many layers use each mask name; 1 for a name left out.
        lengths: tokens of every sample, before the cut. When left out, the dataset's attribute or method `lengths` is
            used; failing that, the lists of the column `input_ids` of a Hugging Face dataset are measured where they
            lie; failing that, every sample is read once.
        shuffle: another order of the samples in every epoch. With False, for evaluation, the dataset's order. Streams
            and a `batch_sampler` have an order of their own, whatever this says.
        drop_last: leave out what would be smaller than the rest at the end of an epoch: the last batch, unless it fills
            `tokens` to the last token (a `batch_sampler` decides on its batches itself), and then a step of fewer
            batches than `accumulate`.
        accumulate: batches of one optimiser step; the last step of an epoch may have fewer.
        sample_mask: instead of `mask`, where masks depend on what is in a sample: a function `sample_mask(sample,
            length)` of the sample as the dataset returns it, and its length after the cut. It runs where `mask` does.
            The rank that plans a batch then reads all of its samples, ahead of time, while `mask` needs none read; a
            stream keeps every sample until its batch was trained on.
        length_cache: file that keeps the lengths of a map-style dataset which does not tell them, so that it is
            measured once, by one process, for all processes and runs. It is made anew where it does not fit the dataset
            any more: another number of samples, another fingerprint of a Hugging Face dataset, another length of one of
            16 samples that are read to find out.

    Raises:
        ValueError: a number below 1, samples longer than the budget, a negative seed, a function that is none, two
            functions, lengths that are given and to be kept, or weights that are not positive or, where the mask is
            left out, name another.
    """

    tokens: int | None = None
    max_length: int | None = None
    seed: int = 0
    mask: MaskFunction = causal_mask
    weights: Mapping[str, float] | None = None
    lengths: Sequence[int] | None = None
    _: KW_ONLY
    shuffle: bool = True
    drop_last: bool = False
    accumulate: int = 1
    sample_mask: Callable[[Any, int], Mask | Mapping[str, Mask]] | None = None
    length_cache: Path | None = None

    def __post_init__(self) -> None:
        check_whole("seed", self.seed, 0)
        check_whole("accumulate", self.accumulate, 1)
        for name in ("shuffle", "drop_last"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        self._check_sizes()
        self._check_masks()
        if self.length_cache is not None:
            if not isinstance(self.length_cache, (str, Path)):
                raise ValueError(f"length_cache is {self.length_cache!r}; give the path of a file")
            if self.lengths is not None:
                raise ValueError("lengths are given, so that length_cache has none to keep: leave out one of them")
            object.__setattr__(self, "length_cache", Path(self.length_cache))

    def _check_sizes(self) -> None:
        if self.tokens is not None:
            check_whole("tokens", self.tokens, 1)
            if self.max_length is None:
                object.__setattr__(self, "max_length", self.tokens)
        if self.max_length is None:
            return
        check_whole("max_length", self.max_length)
        if not 1 <= self.longest <= (NO_CUT if self.tokens is None else self.tokens):
            raise ValueError(
                f"max_length is {self.max_length}; it must be at least 1"
                if self.tokens is None
                else f"max_length is {self.max_length}; it must lie in [1, {self.tokens}], so that every sample fits "
                "into a batch: lower max_length or raise tokens"
            )

    def _check_masks(self) -> None:
        if not callable(self.mask):
            raise ValueError(f"mask is {self.mask!r}; give a function of a sample's index and length")
        if self.sample_mask is not None:
            if not callable(self.sample_mask):
                raise ValueError(f"sample_mask is {self.sample_mask!r}; give a function of a sample and its length")
            if self.mask is not causal_mask:
                raise ValueError("mask and sample_mask are both given; a sample has its masks from one of them")
        causal_alone = self.mask is causal_mask and self.sample_mask is None
        for name, weight in (self.weights or {}).items():
            if causal_alone and name != DEFAULT_MASK:
                raise ValueError(f"weight for mask {name!r}, but the only one without a function is {DEFAULT_MASK!r}")
            if not _is_positive(weight):
                raise ValueError(f"the weight of mask {name!r} is {weight!r}; it must be a positive number")

    @property
    def longest(self) -> int:
        """`max_length`, or a number that no sample reaches where nothing is cut."""
        return NO_CUT if self.max_length is None else self.max_length


@dataclass(frozen=True, slots=True)
class LookAhead:
    """How far ahead of training plans are made, by whom, and what happens when that goes wrong.

    Args:
        kappa: when iteration i runs, the plans of i .. i + kappa are ready or under way (paper, 6.1). So a plan has the
            time of kappa steps to be made in; with 0 every step waits for its plan.
        workers: planner processes of this rank, each with one plan at a time; `auto` is as many as can be busy, of the
            cores that are left when every rank of the node has one. With 0 a thread of the training process plans, and
            slows it down.
        timeout_s: how long a step waits for its plan before it fails.
        remote: leave planning to `dyncp planner` processes on the same store, on any host; this rank plans only what
            they do not take, or do not finish.
        plan_limit_s: how long one plan may take; then the planner process is replaced, and the batch planned by
            simpler means. Starting and compiling do not count.
        patience_s: how long the plan store may be away before that is an error.
        cache_bytes: of plans that are kept in memory, for batches of the same lengths and masks; 0 for none.
        worker_bytes: memory of a planner process above which it is replaced by a fresh one.

    Raises:
        ValueError: a negative or fractional number, or no time to wait, or no end of it.
    """

    kappa: int = 4
    workers: int | Literal["auto"] = "auto"
    timeout_s: float = 300.0
    _: KW_ONLY
    remote: bool = False
    plan_limit_s: float = 60.0
    patience_s: float = 60.0
    cache_bytes: int = 64 << 20
    worker_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        for name in ("kappa", "workers", "cache_bytes", "worker_bytes"):
            if name != "workers" or self.workers != "auto":
                check_whole(name, getattr(self, name), 0)
        if self.kappa > MOST_KAPPA:
            raise ValueError(f"kappa is {self.kappa}; it must be at most {MOST_KAPPA}")
        if not isinstance(self.remote, bool):
            raise ValueError(f"remote is {self.remote!r}; it must be True or False")
        for name in ("timeout_s", "plan_limit_s", "patience_s"):
            value = getattr(self, name)
            if not _is_positive(value) or value > MOST_S:
                raise ValueError(f"{name} is {value!r}; it must be positive, and at most {MOST_S:g} seconds")

    def worker_count(self, ranks: int, ranks_here: int, cores: int) -> int:
        """Planner processes of one rank.

        Args:
            ranks: that share the planning.
            ranks_here: those on the same machine.
            cores: of that machine.
        """
        if self.workers != "auto":
            return self.workers
        busy = -(-(self.kappa + 1) // ranks)  # of kappa + 1 plans under way
        return max(1, min(busy, cores // ranks_here - 1))


def _is_positive(value: Any) -> bool:
    return isinstance(value, Real) and 0 < float(value) < math.inf


def check_whole(name: str, value: Any, least: int | None = None) -> None:
    """ValueError unless a value is a whole number of at least `least`."""
    if not isinstance(value, Integral) or (least is not None and int(value) < least):
        at_least = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} is {value!r}; it must be a whole number{at_least}")
