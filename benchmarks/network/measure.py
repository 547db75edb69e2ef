"""Runs plans on the hosts: forward, then backward, each from when all hosts begin at once until the last is done.

What other processes of the machine take from the processors is noted with every run, since there is no way to tell it
from the times themselves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.network.quiet import QUIET_SHARE, processors, processors_busy_s
from benchmarks.network.team import Team
from dyncp.ir.blocks import HAS_Q
from dyncp.ir.codec import encode_rank
from dyncp.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class Timed:
    """One run of a plan.

    Args:
        forward_s, backward_s: from the common start of the pass until the last host has finished it.
        others_share: of all processors, what processes outside of the benchmark took meanwhile.
    """

    forward_s: float
    backward_s: float
    others_share: float

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


def load(team: Team, plan: Plan, lengths: Sequence[int], folder: Path) -> None:
    """Give every host its part of a plan, and let it make its tensors.

    Args:
        team: the hosts.
        plan: for as many ranks.
        lengths: of the batch's sequences, without padding.
        folder: for the plan's parts.
    """
    requests = []
    for rank in range(len(team)):
        path = folder / f"plan{rank}.bin"
        path.write_bytes(encode_rank(plan.rank(rank)))
        requests.append({"do": "load", "plan": str(path), "lengths": list(lengths)})
    team.ask(requests)


def run_once(team: Team, *, compare: bool = False, save: Path | None = None) -> Timed:
    """One forward and backward of what was loaded.

    Args:
        team: the hosts.
        compare: whether the hosts first make sure that they run the same plan.
        save: folder for the results of every rank.
    """
    busy_s, worked_s, started = 0.0, processors_busy_s(), time.monotonic()
    seconds = []
    for pass_ in ("forward", "backward"):
        requests: list[dict[str, Any] | None] = [{"do": pass_, "compare": compare} for _ in range(len(team))]
        if save is not None and pass_ == "backward":
            requests = [request | {"save": str(save / f"{rank}.pt")} for rank, request in enumerate(requests)]
        at, answers = team.ask(requests, timed=True)
        seconds.append(max(answer["end"] for answer in answers) - at)
        busy_s += sum(answer["busy_s"] for answer in answers)
    others_s = max(0.0, processors_busy_s() - worked_s - busy_s)
    return Timed(*seconds, others_share=others_s / ((time.monotonic() - started) * processors()))


def gathered(plan: Plan, lengths: Sequence[int], folder: Path) -> dict[str, torch.Tensor]:
    """The results of all ranks in the batch's order, without padding."""
    starts = np.cumsum([0, *lengths])
    whole: dict[str, torch.Tensor] = {}
    for rank in range(plan.header.ranks):
        sequence, position = plan.header.local_tokens(rank, HAS_Q)
        real = np.flatnonzero(position < np.asarray(lengths)[sequence])
        rows = torch.from_numpy(starts[sequence[real]] + position[real])
        for name, part in torch.load(folder / f"{rank}.pt").items():
            if name not in whole:
                whole[name] = torch.full((int(starts[-1]), *part.shape[1:]), float("nan"), dtype=part.dtype)
            whole[name][rows] = part[torch.from_numpy(real)]
    return whole


def difference(got: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]) -> float:
    """The largest relative difference of output and gradients, in the L2 norm."""
    return max(float((got[name] - value).norm() / value.norm()) for name, value in want.items())


def quietest(runs: Sequence[Timed], count: int) -> list[Timed]:
    """The runs during which other processes took least."""
    return sorted(runs, key=lambda run: run.others_share)[:count]


def needs_more(runs: Sequence[Timed], count: int) -> bool:
    """Whether a plan should run again: until `count` runs were quiet, and twice as often at most."""
    return sum(run.others_share <= QUIET_SHARE for run in runs) < count and len(runs) < 2 * count
