"""What is right, and how wrong something is.

An error is the norm of the difference over the norm of what is right; what is not a finite number is infinitely wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.gpu.cases import Inputs
from benchmarks.gpu.session import Row
from dyncp.ir.batch import Batch
from dyncp.runtime.dense import dense_attention
from dyncp.verify import TOLERANCE, worse

NAMES = ("out", "dq", "dk", "dv")


def reference(batch: Batch, inputs: Inputs) -> list[Tensor]:
    """Output and gradients of sequences that lie one behind the other, in fp64, a chunk of rows at a time."""
    lengths = [sequence.length for sequence in batch.sequences]
    split = zip(*(tensor.double().split(lengths) for tensor in inputs), strict=True)
    parts = []
    for sequence, (q, k, v, do) in zip(batch.sequences, split, strict=True):
        leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        (mask,) = sequence.masks.values()
        out = dense_attention(*leaves, mask)
        parts.append([out.detach(), *torch.autograd.grad(out, leaves, do)])
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def compared(row: Row, run: Callable[[], Sequence[Tensor]], wanted: Sequence[Tensor], poison: bool) -> Row:
    """A row with what comes of a run: its errors, whether they are within the tolerance of the row's dtype, and whether
    a second run gives the same bits; or why there is no result.

    Args:
        row: what is run.
        run: gives output and gradients.
        wanted: the right ones.
        poison: whether memory that is allocated without values is full of NaN.
    """
    try:
        with poisoned() if poison else contextlib.nullcontext():
            got, again = run(), run()
    except Exception as error:  # noqa: BLE001 whatever a kernel or its compiler raises, the other cases run
        return {**row, "error": reason(error), "ok": False}
    pairs = zip(NAMES, got, wanted, strict=True)
    errors = {name: worse(0.0, float((a.double() - b).norm() / b.norm())) for name, a, b in pairs}
    part = max(errors.values()) / TOLERANCE[row["dtype"]]
    same = all(torch.equal(one, other) for one, other in zip(got, again, strict=True))
    return {**row, "errors": errors, "of_tolerance": part, "ok": part <= 1, "same_bits": same}


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory that is allocated without values is full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # without it nothing is filled
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def reason(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"
