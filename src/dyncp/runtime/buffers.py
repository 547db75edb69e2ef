"""From the slot numbers of a program to tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dyncp.ir.arrays import Ints
from dyncp.ir.plan import FIELDS, CommLaunch, Kind, Place, PlanHeader, Program

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Run(NamedTuple):
    """One message of a launch: bytes `[start, stop)` of scratch or kept memory."""

    peer: int
    is_send: bool
    place: int
    start: int
    stop: int


class Layout:
    """What the slots and messages of a program are, whatever the memory: made once, used by every run."""

    def __init__(self, header: PlanHeader, program: Program) -> None:
        slots = program.slots
        self.arena_bytes = program.arena_bytes
        self.fields = {
            (int(kind), int(wire)): [
                (field.name, heads, dim, DTYPES[dtype])
                for field, (heads, dim, dtype) in zip(FIELDS[kind], header.field_layout(kind, wire), strict=True)
            ]
            for kind in Kind
            for wire in (False, True)
        }
        tokens = header.tokens.tokens[slots.block]
        columns = (slots.kind, slots.wire, slots.place, slots.group, slots.offset, tokens)
        self.slots: list[tuple[int, ...]] = list(zip(*(column.tolist() for column in columns), strict=True))
        self.messages = {
            launch: self._messages(launch) for launch in program.instructions if isinstance(launch, CommLaunch)
        }

    def _messages(self, launch: CommLaunch) -> list[Run]:
        slots, ptr = launch.slots.tolist(), launch.ptr.tolist()
        return [
            Run(peer, bool(send), *self.run(slots[ptr[i] : ptr[i + 1]]))
            for i, (peer, send) in enumerate(zip(launch.peer.tolist(), launch.send.tolist(), strict=True))
        ]

    def run(self, slots: list[int]) -> tuple[int, int, int]:
        """(place, start, stop): the memory of slots that lie one behind the other."""
        kind, wire, place, _, start, _ = self.slots[slots[0]]
        assert place != Place.LOCAL, "messages are packed into scratch memory"
        stop = start
        for slot in slots:
            kind, wire, other_place, _, offset, rows = self.slots[slot]
            assert (other_place, offset) == (place, stop), "the slots of a message lie one behind the other"
            stop += sum(rows * heads * dim * dtype.itemsize for _, heads, dim, dtype in self.fields[kind, wire])
        return place, start, stop


class Arenas:
    """Scratch memory that passes on a GPU hand on to each other, so that a pass allocates none.

    Passes that are queued on one stream run one after the other, and all messages of a pass have come and gone before
    it ends, so the next one may use the same memory though none of it has happened yet. What is handed on grows to the
    largest that a pass has needed. While a CUDA graph is captured memory is allocated as torch does it, since a graph
    keeps what it was captured with.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.device, int], list[Tensor]] = {}  # by stream

    def take(self, size_bytes: int, device: torch.device) -> Tensor:
        """uint8 memory, not initialised, of at least that size."""
        free = self._of_stream(device)
        while free:  # of several threads' passes on one stream, each takes its own
            memory = free.pop()
            if len(memory) >= size_bytes:
                return memory
        return allocate(size_bytes, device)

    def give(self, memory: Tensor) -> None:
        """Hand on memory of a pass that is queued, on the stream that it was taken on."""
        self._of_stream(memory.device).append(memory)

    def _of_stream(self, device: torch.device) -> list[Tensor]:
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return []
        return self._free.setdefault((device, torch.cuda.current_stream(device).cuda_stream), [])


ARENAS = Arenas()


class Buffers:
    """The memory of one run of a program, seen through its slots.

    A slot's fields are views `[rows, heads, dim]` of the caller's tensors (`Place.LOCAL`), of scratch memory that is
    this object's until `release` (`ARENA`), or of memory that lives from the forward to the backward (`KEPT`). A view
    is made when it is first asked for, and once per run.

    Args:
        layout: of the program.
        local: the caller's tensors `[rows, all heads, dim]` by field name (see `ir.plan.FIELDS`). Partial results among
            them start from nothing: zeros, and minus infinity for the log-sum-exp.
        kept: memory as `allocate(program.kept_bytes)` gives it.
    """

    def __init__(self, layout: Layout, local: Mapping[str, Tensor], kept: Tensor) -> None:
        self.layout = layout
        self.local = local
        self.arena, self.kept = ARENAS.take(layout.arena_bytes, kept.device), kept
        self.device = kept.device
        self._memory = {int(Place.ARENA): self.arena, int(Place.KEPT): kept}
        self._fields: list[tuple[Tensor, ...] | None] = [None] * len(layout.slots)

    def release(self) -> None:
        """Hand on scratch memory, after the last instruction."""
        ARENAS.give(self.arena)

    def fields(self, slot: int) -> tuple[Tensor, ...]:
        """The fields of a slot, in the order of `FIELDS`, each `[rows, heads, dim]`."""
        views = self._fields[slot]
        if views is None:
            views = self._fields[slot] = self._resolve(slot)
        return views

    def kind(self, slot: int) -> Kind:
        """What kind of data a slot holds."""
        return Kind(self.layout.slots[slot][0])

    def clear(self, slots: Ints) -> None:
        """Set the partial results in `slots` to nothing."""
        for slot in slots.tolist():
            fields = self.fields(slot)
            for field in fields:
                field.zero_()
            if self.kind(slot) == Kind.OUT:
                fields[1].fill_(-math.inf)

    def message(self, run: Run) -> Tensor:
        """uint8[bytes]: the memory of a message."""
        return self._memory[run.place][run.start : run.stop]

    def _resolve(self, slot: int) -> tuple[Tensor, ...]:
        kind, wire, place, group, offset, rows = self.layout.slots[slot]
        views = []
        for name, heads, dim, dtype in self.layout.fields[kind, wire]:
            if place == Place.LOCAL:
                whole = self.local[name]
                strides = whole.stride()
                start = whole.storage_offset() + offset * strides[0] + group * heads * strides[1]
                views.append(whole.as_strided((rows, heads, dim), strides, start))
            else:
                size_bytes = rows * heads * dim * dtype.itemsize
                flat = self._memory[place][offset : offset + size_bytes].view(dtype)
                views.append(flat.view(rows, heads, dim))
                offset += size_bytes
        return tuple(views)


def allocate(size_bytes: int, device: torch.device) -> Tensor:
    """uint8 memory for slots, not initialised."""
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)
