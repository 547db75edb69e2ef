"""Kernels on FlashAttention for sequences of any lengths, which comes with PyTorch.

Letters in names: T tokens of all sequences of a call, H query heads of a head group, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dyncp.ir.arrays import Ints
from dyncp.ir.plan import BACKWARD, FORWARD, Attention, Copy, Pass, PlanHeader, RankProgram, Reduction
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.buffers import DTYPES, Buffers
from dyncp.runtime.kernels.api import KernelFactory, Score, choose_kernels, mask_patterns
from dyncp.runtime.kernels.packing import divide, join
from dyncp.runtime.kernels.reference import merge
from dyncp.runtime.kernels.torch_cpu import TINY, stand_in

MOST_DIM = 256  # the widest heads that FlashAttention takes
DIM_MULTIPLE = 8


class Form(IntEnum):
    """What a computation block's mask looks like."""

    FULL = 0
    CAUSAL = 1  # as many rows as keys; row i sees the keys up to i
    OTHER = 2


class FlashOps(NamedTuple):
    """FlashAttention's two operators, with the signatures of PyTorch's, and the dtypes that they take."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...]


TORCH_OPS = FlashOps(
    torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward, (torch.float16, torch.bfloat16)
)


class Flash:
    """Kernels on FlashAttention; see `Kernels`. For divisions, on CUDA, all of whose blocks are full or causal.

    PyTorch has FlashAttention 2 built in. `torch.nn.attention.activate_flash_attention_impl("FA3")`, called once in
    every process, puts FlashAttention 3 in its place, on Hopper, where the package `flash_attn_interface` is installed;
    "FA4" likewise, on Hopper or Blackwell, with `flash_attn.cute`. Both register themselves for the operators that are
    called here. `restore_flash_attention_impl()` returns to FlashAttention 2.

    FlashAttention has no softcap here, no mask but a causal one, and takes fp16 or bf16 and keys as wide as values. A
    division that needs another thing, in one block even, is left to other kernels: those on Triton where they are
    installed, else `Reference`. So is a scale that is not positive, with which its running maximum would be wrong. Of
    causal blocks only square ones are taken, where it makes no difference that FlashAttention counts the diagonal from
    the last row and the last key.

    A division takes two calls at most. In the one of full blocks, query blocks that see the same key blocks are one
    sequence, with these keys as one. In the one of causal blocks, each is a sequence.

    A call's output is in the dtype of the model before it is merged in fp32, so in bf16 each one adds a relative error
    of up to 2^-9 to what it contributes; so do its gradients. The log-sum-exps are fp32. The backward of FlashAttention
    adds dQ up in any order; for the same bits in every run, turn on `torch.use_deterministic_algorithms`.

    Args:
        header, program, device: as of every `KernelFactory`. Only instructions of the program can be run.
        ops: FlashAttention.
        others: what divisions are left to, and what reduces and copies; Triton or `Reference` when left out.
    """

    def __init__(
        self,
        header: PlanHeader,
        program: RankProgram,
        device: torch.device,
        ops: FlashOps = TORCH_OPS,
        others: KernelFactory | None = None,
    ) -> None:
        self._ops = ops
        self._others = (others or other_kernels(device, header.shape))(header, program, device)
        self._calls: dict[Attention, list[Call]] = {}  # of the instructions that are not left to others
        shape = header.shape
        if shape.value_dim != shape.head_dim or shape.head_dim > MOST_DIM or shape.head_dim % DIM_MULTIPLE:
            return
        if DTYPES[shape.dtype] not in ops.dtypes:
            return
        of_comp, patterns = mask_patterns(program.comps, header.tokens)
        form = np.array([form_of(rows, keys) for rows, keys in patterns], "int64")[of_comp]
        for pass_, part in ((FORWARD, program.forward), (BACKWARD, program.backward)):
            tokens = header.tokens.tokens[part.slots.block]
            for instruction in part.instructions:
                if isinstance(instruction, Attention) and (form[instruction.comp] != Form.OTHER).all():
                    self._calls[instruction] = _calls(instruction, pass_, form[instruction.comp], tokens, device)

    def attend(self, buffers: Buffers, instruction: Attention, score: Score) -> None:
        if not self._takes(instruction, score):
            return self._others.attend(buffers, instruction, score)
        buffers.clear(instruction.fresh)
        for call in self._calls[instruction]:
            q_THD, k_T1D, v_T1D = call.queries.join(buffers, 0, 0), *(call.keys.join(buffers, 0, i) for i in (0, 1))
            o_THD, lse_HT, *_ = self._ops.forward(
                q_THD, k_T1D, v_T1D, *call.bounds, 0.0, call.is_causal, False, scale=score.scale
            )
            for slot, rows in call.queries.written():
                o, lse = buffers.fields(slot)
                merge(o, lse, o_THD[rows], lse_HT[:, rows].t().unsqueeze(2))
        return None

    def attend_backward(self, buffers: Buffers, instruction: Attention, score: Score) -> None:
        if not self._takes(instruction, score):
            return self._others.attend_backward(buffers, instruction, score)
        buffers.clear(instruction.fresh)
        for call in self._calls[instruction]:
            q_THD, do_THD = (call.queries.join(buffers, column, 0) for column in (0, 1))
            lse_TH1, delta_TH1 = (call.queries.join(buffers, 2, field) for field in (0, 1))
            k_T1D, v_T1D = (call.keys.join(buffers, 0, field) for field in (0, 1))
            o_THD = stand_in(do_THD.float(), delta_TH1).to(q_THD.dtype)
            lse_HT = lse_TH1.squeeze(2).t().contiguous()
            no_dropout = q_THD.new_zeros(2, dtype=torch.uint64), q_THD.new_empty(0)
            gradients = self._ops.backward(
                *(do_THD, q_THD, k_T1D, v_T1D, o_THD, lse_HT),
                *call.bounds,
                *(0.0, call.is_causal, *no_dropout),
                scale=score.scale,
            )
            for slot, rows in call.queries.written():
                _add(buffers.fields(slot), gradients[:1], rows)
            for slot, rows in call.keys.written():
                _add(buffers.fields(slot), gradients[1:], rows)
        return None

    def reduce(self, buffers: Buffers, instruction: Reduction) -> None:
        self._others.reduce(buffers, instruction)

    def copy(self, buffers: Buffers, instruction: Copy) -> None:
        self._others.copy(buffers, instruction)

    def _takes(self, instruction: Attention, score: Score) -> bool:
        return instruction in self._calls and score.softcap is None and score.scale >= TINY


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The query blocks, or the key blocks, of all sequences of a call, one behind the other."""

    slots: list[list[int]]  # [blocks][columns], what is read of each block, then what is written
    rows: list[slice]  # [blocks], of each block in a joined tensor
    bounds: Tensor  # int32[sequences + 1], of the sequences in it
    longest: int  # rows of the longest sequence

    def join(self, buffers: Buffers, column: int, field: int) -> Tensor:
        """`[T, heads, dim]`: a field of the slots of a column."""
        return join(buffers, (slots[column] for slots in self.slots), field)

    def written(self) -> Iterator[tuple[int, slice]]:
        """(slot that is written, rows) of each block."""
        return zip((slots[-1] for slots in self.slots), self.rows, strict=True)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Blocks of an instruction that are computed together."""

    queries: Side
    keys: Side
    is_causal: bool

    @property
    def bounds(self) -> tuple[Tensor, Tensor, int, int]:
        """The arguments cum_seq_q, cum_seq_k, max_q and max_k of the operators."""
        return self.queries.bounds, self.keys.bounds, self.queries.longest, self.keys.longest


def form_of(rows: Ints, keys: int) -> Form:
    """What a mask looks like that is given as disjoint key intervals of its rows, int32[rows, R, 2]."""
    seen = np.maximum(rows[:, :, 1] - rows[:, :, 0], 0).sum(axis=1)
    if (seen == keys).all():
        return Form.FULL
    # A row that sees i + 1 keys, none beyond key i, sees exactly the first i + 1.
    staircase = np.arange(1, keys + 1)
    if len(rows) == keys and (seen == staircase).all() and (rows[:, :, 1].max(axis=1) == staircase).all():
        return Form.CAUSAL
    return Form.OTHER


def _calls(instruction: Attention, pass_: Pass, form: Ints, tokens: Ints, device: torch.device) -> list[Call]:
    """The calls of an instruction.

    Args:
        instruction: whose blocks are full or causal.
        pass_: of its program.
        form: int64[n], `Form` of each item.
        tokens: of each slot of the program.
        device: of the tables.
    """
    calls = []
    for wanted in (Form.FULL, Form.CAUSAL):
        items = np.flatnonzero(form == wanted)
        if not len(items):
            continue
        part = divide(instruction, pass_, items)
        pairs = list(zip(part.query.tolist(), part.key.tolist(), strict=True))
        sequences = _common_sequences(pairs) if wanted is Form.FULL else [([query], [key]) for query, key in pairs]
        queries, keys = zip(*sequences, strict=True)
        sides = _side(queries, part.query_slots, tokens, device), _side(keys, part.key_slots, tokens, device)
        calls.append(Call(*sides, wanted is Form.CAUSAL))
    return calls


def _common_sequences(pairs: list[tuple[int, int]]) -> list[tuple[list[int], list[int]]]:
    """Query blocks that see the same key blocks, and these, from pairs of a query block and a key block."""
    keys_of: dict[int, list[int]] = {}
    for query, key in pairs:
        keys_of.setdefault(query, []).append(key)
    queries_of: dict[tuple[int, ...], list[int]] = {}
    for query, keys in keys_of.items():
        queries_of.setdefault(tuple(sorted(keys)), []).append(query)
    return [(queries, list(keys)) for keys, queries in queries_of.items()]


def _side(sequences: tuple[list[int], ...], slots: Ints, tokens: Ints, device: torch.device) -> Side:
    """One side of a call, of sequences given as lists of blocks, whose slots are int64[blocks, columns]."""
    blocks = np.concatenate(sequences)
    sizes = tokens[slots[blocks, 0]]
    stops = np.cumsum(sizes)
    rows = [slice(*bounds) for bounds in zip((stops - sizes).tolist(), stops.tolist(), strict=True)]
    last = np.cumsum([len(sequence) for sequence in sequences]) - 1
    bounds = np.concatenate([[0], stops[last]])
    return Side(
        slots[blocks].tolist(), rows, torch.from_numpy(bounds.astype("int32")).to(device), int(np.diff(bounds).max())
    )


def _add(fields: tuple[Tensor, ...], gradients: tuple[Tensor, ...], rows: slice) -> None:
    for total, gradient in zip(fields, gradients, strict=True):
        total += gradient[rows]


def other_kernels(device: torch.device, shape: AttentionShape) -> KernelFactory:
    """The kernels for what FlashAttention does not take."""
    return choose_kernels("auto", device, shape)
