"""Strategies side by side: each plans the same batch, and the simulator says how long its plan takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from dyncp.cost.layer import Model, context_cluster
from dyncp.cost.model import CostModel
from dyncp.cost.roofline import Roofline
from dyncp.ir.batch import Batch
from dyncp.ir.cluster import Cluster
from dyncp.ir.shape import AttentionShape
from dyncp.simulator import Simulation, simulate
from dyncp.simulator.iteration import Iteration, Training, iteration
from dyncp.strategies import STRATEGIES, Planned, build
from dyncp.strategies.api import Options
from dyncp.strategies.padding import as_run

LEFT_OUT = (
    "Not modelled: switches and congestion beyond the nodes' links, transfers that slow computation down,\n"
    "devices that differ, limits of memory."
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated, but for batch and strategy.

    Args:
        shape: of one attention layer on one rank of a plan.
        devices: the machines.
        options: how to plan.
        cost: what computation takes; from the data sheet of `devices` when left out.
        model, training: of whole iterations; without a model, a rank of a plan is a device, and only attention is
            simulated.
    """

    shape: AttentionShape
    devices: Cluster
    options: Options = field(default_factory=Options)
    cost: CostModel | None = None
    model: Model | None = None
    training: Training | None = None

    @property
    def cluster(self) -> Cluster:
        """The ranks of a plan: devices, or tensor-parallel groups of them."""
        return self.devices if self.training is None else context_cluster(self.devices, self.training.tp)


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A strategy's plan of a batch and its simulation.

    Args:
        planned: the plan.
        simulation: of it.
        iteration: around it, where there is a model.
        padding: tokens of the plan that are not in the batch, for a strategy that pads.
    """

    planned: Planned
    simulation: Simulation
    iteration: Iteration | None
    padding: int

    @property
    def strategy(self) -> str:
        """The strategy's name."""
        return self.planned.plan.header.strategy

    @property
    def time_s(self) -> float:
        """What strategies are ranked by: an iteration, or one layer of attention, forward and backward."""
        return self.simulation.total_s if self.iteration is None else self.iteration.total_s

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "strategy": self.strategy,
            "total_s": self.simulation.total_s,
            "forward": self.simulation.forward.figures(),
            "backward": self.simulation.backward.figures(),
            "padding_tokens": self.padding,
            "planning_s": sum(self.planned.seconds.values()),
            "notes": list(self.planned.layout.notes),
            **({} if self.iteration is None else {"iteration": self.iteration.figures()}),
        }


@dataclass(frozen=True, slots=True)
class Failure:
    """A strategy that cannot plan a batch, and why."""

    strategy: str
    reason: str

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return {"strategy": self.strategy, "error": self.reason}


def strategy_names(words: str) -> list[str]:
    """The strategies that `all`, or names separated by commas, stand for.

    Raises:
        ValueError: an unknown name.
    """
    if words == "all":
        return list(STRATEGIES)
    names = list(dict.fromkeys(word.strip() for word in words.split(",")))
    for name in names:
        if name not in STRATEGIES:
            raise ValueError(f"unknown strategy {name!r}; choose all, or some of {', '.join(STRATEGIES)}")
    return names


def run_strategy(batch: Batch, strategy: str, setting: Setting) -> Outcome:
    """Plan and simulate.

    Raises:
        ValueError: a batch that the strategy cannot plan.
    """
    run = as_run(batch, strategy)
    cluster = setting.cluster
    planned = build(run, setting.shape, cluster, strategy, setting.options)
    simulation = simulate(planned.plan, cluster, setting.cost or Roofline.of(setting.devices))
    whole = None
    if setting.model is not None and setting.training is not None:
        header = planned.plan.header
        whole = iteration(simulation, header, setting.model, setting.devices, setting.training, batch.tokens)
    return Outcome(planned, simulation, whole, run.tokens - batch.tokens)


def compare(batch: Batch, strategies: Iterable[str], setting: Setting) -> list[Outcome | Failure]:
    """Each strategy's outcome, the fastest first, then those that fail.

    Raises:
        ValueError: all of them fail.
    """
    outcomes: list[Outcome] = []
    failures: list[Failure] = []
    for name in strategies:
        try:
            outcomes.append(run_strategy(batch, name, setting))
        except (ValueError, MemoryError) as error:
            failures.append(Failure(name, " ".join(str(error).split()) or type(error).__name__))
    if not outcomes:
        raise ValueError("; ".join(f"{failure.strategy}: {failure.reason}" for failure in failures))
    return [*sorted(outcomes, key=lambda outcome: outcome.time_s), *failures]


def setting_figures(setting: Setting) -> dict[str, Any]:
    """What was simulated, for JSON."""
    cluster = {
        name: None if value == float("inf") else value for name, value in asdict(setting.devices).items()
    }  # JSON has no infinity
    return {
        "cluster": cluster,
        "shape": asdict(setting.shape),
        "model": None if setting.model is None else asdict(setting.model),
        "training": None if setting.training is None else asdict(setting.training),
    }
