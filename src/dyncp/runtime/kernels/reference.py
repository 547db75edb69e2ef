"""The definition of the kernels: explicit maths on any device, dense masks, one computation block at a time.

Letters in names: H query heads of a head group, Q rows, K keys, D head dim. Everything is computed in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dyncp.ir.plan import Attention, Copy, Kind, PlanHeader, RankProgram, Reduction
from dyncp.runtime.buffers import Buffers
from dyncp.runtime.kernels.api import Score, mask_patterns


class Reference:
    """Kernels in plain torch; see `Kernels`."""

    def __init__(self, header: PlanHeader, program: RankProgram, device: torch.device) -> None:
        self.pattern, patterns = mask_patterns(program.comps, header.tokens)
        self.masks = [(torch.from_numpy(rows.copy()).to(device), keys) for rows, keys in patterns]

    def attend(self, buffers: Buffers, instruction: Attention, score: Score) -> None:
        buffers.clear(instruction.fresh)
        for comp, (q_slot, kv_slot), (out_slot,) in items(instruction):
            (q,), (k, v) = buffers.fields(q_slot), buffers.fields(kv_slot)
            scores_HQK, _ = _scores(_by_head(q), _by_head(k), score)
            scores_HQK.masked_fill_(~self._visible(comp), float("-inf"))
            # Weights that sum to 1 whatever the rounding of the log-sum-exp, which is coarse where scores are large.
            top_HQ1 = finite(scores_HQK.amax(-1, keepdim=True))
            p_HQK = (scores_HQK - top_HQ1).exp_()
            total_HQ1 = p_HQK.sum(-1, keepdim=True)
            o_HQD = p_HQK @ _by_head(v) / total_HQ1.masked_fill(total_HQ1 == 0, 1.0)
            lse_HQ1 = top_HQ1 + total_HQ1.log()
            o, lse = buffers.fields(out_slot)
            merge(o, lse, o_HQD.transpose(0, 1), lse_HQ1.transpose(0, 1))

    def attend_backward(self, buffers: Buffers, instruction: Attention, score: Score) -> None:
        buffers.clear(instruction.fresh)
        for comp, (q_slot, do_slot, stats_slot, kv_slot), (dq_slot, dkv_slot) in items(instruction):
            q_HQD, do_HQD = (_by_head(buffers.fields(slot)[0]) for slot in (q_slot, do_slot))
            lse_HQ1, delta_HQ1 = (_by_head(field) for field in buffers.fields(stats_slot))
            k_1KD, v_1KD = (_by_head(field) for field in buffers.fields(kv_slot))
            scores_HQK, slope_HQK = _scores(q_HQD, k_1KD, score)
            scores_HQK.masked_fill_(~self._visible(comp), float("-inf"))
            p_HQK = (scores_HQK - lse_HQ1).exp_()
            dp_HQK = do_HQD @ v_1KD.transpose(1, 2)
            ds_HQK = p_HQK * (dp_HQK - delta_HQ1) * score.scale
            if slope_HQK is not None:
                ds_HQK *= slope_HQK
            (dq,), (dk, dv) = buffers.fields(dq_slot), buffers.fields(dkv_slot)
            dq += (ds_HQK @ k_1KD).transpose(0, 1)
            dk += (ds_HQK.transpose(1, 2) @ q_HQD).sum(0).unsqueeze(1)  # the query heads share the key's head
            dv += (p_HQK.transpose(1, 2) @ do_HQD).sum(0).unsqueeze(1)

    def reduce(self, buffers: Buffers, instruction: Reduction) -> None:
        reduce(buffers, instruction)

    def copy(self, buffers: Buffers, instruction: Copy) -> None:
        copy(buffers, instruction)

    def _visible(self, comp: int) -> Tensor:
        rows, keys = self.masks[self.pattern[comp]]
        return visible(rows, 0, keys)


def reduce(buffers: Buffers, instruction: Reduction) -> None:
    """`Kernels.reduce` in plain torch."""
    buffers.clear(instruction.fresh)
    for src_slot, dst_slot in zip(instruction.src.tolist(), instruction.dst.tolist(), strict=True):
        src, dst = buffers.fields(src_slot), buffers.fields(dst_slot)
        if buffers.kind(dst_slot) == Kind.OUT:
            merge(*dst, *src)
        else:
            for total, part in zip(dst, src, strict=True):
                total += part


def copy(buffers: Buffers, instruction: Copy) -> None:
    """`Kernels.copy` in plain torch."""
    for src_slot, dst_slot in zip(instruction.src.tolist(), instruction.dst.tolist(), strict=True):
        for src, dst in zip(buffers.fields(src_slot), buffers.fields(dst_slot), strict=True):
            dst.copy_(src)


def visible(intervals: Tensor, start: int, stop: int) -> Tensor:
    """bool[rows, stop - start]: which of the keys `[start, stop)` each row sees; intervals is int32[rows, R, 2]."""
    key = torch.arange(start, stop, dtype=torch.int32, device=intervals.device)
    seen = torch.zeros(len(intervals), stop - start, dtype=torch.bool, device=intervals.device)
    for lo, hi in (part.unbind(1) for part in intervals.unbind(1)):
        seen |= (key >= lo[:, None]) & (key < hi[:, None])
    return seen


def finite(lse: Tensor) -> Tensor:
    """The log-sum-exp, or the largest score, with 0 in place of minus infinity (rows that see nothing): then
    `exp(score - lse)` is 0 there and not NaN."""
    return lse.masked_fill(lse == float("-inf"), 0.0)


def merge(o: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor) -> None:
    """Merge a partial output into (o, lse), in place. Shapes `[rows, heads, dim]` and `[rows, heads, 1]`.

    With weights from the log-sum-exps, `o = (e^lse o + e^lse_part o_part) / (e^lse + e^lse_part)`; two parts that saw
    nothing stay nothing.
    """
    # The weight of the new part as a sigmoid: never NaN once "both empty" (inf - inf) is given some weight.
    weight = torch.sigmoid((lse_part - lse).nan_to_num_(nan=0.0, posinf=float("inf"), neginf=float("-inf")))
    o.lerp_(o_part.to(o.dtype), weight)
    torch.logaddexp(lse, lse_part, out=lse)


def items(instruction: Attention) -> zip[tuple[int, list[int], list[int]]]:
    """(computation block, slots read, slots written) of each item."""
    return zip(instruction.comp.tolist(), instruction.reads.tolist(), instruction.writes.tolist(), strict=True)


def _by_head(field: Tensor) -> Tensor:
    return field.transpose(0, 1).float()


def _scores(q_HQD: Tensor, k_1KD: Tensor, score: Score) -> tuple[Tensor, Tensor | None]:
    """Scores, and the slope of the softcap at each (None without one)."""
    scores_HQK = (q_HQD @ k_1KD.transpose(1, 2)) * score.scale
    if score.softcap is None:
        return scores_HQK, None
    tanh_HQK = torch.tanh(scores_HQK / score.softcap)
    return tanh_HQK * score.softcap, 1 - tanh_HQK**2
