"""What a plan costs each rank, counted from the plan's own instructions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.plan import PASSES, Attention, CommLaunch, Program, RankPlan
from dyncp.report.summary import launch_bytes


@dataclass(frozen=True, slots=True)
class RankLoad:
    """One rank's share of one attention layer."""

    forward_bytes: int  # sent
    backward_bytes: int  # sent
    pairs: int  # (query, key) pairs computed, counted once per head group
    tokens: int  # owned


def rank_load(plan: RankPlan) -> RankLoad:
    """A rank's share under a plan; with several masks, the sum over them."""
    sent = [sum(_sent_bytes(plan, getattr(program, pass_.name)) for program in plan.programs) for pass_ in PASSES]
    pairs = 0
    for program in plan.programs:
        comps = program.comps
        of_comp = np.array([comps.mask(i, plan.header.tokens).pairs() for i in range(len(comps))], np.int64)
        for instruction in program.forward.instructions:
            if isinstance(instruction, Attention):
                pairs += int(of_comp[instruction.comp].sum())
    return RankLoad(sent[0], sent[1], pairs, len(plan.header.local_tokens(plan.rank)[0]))


def _sent_bytes(plan: RankPlan, program: Program) -> int:
    launches = (instruction for instruction in program.instructions if isinstance(instruction, CommLaunch))
    return sum(int(launch_bytes(plan.header, program, launch, send=True)[2].sum()) for launch in launches)


def strategy_figures(loads: list[list[RankLoad]], layers: int) -> dict[str, Any]:
    """A strategy's figures over all steps.

    Args:
        loads: of each step, of each rank.
        layers: attention layers that run each plan.

    Returns:
        Bytes that crossed ranks, per step and summed over all layers; and imbalances, max/mean over ranks: of each
        step, and `sum of max / sum of mean` over the steps, the factor by which the fullest rank delays all.
    """
    forward, backward, pairs, tokens = (
        np.array([[getattr(load, name) for load in step] for step in loads], np.float64)
        for name in ("forward_bytes", "backward_bytes", "pairs", "tokens")
    )
    per_step = layers * (forward + backward).sum(axis=1)
    return {
        "forward_bytes": int(layers * forward.sum()),
        "backward_bytes": int(layers * backward.sum()),
        "total_bytes": int(per_step.sum()),
        "bytes_per_step": [int(step) for step in per_step],
        "compute_imbalance": _imbalance(pairs),
        "token_imbalance": _imbalance(tokens),
        "compute_imbalance_per_step": [_imbalance(step[None]) for step in pairs],
    }


def _imbalance(shares: Ints) -> float:
    """Sum of the largest over the sum of the means; `shares` is float64[steps, ranks]."""
    return float(shares.max(axis=1).sum() / shares.mean(axis=1).sum())
