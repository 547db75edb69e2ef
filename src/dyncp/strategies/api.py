"""What a strategy is: a function from a batch to blocks, their placement and their schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dyncp.ir.arguments import positive_number, whole_number
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.plan import KEEP, WIRE
from dyncp.ir.schedule import Schedule
from dyncp.ir.shape import AttentionShape


@dataclass(frozen=True, slots=True)
class Options:
    """How to plan.

    Args:
        block_tokens: Tokens of a block; the last one of a sequence may be shorter. Read by the strategies `dynamic` and
            `data_parallel`; the rings cut each sequence into as many blocks as they need.
        divisions: Parts that each rank's computation is split into, to overlap with transfers (paper, 4.3). Read by
            `dynamic`.
        epsilon_nodes: How far above the mean the computation of a node may lie, as a fraction (paper, 4.2). Read by
            `dynamic`.
        epsilon_ranks: How far above the mean of its node the computation of a rank may lie, as a fraction (paper, 4.2).
            Read by `dynamic`.
        keep: What remote data the forward keeps for the backward: `none`, `kv` or `all`.
        wire: Dtype of partial results in transfers: `model` or `float32`.
        seed: Of the order in which one of several tries shows the blocks to the partitioner when they are split over
            nodes. Plans for one node, for batches of fewer than 4,096 tokens or of more than about 4,000 computation
            blocks (counted once per head group), and of the strategies that do not partition, do not depend on it.

    Raises:
        ValueError: a number out of range or an unknown word.
    """

    block_tokens: int = 1024
    divisions: int = 4
    epsilon_nodes: float = 0.4
    epsilon_ranks: float = 0.1
    keep: str = "none"
    wire: str = "model"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("block_tokens", 1), ("divisions", 1), ("seed", 0)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        for name in ("epsilon_nodes", "epsilon_ranks"):
            positive_number(name, getattr(self, name))
        for name, words in (("keep", KEEP), ("wire", WIRE)):
            if getattr(self, name) not in words:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; choose one of {', '.join(words)}")


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
