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
from dyncp.ir.shape import MAX_HEADS, AttentionShape
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
    """Kernels that can be chosen by name. What they do not take beyond this, they say themselves."""

    module: str  # imported at first use
    factory: str
    devices: tuple[str, ...] = ()  # types that they run on; none: all
    package: str | None = None  # that must be installed
    capability: tuple[int, int] = (0, 0)  # of a GPU, at least
    most_dim: int = MAX_HEADS  # of heads


KERNELS = {
    "reference": Choice("dyncp.runtime.kernels.reference", "Reference"),
    "torch_cpu": Choice("dyncp.runtime.kernels.torch_cpu", "TorchCpu", ("cpu",)),
    "flex": Choice("dyncp.runtime.kernels.flex", "Flex", ("cuda",), "triton"),
    "flash": Choice("dyncp.runtime.kernels.flash", "Flash", ("cuda",), None, (8, 0)),
    "triton": Choice("dyncp.runtime.kernels.triton", "Triton", ("cuda", "cpu"), "triton", (8, 0), 256),
}
FASTEST = {"cpu": ("torch_cpu",), "cuda": ("triton",)}  # by type of device: the first that has no objections


def choose_kernels(name: str, device: torch.device, shape: AttentionShape) -> KernelFactory:
    """Kernels by name; `auto` takes the fastest that run on the device, and says in the log which these are.

    Raises:
        ValueError: an unknown name, a device or head dims that the kernels do not take, or a package that is missing.
    """
    if name == "auto":
        name = fastest_kernels(device, max(shape.head_dim, shape.value_dim))
    if name not in KERNELS:
        raise ValueError(f"unknown kernels {name!r}; choose one of auto, {', '.join(KERNELS)}")
    objection = objection_to(KERNELS[name], device, max(shape.head_dim, shape.value_dim))
    if objection:
        raise ValueError(f"kernels {name!r} {objection}; use kernels='auto'")
    made: KernelFactory = getattr(importlib.import_module(KERNELS[name].module), KERNELS[name].factory)
    return made


@cache
def fastest_kernels(device: torch.device, dim: int) -> str:
    """What `auto` stands for on a device, for heads of that dim."""
    objections = {name: objection_to(KERNELS[name], device, dim) for name in FASTEST.get(device.type, ())}
    name = next((name for name, objection in objections.items() if objection is None), "reference")
    why = "".join(f"; kernels {other!r} {objection}" for other, objection in objections.items() if objection)
    logging.getLogger("dyncp").info("kernels for tensors on %s, heads of %d: %s%s", device, dim, name, why)
    return name


def objection_to(choice: Choice, device: torch.device, dim: int) -> str | None:
    """Why kernels cannot be used on a device for heads of that dim, in words that follow their name."""
    if choice.devices and device.type not in choice.devices:
        return f"do not run on {device}, but on {' and '.join(choice.devices)}"
    if choice.package and importlib.util.find_spec(choice.package) is None:
        return f"need the package {choice.package}, which is not installed"
    if dim > choice.most_dim:
        return f"have head dims up to {choice.most_dim}, not {dim}"
    if device.type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
        if capability < choice.capability:
            return (
                f"need compute capability {'.'.join(map(str, choice.capability))}, not {'.'.join(map(str, capability))}"
            )
    return None


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
