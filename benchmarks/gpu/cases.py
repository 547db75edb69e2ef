"""Masks and tensors: what is attended to what, for plans and for FlexAttention alike.

Letters in names: T tokens, H heads, D dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dyncp import masks
from dyncp.bench.corpus import branches, parts_of
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.ir.mask import Mask
from dyncp.ir.plan import RankPlan
from dyncp.ir.shape import AttentionShape
from dyncp.ir.slices import HI, HI_STEP, LO, Q_START, Q_STOP
from dyncp.runtime.buffers import DTYPES
from dyncp.strategies import build
from dyncp.strategies.api import Options

DENSE = ("causal", "full")
SPARSE = ("lambda", "causal_blockwise", "shared_question", "tree", "document")
KINDS = (*DENSE, *SPARSE)
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # FlexAttention's: (batch, head, query, key) -> bool


@cache
def mask_of(kind: str, tokens: int) -> Mask:
    """A mask of one of `KINDS`; windows and blocks are the paper's (section 7), or parts of a short sequence."""
    match kind:
        case "causal":
            return masks.causal(tokens)
        case "full":
            return masks.full(tokens)
        case "lambda":
            return masks.lambda_(tokens, *sink_and_window(tokens))
        case "causal_blockwise":
            return masks.causal_blockwise(tokens, example_tokens(tokens), 1, 2)
        case "shared_question":
            return masks.shared_question(*masks.shared_question_split(tokens))
        case "tree":
            return branches(tokens, Random(0))
        case "document":
            return masks.document(parts_of(tokens, Random(0), max(4, min(1500, tokens // 8)), 1.0))
    raise ValueError(f"unknown mask {kind!r}; choose one of {', '.join(KINDS)}")


def sink_and_window(tokens: int) -> tuple[int, int]:
    """Of the mask `lambda`."""
    return min(64, tokens // 16), max(1, min(4096, tokens // 4))


def example_tokens(tokens: int) -> int:
    """Of each block of the mask `causal_blockwise`."""
    return max(1, min(256, tokens // 16))


def mask_mod(kind: str, tokens: int, device: torch.device) -> MaskMod | None:
    """What FlexAttention calls the same mask; None where it sees everything."""
    match kind:
        case "full":
            return None
        case "causal":
            return lambda b, h, q, k: k <= q
        case "lambda":
            sink, window = sink_and_window(tokens)
            return lambda b, h, q, k: (k <= q) & ((q - k < window) | (k < sink))
        case "causal_blockwise":
            block = example_tokens(tokens)
            reach, last = 2 * block + 1, (tokens - 1) // block * block
            return lambda b, h, q, k: (k <= q) & ((q - k < reach) | (k < block) | (q >= last))
    seen_until = torch.from_numpy(last_rows(mask_of(kind, tokens))).to(device)
    return lambda b, h, q, k: (k <= q) & (q < seen_until[k])


def last_rows(mask: Mask) -> np.ndarray:
    """int64[T]: of each key the end of the rows that see it, which in a prefix tree begin at its own."""
    ends = np.zeros(mask.k_length, np.int64)
    for piece in mask.slices:
        q_start, q_stop, lo = piece[[Q_START, Q_STOP, LO]]
        hi = piece[HI] + piece[HI_STEP] * (q_stop - q_start - 1)
        ends[lo:hi] = np.maximum(ends[lo:hi], q_stop)
    return ends


@lru_cache(maxsize=8)  # its passes share what is made ready for a device
def one_rank(mask: Mask, shape: AttentionShape, block_tokens: int, copies: int = 1) -> RankPlan:
    """The part of the only rank of a plan for one sequence, or several alike, cut into blocks of `block_tokens`.

    With other keys than queries, or more than one sequence, keys are tokens of their own (cross-attention).
    """
    apart = copies > 1 or mask.q_length != mask.k_length
    sequence = Sequence(mask.q_length, mask, mask.k_length if apart else None)
    options = Options(block_tokens=block_tokens)
    return build(Batch([sequence] * copies), shape, Cluster(1, 1), "data_parallel", options).plan.rank(0)


def unprepared(part: RankPlan) -> RankPlan:
    """The same part of a plan, of which nothing has been made ready for a device."""
    return replace(part, programs=tuple(replace(program) for program in part.programs))


class Inputs(NamedTuple):
    """What attention and its backward are given."""

    q: Tensor  # [T, q_heads, D]
    k: Tensor  # [Tk, kv_heads, D]
    v: Tensor  # [Tk, kv_heads, Dv]
    do: Tensor  # [T, q_heads, Dv]

    @property
    def size_bytes(self) -> int:
        """Of all of them."""
        return sum(tensor.nbytes for tensor in self)


def random_inputs(shape: AttentionShape, q_tokens: int, kv_tokens: int, device: torch.device, seed: int) -> Inputs:
    """Normally distributed, in the dtype of the shape."""
    generator = torch.Generator(device).manual_seed(seed)
    sizes = (
        (q_tokens, shape.q_heads, shape.head_dim),
        (kv_tokens, shape.kv_heads, shape.head_dim),
        (kv_tokens, shape.kv_heads, shape.value_dim),
        (q_tokens, shape.q_heads, shape.value_dim),
    )
    dtype = DTYPES[shape.dtype]
    return Inputs(*(torch.randn(size, device=device, generator=generator).to(dtype) for size in sizes))


def useful_flops(mask: Mask, shape: AttentionShape, backward: bool) -> float:
    """Of the pairs that the mask shows: two matrix products in the forward, five in the backward."""
    forward = 2 * mask.pairs() * (shape.head_dim + shape.value_dim) * shape.q_heads
    return forward * (2.5 if backward else 1.0)
