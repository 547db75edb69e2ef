"""The public call: attention over the tokens of all ranks, under a plan, differentiable."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from dyncp.ir.blocks import HAS_KV, HAS_Q
from dyncp.ir.plan import BACKWARD, FORWARD, Pass, Plan, PlanHeader, RankPlan
from dyncp.runtime.buffers import DTYPES, Buffers, allocate
from dyncp.runtime.executor import Executor
from dyncp.runtime.kernels.api import Score
from dyncp.runtime.kernels.reference import finite
from dyncp.runtime.prepare import prepared_for
from dyncp.runtime.transports.api import Transport
from dyncp.runtime.transports.local import LocalWorld
from dyncp.runtime.transports.torch_dist import TorchDistTransport

TIMEOUT_S = 300.0
LONGEST_TIMEOUT_S = 1e9
FP32 = torch.finfo(torch.float32)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: RankPlan | Plan,
    group: dist.ProcessGroup | Transport | None = None,
    *,
    mask: str | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernels: str = "auto",
    timeout_s: float = TIMEOUT_S,
    compare_digests: bool | None = None,
) -> Tensor:
    """Attention of this rank's queries to all keys that their masks show, wherever these are.

    All ranks of the plan must call this, and the backward of its result, the same number of times in the same order;
    also ranks without tokens. mask, scale, softcap, whether there are sinks, and compare_digests must agree.

    Scores and their log-sum-exps are rounded to fp32, so expect relative errors of about 1e-7 times the largest score:
    results are within 1e-5 of exact ones up to scores of about 100. The gradient of q does worse where the keys of a
    row have a large part in common, which cancels there: within 1e-5 up to scores of about 20.

    Args:
        q: `[T_local, q_heads, head_dim]`, the queries of this rank's tokens, in the order of
            `plan.header.local_tokens(rank)`. q, k and v are in the dtype of the plan's `AttentionShape`; nothing is
            cast, not under autocast either.
        k: `[Tk_local, kv_heads, head_dim]`; the same tokens, except in cross-attention.
        v: `[Tk_local, kv_heads, v_head_dim]`.
        plan: this rank's part of a plan, as `plan.rank(rank)` and the loader give it, or the whole plan, of which this
            rank's part is taken.
        group: the ranks of the plan: a process group (the default group when left out) or a transport, such as
            `TorchDistTransport(group, exchange="all_to_all")`.
        mask: name of the mask that this layer has; may be left out when the plan has only one.
        scale: what `q.k` is multiplied by, a number and no tensor; `1 / sqrt(head_dim)` when left out.
        softcap: scores become `softcap * tanh(score / softcap)`; a positive number.
        sinks: `[q_heads]`, a learned logit per head that takes part in every row's softmax and has no value. Its
            gradient is the part of this rank's tokens: sum it over the ranks like that of any replicated parameter.
        kernels: `auto` takes `torch_cpu` on a CPU and `triton` on a GPU where that is installed, else `reference`, and
            says so in the log (logger `dyncp`). `triton` has head dims up to 256. `flex` and `flash` run divisions of a
            plan by PyTorch's FlexAttention and FlashAttention, see `runtime/kernels/`.
        timeout_s: the longest to wait for the messages of one step; with NCCL the time-out of the process group holds
            instead.
        compare_digests: make sure before each pass that all ranks run the same one, of the same plan, with the same
            mask and settings; costs a message of 256 bytes to every rank. When left out, that is done with CPU tensors,
            and not on a GPU, where the host would have to wait; there, ranks that have come apart give wrong numbers
            or hang, so turn it on to debug.

    Returns:
        `[T_local, q_heads, v_head_dim]` in the dtype of q. A query that sees nothing gets output 0 and gradient 0.

    Raises:
        ValueError: tensors that do not fit the plan, a plan for other ranks, an unknown mask or kernels, a setting out
            of range, a GPU that is not the process's current one; with compare_digests also, here and in the backward,
            another rank that runs something else.
        TransportError: a rank was lost or too slow; names rank, pass, instruction and peers.
    """
    if not isinstance(plan, Plan | RankPlan):
        raise ValueError(
            f"plan is of type {type(plan).__name__}; expected a Plan or a RankPlan: decode bytes with "
            "dyncp.ir.codec.decode_plan or decode_rank"
        )
    transport = _transport(group, plan.header)
    part = _rank_plan(plan, transport)
    mask = _mask_name(mask, part.header)
    _check_tensors(part, q, k, v, sinks)
    score = _score(scale, softcap, part.header)
    timeout_s = _number(
        "timeout_s", timeout_s, FP32.tiny, LONGEST_TIMEOUT_S, f"seconds, above 0 and at most {LONGEST_TIMEOUT_S:g}"
    )
    made = prepared_for(part, mask, kernels, q.device)
    compared = None
    if q.device.type == "cpu" if compare_digests is None else compare_digests:
        compared = f"scale {score.scale:.6g}, softcap {score.softcap}, {'no ' * (sinks is None)}sinks"
    executor = Executor(part, mask, made, transport, score, timeout_s, compared)
    out: Tensor = PlannedAttention.apply(q, k, v, sinks, executor)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, slots=True)
class Finished:
    """What a forward leaves for the backward."""

    out: Tensor  # [T, q_heads, Dv], model dtype
    lse: Tensor  # fp32[T, q_heads, 1], with the sinks; 0 for rows that see nothing
    kept: Tensor  # uint8[bytes]


def run_forward(executor: Executor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Finished:
    """One forward pass on this rank, outside of autograd; tensors as in `attention`."""
    shape = executor.plan.header.shape
    rows = (len(q), shape.q_heads)
    o = q.new_zeros((*rows, shape.value_dim), dtype=torch.float32)
    lse = q.new_full((*rows, 1), -math.inf, dtype=torch.float32)
    kept = allocate(executor.program(FORWARD).kept_bytes, q.device)
    local = {"q": q, "k": k, "v": v, "o": o, "lse": lse}
    _run(executor, FORWARD, local, kept)
    if sinks is not None:
        with_sinks = torch.logaddexp(lse, sinks.float().view(1, -1, 1))
        o *= torch.exp(lse - finite(with_sinks))
        lse = with_sinks
    return Finished(o.to(q.dtype), finite(lse), kept)


def run_backward(
    executor: Executor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, done: Finished, do: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """One backward pass on this rank, outside of autograd: gradients of q, k, v (fp32) and of the sinks."""
    delta = (do.float() * done.out.float()).sum(2, keepdim=True)
    dq, dk, dv = (torch.zeros(tensor.shape, dtype=torch.float32, device=tensor.device) for tensor in (q, k, v))
    local = {"q": q, "k": k, "v": v, "do": do, "lse": done.lse, "delta": delta, "dq": dq, "dk": dk, "dv": dv}
    _run(executor, BACKWARD, local, done.kept)
    if sinks is None:
        return dq, dk, dv, None
    # The sink takes exp(sink - lse) of each row's softmax, with a value of zero, so dP - delta is -delta there.
    share = torch.exp(sinks.float().view(1, -1, 1) - done.lse)
    return dq, dk, dv, -(share * delta).sum((0, 2)).to(sinks.dtype)


def _run(executor: Executor, pass_: Pass, local: dict[str, Tensor], kept: Tensor) -> None:
    buffers = Buffers(executor.prepared.layout(pass_), local, kept)
    executor.run(pass_, buffers)
    buffers.release()  # not after an error, when messages may still be on their way


class PlannedAttention(torch.autograd.Function):
    """`run_forward` and `run_backward` as one differentiable operation."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, executor: Executor) -> Tensor:
        q, k, v = (_last_dim_contiguous(tensor) for tensor in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):
            done = run_forward(executor, q, k, v, sinks)
        # Saved as tensors, the kept memory too, so that activation checkpointing can drop and remake them.
        ctx.save_for_backward(q, k, v, sinks, done.out, done.lse, done.kept)
        ctx.executor = executor
        return done.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, *done = ctx.saved_tensors
        do = _last_dim_contiguous(do)
        with torch.autocast(q.device.type, enabled=False):
            gradients = run_backward(ctx.executor, q, k, v, sinks, Finished(*done), do)
        dq, dk, dv, dsinks = gradients
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None


def _last_dim_contiguous(tensor: Tensor) -> Tensor:
    """What kernels need; rows and heads may be strided, as in a slice of a fused projection."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _transport(group: dist.ProcessGroup | Transport | None, header: PlanHeader) -> Transport:
    if isinstance(group, Transport):
        return group
    if group is None and not (dist.is_available() and dist.is_initialized()):
        if header.ranks == 1:
            return LocalWorld(1).transport(0)
        raise ValueError(
            f"the plan is for {header.ranks} ranks, but torch.distributed is not initialized: call "
            "torch.distributed.init_process_group, or give `group` a transport"
        )
    return TorchDistTransport(group)


def _rank_plan(plan: RankPlan | Plan, transport: Transport) -> RankPlan:
    if transport.world_size != plan.header.ranks:
        raise ValueError(
            f"the plan is for {plan.header.ranks} ranks, but the group has {transport.world_size}: plan for a cluster "
            "of the group's size, or pass the group that the plan was made for"
        )
    part = plan.rank(transport.rank) if isinstance(plan, Plan) else plan
    if part.rank != transport.rank:
        raise ValueError(
            f"got rank {part.rank}'s part of the plan on rank {transport.rank} of the group; use "
            f"plan.rank({transport.rank})"
        )
    return part


def _mask_name(name: str | None, header: PlanHeader) -> str:
    if name is None and len(header.mask_names) != 1:
        raise ValueError(f"the plan has masks {', '.join(header.mask_names)}; say which with mask=...")
    if name is not None and name not in header.mask_names:
        raise ValueError(f"no mask {name!r} in this plan; it has {', '.join(header.mask_names)}")
    return header.mask_names[0] if name is None else name


def _score(scale: float | None, softcap: float | None, header: PlanHeader) -> Score:
    if scale is None:
        scale = 1 / math.sqrt(header.shape.head_dim)
    wanted = "a finite number, or None for 1 / sqrt(head_dim); to learn a scale, multiply q by it"
    scale = _number("scale", scale, -FP32.max, FP32.max, wanted)
    if softcap is not None:
        softcap = _number("softcap", softcap, FP32.tiny, FP32.max, "a positive finite number, or None for no cap")
    return Score(scale, softcap)


def _number(name: str, value: Any, least: float, most: float, wanted: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= float(value) <= most:
        got = repr(value) if isinstance(value, Real | str | None) else f"of type {type(value).__name__}"
        raise ValueError(f"{name} is {got}; expected {wanted}")
    return float(value)


def _check_tensors(plan: RankPlan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    header, shape = plan.header, plan.header.shape
    queries, keys = (int(header.tokens.tokens[header.owned(plan.rank, role)].sum()) for role in (HAS_Q, HAS_KV))
    expected = {
        "q": (q, (queries, shape.q_heads, shape.head_dim)),
        "k": (k, (keys, shape.kv_heads, shape.head_dim)),
        "v": (v, (keys, shape.kv_heads, shape.value_dim)),
    }
    for name, (tensor, wanted) in expected.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is of type {type(tensor).__name__}; expected a torch.Tensor")
        if tuple(tensor.shape) != wanted:
            raise ValueError(
                f"{name} is {list(tensor.shape)}, but the plan wants [tokens, heads, dim] = {list(wanted)} on rank "
                f"{plan.rank}: give it the tokens of plan.header.local_tokens({plan.rank}), and plan with the "
                "AttentionShape of the layer"
            )
        if tensor.dtype != DTYPES[shape.dtype]:
            raise ValueError(
                f"{name} is {tensor.dtype}, but the plan is for {shape.dtype}: cast it, or plan for its dtype"
            )
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} and q on {q.device}: move them to one device")
    if sinks is not None:
        wanted_sinks = f"expected one logit per query head, a floating-point tensor [{shape.q_heads}] on {q.device}"
        if not isinstance(sinks, Tensor):
            raise ValueError(f"sinks is of type {type(sinks).__name__}; {wanted_sinks}")
        if tuple(sinks.shape) != (shape.q_heads,) or sinks.device != q.device or not sinks.is_floating_point():
            raise ValueError(f"sinks is {sinks.dtype} {list(sinks.shape)} on {sinks.device}; {wanted_sinks}")
