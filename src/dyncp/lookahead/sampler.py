"""Which samples make which batch: shuffled, under a token budget, the same on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from dyncp.ir.arrays import Ints, frozen


class TokenBudgetSampler:
    """Batches of whole samples with at most `tokens` tokens; every sample is in one batch of an epoch.

    Args:
        lengths: length of every sample, before the cut.
        tokens: most tokens of a batch.
        max_length: samples are cut to this many tokens.
        seed: of the shuffle, together with the epoch.

    Raises:
        ValueError: no samples, or a sample without tokens.
    """

    def __init__(self, lengths: Any, tokens: int, max_length: int, seed: int) -> None:
        lengths = np.asarray(lengths)
        if not lengths.size:
            raise ValueError("the dataset has no samples; a batch needs at least one")
        if lengths.ndim != 1 or lengths.dtype.kind not in "iu":
            raise ValueError(f"lengths are {lengths.dtype}{list(lengths.shape)}; expected integers, one per sample")
        if lengths.min() < 1:
            index = int(np.argmin(lengths))
            raise ValueError(f"sample {index} has length {lengths[index]}; leave empty samples out of the dataset")
        self.lengths: Ints = frozen(np.minimum(lengths, max_length), "int64")  # int64[samples], after the cut
        self.tokens = tokens
        self.seed = seed

    def batches(self, epoch: int) -> list[Ints]:
        """The batches of an epoch, each int64[n] indices of samples: a shuffle, filled up in order."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.lengths))
        ends = np.cumsum(self.lengths[order])
        cuts = [0]
        while cuts[-1] < len(order):
            used = ends[cuts[-1] - 1] if cuts[-1] else 0
            cuts.append(int(np.searchsorted(ends, used + self.tokens, "right")))
        return np.split(order, cuts[1:-1])
