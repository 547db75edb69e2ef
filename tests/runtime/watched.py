"""Watches every load and store of Triton's interpreter: what a GPU would do silently is an error here.

A launch may read the slots that its instruction names and its tables, and write the slots that it names as written. No
two programs may write the same byte, or one write what another reads, since nothing orders them on a GPU. A fresh slot
is written as a whole. Positions in memory are multiples of what the kernel was compiled for.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager

import numpy as np
from triton.runtime import interpreter

from dyncp.ir.plan import Attention, Copy, Place
from dyncp.runtime.kernels.triton import Triton

NOBODY, SEVERAL = 0, -1  # in place of a program


class Area:
    """The bytes of one storage: what may be done to each, and which programs have."""

    def __init__(self, tensor) -> None:
        storage = tensor.untyped_storage()
        self.begin, size = storage.data_ptr(), storage.nbytes()
        self.readable, self.writable = np.zeros((2, size), bool)
        self.reader, self.writer = np.full((2, size), NOBODY)

    def bytes_of(self, view) -> np.ndarray:
        """The numbers of a view's bytes."""
        at = np.full((), view.data_ptr() - self.begin)
        for size, stride in zip(view.shape, view.stride(), strict=True):
            at = at[..., None] + np.arange(size) * stride * view.element_size()
        return (at.ravel()[:, None] + np.arange(view.element_size())).ravel()


class Watch:
    """One launch."""

    def __init__(self) -> None:
        self.areas: dict[int, Area] = {}

    def allow(self, view, write: bool) -> Area | None:
        """Let programs read a view, or write it too."""
        if not view.untyped_storage().nbytes():
            return None
        area = self.areas.setdefault(view.untyped_storage().data_ptr(), Area(view))
        here = area.bytes_of(view)
        area.readable[here] = True
        area.writable[here] |= write
        return area

    def touch(self, pointers, mask, size_bytes: int, write: bool, program: int) -> None:
        """A program loads or stores."""
        where = pointers.ravel().astype(np.int64)[np.broadcast_to(mask, pointers.shape).ravel().astype(bool)]
        left = np.ones(len(where), bool)
        for area in self.areas.values():
            inside = left & (where >= area.begin) & (where + size_bytes <= area.begin + len(area.reader))
            left &= ~inside
            at = ((where[inside] - area.begin)[:, None] + np.arange(size_bytes)).ravel()
            assert (area.writable if write else area.readable)[at].all(), "outside of the slots of the instruction"
            assert np.isin(area.writer[at], (NOBODY, program)).all(), "what another program has written"
            if write:
                assert np.isin(area.reader[at], (NOBODY, program)).all(), "what another program has read"
                area.writer[at] = program
            else:
                area.reader[at] = np.where(np.isin(area.reader[at], (NOBODY, program)), program, SEVERAL)
        assert not left.any(), "outside of all tensors"


def slots_of(instruction) -> tuple[set[int], set[int], set[int]]:
    """Slots that are read, written, and written as a whole."""
    if isinstance(instruction, Attention):
        read, written = instruction.reads, instruction.writes
    else:
        read, written = instruction.src, instruction.dst
    fresh = written if isinstance(instruction, Copy) else instruction.fresh
    whole = set(np.ravel(fresh).tolist())
    return set(np.ravel(read).tolist()), set(np.ravel(written).tolist()) | whole, whole


@contextmanager
def watched(monkeypatch):
    """Watch all launches; gives a list with an entry for each."""
    builder, run, lock, launches = type(interpreter.interpreter_builder), Triton._run, threading.RLock(), []
    load, store = builder.create_masked_load, builder.create_masked_store

    def watched_load(self, pointers, mask, *rest):
        size_bytes = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
        launches[-1].touch(pointers.data, mask.data, size_bytes, False, self.grid_idx[0] + 1)
        return load(self, pointers, mask, *rest)

    def watched_store(self, pointers, value, mask, *rest):
        launches[-1].touch(pointers.data, mask.data, value.data.dtype.itemsize, True, self.grid_idx[0] + 1)
        return store(self, pointers, value, mask, *rest)

    def watched_run(self, buffers, instruction, *numbers, **constants):
        with lock:
            watch, launch = Watch(), self._launches[instruction]
            read, written, whole = slots_of(instruction)
            for slot in read | written:
                place = buffers.layout.slots[slot][2]
                for field in buffers.fields(slot):
                    area = watch.allow(field, slot in written)
                    in_memory = place != Place.LOCAL and field.shape[2] > 1
                    assert not in_memory or (field.data_ptr() - area.begin) % launch.constants["UNIT"] == 0
            for table in launch.tables:
                watch.allow(table, False)
            launches.append(watch)
            run(self, buffers, instruction, *numbers, **constants)
            for slot in whole:
                for field in buffers.fields(slot):
                    area = watch.areas[field.untyped_storage().data_ptr()]
                    assert (area.writer[area.bytes_of(field)] != NOBODY).all(), "a fresh slot was not written"

    with monkeypatch.context() as patch:
        patch.setattr(builder, "create_masked_load", watched_load)
        patch.setattr(builder, "create_masked_store", watched_store)
        patch.setattr(Triton, "_run", watched_run)
        yield launches
