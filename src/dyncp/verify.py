"""Plans against dense attention: execute a plan with all its ranks in this process, and compare with the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.blocks import HAS_KV, HAS_Q
from dyncp.ir.check import check_plan
from dyncp.ir.cluster import Cluster
from dyncp.ir.mask import Mask
from dyncp.ir.plan import KEEP, WIRE, Plan
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.attention import attention
from dyncp.runtime.buffers import DTYPES
from dyncp.runtime.dense import dense_attention
from dyncp.runtime.transports.local import LocalTransport, run_ranks
from dyncp.strategies import STRATEGIES, build
from dyncp.strategies.api import Options

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}  # relative L2 error, by dtype
LEAST_SIZE = 0.1  # of a gradient, as a fraction of dV's root mean square, for its error to be relative to itself
MAX_LENGTH = 600  # of a random sequence


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to verify: a batch, how it is planned, and how scores are made."""

    batch: Batch
    shape: AttentionShape
    cluster: Cluster
    strategy: str
    options: Options
    softcap: float | None = None
    sinks: bool = False

    @property
    def tolerance(self) -> float:
        """The relative error that is allowed."""
        return TOLERANCE[self.shape.dtype]


@dataclass(frozen=True, slots=True)
class Tensors:
    """Inputs of one attention over the whole batch, or its results; sequences lie one behind the other."""

    q: Tensor  # [T, q_heads, D]
    k: Tensor  # [Tk, kv_heads, D]
    v: Tensor  # [Tk, kv_heads, Dv]
    out: Tensor  # [T, q_heads, Dv], or the gradient that enters there
    sinks: Tensor | None  # [q_heads]


def verify(case: Case) -> dict[str, float]:
    """Plan a case, check the plan, execute it forward and backward under every mask, and compare with dense attention.

    Returns:
        The largest error over the masks by name of result, see `mask_errors`.

    Raises:
        PlanError: the plan is broken.
        ValueError: the case cannot be planned.
    """
    planned = build(case.batch, case.shape, case.cluster, case.strategy, case.options)
    check_plan(planned.plan, planned.layout.blocks, planned.batch)
    by_mask = list(mask_errors(planned.plan, case).values())
    return {label: reduce(worse, (errors[label] for errors in by_mask)) for label in by_mask[0]}


def mask_errors(plan: Plan, case: Case) -> dict[str, dict[str, float]]:
    """Execute a case's plan forward and backward under every mask, and compare with dense attention.

    Returns:
        By mask, the relative L2 error of `out`, `dq`, `dk`, `dv` (and `dsinks`); infinite where a result is not a
        finite number. Where nearly every row sees a single key, the gradients of queries, keys and sinks are 0 up to
        rounding; so the size that an error is relative to is at least `LEAST_SIZE` times that of dV.
    """
    generator = torch.Generator().manual_seed(case.options.seed)
    inputs = _random_inputs(case, generator)
    by_mask: dict[str, dict[str, float]] = {}
    for name in case.batch.mask_names:
        errors = by_mask.setdefault(name, {})
        got, expected = run_plan(plan, case, inputs, name), run_dense(case, inputs, name)
        least = LEAST_SIZE * expected.v.norm() / max(1, expected.v.numel()) ** 0.5
        for field, label in (("out", "out"), ("q", "dq"), ("k", "dk"), ("v", "dv"), ("sinks", "dsinks")):
            right = getattr(expected, field)
            if right is not None:
                scale = right.norm() if field == "out" else torch.maximum(right.norm(), least * right.numel() ** 0.5)
                error = float((getattr(got, field).double() - right).norm() / scale.clamp_min(1e-30))
                errors[label] = worse(0.0, error)
    return by_mask


def worse(error: float, other: float) -> float:
    """The larger of two errors. One that is not a finite number counts as infinite; `max` would lose a NaN."""
    return max(error, other) if math.isfinite(error) and math.isfinite(other) else math.inf


def run_plan(plan: Plan, case: Case, inputs: Tensors, mask: str) -> Tensors:
    """Output and gradients from a plan, all ranks in this process; fp32 gradients of the sinks summed over ranks."""
    rows = {
        role: [_rows(plan, case.batch, rank, role) for rank in range(plan.header.ranks)] for role in (HAS_Q, HAS_KV)
    }

    def one_rank(transport: LocalTransport) -> tuple[Tensor, ...]:
        here_q, here_kv = rows[HAS_Q][transport.rank], rows[HAS_KV][transport.rank]
        leaves = [inputs.q[here_q], inputs.k[here_kv], inputs.v[here_kv]]
        leaves += [] if inputs.sinks is None else [inputs.sinks.clone()]
        for leaf in leaves:
            leaf.requires_grad_()
        q, k, v, *sinks = leaves
        out = attention(
            q, k, v, plan, transport, mask=mask, softcap=case.softcap, sinks=sinks[0] if sinks else None, timeout_s=60
        )
        return (out.detach(), *torch.autograd.grad(out, leaves, inputs.out[here_q]))

    result = Tensors(
        torch.empty_like(inputs.q),
        torch.empty_like(inputs.k),
        torch.empty_like(inputs.v),
        torch.empty_like(inputs.out),
        None if inputs.sinks is None else torch.zeros_like(inputs.sinks),
    )
    for rank, (out, dq, dk, dv, *dsinks) in enumerate(run_ranks(plan.header.ranks, one_rank)):
        result.out[rows[HAS_Q][rank]], result.q[rows[HAS_Q][rank]] = out, dq
        result.k[rows[HAS_KV][rank]], result.v[rows[HAS_KV][rank]] = dk, dv
        if result.sinks is not None:
            result.sinks.add_(dsinks[0])
    return result


def run_dense(case: Case, inputs: Tensors, mask: str) -> Tensors:
    """The same from dense attention in fp64."""
    q, k, v = (tensor.double().requires_grad_() for tensor in (inputs.q, inputs.k, inputs.v))
    sinks = None if inputs.sinks is None else inputs.sinks.double().requires_grad_()
    outs = []
    start = k_start = 0
    for sequence in case.batch.sequences:
        stop, k_stop = start + sequence.length, k_start + sequence.keys
        one = q[start:stop], k[k_start:k_stop], v[k_start:k_stop]
        outs.append(dense_attention(*one, sequence.masks[mask], softcap=case.softcap, sinks=sinks))
        start, k_start = stop, k_stop
    out = torch.cat(outs)
    leaves = [q, k, v] if sinks is None else [q, k, v, sinks]
    dq, dk, dv, *dsinks = torch.autograd.grad(out, leaves, inputs.out.double())
    return Tensors(dq, dk, dv, out.detach(), dsinks[0] if dsinks else None)


def _random_inputs(case: Case, generator: torch.Generator) -> Tensors:
    shape, tokens = case.shape, case.batch.tokens
    keys = sum(sequence.keys for sequence in case.batch.sequences)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(DTYPES[shape.dtype])

    return Tensors(
        random(tokens, shape.q_heads, shape.head_dim),
        random(keys, shape.kv_heads, shape.head_dim),
        random(keys, shape.kv_heads, shape.value_dim),
        random(tokens, shape.q_heads, shape.value_dim),
        torch.randn(shape.q_heads, generator=generator) if case.sinks else None,
    )


def _rows(plan: Plan, batch: Batch, rank: int, role: int) -> Tensor:
    """int64[T_local]: the rows of a rank's tokens in `Tensors`."""
    sequence, position = plan.header.local_tokens(rank, role)
    sizes = [one.length if role == HAS_Q else one.keys for one in batch.sequences]
    return torch.from_numpy((np.cumsum(sizes) - sizes)[sequence] + position)


def _slices(rng: np.random.Generator, length: int, keys: int) -> Mask:
    rows = []
    for _ in range(rng.integers(1, 6)):
        (q_start, q_stop), (k_start, k_stop) = _span(rng, length), _span(rng, keys)
        rows.append([q_start, q_stop, k_start, k_stop, str(rng.choice(["full", "causal", "inv_causal", "bi_causal"]))])
    return masks.from_slices(length, keys, rows)


def _tree(rng: np.random.Generator, length: int) -> Mask:
    lengths = _parts(rng, length, 8)
    parents = [int(rng.integers(-1, node)) for node in range(len(lengths))]
    return masks.tree(parents, lengths)


def _question(rng: np.random.Generator, length: int) -> Mask:
    question, *answers = _parts(rng, length, 5)
    return masks.shared_question(question, answers)


# every kind of mask, with random parameters
RANDOM_MASKS: dict[str, Callable[[np.random.Generator, int], Mask]] = {
    "full": lambda rng, length: masks.full(length),
    "causal": lambda rng, length: masks.causal(length),
    "sliding_window": lambda rng, length: masks.sliding_window(length, int(rng.integers(1, length + 1))),
    "lambda": lambda rng, length: masks.lambda_(length, *rng.integers(1, max(2, length // 3), 2).tolist()),
    "causal_blockwise": lambda rng, length: masks.causal_blockwise(
        length, int(rng.integers(1, length + 1)), *rng.integers(1, 3, 2).tolist()
    ),
    "shared_question": _question,
    "document": lambda rng, length: masks.document(_parts(rng, length, 6)),
    "prefix_lm": lambda rng, length: masks.prefix_lm(length, int(rng.integers(1, length + 1))),
    "tree": _tree,
    "slices": lambda rng, length: _slices(rng, length, length),
    "dense": lambda rng, length: masks.from_dense(rng.random((length, length)) < 0.3),
    "mask_mod": lambda rng, length: masks.from_mask_mod(lambda q, k: (q - k) % 7 < 3, length, length),
}


def random_case(seed: int, number: int) -> Case:
    """Case `number` of the corpus `seed`: strategies and `keep` in turn, everything else at random.

    1 to 5 sequences of 1 to 600 tokens, each with its own mask (in one case of four two named ones), one in ten with
    other tokens as keys; 1 to 8 ranks on 1 or 2 nodes; grouped heads, values of another dimension, fp32 and bf16,
    softcap and sinks.
    """
    rng = np.random.default_rng([seed, number])
    strategies, keeps = list(STRATEGIES), list(KEEP)
    nodes = int(rng.integers(1, 3))
    options = Options(
        block_tokens=int(rng.choice([16, 37, 64, 128, 300])),
        divisions=int(rng.integers(1, 6)),
        keep=keeps[number // len(strategies) % len(keeps)],
        wire=str(rng.choice(WIRE)),
        seed=number,
    )
    return Case(
        _random_batch(rng),
        _random_shape(rng),
        Cluster(nodes, int(rng.integers(1, 8 // nodes + 1))),
        strategies[number % len(strategies)],
        options,
        softcap=2.0 if rng.random() < 0.2 else None,
        sinks=bool(rng.random() < 0.2),
    )


def _random_batch(rng: np.random.Generator) -> Batch:
    names = ("default",) if rng.random() < 0.75 else ("window", "global")
    sequences = []
    for _ in range(rng.integers(1, 6)):
        length, keys = (round(float(np.exp(rng.uniform(0, np.log(MAX_LENGTH))))) for _ in range(2))
        if rng.random() < 0.1:
            sequences.append(Sequence(length, {name: _slices(rng, length, keys) for name in names}, keys))
            continue
        # scattered pairs make thousands of slices: short sequences show as much
        kinds = [kind for kind in RANDOM_MASKS if length <= 64 or kind not in ("dense", "mask_mod")]
        sequences.append(Sequence(length, {name: RANDOM_MASKS[str(rng.choice(kinds))](rng, length) for name in names}))
    return Batch(tuple(sequences), {name: float(rng.integers(1, 6)) for name in names})


def _random_shape(rng: np.random.Generator) -> AttentionShape:
    kv_heads, head_dim = int(rng.integers(1, 4)), int(rng.choice([4, 8, 16]))
    v_head_dim = head_dim if rng.random() < 0.75 else int(rng.choice([2, 8, 24]))
    dtype = "float32" if rng.random() < 0.75 else "bfloat16"
    return AttentionShape(kv_heads * int(rng.integers(1, 4)), kv_heads, head_dim, v_head_dim, dtype)


def _span(rng: np.random.Generator, length: int) -> list[int]:
    start, stop = sorted(rng.integers(0, length + 1, 2).tolist())
    return [start, stop] if start < stop else [min(start, length - 1), min(start, length - 1) + 1]


def _parts(rng: np.random.Generator, length: int, most: int) -> list[int]:
    """`length` cut at random into at most that many parts, none empty."""
    count = int(rng.integers(1, min(most, length) + 1))
    cuts = np.sort(rng.choice(np.arange(1, length), count - 1, replace=False)) if count > 1 else np.empty(0, int)
    return [int(part) for part in np.diff([0, *cuts, length])]
