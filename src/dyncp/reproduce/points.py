"""What a figure is made of: values of ours, over several batches, beside the paper's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dyncp.ir.cluster import Cluster
from dyncp.reproduce.cases import Bench
from dyncp.reproduce.data import BATCH_TOKENS, DATASETS, MASK_NAMES, Lengths, batches_of

SCALES = (0.5, 1.0, 2.0, 4.0)
NAMES = {"longdatacollections": "LongDataCollections", "longalign": "LongAlign"}
RATIO = "x"  # unit of ratios
At = dict[str, str]


@dataclass(frozen=True, slots=True)
class Point:
    """One value.

    Args:
        at: where, in words: data set, scale, mask and so on; a row of a table.
        method: a column of it.
        ours: of each batch.
        paper: None where the paper has none.
        unit: of both.
    """

    at: At
    method: str
    ours: tuple[float, ...]
    paper: float | None = None
    unit: str = "ms"

    @property
    def mean(self) -> float:
        """Of ours; of ratios the geometric mean."""
        return statistics.geometric_mean(self.ours) if self.unit == RATIO else statistics.fmean(self.ours)

    @property
    def spread(self) -> float:
        """Standard deviation of ours over the batches."""
        return statistics.pstdev(self.ours)

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        return None if self.paper is None else self.mean / self.paper

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"mean": self.mean, "spread": self.spread, "ratio": self.ratio}

    @classmethod
    def of(cls, figures: dict[str, Any]) -> Point:
        """The inverse of `figures`."""
        return cls(figures["at"], figures["method"], tuple(figures["ours"]), figures["paper"], figures["unit"])


@dataclass(frozen=True, slots=True)
class Scope:
    """What to measure, and how much of it.

    Args:
        bench: measures and remembers.
        batches: for each point.
        quick: fewer scales, masks and sizes.
        seed: of the batches.
        datasets: keys of `data.DATASETS`.
        own: real lengths in place of the distributions.
        cluster: of the micro-benchmarks.
        masks: of those with several.
    """

    bench: Bench
    batches: int = 3
    quick: bool = False
    seed: int = 0
    datasets: tuple[str, ...] = tuple(DATASETS)
    own: tuple[int, ...] | None = None
    cluster: Cluster = field(default_factory=lambda: Cluster.preset("p4de", 4))
    masks: tuple[str, ...] = MASK_NAMES

    def few(self, values: Sequence[Any]) -> list[Any]:
        """Values to go through; in a quick look the first and the last."""
        return [values[0], values[-1]] if self.quick and len(values) > 2 else list(values)

    @property
    def scales(self) -> tuple[float, ...]:
        """Of the lengths."""
        return tuple(self.few(SCALES))

    def lengths(self, dataset: str, scale: float = 1.0, tokens: int = BATCH_TOKENS) -> list[Lengths]:
        """The batches of a point."""
        return batches_of(dataset, scale, self.batches, self.seed, tokens, self.own)

    @classmethod
    def in_folder(cls, folder: Path, **options: Any) -> Scope:
        """With a cache under a folder."""
        return cls(Bench(folder / "cache"), **options)
