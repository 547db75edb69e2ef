"""Run plans on one GPU, all ranks in one process, and compare with dense attention in fp64.

    PYTHONPATH=src python benchmarks/gpu/check_executor.py [--tokens 8192] [--out FILE.json]

Needs torch with CUDA and numpy; the dynamic strategy also needs mtkahypar and is left out without it. Checks numbers,
not speed: there are no GPU kernels yet, so the plain reference kernels run. Exits 1 past the tolerance.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import sys
from pathlib import Path

import torch

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.blocks import HAS_Q
from dyncp.ir.check import check_plan
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import Plan
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.attention import Finished, run_backward, run_forward
from dyncp.runtime.buffers import DTYPES
from dyncp.runtime.dense import dense_attention
from dyncp.runtime.executor import Executor
from dyncp.runtime.kernels.api import Score
from dyncp.runtime.prepare import prepare
from dyncp.runtime.transports.local import LocalTransport, run_ranks
from dyncp.strategies import STRATEGIES, build
from dyncp.strategies.api import Options

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
NAMES = ("out", "dq", "dk", "dv")


def mixed_batch(tokens: int) -> Batch:
    """Four sequences of unequal lengths, a mask kind each."""
    a, b, c = tokens // 2, tokens // 4, tokens // 8
    d = tokens - a - b - c
    kinds = [
        masks.causal(a),
        masks.lambda_(b, 64, 512),
        masks.causal_blockwise(c, 128, 1, 2),
        masks.shared_question(*masks.shared_question_split(d)),
    ]
    return Batch([Sequence(mask.q_length, mask) for mask in kinds])


def on_ranks(plan: Plan, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """out, dq, dk, dv of all tokens, in the order of the tensors' rows, by the plan."""
    header = plan.header
    device = tensors[0].device
    q = tensors[0]
    starts = [0]
    lengths = [
        int(header.tokens.stop[header.tokens.sequence == s].max()) for s in range(int(header.tokens.sequence.max()) + 1)
    ]
    for length in lengths:
        starts.append(starts[-1] + length)
    first = torch.tensor(starts)

    def one(transport: LocalTransport) -> tuple[torch.Tensor, list[torch.Tensor]]:
        sequence, position = (torch.from_numpy(x.copy()) for x in header.local_tokens(transport.rank, HAS_Q))
        rows = (first[sequence.long()] + position).to(device)
        mine = [tensor[rows] for tensor in tensors]
        part = plan.rank(transport.rank)
        kernels = prepare(part, "default", "reference", device)
        executor = Executor(part, "default", kernels, transport, Score(1 / math.sqrt(q.shape[2])), 60.0)
        done: Finished = run_forward(executor, *mine[:3], None)
        dq, dk, dv, _ = run_backward(executor, *mine[:3], None, done, mine[3])
        return rows, [done.out, dq, dk, dv]

    results = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in (tensors[3], *tensors[:3])]
    for rows, parts in run_ranks(header.ranks, one):
        for result, part in zip(results, parts, strict=True):
            result[rows] = part.double()
    return results


def dense(batch: Batch, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same by dense attention in fp64, sequence by sequence."""
    parts: list[list[torch.Tensor]] = []
    start = 0
    for sequence in batch.sequences:
        q, k, v, do = (tensor[start : start + sequence.length].double() for tensor in tensors)
        for tensor in (q, k, v):
            tensor.requires_grad_()
        out = dense_attention(q, k, v, sequence.masks["default"])
        parts.append([out.detach(), *torch.autograd.grad(out, (q, k, v), do)])
        start += sequence.length
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    strategies = [s for s in STRATEGIES if s != "dynamic" or importlib.util.find_spec("mtkahypar")]
    batch = mixed_batch(arguments.tokens)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    report = {"device": name, "torch": torch.__version__, "tokens": batch.tokens, "rows": []}
    worst = 0.0
    for dtype in ("float32", "bfloat16"):
        shape = AttentionShape(8, 2, 64, dtype=dtype)
        generator = torch.Generator(device).manual_seed(0)
        heads = (shape.q_heads, shape.kv_heads, shape.kv_heads, shape.q_heads)
        tensors = [
            torch.randn(batch.tokens, h, shape.head_dim, device=device, generator=generator).to(DTYPES[dtype])
            for h in heads
        ]
        wanted = dense(batch, tensors)
        for strategy in strategies:
            for keep in ("none", "kv", "all"):
                made = build(batch, shape, Cluster(2, 2), strategy, Options(block_tokens=512, keep=keep))
                check_plan(made.plan, made.layout.blocks)
                got = on_ranks(made.plan, tensors)
                errors = {n: float((a - b).norm() / b.norm()) for n, a, b in zip(NAMES, got, wanted, strict=True)}
                worst = max(worst, max(errors.values()) / TOLERANCE[dtype])
                report["rows"].append({"dtype": dtype, "strategy": strategy, "keep": keep, **errors})
                print(
                    f"{dtype:9} {strategy:14} {keep:5}",
                    "  ".join(f"{n} {e:.2e}" for n, e in errors.items()),
                    flush=True,
                )
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{name}, torch {torch.__version__}: largest error is {worst:.2f} of the tolerance")
    sys.exit(worst > 1)


if __name__ == "__main__":
    torch.backends.cuda.matmul.allow_tf32 = False
    main()
