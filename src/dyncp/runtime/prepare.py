"""What is derived from a program before it first runs, and kept as long as it: kernels with their tables, layouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from weakref import WeakKeyDictionary

import torch

from dyncp.ir.plan import FORWARD, Pass, RankPlan, RankProgram
from dyncp.runtime.buffers import Layout
from dyncp.runtime.kernels.api import Kernels, choose_kernels, fastest_kernels


@dataclass(frozen=True, slots=True)
class Prepared:
    """One rank's programs under one mask, ready for a device."""

    kernels: Kernels
    layouts: tuple[Layout, Layout]  # forward, backward

    def layout(self, pass_: Pass) -> Layout:
        """The layout of a pass."""
        return self.layouts[0 if pass_ is FORWARD else 1]


@dataclass(frozen=True, slots=True)
class _OfProgram:
    """All that is prepared of a program; only one thread prepares at a time, and others wait for it."""

    made: dict[tuple[str, torch.device], Prepared] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)


# Of the programs in use: all layers of a model and both passes share it, and it goes with the program.
_prepared: WeakKeyDictionary[RankProgram, _OfProgram] = WeakKeyDictionary()
_looking_up = Lock()


def prepare(plan: RankPlan, device: torch.device | str, kernels: str = "auto") -> None:
    """Make ready for a plan before `attention` is called with it: tables of its blocks are made and, for a GPU, sent
    there, on a stream of their own. `attention` does it at the first call with a plan otherwise, where training waits.

    It may be called from another thread, as `DynamicLoader` does with what it is given as `prepare`:

        device = torch.device("cuda", torch.cuda.current_device())
        loader = DynamicLoader(..., prepare=lambda plan: dyncp.prepare(plan, device))

    Args:
        plan: this rank's part of a plan; all its masks are made ready.
        device: of the tensors to come, a GPU with its number.
        kernels: as in `attention`.

    Raises:
        ValueError: unknown kernels, such as do not run on the device, a GPU without a number or where there is none, a
            whole plan.
    """
    if not isinstance(plan, RankPlan):
        raise ValueError(f"plan is of type {type(plan).__name__}; expected one rank's part, as plan.rank(rank)")
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {device}, but PyTorch sees no GPU; use a build of it with CUDA, or a CPU")
    if device.type == "cuda" and device.index is None:
        raise ValueError(
            "device is cuda, of which each thread has its own idea; say which GPU: "
            "torch.device('cuda', torch.cuda.current_device()), called where training runs"
        )
    for mask in plan.header.mask_names:
        prepared_for(plan, mask, kernels, device)


def prepared_for(plan: RankPlan, mask: str, kernels: str, device: torch.device) -> Prepared:
    """What runs of one rank's part of a plan share, made at first use.

    Raises:
        ValueError: unknown kernels, or such as do not run on the device.
    """
    program, shape = plan.program(mask), plan.header.shape
    if kernels == "auto":
        kernels = fastest_kernels(device, max(shape.head_dim, shape.value_dim))
    with _looking_up:
        own = _prepared.setdefault(program, _OfProgram())
    with own.lock:
        if (kernels, device) not in own.made:
            factory = choose_kernels(kernels, device, shape)
            layouts = Layout(plan.header, program.forward), Layout(plan.header, program.backward)
            own.made[kernels, device] = Prepared(factory(plan.header, program, device), layouts)
        return own.made[kernels, device]
