"""What is measured of a case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

ROUNDING = 1e-6  # of a limit on balance, as in the notes of a plan
STAGES = ("blocks", "place", "schedule", "lower")  # of planning


@dataclass(frozen=True, slots=True)
class Figures:
    """What a placement moves, and how even it is. Bytes are those of all ranks and of the passes that count; of several
    masks, each as often as its weight says. Balance is the largest rank's share over the mean; of several masks, under
    the one where it is largest.
    """

    total_bytes: float
    inter_node_bytes: float
    compute: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Run:
    """One plan, from one seed."""

    seed: int
    seconds: Mapping[str, float]  # by stage: STAGES, and "encode" (all ranks' parts as bytes), which is no planning
    cpu_s: float  # of planning, over all threads
    peak_bytes: int | None  # memory of the process while planning, with what it had before; None where nobody says
    encoded_bytes: int
    plan: Figures  # bytes counted from the plan's messages
    placement: Figures | None  # bytes by the formula that a solver's placement is judged by; None without a solver

    @property
    def planning_s(self) -> float:
        """Seconds of all stages of planning."""
        return sum(self.seconds[stage] for stage in STAGES)


@dataclass(frozen=True, slots=True)
class Solved:
    """What a general solver made of the same blocks under the same limits; or why it was not asked."""

    skipped: str = ""
    seconds: float = 0.0
    block_tokens: int = 0  # of the largest block
    figures: Figures | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """A case in numbers."""

    sequences: int
    tokens: int
    pairs: float  # of one head; of several masks, each as often as its weight says
    mask: str
    nodes: int
    ranks: int
    q_heads: int
    kv_heads: int
    objective: str
    options: Mapping[str, Any]  # of the planner, but for the seed
    crossed: float  # what a byte between nodes costs on top of one that moves, for the objective
    most_compute: float  # largest rank's share over the mean that is within the limits
    most_tokens: float

    def cost(self, figures: Figures) -> float:
        """What the objective makes small."""
        return figures.total_bytes + self.crossed * figures.inter_node_bytes

    def broken(self, figures: Figures) -> tuple[str, ...]:
        """The limits on balance that a placement does not meet, of "compute" and "tokens"."""
        limits = {"compute": self.most_compute, "tokens": self.most_tokens}
        return tuple(name for name, most in limits.items() if getattr(figures, name) > most + ROUNDING)


@dataclass(frozen=True, slots=True)
class Result:
    """All that is measured of one case."""

    name: str
    setting: Setting
    block_tokens: int  # of the largest block that planning begins with
    token_blocks: int  # before some are cut to even out tokens
    computation_blocks: int  # over all head groups
    runs: tuple[Run, ...]  # at least one
    bound_bytes: float  # that any placement within the limits moves at least
    bound_inter_node_bytes: float
    ring: Figures
    zigzag: Figures
    solvers: Mapping[str, Solved] = field(default_factory=dict)  # by preset
    limits: Mapping[str, float] = field(default_factory=dict)  # of a case with targets, keys of FIGURES

    @property
    def planning_s(self) -> float:
        """Seconds of planning, the median over the runs."""
        return median(run.planning_s for run in self.runs)

    def stage_s(self, stage: str) -> float:
        """Seconds of a stage, the median over the runs."""
        return median(run.seconds[stage] for run in self.runs)

    @property
    def total_bytes(self) -> float:
        """What the plan moves, the median over the runs."""
        return median(run.plan.total_bytes for run in self.runs)

    @property
    def inter_node_bytes(self) -> float:
        """What the plan moves between nodes, the median over the runs."""
        return median(run.plan.inter_node_bytes for run in self.runs)

    @property
    def compute(self) -> float:
        """Balance of the computation in the worst run."""
        return max(run.plan.compute for run in self.runs)

    @property
    def tokens(self) -> float:
        """Balance of the tokens in the worst run."""
        return max(run.plan.tokens for run in self.runs)

    @property
    def bound_ratio(self) -> float | None:
        """What the plan moves over the lower bound; None where that is 0."""
        return self.total_bytes / self.bound_bytes if self.bound_bytes else None

    @property
    def peak_bytes(self) -> float | None:
        """Memory while planning, of the worst run; None where it is not known."""
        peaks = [run.peak_bytes for run in self.runs if run.peak_bytes is not None]
        return max(peaks, default=None)

    @property
    def placement(self) -> Figures | None:
        """The formula's figures, medians of the bytes and the worst of the balances."""
        found = [run.placement for run in self.runs if run.placement is not None]
        if not found:
            return None
        return Figures(
            median(figures.total_bytes for figures in found),
            median(figures.inter_node_bytes for figures in found),
            max(figures.compute for figures in found),
            max(figures.tokens for figures in found),
        )

    @property
    def own_broken(self) -> tuple[str, ...]:
        """The limits that the plan of some run does not meet."""
        return self.setting.broken(Figures(0.0, 0.0, self.compute, self.tokens))


# figures that a target can limit: properties of a result
FIGURES = (
    "planning_s",
    "total_bytes",
    "inter_node_bytes",
    "compute",
    "tokens",
    "bound_ratio",
    "peak_bytes",
)
