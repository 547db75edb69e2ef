"""Kernels for the CPU, on torch's own flash attention operator.

Letters in names: H query heads of a head group, Q rows, K keys, D head dim (the wider of key and value heads).

What the operator wants (torch 2.13): no empty inputs, since zero keys end the process; value heads as wide as key
heads; masks as additive floats. A row that is masked everywhere gets a log-sum-exp of 0. Its own causal mask is minus
infinity before the scale is applied, so it takes a positive scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from dyncp.ir.arrays import Ints
from dyncp.ir.plan import Attention, Copy, PlanHeader, RankProgram, Reduction
from dyncp.runtime.buffers import Buffers
from dyncp.runtime.kernels.api import Score
from dyncp.runtime.kernels.reference import Reference, copy, items, merge, reduce, visible

STRIP_ROWS = 512  # rows that share a range of keys; the operator itself works through keys 512 at a time
CACHED_MASK_BYTES = 64 << 20  # for all patterns of a plan together; masks beyond are made anew at every use

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
TINY = torch.finfo(torch.float32).tiny

_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True, eq=False)
class Strip:
    """Some rows of a computation block and the range of keys that they see: one call of the operator."""

    rows: slice
    keys: slice
    causal: bool = False  # row i sees the first i + 1 of the keys
    intervals: Tensor | None = None  # int32[rows, R, 2], where neither all keys nor `causal` says it
    blind: Tensor | None = None  # bool[rows, 1, 1]: rows that see nothing, where there are any
    mask: Tensor | None = None  # `additive_mask`, where it is kept

    def masking(self, scale: float) -> tuple[bool, Tensor | None]:
        """What the operator is told: whether the strip is causal, and what to add to the scores."""
        if self.causal and scale < TINY:  # minus infinity times such a scale is NaN, or the wrong infinity
            rows, keys = (part.stop - part.start for part in (self.rows, self.keys))
            return False, torch.full((rows, keys), float("-inf")).triu_(1)
        return self.causal, self.additive_mask()

    def additive_mask(self) -> Tensor | None:
        """fp32[rows, keys]: 0 where a row sees a key, minus infinity elsewhere; None where there is nothing to add."""
        if self.intervals is None or self.mask is not None:
            return self.mask
        seen = visible(self.intervals, self.keys.start, self.keys.stop)
        return torch.full(seen.shape, float("-inf")).masked_fill_(seen, 0.0)


class TorchCpu:
    """Kernels on the CPU flash operator; see `Kernels`. Softcap, which the operator lacks, is left to `Reference`.

    Blocks are computed in fp32 whatever the dtype of the model, so that partial results are rounded only where they
    are sent or finished; the operator is hardly faster in bf16.
    """

    def __init__(self, header: PlanHeader, program: RankProgram, device: torch.device) -> None:
        self._reference = Reference(header, program, device)
        self._pattern = self._reference.pattern
        self._strips: list[list[Strip]] = []
        room_bytes = CACHED_MASK_BYTES
        for rows, _ in self._reference.masks:
            strips = cut_into_strips(rows.numpy())
            for i, strip in enumerate(strips):
                if strip.intervals is not None:
                    size_bytes = 4 * (strip.rows.stop - strip.rows.start) * (strip.keys.stop - strip.keys.start)
                    if size_bytes <= room_bytes:
                        room_bytes -= size_bytes
                        strips[i] = replace(strip, mask=strip.additive_mask())
            self._strips.append(strips)

    def attend(self, buffers: Buffers, instruction: Attention, score: Score) -> None:
        if score.softcap is not None:
            return self._reference.attend(buffers, instruction, score)
        buffers.clear(instruction.fresh)
        for comp, (q_slot, kv_slot), (out_slot,) in items(instruction):
            (q,), (k, v), (o, lse) = (buffers.fields(slot) for slot in (q_slot, kv_slot, out_slot))
            value_dim = v.shape[2]
            q_1HQD, k_11KD, v_11KD = _widened(q, k, v)
            for strip in self._strips[self._pattern[comp]]:
                rows, keys = strip.rows, strip.keys
                causal, mask = strip.masking(score.scale)
                o_1HQD, lse_1HQ = _flash(
                    q_1HQD[:, :, rows],
                    k_11KD[:, :, keys],
                    v_11KD[:, :, keys],
                    0.0,
                    causal,
                    attn_mask=mask,
                    scale=score.scale,
                )
                lse_part = lse_1HQ[0].t().unsqueeze(2)
                if strip.blind is not None:
                    lse_part = lse_part.masked_fill(strip.blind, float("-inf"))
                merge(o[rows], lse[rows], o_1HQD[0, :, :, :value_dim].transpose(0, 1), lse_part)
        return None

    def attend_backward(self, buffers: Buffers, instruction: Attention, score: Score) -> None:
        if score.softcap is not None:
            return self._reference.attend_backward(buffers, instruction, score)
        buffers.clear(instruction.fresh)
        rows_of: dict[tuple[int, int, int], tuple[Tensor, ...]] = {}  # an instruction often uses a query block again
        for comp, (q_slot, do_slot, stats_slot, kv_slot), (dq_slot, dkv_slot) in items(instruction):
            k, v = buffers.fields(kv_slot)
            key_dim, value_dim = k.shape[2], v.shape[2]
            slots = (q_slot, do_slot, stats_slot)
            if slots not in rows_of:
                fields = [field for slot in slots for field in buffers.fields(slot)]
                rows_of[slots] = _query_side(*fields)
            q_1HQD, do_1HQD, o_1HQD, lse_1HQ = rows_of[slots]
            k_11KD, v_11KD = _widened(k, v)
            (dq,), (dk, dv) = buffers.fields(dq_slot), buffers.fields(dkv_slot)
            for strip in self._strips[self._pattern[comp]]:
                rows, keys = strip.rows, strip.keys
                causal, mask = strip.masking(score.scale)
                dq_1HQD, dk_11KD, dv_11KD = _flash_backward(
                    do_1HQD[:, :, rows],
                    q_1HQD[:, :, rows],
                    k_11KD[:, :, keys],
                    v_11KD[:, :, keys],
                    o_1HQD[:, :, rows],
                    lse_1HQ[:, :, rows],
                    0.0,
                    causal,
                    attn_mask=mask,
                    scale=score.scale,
                )
                dq[rows] += dq_1HQD[0, :, :, :key_dim].transpose(0, 1)
                dk[keys] += dk_11KD[0, :, :, :key_dim].transpose(0, 1)
                dv[keys] += dv_11KD[0, :, :, :value_dim].transpose(0, 1)
        return None

    def reduce(self, buffers: Buffers, instruction: Reduction) -> None:
        reduce(buffers, instruction)

    def copy(self, buffers: Buffers, instruction: Copy) -> None:
        copy(buffers, instruction)


def cut_into_strips(rows: Ints) -> list[Strip]:
    """The calls that a block's mask takes, given as key intervals of its rows, int32[rows, R, 2].

    A mask that is full or causal takes one; others are cut into strips of rows, so that keys which no row of a strip
    sees, as before a sliding window, cost nothing.
    """
    whole = _strip(rows, 0, len(rows))
    if whole is None or whole.intervals is None:
        return [] if whole is None else [whole]
    strips = (_strip(rows, start, min(start + STRIP_ROWS, len(rows))) for start in range(0, len(rows), STRIP_ROWS))
    return [strip for strip in strips if strip is not None]


def _strip(rows: Ints, start: int, stop: int) -> Strip | None:
    """Rows `[start, stop)` cropped to what sees and is seen; None for nothing."""
    lo, hi = rows[start:stop, :, 0], rows[start:stop, :, 1]
    seen = np.maximum(hi - lo, 0).sum(axis=1)
    seeing = np.flatnonzero(seen)
    if not len(seeing):
        return None
    start, stop = start + int(seeing[0]), start + int(seeing[-1]) + 1
    seen = seen[seeing[0] : seeing[-1] + 1]
    used = lo < hi
    first, last = int(lo[used].min()), int(hi[used].max())
    area = slice(start, stop), slice(first, last)
    if (seen == last - first).all():
        return Strip(*area)
    # A row that sees i + 1 keys, none beyond key i, sees exactly the first i + 1.
    reach = hi[seeing[0] : seeing[-1] + 1].max(axis=1) - first
    staircase = np.minimum(np.arange(1, stop - start + 1), last - first)
    if (seen == staircase).all() and (reach == staircase).all():
        return Strip(*area, causal=True)
    blind = torch.from_numpy(seen == 0).view(-1, 1, 1) if (seen == 0).any() else None
    return Strip(*area, intervals=torch.from_numpy(rows[start:stop].copy()), blind=blind)


def _widened(*fields: Tensor) -> list[Tensor]:
    """Fields `[tokens, heads, dim]` as the operator takes them: fp32, `[1, heads, tokens, D]`, one D for all."""
    width = max(field.shape[2] for field in fields)
    views = (field.float().transpose(0, 1).unsqueeze(0) for field in fields)
    return [pad(view, (0, width - view.shape[3])) if view.shape[3] < width else view for view in views]


def _query_side(q: Tensor, do: Tensor, lse: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
    """What the backward operator takes of a query block."""
    do = do.float()
    lse_1HQ = lse[:, :, 0].t().contiguous().unsqueeze(0)
    return (*_widened(q, do, stand_in(do, delta)), lse_1HQ)


def stand_in(do: Tensor, delta: Tensor) -> Tensor:
    """What to give a flash backward operator as the output O.

    Such an operator asks for O, but only to form `delta = sum(dO * O)`. A rank that computes for another has delta
    instead, so it gives the projection of O on dO, `dO * delta / sum(dO * dO)`: the shortest vector with that delta.

    Args:
        do: fp32[rows, heads, dim].
        delta: fp32[rows, heads, 1].
    """
    # Small gradients must not vanish when squared, beside whatever other rows hold; nor may a NaN leave its row.
    largest = do.abs().amax(2, keepdim=True).clamp_min_(TINY)
    scaled = do / largest
    return scaled * (delta / largest / (scaled * scaled).sum(2, keepdim=True).clamp_min_(TINY))
