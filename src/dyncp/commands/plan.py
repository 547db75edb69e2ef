"""`dyncp plan`: plan one batch; print its figures, write the plan, draw it, check it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from dyncp.commands.options import BatchOptions, ClusterOptions, ShapeOptions
from dyncp.ir import codec
from dyncp.ir.check import PlanError, check_plan
from dyncp.report.summary import summarize, summary_text
from dyncp.strategies import STRATEGIES, Planned, build
from dyncp.strategies.api import Options


@dataclass(frozen=True)
class Command:
    """Plan one batch and say what the plan moves, how even it is and how long it took to make.

    Bytes are those of one attention layer over all ranks (of several masks, the weighted sum).
    """

    batch: BatchOptions = field(default_factory=BatchOptions)
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    shape: ShapeOptions = field(default_factory=ShapeOptions)
    planning: Options = field(default_factory=Options)
    strategy: Annotated[str, arg(metavar="|".join(STRATEGIES))] = "dynamic"
    """How to spread the batch."""
    json: bool = False
    """Print one JSON object instead of a table."""
    text: bool = False
    """Print the plan itself, in its text form, instead of a table."""
    check: bool = False
    """Check the plan: every computation once, every read preceded by its write, no deadlock."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """Write the plan to a file."""
    picture: Annotated[Path | None, arg(metavar="FILE")] = None
    """Draw the plan into a PNG file (needs the extra `viz`)."""


def run(command: Command) -> int:
    """Do what `Command` says; 1 when the check fails."""
    if command.json and command.text:
        raise ValueError("got both --json and --text; choose one")
    planned = build(
        command.batch.batch(), command.shape.build(), command.cluster.build(), command.strategy, command.planning
    )
    if command.check and not _check(planned):
        return 1
    if command.out is not None:
        codec.write_plan(planned.plan, command.out)
    if command.picture is not None:
        from dyncp.report.picture import plan_picture

        plan_picture(planned, command.picture)
    if command.text:
        print(codec.to_text(planned.plan))
    elif command.json:
        print(json.dumps(summarize(planned)))
    else:
        print(summary_text(summarize(planned)))
    return 0


def _check(planned: Planned) -> bool:
    try:
        check_plan(planned.plan, planned.layout.blocks)
    except PlanError as error:  # a table with the bad cell marked: more than one line, and not the user's mistake
        print(f"dyncp: the plan is broken: {error}", file=sys.stderr)
        return False
    return True
