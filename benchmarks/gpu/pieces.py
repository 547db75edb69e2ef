"""Programs of one rank with the memory they run on, to be run again and again; some of them are written by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.cases import random_inputs
from dyncp.ir.blocks import HAS_KV, HAS_Q, TokenBlocks
from dyncp.ir.plan import (
    BACKWARD,
    FORWARD,
    Comps,
    Copy,
    Instruction,
    Kind,
    Pass,
    Place,
    PlanHeader,
    Program,
    RankPlan,
    RankProgram,
    Reduction,
    Slots,
)
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.buffers import Buffers, allocate
from dyncp.runtime.executor import Executor
from dyncp.runtime.kernels.api import Score
from dyncp.runtime.prepare import Prepared, prepared_for
from dyncp.runtime.transports.api import Message

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Silent:
    """A transport that sends and receives nothing: what was to be received is what the memory holds."""

    rank: int
    world_size: int

    def begin(
        self, program: str, last_steps: tuple[int, ...], device: torch.device, timeout_s: float
    ) -> tuple[int, ...]:
        """No step is one for all ranks."""
        return (0,) * len(last_steps)

    def start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> None:
        """Nothing."""

    def wait(self, handle: None, timeout_s: float) -> None:
        """Nothing."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One pass of one rank's program under the plan's only mask, on tensors of its own."""

    executor: Executor
    pass_: Pass
    buffers: Buffers

    def run(self) -> None:
        """On the same memory as before."""
        self.executor.run(self.pass_, self.buffers)

    def run_anew(self) -> None:
        """With scratch memory made anew, as in every layer of a model."""
        layout = self.executor.prepared.layout(self.pass_)
        self.executor.run(self.pass_, Buffers(layout, self.buffers.local, self.buffers.kept))

    def instructions(self) -> tuple[Instruction, ...]:
        """What is run."""
        return self.executor.program(self.pass_).instructions


def piece_of(
    part: RankPlan, pass_: Pass, kernels: str, device: torch.device, prepared: Prepared | None = None
) -> Piece:
    """A pass ready to run on random tensors; messages do not move."""
    (mask,) = part.header.mask_names
    prepared = prepared or prepared_for(part, mask, kernels, device)
    transport = Silent(part.rank, part.header.ranks)
    executor = Executor(part, mask, prepared, transport, Score(1 / math.sqrt(part.header.shape.head_dim)), TIMEOUT_S)
    kept = allocate(executor.program(pass_).kept_bytes, device).zero_()
    return Piece(executor, pass_, Buffers(prepared.layout(pass_), local_tensors(part, pass_, device), kept))


def local_tensors(part: RankPlan, pass_: Pass, device: torch.device) -> dict[str, Tensor]:
    """Random tensors of the tokens that the rank owns, those of a pass; partial results begin at nothing."""
    header, shape = part.header, part.header.shape
    q_tokens, kv_tokens = (len(header.local_tokens(part.rank, role)[0]) for role in (HAS_Q, HAS_KV))
    q, k, v, do = random_inputs(shape, q_tokens, kv_tokens, device, seed=0)
    rows = (q_tokens, shape.q_heads)
    lse = torch.full((*rows, 1), math.log(max(kv_tokens, 1)) + 0.5, device=device)
    local = {"q": q, "k": k, "v": v, "lse": lse}
    if pass_ is FORWARD:
        return local | {"o": torch.zeros(do.shape, device=device)}
    sums = {f"d{name}": torch.zeros(local[name].shape, device=device) for name in ("q", "k", "v")}
    return local | {"do": do, "delta": torch.zeros(*rows, 1, device=device)} | sums


def repeated(part: RankPlan, times: int) -> RankPlan:
    """A part of a plan that does every instruction many times over."""
    (program,) = part.programs
    forward, backward = (
        replace(each, instructions=each.instructions * times) for each in (program.forward, program.backward)
    )
    return replace(part, programs=(replace(program, forward=forward, backward=backward),))


def pass_of(kind: Kind) -> Pass:
    """The pass in which data of a kind moves first."""
    return FORWARD if kind in (Kind.Q, Kind.KV, Kind.OUT) else BACKWARD


def moving(kind: Kind, reduce: bool, blocks: int, tokens: int, shape: AttentionShape) -> RankPlan:
    """A rank that does one instruction to all of its data of a kind: copy it into scratch memory, as before a message
    is sent, or add to it what lies there in the model's dtype, as after one has come."""
    start = np.arange(blocks) * tokens
    of = TokenBlocks(np.zeros(blocks), start, start + tokens, np.full(blocks, HAS_Q | HAS_KV))
    header = PlanHeader("by hand", shape, 1, 1, "none", "model", ("default",), (1.0,), of, np.zeros(blocks))
    block, group = (axis.ravel() for axis in np.mgrid[:blocks, : shape.groups])
    count = len(block)
    size_bytes = header.piece_bytes(kind, reduce)[block]
    ones, far = np.ones(count), np.cumsum(size_bytes) - size_bytes
    slots = Slots(
        np.full(2 * count, kind),
        np.tile(block, 2),
        np.tile(group, 2),
        np.concatenate([Place.LOCAL * ones, Place.ARENA * ones]),
        np.concatenate([0 * ones, reduce * ones]),
        np.concatenate([start[block], far]),
    )
    near, there = np.arange(count), np.arange(count, 2 * count)
    instruction = Reduction(there, near, []) if reduce else Copy(near, there)
    program = Program(slots, (instruction,), int(size_bytes.sum()), 0)
    nothing = Program(Slots([], [], [], [], [], []), (), 0, 0)
    comps = Comps([], [], [], [0], np.zeros((0, 6)))
    both = (program, nothing) if pass_of(kind) is FORWARD else (nothing, program)
    return RankPlan(header, 0, (RankProgram(comps, *both),), "by hand")


def fill(piece: Piece, slots: Sequence[int]) -> None:
    """Random values into some slots."""
    for slot in slots:
        for field in piece.buffers.fields(slot):
            field.normal_()
