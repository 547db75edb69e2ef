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
from triton.runtime.interpreter import InterpretedFunction

from dyncp.ir.plan import BACKWARD, FORWARD, Attention, Copy, Pass, PlanHeader, RankProgram, Reduction
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.buffers import Buffers
from dyncp.runtime.kernels import reference
from dyncp.runtime.kernels.api import Score, mask_patterns
from dyncp.runtime.kernels.configs import INTERPRETER, SMALLEST, Backward, Forward, Tiles, tiles_of
from dyncp.runtime.kernels.move_tables import Chunks, copy_tables, reduction_tables, runs_in_kernels
from dyncp.runtime.kernels.tables import Masks, SlotTable, attends_in_kernels, backward_tables, forward_tables
from dyncp.runtime.kernels.tiles import Patterns, Tiling
from dyncp.runtime.kernels.triton_attention import attend_backward, attend_forward
from dyncp.runtime.kernels.triton_moves import copy_slots, merge_outputs, sum_gradients
from dyncp.runtime.kernels.upload import Upload

MOVED_AT_ONCE = 4096  # elements that a program of a reduction or copy holds
MOVED_STATISTICS = 1024
MOVE_WARPS = 4
FORWARD_FIELDS = ("q", "k", "v", "o", "lse")
BACKWARD_FIELDS = ("q", "k", "v", "do", "lse", "delta", "dq", "dk", "dv")


Ready = Attention | Reduction | Copy
INTERPRETING = threading.Lock()  # Triton's interpreter has one state for all threads


class Launch(NamedTuple):
    """An instruction made ready."""

    kernel: Any
    fields: tuple[str, ...]  # the caller's tensors that it takes
    programs: int
    tables: tuple[Any, ...]  # int32 tensors on the device; first, where they will be
    constants: dict[str, Any]


class Triton:
    """Kernels in Triton; see `Kernels`. On a CPU under Triton's interpreter only, for tests.

    Args:
        header, program, device: as all kernels have them.
        tiles: in place of those in `configs.py`.

    Raises:
        ValueError: tensors on a CPU without the interpreter.
    """

    def __init__(
        self, header: PlanHeader, program: RankProgram, device: torch.device, tiles: Tiles | None = None
    ) -> None:
        capability = capability_of(device)
        self._guard = INTERPRETING if capability == INTERPRETER else nullcontext()
        upload = Upload()
        of_comp, found = mask_patterns(program.comps, header.tokens)
        patterns = Patterns.of(found)
        self.tiles = tiles or tiles_of(header.shape, capability)
        maker = _Maker(header.shape, self.tiles, upload, upload.add(patterns.planes))
        launches: dict[Ready, Launch] = {}
        self._others: reference.Reference | None = None  # for what the kernels cannot do
        for pass_, own in ((FORWARD, program.forward), (BACKWARD, program.backward)):
            slots, masks = SlotTable(header, own), Masks(pass_, np.array(of_comp, "int64"), patterns)
            for instruction in own.instructions:
                match instruction:
                    case Attention() if attends_in_kernels(slots, instruction, pass_):
                        launches[instruction] = maker.attention(slots, instruction, masks)
                    case Reduction() | Copy() if runs_in_kernels(slots, instruction):
                        launches[instruction] = maker.move(slots, instruction, pass_)
                    case Attention() | Reduction() | Copy():
                        self._others = self._others or reference.Reference(header, program, device)
                    case _:
                        pass
        self._tables = upload.send(device)
        memory = self._tables.memory
        self._launches = {
            instruction: launch._replace(tables=tuple(memory[part] for part in launch.tables))
            for instruction, launch in launches.items()
        }

    def attend(self, buffers: Buffers, instruction: Attention, score: Score) -> None:
        if instruction not in self._launches:
            return self._left().attend(buffers, instruction, score)
        return self._attend(buffers, instruction, score)

    def attend_backward(self, buffers: Buffers, instruction: Attention, score: Score) -> None:
        if instruction not in self._launches:
            return self._left().attend_backward(buffers, instruction, score)
        return self._attend(buffers, instruction, score)

    def reduce(self, buffers: Buffers, instruction: Reduction) -> None:
        if instruction not in self._launches:
            return self._left().reduce(buffers, instruction)
        return self._run(buffers, instruction)

    def copy(self, buffers: Buffers, instruction: Copy) -> None:
        if instruction not in self._launches:
            return self._left().copy(buffers, instruction)
        return self._run(buffers, instruction)

    def _left(self) -> reference.Reference:
        assert self._others is not None, "an instruction of another program"
        return self._others

    def _attend(self, buffers: Buffers, instruction: Attention, score: Score) -> None:
        softcap = 1.0 if score.softcap is None else score.softcap
        self._run(buffers, instruction, score.scale, softcap, SOFTCAP=score.softcap is not None)

    def _run(self, buffers: Buffers, instruction: Ready, *numbers: float, **constants: Any) -> None:
        launch = self._launches[instruction]
        if not launch.programs:
            return
        local = [buffers.local[name] for name in launch.fields]
        strides = [stride for tensor in local for stride in tensor.stride()[:2]]
        self._tables.use()
        with self._guard:
            launch.kernel[(launch.programs,)](
                *local, buffers.arena, buffers.kept, *launch.tables, *strides, *numbers, **launch.constants, **constants
            )


class _Maker:
    """Makes launches, with places in an upload instead of tables."""

    def __init__(self, shape: AttentionShape, tiles: Tiles, upload: Upload, planes: slice) -> None:
        self._shape, self._tiles = shape, tiles
        self._upload, self._planes = upload, planes

    def attention(self, slots: SlotTable, instruction: Attention, masks: Masks) -> Launch:
        heads, pass_ = self._shape.group_heads, masks.pass_
        fields: tuple[str, ...]
        if pass_ is FORWARD:
            config: Forward | Backward = self._tiles.forward
            tiling = Tiling(heads, self._tiles.forward.block_m, self._tiles.forward.block_n, by_keys=False)
            tables = forward_tables(slots, instruction, masks, tiling)
            kernel, fields = attend_forward, FORWARD_FIELDS
        else:
            config = sizes = self._tiles.backward
            of_keys = Tiling(heads, sizes.keys_m, sizes.keys_n, by_keys=True)
            of_queries = Tiling(heads, sizes.queries_m, sizes.queries_n, by_keys=False)
            tables = backward_tables(slots, instruction, masks, of_keys, of_queries)
            kernel, fields = attend_backward, BACKWARD_FIELDS
        places = [self._upload.add(table) for table in (tables.programs, *tables.runs)]
        constants = attention_constants(self._shape, config) | {"UNIT": tables.unit}
        return Launch(kernel, fields, len(tables.programs), (*places, self._planes), constants)

    def move(self, slots: SlotTable, instruction: Reduction | Copy, pass_: Pass) -> Launch:
        fields: tuple[str, ...]
        if isinstance(instruction, Copy):
            kernel, moves = copy_slots, copy_tables(slots, instruction, pass_, chunks_of(self._shape))
            fields = ("q", "k", "v", "do", "lse", "delta") if pass_ is BACKWARD else ("q", "k", "v", "q", "lse", "lse")
        else:
            moves = reduction_tables(slots, instruction, chunks_of(self._shape))
            forward = pass_ is FORWARD
            kernel, fields = (merge_outputs, ("o", "lse", "q")) if forward else (sum_gradients, ("dq", "dk", "dv", "q"))
        places = (self._upload.add(moves.programs), self._upload.add(moves.sources))
        return Launch(kernel, fields, len(moves.programs), places, move_constants(self._shape, kernel, moves.unit))


def attention_constants(shape: AttentionShape, config: Forward | Backward) -> dict[str, Any]:
    """What is compiled into the attention kernel of a pass, but for UNIT and SOFTCAP."""
    precision = "ieee" if shape.dtype == "float32" else "tf32"  # which matters in fp32 only
    return block_sizes(shape) | config.constants() | {"PRECISION": precision}


def move_constants(shape: AttentionShape, kernel: Any, unit: int) -> dict[str, Any]:
    """What is compiled into the kernel of a reduction or copy."""
    sizes, chunks = block_sizes(shape), chunks_of(shape)
    names = ("H", "E", "E1") if kernel is merge_outputs else ("H", "D", "E", "E1")
    constants = {name: sizes[name] for name in names} | {"UNIT": unit, "BLOCK_M": chunks.rows, "num_warps": MOVE_WARPS}
    if kernel is not merge_outputs:
        constants["D1"] = triton.next_power_of_2(max(shape.head_dim, 16))  # moves take rows as a whole
    if kernel is copy_slots:
        constants["BLOCK_STATISTICS"] = chunks.statistics
    return constants


def chunks_of(shape: AttentionShape) -> Chunks:
    """How much the programs of reductions and copies take on."""
    widest = triton.next_power_of_2(max(shape.head_dim, shape.value_dim, 16))
    return Chunks(MOVED_AT_ONCE // widest, MOVED_STATISTICS)


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


def capability_of(device: torch.device) -> int:
    """The compute capability of a device, 90 for 9.0; INTERPRETER for a CPU.

    Raises:
        ValueError: a CPU without Triton's interpreter.
    """
    if device.type == "cuda":
        if torch.version.hip:  # AMD's have no more shared memory than these; nobody has tried
            return SMALLEST
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor
    if not isinstance(attend_forward, InterpretedFunction):
        raise ValueError(
            "kernels 'triton' got tensors on a CPU, where they run only to be tested, with TRITON_INTERPRET=1 in the "
            "environment: choose 'auto', or move the tensors to a GPU"
        )
    return INTERPRETER
