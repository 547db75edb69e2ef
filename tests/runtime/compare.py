"""Runs plans on random tensors and compares them with dense attention; used by the tests of this folder and of dist."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from runtime.block_plan import block_plan
from torch import Tensor

from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.blocks import HAS_KV, HAS_Q
from dyncp.ir.mask import Mask
from dyncp.ir.plan import Plan
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.attention import attention
from dyncp.runtime.dense import dense_attention
from dyncp.runtime.transports.local import run_ranks

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}


@dataclass
class Tensors:
    """The tensors of a whole batch, all sequences one behind the other."""

    batch: Batch
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor

    def rows(self, plan: Plan, rank: int, role: int) -> Tensor:
        """Which rows are a rank's, in its order."""
        lengths = [s.length if role == HAS_Q else s.keys for s in self.batch.sequences]
        sequence, position = plan.header.local_tokens(rank, role)
        return torch.from_numpy(np.cumsum([0, *lengths])[sequence] + position)


def random_tensors(batch: Batch, shape: AttentionShape, seed: int = 0) -> Tensors:
    g = torch.Generator().manual_seed(seed)
    queries, keys = (sum(getattr(s, name) for s in batch.sequences) for name in ("length", "keys"))
    sizes = (
        (queries, shape.q_heads, shape.head_dim),
        (keys, shape.kv_heads, shape.head_dim),
        (keys, shape.kv_heads, shape.value_dim),
        (queries, shape.q_heads, shape.value_dim),
    )
    return Tensors(batch, *(torch.randn(size, generator=g).to(getattr(torch, shape.dtype)) for size in sizes))


def dense(tensors: Tensors, mask: str = "default", sinks: Tensor | None = None, **settings) -> dict[str, Tensor]:
    """Output and gradients by dense attention in fp32, sequence by sequence."""
    q, k, v = (tensor.detach().float().requires_grad_() for tensor in (tensors.q, tensors.k, tensors.v))
    sinks = None if sinks is None else sinks.detach().clone().requires_grad_()
    sequences = tensors.batch.sequences
    splits = zip(
        q.split([s.length for s in sequences]),
        k.split([s.keys for s in sequences]),
        v.split([s.keys for s in sequences]),
        strict=True,
    )
    out = torch.cat(
        [
            dense_attention(*qkv, s.masks[mask], sinks=sinks, **settings)
            for qkv, s in zip(splits, sequences, strict=True)
        ]
    )
    out.backward(tensors.do.float())
    result = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return result if sinks is None else {**result, "dsinks": sinks.grad}


def rank_attention(tensors: Tensors, plan: Plan, group, rank=None, sinks=None, **settings) -> dict[str, Tensor]:
    """One rank's rows of output and gradients; the rank is that of `group`, where this is a transport."""
    rank = group.rank if rank is None else rank
    own = {role: tensors.rows(plan, rank, role) for role in (HAS_Q, HAS_KV)}
    q = tensors.q[own[HAS_Q]].requires_grad_()
    k, v = (tensor[own[HAS_KV]].requires_grad_() for tensor in (tensors.k, tensors.v))
    sinks = None if sinks is None else sinks.detach().clone().requires_grad_()
    out = attention(q, k, v, plan, group, sinks=sinks, **({"timeout_s": 30.0} | settings))
    out.backward(tensors.do[own[HAS_Q]])
    result = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return result if sinks is None else {**result, "dsinks": sinks.grad}


def gather(tensors: Tensors, plan: Plan, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The rows of all ranks, back in the batch's order."""
    result = {name: torch.cat([part[name] for part in parts]) for name in parts[0] if name != "dsinks"}
    for name, value in result.items():
        role = HAS_Q if name in ("out", "dq") else HAS_KV
        order = torch.cat([tensors.rows(plan, rank, role) for rank in range(plan.header.ranks)])
        assert sorted(order.tolist()) == list(range(len(value)))
        result[name] = torch.empty_like(value).index_copy(0, order, value)
    if "dsinks" in parts[0]:
        result["dsinks"] = sum(part["dsinks"] for part in parts)
    return result


def distributed(tensors: Tensors, plan: Plan, **settings) -> dict[str, Tensor]:
    """Output and gradients of a plan with all its ranks in this process."""
    parts = run_ranks(plan.header.ranks, lambda transport: rank_attention(tensors, plan, transport, **settings))
    return gather(tensors, plan, parts)


def relative_error(got: Tensor, want: Tensor) -> float:
    """In the L2 norm. A gradient that is zero but for rounding, as dQ of a row that sees one key, has no relative
    error: so values count as at least 0.1 in the mean, where inputs are about 1."""
    size = max(want.double().norm().item(), 0.1 * want.numel() ** 0.5)
    return (got.double() - want.double()).norm().item() / size if size else 0.0


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    errors = {name: relative_error(got[name], want[name]) for name in want}
    assert got.keys() == want.keys()
    assert all(error <= tolerance for error in errors.values()), errors


def compare(mask: Mask, cuts: list[int], shape: AttentionShape, seed: int = 0, sinks=None, **settings) -> None:
    """Kernels on one mask, its keys cut into blocks, against dense attention."""
    batch = Batch([Sequence(mask.q_length, mask, kv_length=mask.k_length)])
    tensors = random_tensors(batch, shape, seed)
    maths = {name: value for name, value in settings.items() if name != "kernels"}
    want = dense(tensors, sinks=sinks, **maths)
    got = distributed(tensors, block_plan(mask, cuts, shape), sinks=sinks, **settings)
    assert_close(got, want, TOLERANCE[shape.dtype])
