"""Plans to simulate."""

from __future__ import annotations

import numpy as np
from any_batch import any_batch
from builders import SHAPE, causal_batch

from dyncp.ir.cluster import Cluster
from dyncp.strategies import STRATEGIES, Planned, build
from dyncp.strategies.api import Options


def cluster_like(rng: np.random.Generator) -> Cluster:
    """Few ranks, with links slow enough to matter for a few tokens."""
    nodes = int(rng.integers(1, 4))
    return Cluster(
        nodes,
        int(rng.integers(1, 5)),
        intra_bytes_per_s=1e9,
        inter_bytes_per_s=float(rng.choice([1e8, 1e9])),
        flops_per_s=1e11,
        flow_bytes_per_s=float(rng.choice([5e7, np.inf])),
        rank_bytes_per_s=float(rng.choice([8e7, np.inf])),
        launch_s=float(rng.choice([0.0, 2e-5])),
    )


def any_planned(seed: int) -> tuple[Planned, Cluster]:
    """A plan of a random batch, by one strategy or another (`ring` where that one cannot plan it)."""
    rng = np.random.default_rng(seed)
    batch, cluster = any_batch(rng), cluster_like(rng)
    names = list(STRATEGIES)
    strategy = names[rng.integers(len(names))]
    options = Options(
        block_tokens=8, keep=str(rng.choice(["none", "kv", "all"])), wire=str(rng.choice(["model", "float32"]))
    )
    try:
        return build(batch, SHAPE, cluster, strategy, options), cluster
    except ValueError:
        return build(batch, SHAPE, cluster, "ring", options), cluster


def one_planned(strategy: str = "zigzag", cluster: Cluster | None = None) -> tuple[Planned, Cluster]:
    """A plan of two causal sequences on two nodes of two."""
    cluster = cluster or Cluster(2, 2)
    return build(causal_batch(90, 40), SHAPE, cluster, strategy, Options(block_tokens=16)), cluster
