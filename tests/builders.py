"""Small batches and plans that many tests start from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.shape import AttentionShape
from dyncp.planner.blockgen import make_blocks, uniform_cut
from dyncp.planner.scheduling.greedy import greedy_schedule
from dyncp.strategies import Planned, build
from dyncp.strategies.api import Layout, Options

SHAPE = AttentionShape(4, 2, 8, dtype="float32")


def causal_batch(*lengths: int) -> Batch:
    return Batch([Sequence(length, masks.causal(length)) for length in lengths])


def random_mask(rng: np.random.Generator, q_length: int, k_length: int):
    """Any boolean mask at all: patches of pairs, rows that see nothing included."""
    dense = np.zeros((q_length, k_length), dtype=bool)
    for _ in range(rng.integers(1, 5)):
        (a, b), (c, d) = np.sort(rng.integers(0, q_length + 1, 2)), np.sort(rng.integers(0, k_length + 1, 2))
        dense[a:b, c:d] ^= np.tri(b - a, d - c, k=rng.integers(-2, 5), dtype=bool) | (rng.random() < 0.5)
    return masks.from_dense(dense)


def random_batch(rng: np.random.Generator, names=("default",), cross: bool = False) -> Batch:
    sequences = []
    for _ in range(rng.integers(1, 5)):
        length = int(rng.integers(1, 40))
        keys = int(rng.integers(1, 40)) if cross and rng.random() < 0.7 else None
        chosen = {name: random_mask(rng, length, keys or length) for name in names}
        sequences.append(Sequence(length, chosen, kv_length=keys))
    return Batch(sequences, {name: float(rng.integers(1, 4)) for name in names})


def random_layout(
    rng: np.random.Generator, batch: Batch, cluster: Cluster, options: Options, shape: AttentionShape = SHAPE
) -> Layout:
    """Blocks placed at random, so that nearly everything moves, and scheduled greedily."""
    blocks = make_blocks(batch, shape.groups, uniform_cut(options.block_tokens))
    placement = Placement(
        rng.integers(0, cluster.ranks, len(blocks.tokens)),
        rng.integers(0, cluster.ranks, (blocks.groups, len(blocks))),
    )
    return Layout(blocks, placement, greedy_schedule(blocks, placement, shape, cluster, options))


def planned(batch: Batch, ranks: int = 3, strategy: str = "ring", shape: AttentionShape = SHAPE, **options) -> Planned:
    return build(batch, shape, Cluster(1, ranks), strategy, Options(**({"block_tokens": 8} | options)))


def assert_same_elsewhere(found: Callable[[], object]) -> None:
    """That a function at the top of a test module returns the same again, here and in another process."""
    here = found()
    assert here == found()
    file = Path(sys.modules[found.__module__].__file__)
    path = [str(file.parent), *sys.path]
    script = f"import sys; sys.path[:0] = {path!r}; from {file.stem} import {found.__name__} as f; print(f())"
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == repr(here)
