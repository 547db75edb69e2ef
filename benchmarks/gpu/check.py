"""Numbers before speed: attention and its gradients against fp64, beside the errors of PyTorch's own kernels.

Every case has inputs of its own, and runs twice: a plan promises the same bits. Memory that our kernels do not write is
full of NaN.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.cases import DENSE, KINDS, Inputs, mask_of, one_rank, random_inputs
from benchmarks.gpu.clock import Deadline
from benchmarks.gpu.compare import compared, reference
from benchmarks.gpu.peers import Contender, Ours, sdpa
from benchmarks.gpu.ranks import check_ranks
from benchmarks.gpu.scale import Scale
from benchmarks.gpu.session import Findings, Row, Session
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.shape import AttentionShape

FUSED = ("SDPA flash", "SDPA cuDNN")  # whose errors ours are held against, the first that runs
HEADS_KINDS = ("causal", "lambda")  # under which all heads and dimensions are checked


class Case(NamedTuple):
    """One thing to check."""

    kind: str
    tokens: int
    block_tokens: int
    shape: AttentionShape

    @property
    def name(self) -> str:
        """All of it in words."""
        shape = self.shape
        dims = f"{shape.head_dim}" if shape.head_dim == shape.value_dim else f"{shape.head_dim}/{shape.value_dim}"
        return f"{self.kind} {self.tokens:,}, {shape.q_heads}/{shape.kv_heads} heads, D {dims}, {shape.dtype}"


def main_cases(scale: Scale) -> list[Case]:
    """All masks."""
    return [Case(kind, scale.check_tokens, scale.check_block, scale.shape) for kind in KINDS]


def other_cases(scale: Scale) -> list[Case]:
    """All masks in other dtypes, at lengths and blocks that are no whole tiles; and all heads and dimensions."""
    base = scale.shape
    small = [AttentionShape(base.q_heads, base.kv_heads, base.head_dim, dtype=dtype) for dtype in scale.small_dtypes]
    shapes = [AttentionShape(*heads, *dims, dtype=base.dtype) for dims in scale.dims for heads in scale.heads]
    return [
        *(Case(kind, scale.small_tokens, scale.small_block, shape) for shape in small for kind in KINDS),
        *(Case(kind, scale.heads_tokens, scale.check_block, shape) for shape in shapes for kind in HEADS_KINDS),
    ]


def check(session: Session, deadline: Deadline, found: Findings) -> None:
    """One rank's attention under all masks; plans with all ranks on the device; then one rank's in other dtypes, heads
    and dimensions. The further kernels come last, and not to those: they compile a lot for each of them."""
    first, *further = session.kernels
    check_masks(session, deadline, found, main_cases(session.scale), (first,))
    check_ranks(session, deadline, found, (first,))
    check_masks(session, deadline, found, other_cases(session.scale), (first,))
    check_masks(session, deadline, found, main_cases(session.scale), further)
    check_ranks(session, deadline, found, further)


def check_masks(
    session: Session, deadline: Deadline, found: Findings, cases: list[Case], kernels: Iterable[str]
) -> None:
    """Cases by our kernels and, without a mask of their own, by PyTorch's."""
    pairs = [(name, case) for name in kernels for case in cases]
    for name, case in deadline.in_time(pairs, lambda pair: f"{pair[0]}, {pair[1].name}", found.left_out):
        mask = mask_of(case.kind, case.tokens)
        seed = zlib.crc32(case.name.encode())
        inputs = random_inputs(case.shape, case.tokens, case.tokens, session.device, seed)
        wanted = reference(Batch([Sequence(case.tokens, mask)]), inputs)
        row = errors_of(case, Ours(name, one_rank(mask, case.shape, case.block_tokens), name), inputs, wanted)
        peers = peer_rows(case, inputs, wanted) if case.kind in DENSE else []
        found.rows += [row | ratio(row, peers), *peers]


def errors_of(case: Case, contender: Contender, inputs: Inputs, wanted: list[Tensor]) -> Row:
    """One contender on one case."""
    row: Row = {"case": case.name, "dtype": case.shape.dtype, "contender": contender.name, "peer": contender.is_peer}
    return compared(row, partial(results, contender, inputs), wanted, poison=not contender.is_peer)


def results(contender: Contender, inputs: Inputs) -> list[Tensor]:
    """Output and gradients, as `[tokens, heads, dim]`."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    out = contender.attend(*(contender.arrange(leaf) for leaf in leaves))
    gradients = torch.autograd.grad(out, leaves, contender.arrange(inputs.do))
    out = out.detach()
    return [out.squeeze(0).transpose(0, 1) if out.dim() == 4 else out, *gradients]


def peer_rows(case: Case, inputs: Inputs, wanted: list[Tensor]) -> list[Row]:
    """The fused kernels that take the case; plain maths where there are none."""
    rows: list[Row] = []
    for name in (*FUSED, "SDPA math"):
        if name in FUSED or all("error" in row for row in rows):
            rows.append(errors_of(case, sdpa(name, case.kind == "causal", inputs), inputs, wanted))
    return rows


def ratio(row: Row, peers: list[Row]) -> Row:
    """The largest of our errors over those of the first fused kernel that ran."""
    ran = [peer for peer in peers if "errors" in peer and peer["contender"].startswith(FUSED)]
    if not ran or "errors" not in row:
        return {}
    of_peer = ran[0]["errors"]
    parts = [error / max(of_peer[name], 1e-30) for name, error in row["errors"].items()]
    return {"ratio": max(parts) if all(map(math.isfinite, parts)) else math.inf, "ratio_to": ran[0]["contender"]}
