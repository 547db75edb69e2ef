"""Kernels on PyTorch's FlexAttention.

Letters in names: B head groups with the same computation blocks, S packed rows, H query heads of a head group, D head
dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from dyncp.ir.arrays import Ints
from dyncp.ir.plan import BACKWARD, FORWARD, Attention, Copy, Pass, PlanHeader, RankProgram, Reduction
from dyncp.runtime.buffers import Buffers
from dyncp.runtime.kernels.api import Score
from dyncp.runtime.kernels.flex_tables import Axis, MaskTables, let_vary
from dyncp.runtime.kernels.packing import divide
from dyncp.runtime.kernels.reference import copy, merge, reduce

TILE = 128  # rows and keys; what the compiled kernels' own tiles divide
LEAST_DIM = 16  # the narrowest heads that tensor cores take
VARIANTS = 64  # compiled functions in one process, at most; see `compiled_flex`

# (q_BSHD, k_BS1D, v_BS1D, mask, scale, softcap) -> (o_BSHD, lse_BSH), differentiable in q, k and v. The lse is fp32 and
# natural; a row that sees nothing gets (0, -inf). scale and softcap are fp32 tensors without dimensions.
AttentionFunction = Callable[[Tensor, Tensor, Tensor, BlockMask, Tensor, Tensor | None], tuple[Tensor, Tensor]]


class Flex:
    """Kernels on FlexAttention; see `Kernels`. Any mask, any head dims, on CUDA.

    A division is cut by head group; groups with the same computation blocks are one batch, and one call. The call gets
    each query block and each key block once, packed one behind the other and padded to whole tiles, and a `BlockMask`
    made from the row intervals of the masks: tiles that see nothing are skipped, those that see all ask no mask.

    A division's output is in the dtype of the model before it is merged in fp32, so in bf16 each one adds a relative
    error of up to 2^-9 to what it contributes; so do its gradients. The log-sum-exps are fp32. The backward computes
    the division's forward again, since FlexAttention differentiates only what it has computed.

    Args:
        header, program, device: as of every `KernelFactory`. Only instructions of the program can be run.
        function: what computes; FlexAttention, compiled on a GPU, when left out.
        tile: rows and keys of a tile.
    """

    def __init__(
        self,
        header: PlanHeader,
        program: RankProgram,
        device: torch.device,
        function: AttentionFunction | None = None,
        tile: int = TILE,
    ) -> None:
        self._function = function or flex_function(device)
        self._calls: dict[Attention, list[Call]] = {}
        tables = MaskTables(program.comps, header.tokens, device, tile)
        masks: dict[bytes, BlockMask] = {}  # forward and backward mostly have the same divisions
        for pass_, part in ((FORWARD, program.forward), (BACKWARD, program.backward)):
            for instruction in part.instructions:
                if isinstance(instruction, Attention):
                    group = part.slots.group[instruction.reads[:, 0]]
                    batches = _batches(instruction, pass_, group)
                    self._calls[instruction] = [_call(batch, program, header, tables, masks) for batch in batches]

    def attend(self, buffers: Buffers, instruction: Attention, score: Score) -> None:
        buffers.clear(instruction.fresh)
        scale, softcap = _on_device(score, buffers.device)
        for call in self._calls[instruction]:
            q_BSHD = _widened(call.queries.pack(buffers, 0, 0))
            k_BS1D, v_BS1D = (_widened(call.keys.pack(buffers, 0, field)) for field in (0, 1))
            o_BSHD, lse_BSH = self._function(q_BSHD, k_BS1D, v_BS1D, call.mask, scale, softcap)
            for slot, batch, rows in call.queries.written():
                o, lse = buffers.fields(slot)
                merge(o, lse, o_BSHD[batch, rows, :, : o.shape[2]], lse_BSH[batch, rows].unsqueeze(2))

    def attend_backward(self, buffers: Buffers, instruction: Attention, score: Score) -> None:
        buffers.clear(instruction.fresh)
        scale, softcap = _on_device(score, buffers.device)
        for call in self._calls[instruction]:
            q_BSHD, do_BSHD = (_widened(call.queries.pack(buffers, column, 0)) for column in (0, 1))
            k_BS1D, v_BS1D = (_widened(call.keys.pack(buffers, 0, field)) for field in (0, 1))
            lse_BSH, delta_BSH = (call.queries.pack(buffers, 2, field).squeeze(3) for field in (0, 1))
            inputs = q_BSHD.requires_grad_(), k_BS1D.requires_grad_(), v_BS1D.requires_grad_()
            with torch.enable_grad():
                part = self._function(*inputs, call.mask, scale, softcap)
            gradients = torch.autograd.grad(part, inputs, _cotangents(part, do_BSHD, lse_BSH, delta_BSH))
            for slot, batch, rows in call.queries.written():
                _add(buffers.fields(slot), gradients[:1], batch, rows)
            for slot, batch, rows in call.keys.written():
                _add(buffers.fields(slot), gradients[1:], batch, rows)

    def reduce(self, buffers: Buffers, instruction: Reduction) -> None:
        reduce(buffers, instruction)

    def copy(self, buffers: Buffers, instruction: Copy) -> None:
        copy(buffers, instruction)


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The query blocks, or the key blocks, of a call."""

    slots: list[list[list[int]]]  # [B][blocks][columns], what is read of each block, then what is written
    rows: list[slice]  # [blocks], of each block in a packed tensor
    padding: list[int]  # [blocks], rows behind each block that hold nothing
    length: int  # S

    def pack(self, buffers: Buffers, column: int, field: int) -> Tensor:
        """`[B, S, heads, dim]`: a field of the slots of a column, zeros in between."""
        fields = [[buffers.fields(slots[column])[field] for slots in blocks] for blocks in self.slots]
        _, heads, dim = fields[0][0].shape
        zeros = fields[0][0].new_zeros((max(self.padding), heads, dim))
        pieces: list[Tensor] = []
        for of_group in fields:
            for piece, padding in zip(of_group, self.padding, strict=True):
                pieces += [piece, zeros[:padding]] if padding else [piece]
        # Not a view of something else, which would tie its sizes to those of another tensor where this is compiled.
        packed = zeros.new_empty((len(self.slots), self.length, heads, dim))
        torch.cat(pieces, out=packed.view(-1, heads, dim))
        return packed

    def written(self) -> Iterator[tuple[int, int, slice]]:
        """(slot that is written, batch, packed rows) of each block."""
        for batch, blocks in enumerate(self.slots):
            for slots, rows in zip(blocks, self.rows, strict=True):
                yield slots[-1], batch, rows


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Head groups of an instruction that have the same computation blocks."""

    queries: Side
    keys: Side
    mask: BlockMask


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What a `Call` is made of."""

    comp: Ints  # int64[n]
    query: Ints  # int64[n], query block of each
    key: Ints  # int64[n], key block of each
    query_slots: list[Ints]  # [B] of int64[NQ, columns]
    key_slots: list[Ints]  # [B] of int64[NK, columns]


def _batches(instruction: Attention, pass_: Pass, group: Ints) -> list[Batch]:
    """Cut an instruction by head group, int32[n] of its items, and join the groups that have the same blocks."""
    order = np.lexsort((instruction.comp, group))
    bounds = np.flatnonzero(np.diff(group[order])) + 1
    batches: dict[bytes, Batch] = {}
    for items in np.split(order, bounds) if len(order) else []:
        part = divide(instruction, pass_, items)
        same = np.stack([part.comp, part.query, part.key]).tobytes()
        batch = batches.setdefault(same, Batch(part.comp, part.query, part.key, [], []))
        batch.query_slots.append(part.query_slots)
        batch.key_slots.append(part.key_slots)
    return list(batches.values())


def _call(
    batch: Batch, program: RankProgram, header: PlanHeader, tables: MaskTables, masks: dict[bytes, BlockMask]
) -> Call:
    """The call of a batch; its mask is taken from `masks`, or put there."""
    axes = []
    for of_comp, of_item in ((program.comps.q_block, batch.query), (program.comps.kv_block, batch.key)):
        block = np.empty(int(of_item.max()) + 1, "int64")
        block[of_item] = of_comp[batch.comp]
        axes.append(Axis(header.tokens.tokens[block].astype("int64"), tables.tile))
    triple = (batch.comp, batch.query, batch.key)
    same = np.stack(triple).tobytes()
    if same not in masks:
        masks[same] = tables.block_mask(*triple, *axes)
    return Call(_side(batch.query_slots, axes[0]), _side(batch.key_slots, axes[1]), masks[same])


def _side(slots: list[Ints], axis: Axis) -> Side:
    starts = axis.first_tile * axis.tile
    rows = [slice(*bounds) for bounds in zip(starts.tolist(), (starts + axis.tokens).tolist(), strict=True)]
    return Side([blocks.tolist() for blocks in slots], rows, axis.padding.tolist(), axis.length)


def _widened(packed: Tensor) -> Tensor:
    """Heads of at least LEAST_DIM, filled up with zeros, which change no score and no output."""
    return pad(packed, (0, LEAST_DIM - packed.shape[3])) if packed.shape[3] < LEAST_DIM else packed


def _on_device(score: Score, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Scale and softcap as tensors: as numbers they would be compiled into the kernels, anew for each value."""
    scale = torch.full((), score.scale, device=device)
    return scale, None if score.softcap is None else torch.full((), score.softcap, device=device)


def _cotangents(
    part: tuple[Tensor, Tensor], do_BSHD: Tensor, lse_BSH: Tensor, delta_BSH: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of a division's own (o, lse) that give what the division adds to dQ, dK and dV.

    With p the division's own softmax, P = p w is that of the whole row for `w = exp(lse_part - lse)`. Gradients go of
    o and gl of lse give `ds = p (go.v - go.o_part + gl)`, and wanted is `P (do.v - delta)`: so go = w do, and
    gl = go.o_part - w delta. Where the division's row sees nothing, w and with it all are 0.
    """
    o_part, lse_part = (tensor.detach() for tensor in part)
    weight = torch.exp(lse_part - lse_BSH)
    go = (do_BSHD * weight.unsqueeze(3)).to(o_part.dtype)
    # Of the rounded go, as the kernel subtracts it again.
    gl = (go.float() * o_part.float()).sum(3) - weight * delta_BSH
    return go, gl


def _add(fields: tuple[Tensor, ...], gradients: tuple[Tensor, ...], batch: int, rows: slice) -> None:
    for total, gradient in zip(fields, gradients, strict=True):
        total += gradient[batch, rows, :, : total.shape[2]]


def flex(
    q_BSHD: Tensor, k_BS1D: Tensor, v_BS1D: Tensor, mask: BlockMask, scale: Tensor, softcap: Tensor | None
) -> tuple[Tensor, Tensor]:
    """FlexAttention as an `AttentionFunction`. On the CPU, where it is not compiled, it works through all pairs, and
    has no backward."""

    def scaled(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return score * scale

    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert softcap is not None
        return softcap * torch.tanh(score * scale / softcap)

    q_BHSD, k_B1SD, v_B1SD = (tensor.transpose(1, 2) for tensor in (q_BSHD, k_BS1D, v_BS1D))
    o_BHSD, extra = flex_attention(
        q_BHSD,
        k_B1SD,
        v_B1SD,
        score_mod=scaled if softcap is None else capped,
        block_mask=mask,
        scale=1.0,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    assert extra.lse is not None
    return o_BHSD.transpose(1, 2), extra.lse.transpose(1, 2)


def _flex_of_whole_tiles(
    q_BSHD: Tensor, k_BS1D: Tensor, v_BS1D: Tensor, mask: BlockMask, scale: Tensor, softcap: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`flex`, told what makes kernels do without checks of bounds."""
    for length in (*mask.seq_lengths, q_BSHD.size(1), k_BS1D.size(1), v_BS1D.size(1)):
        torch._check(length > 0)  # type: ignore[no-untyped-call]
        torch._check(length % TILE == 0)  # type: ignore[no-untyped-call]
    return flex(q_BSHD, k_BS1D, v_BS1D, mask, scale, softcap)


@cache
def compiled_flex(backend: str | Callable[..., Any] = "inductor") -> AttentionFunction:
    """`flex`, compiled for packed tensors of any size.

    Every division of every plan has other sizes, so these are symbols in the compiled code: B, S and the sizes of the
    tables. What makes another compiled function, a *variant*, is: the pass (the backward needs what autograd saves),
    one head group in a batch or more, softcap or none, the number of key intervals per row (in powers of two, the most
    of the rank's masks), and heads, head dims and dtype. So a model takes about four, at some seconds each, and that
    its plans change takes none. More than VARIANTS is an error, and not FlexAttention without compilation, which would
    write down all scores.

    Args:
        backend: as of `torch.compile`.
    """
    import torch._dynamo

    compiled = torch.compile(_flex_of_whole_tiles, dynamic=True, fullgraph=True, backend=backend)

    def call(
        q_BSHD: Tensor, k_BS1D: Tensor, v_BS1D: Tensor, mask: BlockMask, scale: Tensor, softcap: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        for tensor in (q_BSHD, k_BS1D, v_BS1D):
            let_vary(tensor, 0, 1)
        with torch._dynamo.config.patch(recompile_limit=VARIANTS):
            return compiled(q_BSHD, k_BS1D, v_BS1D, mask, scale, softcap)

    return call


def flex_function(device: torch.device) -> AttentionFunction:
    """FlexAttention for a device."""
    return flex if device.type == "cpu" else compiled_flex()
