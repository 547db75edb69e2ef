"""From the slot numbers of a program to tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dyncp.ir.arrays import Ints
from dyncp.ir.plan import FIELDS, Kind, Place, PlanHeader, Program

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Buffers:
    """The memory of one run of a program, seen through its slots.

    A slot's fields are views `[rows, heads, dim]` of the caller's tensors (`Place.LOCAL`), of scratch memory that lives
    as long as this object (`ARENA`), or of memory that lives from the forward to the backward (`KEPT`). A view is made
    when it is first asked for, and once per run.

    Args:
        header, program: the program and the header of its plan.
        local: the caller's tensors `[rows, all heads, dim]` by field name (see `ir.plan.FIELDS`). Partial results among
            them start from nothing: zeros, and minus infinity for the log-sum-exp.
        kept: memory as `allocate(program.kept_bytes)` gives it.
    """

    def __init__(self, header: PlanHeader, program: Program, local: Mapping[str, Tensor], kept: Tensor) -> None:
        slots = program.slots
        memory = {Place.ARENA: allocate(program.arena_bytes, kept.device), Place.KEPT: kept}
        self.device = kept.device
        self._memory = {int(place): tensor for place, tensor in memory.items()}
        self._local = local
        self._fields: list[tuple[Tensor, ...] | None] = [None] * len(slots)
        self._layouts = {
            (int(kind), int(wire)): [
                (field.name, heads, dim, DTYPES[dtype])
                for field, (heads, dim, dtype) in zip(FIELDS[kind], header.field_layout(kind, wire), strict=True)
            ]
            for kind in Kind
            for wire in (False, True)
        }
        tokens = header.tokens.tokens[slots.block]
        columns = (slots.kind, slots.wire, slots.place, slots.group, slots.offset, tokens)
        self._slots = list(zip(*(column.tolist() for column in columns), strict=True))

    def fields(self, slot: int) -> tuple[Tensor, ...]:
        """The fields of a slot, in the order of `FIELDS`, each `[rows, heads, dim]`."""
        views = self._fields[slot]
        if views is None:
            views = self._fields[slot] = self._resolve(slot)
        return views

    def kind(self, slot: int) -> Kind:
        """What kind of data a slot holds."""
        return Kind(self._slots[slot][0])

    def clear(self, slots: Ints) -> None:
        """Set the partial results in `slots` to nothing."""
        for slot in slots.tolist():
            fields = self.fields(slot)
            for field in fields:
                field.zero_()
            if self._slots[slot][0] == Kind.OUT:
                fields[1].fill_(-math.inf)

    def message(self, slots: list[int]) -> Tensor:
        """uint8[bytes]: the memory of slots that lie one behind the other."""
        kind, wire, place, _, start, _ = self._slots[slots[0]]
        assert place != Place.LOCAL, "messages are packed into scratch memory"
        stop = start
        for slot in slots:
            kind, wire, other_place, _, offset, rows = self._slots[slot]
            assert (other_place, offset) == (place, stop), "the slots of a message lie one behind the other"
            stop += sum(rows * heads * dim * dtype.itemsize for _, heads, dim, dtype in self._layouts[kind, wire])
        return self._memory[place][start:stop]

    def _resolve(self, slot: int) -> tuple[Tensor, ...]:
        kind, wire, place, group, offset, rows = self._slots[slot]
        views = []
        for name, heads, dim, dtype in self._layouts[kind, wire]:
            if place == Place.LOCAL:
                whole = self._local[name]
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
