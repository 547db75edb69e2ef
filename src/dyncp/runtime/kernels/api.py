"""What the executor needs of kernels, and the choice among them."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
import torch

from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import TokenBlocks
from dyncp.ir.plan import Attention, Comps, Copy, PlanHeader, RankProgram, Reduction
from dyncp.runtime.buffers import Buffers


@dataclass(frozen=True, slots=True)
class Score:
    """How a score comes from a query and a key: `scale * q.k`, then `softcap * tanh(score / softcap)` if not None."""

    scale: float
    softcap: float | None = None


class Kernels(Protocol):
    """The computing instructions. An instance is made for one device and for what one rank does under one mask, whose
    tables it may prepare once; it holds no data of a run, and no reference to the `RankProgram`, with which it goes.

    All operations accumulate in fp32, in an order that the plan fixes: the same plan and inputs give the same bits.
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


KernelFactory = Callable[[PlanHeader, RankProgram, torch.device], Kernels]


class Choice(NamedTuple):
    """Kernels that can be chosen by name."""

    module: str  # imported at first use
    factory: str
    devices: tuple[str, ...]  # types that they run on; none: all
    package: str | None = None  # that must be installed


KERNELS = {
    "reference": Choice("dyncp.runtime.kernels.reference", "Reference", ()),
    "torch_cpu": Choice("dyncp.runtime.kernels.torch_cpu", "TorchCpu", ("cpu",)),
    "flex": Choice("dyncp.runtime.kernels.flex", "Flex", ("cuda",)),
    "flash": Choice("dyncp.runtime.kernels.flash", "Flash", ("cuda",)),
    "triton": Choice("dyncp.runtime.kernels.triton", "Triton", ("cuda", "cpu"), "triton"),
}
FASTEST = {"cpu": ("torch_cpu",), "cuda": ("triton",)}  # by type of device: the first that is installed


def choose_kernels(name: str, device: torch.device) -> KernelFactory:
    """Kernels by name; `auto` takes the fastest that run on the device, and says in the log which these are.

    Raises:
        ValueError: an unknown name, kernels that do not run on the device, or a package that is not installed.
    """
    if name == "auto":
        name = fastest_kernels(device)
    if name not in KERNELS:
        raise ValueError(f"unknown kernels {name!r}; choose one of auto, {', '.join(KERNELS)}")
    choice = KERNELS[name]
    if choice.devices and device.type not in choice.devices:
        raise ValueError(
            f"kernels {name!r} got tensors on {device}; move them to {' or '.join(choice.devices)}, or choose 'auto'"
        )
    if not is_installed(choice):
        raise ValueError(f"kernels {name!r} need the package {choice.package}, which is not installed")
    made: KernelFactory = getattr(importlib.import_module(choice.module), choice.factory)
    return made


@cache
def fastest_kernels(device: torch.device) -> str:
    """What `auto` stands for on a device."""
    fit = [name for name in FASTEST.get(device.type, ()) if is_installed(KERNELS[name])]
    name = fit[0] if fit else "reference"
    logging.getLogger("dyncp").info("kernels for tensors on %s: %s", device.type, name)
    return name


def is_installed(choice: Choice) -> bool:
    """Whether the package that kernels need is there."""
    return choice.package is None or importlib.util.find_spec(choice.package) is not None


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
