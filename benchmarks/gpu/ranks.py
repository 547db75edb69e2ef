"""Plans of several ranks with all ranks in one process on one device, compared with dense attention in fp64.

Autograd runs the backwards of all threads in one, where ranks would wait for each other; so the passes are called
outside of it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.cases import Inputs, mask_of, random_inputs
from benchmarks.gpu.clock import Deadline
from benchmarks.gpu.compare import compared, reference
from benchmarks.gpu.scale import RankCase
from benchmarks.gpu.session import Findings, Session
from dyncp.ir.batch import DEFAULT_MASK, Batch, Sequence
from dyncp.ir.check import check_plan
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import Plan
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.attention import run_backward, run_forward
from dyncp.runtime.executor import Executor
from dyncp.runtime.kernels.api import Score
from dyncp.runtime.prepare import prepared_for
from dyncp.runtime.transports.local import LocalTransport, run_ranks
from dyncp.strategies import build
from dyncp.strategies.api import Options

CLUSTER = Cluster(2, 2)
MASKS = ("causal", "lambda", "causal_blockwise", "shared_question")
TIMEOUT_S = 60.0


def mixed_batch(tokens: int) -> Batch:
    """Four sequences of unequal lengths, a mask kind each."""
    lengths = [tokens // 2, tokens // 4, tokens // 8]
    lengths.append(tokens - sum(lengths))
    return Batch([Sequence(length, mask_of(kind, length)) for kind, length in zip(MASKS, lengths, strict=True)])


def name_of(case: RankCase) -> str:
    """A configuration in words."""
    return f"{CLUSTER.ranks} ranks, {case.strategy}, keep {case.keep}, {case.dtype}"


def check_ranks(session: Session, deadline: Deadline, found: Findings, kernels: Iterable[str]) -> None:
    """Add a row for each configuration and set of kernels."""
    scale = session.scale
    batch, base = mixed_batch(scale.rank_tokens), scale.shape
    cases = [(name, case) for name in kernels for case in scale.rank_cases]
    left_out = found.left_out
    for name, case in deadline.in_time(cases, lambda each: f"{each[0]}, {name_of(each[1])}", left_out):
        shape = AttentionShape(base.q_heads, base.kv_heads, base.head_dim, dtype=case.dtype)
        inputs = random_inputs(shape, batch.tokens, batch.tokens, session.device, zlib.crc32(name_of(case).encode()))
        wanted = reference(batch, inputs)
        options = Options(block_tokens=scale.rank_block, keep=case.keep)
        planned = build(batch, shape, CLUSTER, case.strategy, options)
        check_plan(planned.plan, planned.layout.blocks)
        row = {"case": name_of(case), "dtype": case.dtype, "contender": name, "peer": False}
        found.rows.append(compared(row, partial(on_ranks, planned.plan, batch, name, inputs), wanted, poison=True))


def on_ranks(plan: Plan, batch: Batch, kernels: str, inputs: Inputs) -> list[Tensor]:
    """Output and gradients of all tokens by the plan, in fp64; NaN where no rank has a row."""
    first = torch.tensor([0, *(sequence.length for sequence in batch.sequences)]).cumsum(0)
    score = Score(1 / math.sqrt(plan.header.shape.head_dim))

    def one(transport: LocalTransport) -> tuple[Tensor, list[Tensor]]:
        sequence, position = (torch.from_numpy(x.copy()).long() for x in plan.header.local_tokens(transport.rank))
        rows = (first[sequence] + position).to(inputs.q.device)
        q, k, v, do = (tensor[rows] for tensor in inputs)
        part = plan.rank(transport.rank)
        prepared = prepared_for(part, DEFAULT_MASK, kernels, q.device)
        executor = Executor(part, DEFAULT_MASK, prepared, transport, score, TIMEOUT_S)
        done = run_forward(executor, q, k, v, None)
        dq, dk, dv, _ = run_backward(executor, q, k, v, None, done, do)
        return rows, [done.out, dq, dk, dv]

    results = [torch.full_like(tensor, math.nan, dtype=torch.float64) for tensor in (inputs.do, *inputs[:3])]
    for rows, parts in run_ranks(plan.header.ranks, one):
        for result, part in zip(results, parts, strict=True):
            result[rows] = part.double()
    return results
