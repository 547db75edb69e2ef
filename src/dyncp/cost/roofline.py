"""Attention time from data sheets and a few fitted constants: work over rate, in tiles, and fixed costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dyncp.cost.model import FULL, Work
from dyncp.ir.arguments import positive_number
from dyncp.ir.arrays import Ints
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import FORWARD, Pass, token_bytes
from dyncp.ir.shape import AttentionShape

TILE = 128  # rows and keys that a kernel works on at once
PRODUCTS = {True: 1.0, False: 2.5}  # the backward has five matrix products where the forward has two


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds of a launch = `launch_s` + `block_s` for each computation block + the longer of computation and memory.

        computation = pairs, rounded up to tiles, x 2 (D + Dv) x query heads (x 2.5 backward) / flops_per_s
        memory      = bytes of the blocks' inputs and outputs, once per item / memory_bytes_per_s

    Args:
        flops_per_s: what fused attention reaches in the forward pass, dense.
        memory_bytes_per_s: of the device's memory.
        backward: rate of the backward pass, as a fraction of `flops_per_s`.
        launch_s, block_s: fixed cost of a launch, and of each computation block in it.
        instruction_s: fixed cost of every other instruction.
        cores: see `CostModel`.

    Raises:
        ValueError: a rate that is not positive, or a negative time.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    backward: float = 0.8
    launch_s: float = 20e-6
    block_s: float = 0.1e-6
    instruction_s: float = 10e-6
    cores: float = math.inf

    def __post_init__(self) -> None:
        for rate in ("flops_per_s", "memory_bytes_per_s", "backward", "cores"):
            positive_number(rate, getattr(self, rate), finite=False)
        for time in ("launch_s", "block_s", "instruction_s"):
            if getattr(self, time) != 0:
                positive_number(time, getattr(self, time))

    @classmethod
    def of(cls, cluster: Cluster) -> Roofline:
        """The devices of a cluster."""
        return cls(
            cluster.flops_per_s,
            cluster.memory_bytes_per_s,
            backward=cluster.backward_rate,
            launch_s=cluster.launch_s,
            block_s=cluster.block_s,
            cores=cluster.cores,
        )

    def attention_s(self, pass_: Pass, shape: AttentionShape, work: Work, launches: int) -> Ints:
        """See `CostModel`."""
        forward = pass_ is FORWARD
        rate = self.flops_per_s * (1.0 if forward else self.backward)
        per_pair = 2 * shape.group_heads * (shape.head_dim + shape.value_dim) * PRODUCTS[forward]
        compute_s = tiled_pairs(work) * (per_pair / rate)
        reads = np.where(
            [kind.of_keys for kind in (*pass_.reads, *pass_.writes)], work.kv_tokens[:, None], work.q_tokens[:, None]
        )
        sizes = np.array([token_bytes(shape, kind, "float32") for kind in (*pass_.reads, *pass_.writes)])
        memory_s = reads @ sizes / self.memory_bytes_per_s
        of_items = np.bincount(work.launch, np.maximum(compute_s, memory_s), launches)
        used = np.bincount(work.launch, minlength=launches) > 0
        blocks = np.bincount(work.launch[first_items(work)], minlength=launches)
        seconds: Ints = of_items + used * self.launch_s + blocks * self.block_s
        return seconds

    def move_s(self, size_bytes: Ints) -> Ints:
        """See `CostModel`."""
        seconds: Ints = size_bytes / self.memory_bytes_per_s
        return seconds


def tiled_pairs(work: Work) -> Ints:
    """float64[n]: the pairs of the tiles that each item touches. A block is rounded up to tiles, and its pairs with it;
    the edge of a mask runs through a tile for every `TILE` rows, of which half is computed in vain."""
    rows, keys = (-(-tokens // TILE) * TILE for tokens in (work.q_tokens, work.kv_tokens))
    rounded = work.pairs * (rows * keys / (work.q_tokens * work.kv_tokens))
    edge = np.where(work.form == FULL, rows * keys, rounded + rows * (TILE / 2))
    return np.minimum(edge, rows * keys).astype("float64")


def first_items(work: Work) -> Ints:
    """int64[m]: one item of each (launch, computation block)."""
    order = np.lexsort((work.comp, work.launch))
    launch, comp = work.launch[order], work.comp[order]
    first = np.ones(len(order), bool)
    first[1:] = (launch[1:] != launch[:-1]) | (comp[1:] != comp[:-1])
    found: Ints = order[first]
    return found
