"""Dense attention in one process: the definition that plans are compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dyncp.ir.mask import Mask
from dyncp.runtime.kernels.reference import visible

CHUNK_SCORES = 1 << 22  # scores held at once


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | Mask,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one sequence by explicit maths in fp32 (fp64 for fp64 inputs), differentiable.

    Long sequences are worked through in chunks of rows of a head group, which the backward computes again, so memory
    does not grow with the square of the length.

    Args:
        q: `[Tq, q_heads, D]`.
        k: `[Tk, kv_heads, D]`; kv_heads divides q_heads.
        v: `[Tk, kv_heads, Dv]`.
        mask: bool `[Tq, Tk]`, True where a query sees a key; or a `Mask`.
        scale: as in `attention`, like the others below.
        softcap: see there.
        sinks: see there; `[q_heads]`.

    Returns:
        `[Tq, q_heads, Dv]` in the dtype of q; 0 where a query sees nothing.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    groups = k.shape[1]
    heads = q.shape[1] // groups
    logits = None if sinks is None else sinks.to(dtype).view(groups, heads, 1, 1)
    rows = max(1, CHUNK_SCORES // (heads * len(k)))
    chunked = rows < len(q)
    outs = []
    for group in range(groups):
        k_KD, v_KD = k[:, group].to(dtype), v[:, group].to(dtype)
        q_HQD = q[:, group * heads : (group + 1) * heads].to(dtype).transpose(0, 1) * scale
        sink = None if logits is None else logits[group]
        parts = []
        for start in range(0, len(q), rows):
            stop = min(start + rows, len(q))
            seen = _visible_rows(mask, start, stop, q.device)
            inputs = (q_HQD[:, start:stop], k_KD, v_KD, seen, softcap, sink)
            parts.append(checkpoint(_attend, *inputs, use_reentrant=False) if chunked else _attend(*inputs))
        outs.append(torch.cat(parts, dim=1))
    return torch.cat(outs).transpose(0, 1).to(q.dtype)


def _visible_rows(mask: Tensor | Mask, start: int, stop: int, device: torch.device) -> Tensor:
    if isinstance(mask, Mask):
        return visible(torch.from_numpy(mask.rows(start, stop)).to(device), 0, mask.k_length)
    return mask[start:stop].to(device)


def _attend(
    q_HQD: Tensor, k_KD: Tensor, v_KD: Tensor, seen_QK: Tensor, softcap: float | None, sink_H11: Tensor | None
) -> Tensor:
    scores_HQK = q_HQD @ k_KD.t()
    if softcap is not None:
        scores_HQK = softcap * torch.tanh(scores_HQK / softcap)
    scores_HQK = scores_HQK.masked_fill(~seen_QK, -math.inf)
    top_HQ1 = scores_HQK.detach().amax(2, keepdim=True)
    if sink_H11 is not None:
        top_HQ1 = torch.maximum(top_HQ1, sink_H11.detach())
    top_HQ1 = top_HQ1.masked_fill(top_HQ1 == -math.inf, 0.0)
    weights_HQK = torch.exp(scores_HQK - top_HQ1)
    total_HQ1 = weights_HQK.sum(2, keepdim=True)
    if sink_H11 is not None:
        total_HQ1 = total_HQ1 + torch.exp(sink_H11 - top_HQ1)
    # A row that sees nothing has weights 0, and so output and gradients 0.
    return (weights_HQK @ v_KD) / total_HQ1.masked_fill(total_HQ1 == 0, 1.0)
