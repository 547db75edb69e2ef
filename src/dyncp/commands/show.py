"""`dyncp show`: what is in a plan file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from dyncp.commands.plan import PASSED
from dyncp.ir import codec
from dyncp.ir.check import check_plan
from dyncp.report.summary import plan_figures, summary_text


@dataclass(frozen=True)
class Command:
    """Read a plan that `dyncp plan --out FILE` wrote, check it, and print its figures."""

    file: Annotated[Positional[Path], arg(metavar="FILE")]
    """Plan file: text if its name ends in `.txt`, else bytes."""
    text: bool = False
    """Print the plan itself, in its text form, instead of a table."""


def run(command: Command) -> int:
    """Do what `Command` says."""
    plan = codec.read_plan(command.file)
    check_plan(plan)
    if command.text:
        print(codec.to_text(plan), end="")
    else:
        print(f"{summary_text(plan_figures(plan))}\n{PASSED}")
    return 0
