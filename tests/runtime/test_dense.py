"""The oracle itself, against torch's attention in fp64 and against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import random_mask
from torch.nn.functional import scaled_dot_product_attention

from dyncp import masks
from dyncp.runtime.dense import dense_attention


def random_qkv(rows: int, keys: int, q_heads: int = 4, kv_heads: int = 2, dim: int = 4, value_dim: int = 6):
    g = torch.Generator().manual_seed(0)
    sizes = (rows, q_heads, dim), (keys, kv_heads, dim), (keys, kv_heads, value_dim)
    return [torch.randn(size, generator=g, dtype=torch.float64, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("scale", [None, 0.3])
def test_equals_torch(scale):
    q, k, v = random_qkv(30, 50)
    mask = masks.causal(50).crop(20, 50, 0, 50)
    got = dense_attention(q, k, v, mask, scale=scale)
    heads_first = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    seen = torch.from_numpy(mask.dense())
    want = scaled_dot_product_attention(*heads_first, attn_mask=seen, scale=scale, enable_gqa=True)
    torch.testing.assert_close(got, want[0].transpose(0, 1))


def test_gradients_with_softcap_sinks_and_blind_rows():
    q, k, v = random_qkv(5, 6, 2, 1, 2, 2)
    dense = random_mask(np.random.default_rng(1), 5, 6).dense()
    dense[2] = False
    sinks = torch.tensor([-0.5, 1.0], dtype=torch.float64, requires_grad=True)
    seen = torch.from_numpy(dense)
    assert torch.autograd.gradcheck(lambda *a: dense_attention(*a[:3], seen, None, 1.5, a[3]), (q, k, v, sinks))


def test_a_row_that_sees_nothing_is_zero():
    q, k, v = random_qkv(4, 4)
    seen = torch.eye(4, dtype=torch.bool)
    seen[1] = False
    for sinks in (None, torch.zeros(4, dtype=torch.float64)):
        out = dense_attention(q, k, v, seen, sinks=sinks)
        assert out[1].eq(0).all()
        (gradient,) = torch.autograd.grad(out.sum(), q)
        assert gradient[1].eq(0).all()


def test_a_sink_takes_its_share():
    q, k, v = (torch.zeros(1, 1, 2), torch.zeros(3, 1, 2), torch.ones(3, 1, 2))
    out = dense_attention(q, k, v, masks.full(1, 3), sinks=torch.zeros(1))
    torch.testing.assert_close(out, torch.full((1, 1, 2), 0.75))


def test_chunks_of_rows_change_nothing(monkeypatch):
    q, k, v = random_qkv(40, 40)
    mask = masks.lambda_(40, 3, 9)
    whole = dense_attention(q, k, v, mask)
    want = torch.autograd.grad(whole.square().sum(), (q, k, v))
    monkeypatch.setattr("dyncp.runtime.dense.CHUNK_SCORES", 7 * 40 * 2)
    for form in (mask, torch.from_numpy(mask.dense())):
        chunked = dense_attention(q, k, v, form)
        torch.testing.assert_close(chunked, whole)
        for got, right in zip(torch.autograd.grad(chunked.square().sum(), (q, k, v)), want, strict=True):
            torch.testing.assert_close(got, right)
