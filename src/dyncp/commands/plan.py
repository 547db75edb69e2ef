"""`dyncp plan`: plan one batch; print its figures, write the plan, draw it, check it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from dyncp.commands.options import BatchOptions, ClusterOptions, ShapeOptions
from dyncp.ir import codec
from dyncp.ir.check import check_plan
from dyncp.report.summary import summarize, summary_text
from dyncp.strategies import STRATEGIES, Planned, build
from dyncp.strategies.api import Options

PASSED = "check passed"


@dataclass(frozen=True)
class Command:
    """Plan one batch and say what the plan moves, how even it is and how long it took to make.

    Bytes are those of one attention layer over all ranks. Of several masks, pairs, bytes and messages are sums in which
    each mask counts as often as its weight says. A line `note: ...` names a limit on balance that could not be met; the
    limit is a multiple of the mean: 1 + --epsilon for computation, 1 + --token-epsilon for tokens. `bound` is what no
    placement can go below (docs/plans.md).
    """

    batch: BatchOptions = field(default_factory=BatchOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    shape: ShapeOptions = field(default_factory=ShapeOptions)
    planning: Options = field(default_factory=Options)
    strategy: Annotated[str, arg(metavar="|".join(STRATEGIES))] = "dynamic"
    """How to spread the batch; the planning options say which strategies read them."""
    json: bool = False
    """Print one JSON object instead of a table."""
    text: bool = False
    """Print the plan itself, in its text form, instead of a table."""
    check: bool = False
    """Check the plan: every computation once, every read preceded by its write, no deadlock."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write the plan to a file."""
    picture: Annotated[Path | None, arg(metavar="FILE")] = None
    """Draw the plan under one mask into a PNG file (needs the extra `viz`)."""
    picture_mask: Annotated[str | None, arg(metavar="NAME")] = None
    """The mask that --picture draws, where the batch has several; the first when left out."""


def run(command: Command) -> int:
    """Do what `Command` says."""
    if command.json and command.text:
        raise ValueError("got both --json and --text; choose one")
    if command.picture_mask is not None and command.picture is None:
        raise ValueError("got --picture-mask without --picture; add --picture FILE")
    planned = build(
        command.batch.batch(), command.shape.build(), command.cluster.build(), command.strategy, command.planning
    )
    if command.check:
        check_plan(planned.plan, planned.layout.blocks, planned.batch)
    if command.out is not None:
        codec.write_plan(planned.plan, command.out)
    if command.picture is not None:
        from dyncp.report.picture import plan_picture

        plan_picture(planned, command.picture, command.picture_mask)
    _print(command, planned)
    return 0


def _print(command: Command, planned: Planned) -> None:
    if command.json:
        print(json.dumps(summarize(planned) | ({"checked": True} if command.check else {})))
        return
    print(codec.to_text(planned.plan) if command.text else summary_text(summarize(planned)))
    if command.check:
        print(f"{'# ' if command.text else ''}{PASSED}")  # the text form of a plan has comments
