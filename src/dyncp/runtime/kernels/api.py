"""What the executor needs of kernels, the choice among them, and what they keep between runs of a plan."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch

from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import TokenBlocks
from dyncp.ir.plan import Attention, Comps, Copy, RankPlan, RankProgram, Reduction
from dyncp.runtime.buffers import Buffers


@dataclass(frozen=True, slots=True)
class Score:
    """How a score comes from a query and a key: `scale * q.k`, then `softcap * tanh(score / softcap)` if not None."""

    scale: float
    softcap: float | None = None


class Kernels(Protocol):
    """The computing instructions. An instance is made for one device and for the computation blocks of one rank under
    one mask, whose tables it may prepare once; it holds no data of a run.

    All operations accumulate in fp32, in the order of the instruction.
    """

    def attend(self, buffers: Buffers, instruction: Attention, score: Score) -> None:
        """Forward: clear `fresh`, then for each item merge attention of the visible pairs into its (O, LSE).

        A row that sees nothing adds nothing: a (0, -inf) stays as it is.
        """
        ...

    def attend_backward(self, buffers: Buffers, instruction: Attention, score: Score) -> None:
        """Backward: clear `fresh`, then for each item add to its dQ, dK and dV.

        The log-sum-exp in its STATS is that of the whole row (finite, also where the row sees nothing at all).
        """
        ...

    def reduce(self, buffers: Buffers, instruction: Reduction) -> None:
        """Clear `fresh`, then merge partial results."""
        ...

    def copy(self, buffers: Buffers, instruction: Copy) -> None:
        """Copy slots, casting to the destination's dtype."""
        ...


KernelFactory = Callable[[Comps, TokenBlocks, torch.device], Kernels]

# name -> (module, class); imported on first use
KERNELS = {
    "reference": ("dyncp.runtime.kernels.reference", "Reference"),
    "torch_cpu": ("dyncp.runtime.kernels.torch_cpu", "TorchCpu"),
}


def get_kernels(name: str, device: torch.device) -> KernelFactory:
    """Kernels by name; `auto` takes the fastest that run on the device.

    Raises:
        ValueError: an unknown name, or kernels that do not run on the device.
    """
    if name == "auto":
        name = "torch_cpu" if device.type == "cpu" else "reference"
    if name not in KERNELS:
        raise ValueError(f"unknown kernels {name!r}; choose one of auto, {', '.join(KERNELS)}")
    if name == "torch_cpu" and device.type != "cpu":
        raise ValueError(f"kernels 'torch_cpu' got tensors on {device}; move them to the CPU or choose 'reference'")
    module, factory = KERNELS[name]
    made: KernelFactory = getattr(importlib.import_module(module), factory)
    return made


# Kernels of the programs in use: all layers of a model and both passes share them, and they go with the program.
_prepared: WeakKeyDictionary[RankProgram, dict[tuple[str, torch.device], Kernels]] = WeakKeyDictionary()


def prepared_kernels(plan: RankPlan, mask: str, name: str, device: torch.device) -> Kernels:
    """Kernels for one rank and mask of a plan, made at first use and kept as long as its program."""
    program = plan.program(mask)
    made = _prepared.setdefault(program, {})
    if (name, device) not in made:
        made[name, device] = get_kernels(name, device)(program.comps, plan.header.tokens, device)
    return made[name, device]


def mask_patterns(comps: Comps, tokens: TokenBlocks) -> tuple[list[int], list[tuple[Ints, int]]]:
    """The different masks among computation blocks (many blocks look alike).

    Returns:
        The pattern of each computation block, and the patterns: key intervals of the rows, int32[rows, R, 2], and the
        number of keys.
    """
    numbers: dict[tuple[int, int, bytes], int] = {}
    patterns: list[tuple[Ints, int]] = []
    of_comp: list[int] = []
    sizes = tokens.tokens
    shapes = zip(sizes[comps.q_block].tolist(), sizes[comps.kv_block].tolist(), strict=True)
    slices = np.split(comps.slices, comps.slice_ptr[1:-1])
    for comp, ((rows, keys), own) in enumerate(zip(shapes, slices, strict=False)):
        number = numbers.setdefault((rows, keys, own.tobytes()), len(patterns))
        if number == len(patterns):
            patterns.append((comps.mask(comp, tokens).rows(0, rows), keys))
        of_comp.append(number)
    return of_comp, patterns
