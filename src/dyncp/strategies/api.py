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
SCHEDULES = ("timeline", "greedy")
BALANCES = ("time", "pairs")
AUTOMATIC = ("block_tokens", "divisions", "inner_ring")  # options that can be "auto"


@dataclass(frozen=True, slots=True)
class Options:
    """How to plan; docs/strategies.md says which strategies read which options.

    Args:
        block_tokens: Most tokens of a block; `auto` chooses for each batch. Blocks are cut along the edges of masks and
            where tokens must be evened out. Read by the strategies `dynamic`, `balanced_qo_home` and `data_parallel`;
            the others cut each sequence into as many blocks as they need.
        schedule: `timeline`, which times schedules and takes the one that ends first, or `greedy`, the paper's.
        divisions: Parts that each rank's computation is split into, so that data for the next part moves while one is
            computed (paper, 4.3); `auto` lets `timeline` choose, and is 4 for `greedy`. Only the strategies `dynamic`
            and `balanced_qo_home` read it.
        epsilon: How far above the mean the computation of a rank may lie, as a fraction (paper, 4.2); `auto` is 0.02,
            and up to 0.25 where there is so little to compute that transfers between nodes take longer.
        token_epsilon: How far above the mean the tokens of a rank may lie, as a fraction.
        balance: What computation is balanced by: `time`, as the cost model has it, or `pairs` of queries and keys, as
            published.
        objective: What placement makes small: `time`, the bytes that move, each weighted by how long it takes within or
            between nodes; `total`, all bytes alike; or `largest`, what the rank that receives most receives.
        forward_weight: What a byte of the forward pass counts.
        backward_weight: What a byte of the backward pass counts.
        partitioner: `tiling` or, as in the paper, `hypergraph` (Mt-KaHyPar, the extra of that name).
        effort: Steps of the local search, against the usual number; more steps take longer and move less.
        tries: Placements that are searched for, each from its own seed; the one whose schedule ends first is taken.
        portfolio: Whether `dynamic` may take the layout of a fixed scheme that is estimated to be faster, where the
            objective is `time`; `--no-portfolio` forbids it.
        head_degree: Ranks of a group that exchanges heads, for the strategies `double_ring` and `head_ring`. Where it
            does not divide both the head groups and the ranks, its largest divisor that does is taken.
        inner_ring: Ranks of an inner ring of `double_ring` (groups of ranks, where these exchange heads), of which the
            largest divisor that the ranks allow is taken; `auto` is the largest power of two that fits in a node.
        keep: What remote data the forward keeps for the backward: `none`, `kv` or `all`.
        wire: Dtype of partial results in transfers: `model` or `float32`.
        seed: Of the local search.

    Raises:
        ValueError: a number out of range or an unknown word.
    """

    block_tokens: int | Literal["auto"] = "auto"
    schedule: str = "timeline"
    divisions: int | Literal["auto"] = "auto"
    epsilon: float | Literal["auto"] = "auto"
    token_epsilon: float = 0.02
    balance: str = "time"
    objective: str = "time"
    forward_weight: float = 1.0
    backward_weight: float = 1.0
    partitioner: str = "tiling"
    effort: float = 1.0
    tries: int = 1
    portfolio: bool = True
    head_degree: int = 2
    inner_ring: int | Literal["auto"] = "auto"
    keep: str = "none"
    wire: str = "model"
    seed: int = 0

    def __post_init__(self) -> None:
        whole = {"block_tokens": 1, "divisions": 1, "head_degree": 1, "inner_ring": 1, "tries": 1, "seed": 0}
        for name, least in whole.items():
            if getattr(self, name) != "auto" or name not in AUTOMATIC:
                object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        for name in ("epsilon", "token_epsilon", "effort"):
            if name != "epsilon" or self.epsilon != "auto":
                positive_number(name, getattr(self, name))
        for name in ("forward_weight", "backward_weight"):
            if getattr(self, name) != 0:
                positive_number(name, getattr(self, name))
        if not self.forward_weight + self.backward_weight > 0:
            raise ValueError("forward_weight and backward_weight are both 0; one of the passes must count")
        for name, words in (
            ("objective", OBJECTIVES),
            ("partitioner", PARTITIONERS),
            ("schedule", SCHEDULES),
            ("balance", BALANCES),
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
