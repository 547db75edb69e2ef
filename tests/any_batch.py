"""Batches and placements at random, with masks of every kind, for the tests of placement."""

from __future__ import annotations

import numpy as np
from builders import random_mask

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster

NAMES = (("default",), ("a", "b"), ("a", "b", "c"))


def any_mask(rng: np.random.Generator, length: int, keys: int):
    """A mask of one kind or another; one in eight sees nothing at all."""
    some = int(rng.integers(1, length + 1))
    kinds = [
        lambda: masks.causal(length),
        lambda: masks.full(length),
        lambda: masks.sliding_window(length, some),
        lambda: masks.lambda_(length, int(rng.integers(0, length + 1)), some),
        lambda: masks.prefix_lm(length, some),
        lambda: masks.shared_question(some, [length - some] if length > some else []),
        lambda: masks.from_dense(np.zeros((length, keys), bool)),
        lambda: random_mask(rng, length, keys),
    ]
    return kinds[rng.integers(6, 8) if length != keys else rng.integers(len(kinds))]()


def any_batch(rng: np.random.Generator, longest: int = 60, sequences: int = 6, names=None, cross=True) -> Batch:
    """Sequences of at most `longest` tokens; some batches are tiny, some have cross-attention."""
    names = names or NAMES[rng.integers(len(NAMES))]
    cross = cross and rng.random() < 0.3
    top = int(rng.choice([2, longest // 3 + 1, longest, longest]))
    parts = []
    for _ in range(rng.integers(1, sequences + 1)):
        length = int(rng.integers(1, top + 1))
        keys = int(rng.integers(1, top + 1)) if cross and rng.random() < 0.7 else None
        chosen = {name: any_mask(rng, length, keys or length) for name in names}
        parts.append(Sequence(length, chosen, kv_length=keys))
    return Batch(parts, {name: float(rng.integers(1, 5)) for name in names})


def any_cluster(rng: np.random.Generator, most: int = 16) -> Cluster:
    """One to `most` ranks on one to three nodes."""
    nodes = int(rng.integers(1, 4))
    return Cluster(nodes, int(rng.integers(1, most // nodes + 1)))


def any_places(rng: np.random.Generator, nets, ranks: int):
    """(int32[B], int32[C]): ranks at random, so that nearly everything moves."""
    return rng.integers(0, ranks, len(nets.tokens)).astype("int32"), rng.integers(0, ranks, len(nets)).astype("int32")
