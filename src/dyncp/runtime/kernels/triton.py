"""Kernels in Triton: one launch for each instruction, whatever the number of blocks in it.

All tables of a program are made here, once, and go to the device in one copy from pinned memory. A launch then needs
nothing from the host but pointers and strides: no copy, no allocation, no waiting.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from dyncp.ir.plan import BACKWARD, FORWARD, Attention, Copy, Pass, PlanHeader, RankProgram, Reduction
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.buffers import Buffers
from dyncp.runtime.kernels import reference
from dyncp.runtime.kernels.api import Score, mask_patterns
from dyncp.runtime.kernels.configs import INTERPRETER, backward_config, forward_config
from dyncp.runtime.kernels.move_tables import Chunks, copy_tables, reduction_tables, runs_in_kernels
from dyncp.runtime.kernels.tables import Masks, SlotTable, backward_tables, forward_tables
from dyncp.runtime.kernels.tiles import Patterns, Tiling
from dyncp.runtime.kernels.triton_attention import attend_backward, attend_forward
from dyncp.runtime.kernels.triton_moves import copy_slots, merge_outputs, sum_gradients
from dyncp.runtime.kernels.upload import Upload

MOST_HEAD_DIM = 256
CHUNKS = Chunks(rows=64, statistics=1024)
MOVE_WARPS = 4


Ready = Attention | Reduction | Copy
INTERPRETING = threading.Lock()  # Triton's interpreter has one state for all threads


class Launch(NamedTuple):
    """An instruction made ready."""

    programs: int
    tables: tuple[Any, ...]  # programs first: numbers, then int32 tensors on the device
    constants: dict[str, Any]


class Triton:
    """Kernels in Triton; see `Kernels`. On a CPU under Triton's interpreter only, for tests.

    Raises:
        ValueError: head dims that the kernels do not have, or tensors on a CPU without the interpreter.
    """

    def __init__(self, header: PlanHeader, program: RankProgram, device: torch.device) -> None:
        check_head_dims(header.shape)
        capability = capability_of(device)
        self._guard = INTERPRETING if capability == INTERPRETER else nullcontext()
        upload = Upload()
        of_comp, found = mask_patterns(program.comps, header.tokens)
        patterns = Patterns.of(found)
        maker = _Maker(header.shape, capability, upload, upload.add(patterns.planes))
        launches: dict[Ready, Launch] = {}
        for pass_, own in ((FORWARD, program.forward), (BACKWARD, program.backward)):
            slots, masks = SlotTable(header, own), Masks(pass_, np.array(of_comp, "int64"), patterns)
            for instruction in own.instructions:
                match instruction:
                    case Attention():
                        launches[instruction] = maker.attention(slots, instruction, masks)
                    case Reduction() | Copy() if runs_in_kernels(slots, instruction):
                        launches[instruction] = maker.move(slots, instruction, pass_)
                    case _:
                        pass
        self._tables = upload.send(device)
        memory = self._tables.memory
        self._launches = {
            instruction: launch._replace(tables=tuple(memory[part] for part in launch.tables))
            for instruction, launch in launches.items()
        }

    def attend(self, buffers: Buffers, instruction: Attention, score: Score) -> None:
        self._attend(attend_forward, ("q", "k", "v", "o", "lse"), buffers, instruction, score)

    def attend_backward(self, buffers: Buffers, instruction: Attention, score: Score) -> None:
        names = ("q", "k", "v", "do", "lse", "delta", "dq", "dk", "dv")
        self._attend(attend_backward, names, buffers, instruction, score)

    def reduce(self, buffers: Buffers, instruction: Reduction) -> None:
        if instruction not in self._launches:
            return reference.reduce(buffers, instruction)
        kernel, names = (merge_outputs, ("o", "lse")) if "o" in buffers.local else (sum_gradients, ("dq", "dk", "dv"))
        local = [buffers.local[name] for name in names]
        in_wire_dtype = buffers.local["q"]
        return self._run(kernel, instruction, (*local, in_wire_dtype, buffers.arena, buffers.kept), _strides(local))

    def copy(self, buffers: Buffers, instruction: Copy) -> None:
        if instruction not in self._launches:
            return reference.copy(buffers, instruction)
        q, k, v, lse = (buffers.local[name] for name in ("q", "k", "v", "lse"))
        local = [q, k, v, buffers.local.get("do", q), lse, buffers.local.get("delta", lse)]  # none in the forward
        return self._run(copy_slots, instruction, (*local, buffers.arena, buffers.kept), _strides(local))

    def _attend(
        self, kernel: Any, names: tuple[str, ...], buffers: Buffers, instruction: Attention, score: Score
    ) -> None:
        local = [buffers.local[name] for name in names]
        softcap = 1.0 if score.softcap is None else score.softcap
        numbers = [*_strides(local), score.scale, softcap]
        memory = (*local, buffers.arena, buffers.kept)
        self._run(kernel, instruction, memory, numbers, SOFTCAP=score.softcap is not None)

    def _run(
        self, kernel: Any, instruction: Ready, memory: tuple[Tensor, ...], numbers: list[Any], **constants: Any
    ) -> None:
        launch = self._launches[instruction]
        if launch.programs:
            self._tables.use()
            with self._guard:
                kernel[(launch.programs,)](*memory, *launch.tables, *numbers, **launch.constants, **constants)


class _Maker:
    """Makes launches, with places in an upload instead of tables."""

    def __init__(self, shape: AttentionShape, capability: int, upload: Upload, planes: slice) -> None:
        self._upload, self._planes = upload, planes
        self._forward, self._backward = forward_config(shape, capability), backward_config(shape, capability)
        self._sizes = block_sizes(shape)
        self._heads = shape.group_heads
        self._precision = {"PRECISION": "ieee" if shape.dtype == "float32" else "tf32"}

    def attention(self, slots: SlotTable, instruction: Attention, masks: Masks) -> Launch:
        forward, backward, heads = self._forward, self._backward, self._heads
        if masks.pass_ is FORWARD:
            tiling = Tiling(heads, forward.block_m, forward.block_n, by_keys=False)
            tables = forward_tables(slots, instruction, masks, tiling)
            chosen = forward.constants()
        else:
            of_keys = Tiling(heads, backward.keys_m, backward.keys_n, by_keys=True)
            of_queries = Tiling(heads, backward.queries_m, backward.queries_n, by_keys=False)
            tables = backward_tables(slots, instruction, masks, of_keys, of_queries)
            chosen = backward.constants()
        places = [self._upload.add(table) for table in (tables.programs, *tables.runs)]
        settings = self._sizes | self._precision | chosen | {"UNIT": tables.unit}
        return Launch(len(tables.programs), (*places, self._planes), settings)

    def move(self, slots: SlotTable, instruction: Reduction | Copy, pass_: Pass) -> Launch:
        if isinstance(instruction, Copy):
            moves = copy_tables(slots, instruction, CHUNKS)
        else:
            moves = reduction_tables(slots, instruction, CHUNKS)
        sizes = self._sizes | {"D1": triton.next_power_of_2(max(self._sizes["D"], 16))}  # moves take D as a whole
        is_merge = isinstance(instruction, Reduction) and pass_ is FORWARD
        names = ("H", "E", "E1") if is_merge else ("H", "D", "D1", "E", "E1")
        settings = {name: sizes[name] for name in names} | {"UNIT": moves.unit, "BLOCK_M": CHUNKS.rows}
        if isinstance(instruction, Copy):
            settings["BLOCK_STATISTICS"] = CHUNKS.statistics
        places = (self._upload.add(moves.programs), self._upload.add(moves.sources))
        return Launch(len(moves.programs), places, settings | {"num_warps": MOVE_WARPS})


def block_sizes(shape: AttentionShape) -> dict[str, int]:
    """The sizes that are compiled into kernels, as the letters there say."""
    d = max(shape.head_dim, 16)
    first = 1 << (d.bit_length() - 1)
    rest = d - first
    return {
        "H": shape.group_heads,
        "D": shape.head_dim,
        "D1": first,
        "D2": max(16, triton.next_power_of_2(rest)) if rest else 0,
        "E": shape.value_dim,
        "E1": max(16, triton.next_power_of_2(shape.value_dim)),
    }


def check_head_dims(shape: AttentionShape) -> None:
    """Refuse what the kernels do not have.

    Raises:
        ValueError: head dims above MOST_HEAD_DIM.
    """
    if max(shape.head_dim, shape.value_dim) > MOST_HEAD_DIM:
        raise ValueError(
            f"head dims are {shape.head_dim} and {shape.value_dim}; kernels 'triton' have up to {MOST_HEAD_DIM}: "
            "choose kernels='reference'"
        )


def capability_of(device: torch.device) -> int:
    """The compute capability of a device, 90 for 9.0; INTERPRETER for a CPU.

    Raises:
        ValueError: a CPU without Triton's interpreter.
    """
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    if not isinstance(attend_forward, InterpretedFunction):
        raise ValueError(
            "kernels 'triton' got tensors on a CPU, where they run only to be tested, with TRITON_INTERPRET=1 in the "
            "environment: choose 'auto', or move the tensors to a GPU"
        )
    return INTERPRETER


def _strides(tensors: list[Tensor]) -> list[int]:
    """Of rows and heads of each."""
    return [stride for tensor in tensors for stride in tensor.stride()[:2]]
