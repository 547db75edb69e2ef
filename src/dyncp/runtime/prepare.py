"""What is derived from a program before it first runs, and kept as long as it: kernels with their tables, layouts."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from dyncp.ir.plan import FORWARD, Pass, Program, RankPlan, RankProgram
from dyncp.runtime.buffers import Layout
from dyncp.runtime.kernels.api import Kernels, choose_kernels


@dataclass(frozen=True, slots=True)
class Prepared:
    """One rank's programs under one mask, ready for a device."""

    kernels: Kernels
    layouts: tuple[Layout, Layout]  # forward, backward

    def layout(self, pass_: Pass) -> Layout:
        """The layout of a pass."""
        return self.layouts[0 if pass_ is FORWARD else 1]


# Of the programs in use: all layers of a model and both passes share them, and they go with the program.
_prepared: WeakKeyDictionary[RankProgram, dict[tuple[str, torch.device], Prepared]] = WeakKeyDictionary()


def prepare(plan: RankPlan, mask: str, kernels: str, device: torch.device) -> Prepared:
    """Make ready what runs of one rank's part of a plan share, at first use: tables of blocks, on a GPU in its memory.

    Args:
        plan: one rank's part of a plan.
        mask: name of one of its masks.
        kernels: as in `attention`.
        device: of the tensors.

    Raises:
        ValueError: unknown kernels, or such as do not run on the device.
    """
    program = plan.program(mask)
    made = _prepared.setdefault(program, {})
    if (kernels, device) not in made:
        factory = choose_kernels(kernels, device)
        programs: tuple[Program, Program] = program.forward, program.backward
        layouts = Layout(plan.header, programs[0]), Layout(plan.header, programs[1])
        made[kernels, device] = Prepared(factory(plan.header, program, device), layouts)
    return made[kernels, device]
