"""A whole training iteration around a simulated attention: linear work, other parallelism, gradients, optimizer.

Parts follow one another; nothing here overlaps but what the simulation of attention overlaps. Left out: pipeline
parallelism, memory limits, reading data, and ranks that differ.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dyncp.cost.layer import (
    BACKWARD_PRODUCTS,
    GEMM_EFFICIENCY,
    Model,
    all_reduce_s,
    context_cluster,
    head_s,
    layer_s,
    tensor_parallel_s,
)
from dyncp.ir.arguments import positive_number, whole_number
from dyncp.ir.blocks import HAS_Q
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import PlanHeader
from dyncp.ir.shape import ITEMSIZE
from dyncp.simulator.run import Simulation

# Seconds of every iteration that nothing below accounts for: launching kernels, clipping, waiting for stragglers.
# Fitted to published iteration times, as `layer.GEMM_EFFICIENCY` (docs/simulator.md).
OVERHEAD_S = 0.43
RECOMPUTE = ("none", "full")
STATE_BYTES = 26  # read and written for each parameter by Adam in fp32: weight, two moments; and the bf16 weight


@dataclass(frozen=True, slots=True)
class Training:
    """How a model is trained.

    Args:
        peak_flops_per_s: of one device, see `layer.PEAK_FLOPS_PER_S`.
        tp: devices of a tensor-parallel group, neighbours in a node.
        recompute: `none`, or `full`: the forward of every layer, attention too, runs once more before its backward.
        gradient_dtype: in which gradients are reduced over the ranks.
        sharded_optimizer: whether each rank updates its part of the parameters only. Gradients are then reduced and
            parameters gathered, which moves as many bytes.
        efficiency: part of the peak that matrix products reach.
        overhead_s: fixed seconds of every iteration.

    Raises:
        ValueError: a number out of range or an unknown word.
    """

    peak_flops_per_s: float
    tp: int = 4
    recompute: str = "none"
    gradient_dtype: str = "bfloat16"
    sharded_optimizer: bool = True
    efficiency: float = GEMM_EFFICIENCY
    overhead_s: float = OVERHEAD_S

    def __post_init__(self) -> None:
        whole_number("tp", self.tp, 1)
        for name in ("peak_flops_per_s", "efficiency"):
            positive_number(name, getattr(self, name))
        if self.overhead_s != 0:
            positive_number("overhead_s", self.overhead_s)
        for name, words in (("recompute", RECOMPUTE), ("gradient_dtype", ITEMSIZE)):
            if getattr(self, name) not in words:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; choose one of {', '.join(words)}")


@dataclass(frozen=True, slots=True)
class Iteration:
    """Seconds of one iteration by part, and how many tokens it trains on. What is recomputed counts as backward."""

    attention_forward_s: float
    attention_backward_s: float
    linear_forward_s: float
    linear_backward_s: float
    tensor_parallel_s: float
    gradients_s: float
    optimizer_s: float
    overhead_s: float
    tokens: int

    @property
    def total_s(self) -> float:
        """All parts."""
        return sum(value for name, value in asdict(self).items() if name != "tokens")

    @property
    def tokens_per_s(self) -> float:
        """Over all ranks."""
        return self.tokens / self.total_s

    def figures(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {"iteration_s": self.total_s, "tokens_per_s": self.tokens_per_s, **asdict(self)}


def tokens_per_rank(header: PlanHeader) -> np.ndarray:
    """int64[R]: tokens that each rank owns."""
    counts = header.tokens.tokens * ((header.tokens.role & HAS_Q) > 0)
    return np.bincount(header.owner, counts, header.ranks).astype("int64")


def iteration(
    simulation: Simulation,
    header: PlanHeader,
    model: Model,
    cluster: Cluster,
    training: Training,
    tokens: int | None = None,
) -> Iteration:
    """The iteration that trains a model on the batch of a plan.

    Args:
        simulation: of the plan, on `context_cluster(cluster, training.tp)`.
        header: the plan's: the tokens of each rank, and how many layers use each mask. The weights of the masks count
            relative to one another; together they stand for all layers.
        model: what is trained.
        cluster: the devices, `training.tp` for each rank of the plan.
        training: how.
        tokens: what the iteration trains on, where the plan's batch is padded; else all tokens of the plan.

    Raises:
        ValueError: a plan of another number of ranks.
    """
    seen = context_cluster(cluster, training.tp)
    if header.ranks != seen.ranks:
        raise ValueError(
            f"the plan has {header.ranks} ranks; {cluster.ranks} devices at tp = {training.tp} are {seen.ranks}"
        )
    here = tokens_per_rank(header)
    most = int(here.max())
    rate = training.peak_flops_per_s * training.efficiency * training.tp
    forward_s = model.layers * layer_s(model, most, rate)
    once_more = 1 if training.recompute == "full" else 0
    attention = [
        one.makespan_s * model.layers / sum(header.mask_weights) for one in (simulation.forward, simulation.backward)
    ]
    one_pass_s = model.layers * tensor_parallel_s(model, most, training.tp, cluster)
    output_s = head_s(model, most, rate)
    return Iteration(
        attention_forward_s=attention[0],
        attention_backward_s=attention[1] + once_more * attention[0],
        linear_forward_s=forward_s + output_s,
        linear_backward_s=(BACKWARD_PRODUCTS + once_more) * forward_s + BACKWARD_PRODUCTS * output_s,
        tensor_parallel_s=(2 + once_more) * one_pass_s,
        gradients_s=gradients_s(model, cluster, training),
        optimizer_s=optimizer_s(model, cluster, training),
        overhead_s=training.overhead_s,
        tokens=int(here.sum()) if tokens is None else tokens,
    )


def gradients_s(model: Model, cluster: Cluster, training: Training) -> float:
    """Seconds of a ring all-reduce of the gradients over all ranks of a plan; the tensor-parallel ranks of a node have
    one each at the same time, and share the node's link."""
    size_bytes = model.parameters / training.tp * ITEMSIZE[training.gradient_dtype]
    near, ranks = cluster.intra_bytes_per_s, cluster.ranks // training.tp
    if cluster.nodes == 1:
        return all_reduce_s(size_bytes, ranks, near, cluster.intra_latency_s)
    rate = min(near, cluster.inter_bytes_per_s / training.tp)
    return all_reduce_s(size_bytes, ranks, rate, cluster.inter_latency_s)


def optimizer_s(model: Model, cluster: Cluster, training: Training) -> float:
    """Seconds of reading and writing parameters, moments and gradients once."""
    shares = training.tp * (cluster.ranks // training.tp if training.sharded_optimizer else 1)
    size_bytes = model.parameters / shares * (STATE_BYTES + ITEMSIZE[training.gradient_dtype])
    return size_bytes / cluster.memory_bytes_per_s
