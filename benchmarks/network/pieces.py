"""Single instructions on single blocks, by hand: what the calibration measures, with the executor's own kernels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from dyncp import masks
from dyncp.ir.blocks import HAS_KV, HAS_Q, TokenBlocks
from dyncp.ir.mask import Mask
from dyncp.ir.plan import (
    FORWARD,
    Attention,
    Comps,
    Copy,
    Kind,
    Pass,
    Place,
    PlanHeader,
    Program,
    RankProgram,
    Reduction,
    Slots,
)
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.buffers import DTYPES, Buffers, Layout, allocate
from dyncp.runtime.kernels.api import Score
from dyncp.runtime.kernels.torch_cpu import TorchCpu

CPU = torch.device("cpu")
Q_BLOCK, KV_BLOCK = 0, 1


class Piece:
    """One query block and one KV block on one rank, in local tensors, and scratch memory for a copy of each kind."""

    def __init__(self, mask: Mask, shape: AttentionShape) -> None:
        q, k = mask.q_length, mask.k_length
        tokens = TokenBlocks(np.zeros(2), [0, 0], [q, k], [HAS_Q, HAS_KV])
        self.header = PlanHeader("piece", shape, 1, 1, "none", "model", ("default",), (1.0,), tokens, np.zeros(2))
        comps = Comps([0], [Q_BLOCK], [KV_BLOCK], [0, len(mask.slices)], mask.slices)
        nothing = Program(Slots([], [], [], [], [], []), (), 0, 0)
        self.kernels = TorchCpu(self.header, RankProgram(comps, nothing, nothing), CPU)
        self.score = Score(1 / math.sqrt(shape.head_dim))
        self.shape = shape
        self.slots: list[tuple[int, int, int, int, int, int]] = []
        self.arena_bytes = 0
        self.local = local_tensors(q, k, shape)

    def slot(self, kind: Kind, group: int, place: Place) -> int:
        """The number of a new slot."""
        block, offset = KV_BLOCK if kind.of_keys else Q_BLOCK, 0
        if place is Place.ARENA:
            offset = self.arena_bytes
            self.arena_bytes += self.slot_bytes(kind)
        self.slots.append((kind, block, group, place, 0, offset))
        return len(self.slots) - 1

    def slot_bytes(self, kind: Kind) -> int:
        """Bytes of a slot of a kind."""
        return int(self.header.piece_bytes(kind, False)[KV_BLOCK if kind.of_keys else Q_BLOCK])

    def buffers(self) -> Buffers:
        """Memory for the slots made so far."""
        slots = Slots(*zip(*self.slots, strict=True))
        layout = Layout(self.header, Program(slots, (), self.arena_bytes, 0))
        return Buffers(layout, self.local, allocate(0, CPU))

    def attention(self, pass_: Pass) -> Callable[[], None]:
        """A call that computes the block once for each head group."""
        reads, writes = [], []
        for group in range(self.shape.groups):
            reads.append([self.slot(kind, group, Place.LOCAL) for kind in pass_.reads])
            writes.append([self.slot(kind, group, Place.LOCAL) for kind in pass_.writes])
        instruction = Attention(np.zeros(self.shape.groups), reads, writes, [])
        attend = self.kernels.attend if pass_ is FORWARD else self.kernels.attend_backward
        buffers = self.buffers()
        return lambda: attend(buffers, instruction, self.score)

    def moves(self, kind: Kind, reduce: bool, items: int) -> tuple[Callable[[], None], int]:
        """A call that copies or reduces `items` slots, and the bytes that it reads and writes."""
        far = [self.slot(kind, 0, Place.ARENA) for _ in range(items)]
        near = [self.slot(kind, item % self.shape.groups, Place.LOCAL) for item in range(items)]
        size_bytes = 2 * items * self.slot_bytes(kind)
        buffers = self.buffers()
        fill = Copy(near, far)
        self.kernels.copy(buffers, fill)
        if reduce:
            instruction = Reduction(far, near, [])
            return (lambda: self.kernels.reduce(buffers, instruction)), size_bytes
        return (lambda: self.kernels.copy(buffers, fill)), size_bytes


def local_tensors(q_tokens: int, kv_tokens: int, shape: AttentionShape) -> dict[str, torch.Tensor]:
    """Random tensors of all fields, of a rank that owns so many tokens."""
    g = torch.Generator().manual_seed(0)
    dtype = DTYPES[shape.dtype]
    queries, keys = (q_tokens, shape.q_heads), (kv_tokens, shape.kv_heads)
    return {
        "q": torch.randn(*queries, shape.head_dim, generator=g).to(dtype),
        "k": torch.randn(*keys, shape.head_dim, generator=g).to(dtype),
        "v": torch.randn(*keys, shape.value_dim, generator=g).to(dtype),
        "do": torch.randn(*queries, shape.value_dim, generator=g).to(dtype),
        "o": torch.zeros(*queries, shape.value_dim),
        "lse": torch.full((*queries, 1), math.log(kv_tokens) + 0.5),
        "delta": torch.zeros(*queries, 1),
        "dq": torch.zeros(*queries, shape.head_dim),
        "dk": torch.zeros(*keys, shape.head_dim),
        "dv": torch.zeros(*keys, shape.value_dim),
    }


def form_masks(form: str, q_tokens: int, kv_tokens: int) -> list[Mask]:
    """The masks that stand for a form of `dyncp.cost.model`; `masked` ones have about half of the pairs."""
    if form == "full":
        return [masks.full(q_tokens, kv_tokens)]
    if form == "causal":
        return [masks.causal(q_tokens, kv_tokens)]
    row = np.arange(q_tokens)
    width = max(1, kv_tokens // 2)
    first = row * (kv_tokens - width) // max(1, q_tokens - 1)  # a band along the diagonal
    last = 1 + row * (kv_tokens - 1) // q_tokens  # all that is left of the diagonal
    band = np.stack([first, first + width], axis=1)
    stairs = np.stack([np.zeros_like(last), last], axis=1)
    return [Mask.from_intervals(q_tokens, kv_tokens, rows[:, None]) for rows in (band, stairs)]


def seconds_of(call: Callable[[], None], budget_s: float = 0.05, most: int = 15) -> float:
    """The median processor time of a call, of at least three after a first one and as many as the budget allows.

    Processor time, because a thread that is held to a share of a processor has this share on average only: what is
    short runs at full speed, or waits for a whole period.
    """
    call()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget_s and len(times) < most):
        started = time.thread_time()
        call()
        times.append(time.thread_time() - started)
    return median(times)


def spinning_share(wall_s: float = 1.0) -> float:
    """The share of a processor that this thread gets if it works all the time."""
    started, worked_s = time.monotonic(), time.thread_time()
    while (passed_s := time.monotonic() - started) < wall_s:
        pass
    return (time.thread_time() - worked_s) / passed_s
