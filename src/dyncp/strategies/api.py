"""What a strategy is: a function from a batch to blocks, their placement and their schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dyncp.ir.arguments import positive_number, whole_number
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.plan import KEEP, WIRE
from dyncp.ir.schedule import Schedule
from dyncp.ir.shape import AttentionShape

OBJECTIVES = ("time", "total", "largest")
PARTITIONERS = ("tiling", "hypergraph")


@dataclass(frozen=True, slots=True)
class Options:
    """How to plan.

    Args:
        block_tokens: Most tokens of a block; `auto` chooses for each batch. Blocks are cut along the edges of masks and
            where tokens must be evened out. Read by the strategies `dynamic` and `data_parallel`; the rings cut each
            sequence into as many blocks as they need.
        divisions: Parts that each rank's computation is split into, to overlap with transfers (paper, 4.3). Read by
            `dynamic`, as all that follow but keep and wire.
        epsilon: How far above the mean the computation of a rank may lie, as a fraction (paper, 4.2).
        token_epsilon: How far above the mean the tokens of a rank may lie, as a fraction.
        objective: What placement makes small: `time`, the bytes that move, each weighted by how long it takes within or
            between nodes; `total`, all bytes alike; or `largest`, what the rank that receives most receives.
        forward_weight: What a byte of the forward pass counts.
        backward_weight: What a byte of the backward pass counts.
        partitioner: `tiling` or, as in the paper, `hypergraph` (Mt-KaHyPar, the extra of that name).
        effort: Steps of the local search, against the usual number; more steps take longer and move less.
        portfolio: `dynamic` takes the layout of another strategy that is estimated to be faster (for `time` only).
        keep: What remote data the forward keeps for the backward: `none`, `kv` or `all`.
        wire: Dtype of partial results in transfers: `model` or `float32`.
        seed: Of the local search.

    Raises:
        ValueError: a number out of range or an unknown word.
    """

    block_tokens: int | Literal["auto"] = "auto"
    divisions: int = 4
    epsilon: float = 0.02
    token_epsilon: float = 0.02
    objective: str = "time"
    forward_weight: float = 1.0
    backward_weight: float = 1.0
    partitioner: str = "tiling"
    effort: float = 1.0
    portfolio: bool = True
    keep: str = "none"
    wire: str = "model"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("block_tokens", 1), ("divisions", 1), ("seed", 0)):
            if getattr(self, name) != "auto" or name != "block_tokens":
                object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        for name in ("epsilon", "token_epsilon", "effort"):
            positive_number(name, getattr(self, name))
        for name in ("forward_weight", "backward_weight"):
            if getattr(self, name) != 0:
                positive_number(name, getattr(self, name))
        if not self.forward_weight + self.backward_weight > 0:
            raise ValueError("forward_weight and backward_weight are both 0; one of the passes must count")
        for name, words in (
            ("objective", OBJECTIVES),
            ("partitioner", PARTITIONERS),
            ("keep", KEEP),
            ("wire", WIRE),
        ):
            if getattr(self, name) not in words:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; choose one of {', '.join(words)}")

    @property
    def pass_weights(self) -> tuple[float, float]:
        """What a byte of the forward and of the backward pass counts."""
        largest = max(self.forward_weight, self.backward_weight)
        return self.forward_weight / largest, self.backward_weight / largest


@dataclass(frozen=True, slots=True)
class Layout:
    """What a strategy returns.

    `notes` says in words which of the constraints it could not meet, and why: each limit is a multiple of the mean, for
    computation 1 + the options' epsilon and for tokens the strategy's own. `seconds` is how long its stages took, where
    it has more than one.
    """

    blocks: Blocks
    placement: Placement
    schedule: Schedule
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


class Strategy(Protocol):
    """A way to spread the attention of a batch over ranks."""

    def __call__(self, batch: Batch, shape: AttentionShape, cluster: Cluster, options: Options) -> Layout:
        """Blocks, placement and schedule of a batch."""
        ...
