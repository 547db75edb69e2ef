"""What a transformer takes beside attention: the work that is linear in tokens, and its parameters.

Work is matrix products over the data sheet's peak, times an efficiency. Norms, rotary positions, activations and
residuals are in that efficiency: they take memory bandwidth, not FLOP/s, and also grow with the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dyncp.ir.arguments import whole_number
from dyncp.ir.cluster import Cluster
from dyncp.ir.shape import AttentionShape

# Dense bf16 FLOP/s of one device, from data sheets, by cluster preset; of a CPU process, about what its cores have.
PEAK_FLOPS_PER_S: Mapping[str, float] = {"p4de": 312e12, "p5": 989e12, "dgx-h200": 989e12, "cpu": 70e9}

# Part of the peak that training reaches outside attention. Fitted, with `iteration.OVERHEAD_S`, to published iteration
# times of the 8B model on 64 A100 (docs/simulator.md).
GEMM_EFFICIENCY = 0.60

BACKWARD_PRODUCTS = 2  # gradients of inputs and of weights: two products where the forward has one
ALL_REDUCES = 2  # of each layer and pass under tensor parallelism: after attention, and after the MLP


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only transformer.

    Args:
        layers: number of them.
        hidden: width of the residual stream.
        q_heads, kv_heads, head_dim: attention.
        ffn: width inside the MLP.
        gated: whether the MLP has a gate (three matrices, as in SwiGLU) or not (two).
        vocabulary: tokens of the embedding and of the output head, which have a matrix each.

    Raises:
        ValueError: a number that is not positive, or heads that do not divide.
    """

    layers: int = 32
    hidden: int = 4096
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 14336
    gated: bool = True
    vocabulary: int = 128256

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "q_heads", "kv_heads", "head_dim", "ffn", "vocabulary"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1))
        self.shape(1)

    @property
    def layer_parameters(self) -> int:
        """Elements of the matrices of one layer."""
        attention = self.hidden * self.head_dim * 2 * (self.q_heads + self.kv_heads)
        return attention + self.hidden * self.ffn * (3 if self.gated else 2)

    @property
    def head_parameters(self) -> int:
        """Elements of the output head; the embedding has as many."""
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """Elements of all matrices."""
        return self.layers * self.layer_parameters + 2 * self.head_parameters

    def shape(self, tp: int, dtype: str = "bfloat16") -> AttentionShape:
        """The attention of one rank of a tensor-parallel group of `tp`.

        Raises:
            ValueError: heads that `tp` does not divide.
        """
        if self.q_heads % tp or self.kv_heads % tp:
            raise ValueError(
                f"{self.q_heads} query heads and {self.kv_heads} KV heads cannot be split over tp = {tp} ranks: choose "
                "a tp that divides both"
            )
        return AttentionShape(self.q_heads // tp, self.kv_heads // tp, self.head_dim, dtype=dtype)


MODELS: Mapping[str, Model] = {
    "8b": Model(),
    "1b": Model(16, 2048, 32, 8, 64, 8192),
    "70b": Model(80, 8192, 64, 8, 128, 28672),
}


def context_cluster(cluster: Cluster, tp: int) -> Cluster:
    """The cluster as context parallelism sees it: a rank is a tensor-parallel group of `tp` neighbouring devices.

    All of a group run the same plan on heads of their own, so plans and figures are those of one of them. Each has its
    own link inside the node; the node's link to the others is shared by `tp` times as many.

    Raises:
        ValueError: groups that do not fill the nodes.
    """
    whole_number("tp", tp, 1)
    if cluster.ranks_per_node % tp:
        raise ValueError(f"tp is {tp}; it must divide the {cluster.ranks_per_node} devices of a node")
    return Cluster(
        **{name: getattr(cluster, name) for name in Cluster.__dataclass_fields__}
        | {
            "ranks_per_node": cluster.ranks_per_node // tp,
            "inter_bytes_per_s": cluster.inter_bytes_per_s / tp,
            "cores": cluster.cores / tp,
        }
    )


def layer_s(model: Model, tokens: int, flops_per_s: float) -> float:
    """Seconds of one layer's matrix products outside attention, forward, over all heads: two FLOPs for each parameter
    and token."""
    return 2 * model.layer_parameters * tokens / flops_per_s


def head_s(model: Model, tokens: int, flops_per_s: float) -> float:
    """Seconds of the output head, forward."""
    return 2 * model.head_parameters * tokens / flops_per_s


def all_reduce_s(size_bytes: float, ranks: int, bytes_per_s: float, latency_s: float) -> float:
    """Seconds of a ring all-reduce; a reduce-scatter and an all-gather (sequence parallelism) take as long."""
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) * (size_bytes / ranks / bytes_per_s + latency_s)


def tensor_parallel_s(model: Model, tokens: int, tp: int, cluster: Cluster, itemsize: int = 2) -> float:
    """Seconds that one layer's all-reduces of one pass take, over the links of a node.

    Args:
        model: its hidden width.
        tokens: of the group.
        tp: ranks of the group.
        cluster: its links inside a node.
        itemsize: bytes of an activation.
    """
    size_bytes = tokens * model.hidden * itemsize
    return ALL_REDUCES * all_reduce_s(size_bytes, tp, cluster.intra_bytes_per_s, cluster.intra_latency_s)
