"""Batches as the originals run them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import SHAPE, causal_batch

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.strategies import STRATEGIES, build
from dyncp.strategies.api import Options
from dyncp.strategies.padding import as_run
from dyncp.verify import Case, Tensors, run_plan, verify

CLUSTER = Cluster(2, 2)
BATCH = Batch(
    [
        Sequence(60, {"a": masks.causal(60), "b": masks.sliding_window(60, 9)}),
        Sequence(23, {"a": masks.causal(23), "b": masks.full(23)}),
        Sequence(1, {"a": masks.causal(1), "b": masks.lambda_(1, 1, 1)}),
        Sequence(9, {"a": masks.full(9, 30), "b": masks.causal(9, 30)}, 30),
    ],
    {"a": 3.0},
)


def test_all_others_run_the_batch_itself():
    for strategy in STRATEGIES:
        assert (as_run(BATCH, strategy) is BATCH) == (strategy != "double_ring")
    with pytest.raises(ValueError, match="unknown strategy 'spiral'"):
        as_run(BATCH, "spiral")


def test_every_sequence_is_as_long_as_the_longest():
    padded = as_run(BATCH, "double_ring")
    assert [sequence.length for sequence in padded.sequences] == [60] * 4
    assert [sequence.kv_length for sequence in padded.sequences] == [None] * 3 + [30]
    assert padded.weights == BATCH.weights
    assert padded.sequences[1].masks["a"] == masks.causal(60)
    assert padded.sequences[1].masks["b"].pairs() == 23 * 23
    assert padded.sequences[3].masks["b"].pairs() == masks.causal(9, 30).pairs()


def test_padding_is_counted():
    batch = causal_batch(64, 32, 16)
    plain, padded = (build(one, SHAPE, CLUSTER, "double_ring").layout for one in (batch, as_run(batch, "double_ring")))
    assert padded.blocks.tokens.tokens.sum() == 3 * 64
    assert padded.blocks.pairs.sum() == 3 * masks.causal(64).pairs()
    size = [(one.blocks.tokens.tokens[one.schedule.transfers.block]).sum() for one in (plain, padded)]
    assert size[1] * (64 + 32 + 16) == size[0] * 3 * 64


def test_padded_plans_are_right():
    case = Case(as_run(BATCH, "double_ring"), SHAPE, CLUSTER, "double_ring", Options())
    assert max(verify(case).values()) <= case.tolerance


@pytest.mark.parametrize("mask", ["a", "b"])
def test_real_tokens_have_the_results_that_they_have_without_padding(mask):
    """Whatever is in the padding, as long as no gradient enters there."""
    plain = Case(BATCH, SHAPE, CLUSTER, "double_ring", Options())
    padded = replace(plain, batch=as_run(BATCH, "double_ring"))
    rows = {side: real_rows(padded.batch, side) for side in ("length", "keys")}
    generator = torch.Generator().manual_seed(0)
    tokens, keys = (sum(getattr(one, side) for one in padded.batch.sequences) for side in ("length", "keys"))
    sizes = (tokens, 4), (keys, 2), (keys, 2), (tokens, 4)
    q, k, v, out = (torch.randn(*size, 8, generator=generator) for size in sizes)
    here, there = rows["length"], rows["keys"]
    gradient = torch.zeros_like(out)
    gradient[here] = out[here]
    plans = [build(case.batch, SHAPE, CLUSTER, "double_ring").plan for case in (plain, padded)]
    want = run_plan(plans[0], plain, Tensors(q[here], k[there], v[there], out[here], None), mask)
    got = run_plan(plans[1], padded, Tensors(q, k, v, gradient, None), mask)
    for name, which in (("out", here), ("q", here), ("k", there), ("v", there)):
        torch.testing.assert_close(getattr(got, name)[which], getattr(want, name), rtol=1e-4, atol=1e-5)


def real_rows(padded, side):
    """The rows of the tokens that are not padding."""
    sizes = [getattr(one, side) for one in padded.sequences]
    firsts = np.cumsum(sizes) - sizes
    real = [getattr(one, side) for one in BATCH.sequences]
    return torch.from_numpy(np.concatenate([first + np.arange(n) for first, n in zip(firsts, real, strict=True)]))
