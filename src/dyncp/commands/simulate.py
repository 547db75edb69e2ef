"""`dyncp simulate`: how long attention, or a whole iteration, takes under one strategy or several."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from dyncp.commands.model_options import ModelOptions
from dyncp.commands.options import BatchOptions, ClusterOptions, ShapeOptions
from dyncp.cost.profiled import Profiled
from dyncp.report.summary import head_text, plan_figures
from dyncp.report.table import columns, format_bytes
from dyncp.simulator.iteration import Iteration
from dyncp.simulator.run import PassResult
from dyncp.simulator.trace import write_trace
from dyncp.strategies import STRATEGIES
from dyncp.strategies.api import Options
from dyncp.tune.compare import (
    LEFT_OUT,
    Failure,
    Outcome,
    Setting,
    compare,
    run_strategy,
    setting_figures,
    strategy_names,
)


@dataclass(frozen=True)
class Command:
    """Simulate the attention of one batch on a cluster: how long a layer takes, what is hidden, what ranks wait for.

    With --compare, several strategies are ranked by the time of forward and backward. With --model, by that of a
    whole training iteration around it. docs/simulator.md says what is modelled, and explains every line.
    """

    batch: BatchOptions = field(default_factory=BatchOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    shape: ShapeOptions = field(default_factory=ShapeOptions)
    planning: Options = field(default_factory=Options)
    model: ModelOptions = field(default_factory=ModelOptions)
    strategy: Annotated[str | None, arg(metavar="|".join(STRATEGIES))] = None
    """How to spread the batch; dynamic when left out."""
    compare: Annotated[str | None, arg(metavar="all|NAME,NAME,...")] = None
    """Several strategies instead, the fastest first."""
    cost: Annotated[Path | None, arg(metavar="FILE")] = None
    """A table of measured times of attention (docs/simulator.md), instead of the cluster's data sheet."""
    trace: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write the simulation of one strategy as a trace that Perfetto (ui.perfetto.dev) opens."""
    json: bool = False
    """Print one JSON object instead of a table."""


def run(command: Command) -> int:
    """Do what `Command` says."""
    if command.strategy is not None and command.compare is not None:
        raise ValueError("got both --strategy and --compare; choose one")
    if command.trace is not None and command.compare is not None:
        raise ValueError("got both --trace and --compare; a trace is of one strategy: choose it with --strategy")
    batch, setting = command.batch.batch(), setting_of(command)
    found: list[Outcome | Failure]
    if command.compare is not None:
        found = compare(batch, strategy_names(command.compare), setting)
    else:
        found = [run_strategy(batch, command.strategy or "dynamic", setting)]
    if command.trace is not None and isinstance(found[0], Outcome):
        write_trace(found[0].simulation, found[0].planned.plan, command.trace)
    if command.json:
        print(json.dumps({**setting_figures(setting), "strategies": [one.figures() for one in found]}))
    else:
        print(comparison_text(found) if command.compare is not None else outcome_text(found[0]))
    return 0


def setting_of(command: Command) -> Setting:
    """What is simulated.

    Raises:
        ValueError: a shape beside a model, which has its own, or anything that its parts refuse.
    """
    devices = command.cluster.build()
    cost = None if command.cost is None else Profiled.read(command.cost)
    if command.model.model is None:
        command.model.check_unused()
        return Setting(command.shape.build(), devices, command.planning, cost)
    if command.shape != ShapeOptions():
        raise ValueError("got both --model and options of the attention layer; a model has its own heads: drop them")
    model, training = command.model.build(command.cluster.machine)
    return Setting(model.shape(training.tp), devices, command.planning, cost, model, training)


def outcome_text(outcome: Outcome | Failure) -> str:
    """One strategy in full."""
    assert isinstance(outcome, Outcome)
    passes = (outcome.simulation.forward, outcome.simulation.backward)
    rows: list[tuple[str, ...]] = [("", "forward", "backward")]
    rows += [(label, *(milliseconds(getattr(one, name)) for one in passes)) for label, name in TIMES]
    rows.append(("hidden share", *(f"{one.hidden_share:.0%}" for one in passes)))
    rows += [(label, *(format_bytes(one.size_bytes[name]) for one in passes)) for label, name in LINKS]
    rows.append(("peak memory", *(format_bytes(one.peak_bytes) for one in passes)))
    figures = plan_figures(outcome.planned.plan, outcome.planned.layout.blocks)
    parts = [head_text(figures), "", columns(rows)]
    parts += [f"note: {note}" for note in outcome.planned.layout.notes]
    if outcome.padding:
        parts.append(f"note: {padding_text(outcome)}")
    if outcome.iteration is not None:
        parts += ["", iteration_text(outcome.iteration)]
    return "\n".join([*parts, "", LEFT_OUT])


TIMES = (
    ("makespan", "makespan_s"),
    ("attention", "attention_s"),
    ("  busiest rank", "slowest_attention_s"),
    ("copies, reductions", "move_s"),
    ("launches", "launch_s"),
    ("waits for transfers", "exposed_s"),
    ("waits for late peers", "late_s"),
    ("idle at the end", "idle_s"),
    ("hidden transfers", "hidden_s"),
)
LINKS = (("within nodes", "intra"), ("between nodes", "inter"))
PARTS = (
    ("attention forward", "attention_forward_s"),
    ("attention backward", "attention_backward_s"),
    ("linear forward", "linear_forward_s"),
    ("linear backward", "linear_backward_s"),
    ("tensor parallelism", "tensor_parallel_s"),
    ("gradients", "gradients_s"),
    ("optimizer", "optimizer_s"),
    ("overhead", "overhead_s"),
)


def comparison_text(found: list[Outcome | Failure]) -> str:
    """Several strategies, a line each."""
    best = next(one for one in found if isinstance(one, Outcome))
    head = ("", *(("iteration", "tokens/s") if best.iteration else ("fwd + bwd",)), "x best", "forward", "backward")
    head += ("attention", "exposed", "hidden", "late", "idle", "in nodes", "between", "peak")
    rows: list[tuple[str, ...]] = [head]
    notes = []
    for one in found:
        if isinstance(one, Failure):
            notes.append(f"{one.strategy}: no plan: {one.reason}")
            continue
        rows.append(_row(one, best.time_s))
        notes += [f"{one.strategy}: note: {note}" for note in one.planned.layout.notes]
        if one.padding:
            notes.append(f"{one.strategy}: {padding_text(one)}")
    plain = next((one for one in found if isinstance(one, Outcome) and not one.padding), best)
    shown = plan_figures(plain.planned.plan, plain.planned.layout.blocks)
    lines = [line for line in head_text(shown).splitlines() if not line.startswith(("strategy", "block"))]
    return "\n".join([*lines, "", columns(rows), *notes, "", LEGEND, LEFT_OUT])


LEGEND = (
    "Times of one attention layer in ms; from `attention` on both passes, means over ranks. exposed: waits for\n"
    "transfers; hidden: transfers while computing; late: waits for peers; idle: at the end. Bytes over all ranks."
)


def _row(outcome: Outcome, best_s: float) -> tuple[str, ...]:
    passes = (outcome.simulation.forward, outcome.simulation.backward)
    whole = outcome.iteration
    leading = (bare(outcome.time_s),) if whole is None else (seconds(whole.total_s), f"{whole.tokens_per_s:,.0f}")
    names = ("attention_s", "exposed_s", "hidden_s", "late_s", "idle_s")
    return (
        f"{outcome.strategy}{'*' if outcome.padding else ''}",
        *leading,
        f"{outcome.time_s / best_s:.2f}" if best_s > 0 else "1.00",
        *(bare(one.makespan_s) for one in passes),
        *(bare(both(passes, name)) for name in names),
        *(format_bytes(sum(one.size_bytes[link] for one in passes)) for _, link in LINKS),
        format_bytes(max(one.peak_bytes for one in passes)),
    )


def both(passes: tuple[PassResult, PassResult], name: str) -> float:
    """A figure of forward and backward together."""
    return sum(getattr(one, name) for one in passes)


def padding_text(outcome: Outcome) -> str:
    """What a strategy pads."""
    return f"pads to the longest sequence, {outcome.padding:,} tokens more, as its original does"


def iteration_text(whole: Iteration) -> str:
    """An iteration by part."""
    rows: list[tuple[str, ...]] = [("iteration", seconds(whole.total_s), f"{whole.tokens_per_s:,.0f} tokens/s")]
    rows += [(f"  {label}", seconds(getattr(whole, name)), f"{getattr(whole, name) / whole.total_s:.0%}")
             for label, name in PARTS]  # fmt: skip
    return columns(rows)


def milliseconds(time_s: float) -> str:
    """Of layers, which take that long."""
    return f"{bare(time_s)} ms"


def bare(time_s: float) -> str:
    """Milliseconds without their unit."""
    return f"{time_s * 1e3:,.{3 if time_s < 0.1 else 1}f}"


def seconds(time_s: float) -> str:
    """Of iterations."""
    return f"{time_s:.3f} s"
