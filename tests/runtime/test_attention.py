"""The public call: every strategy against dense attention, and how it behaves under autograd."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from builders import SHAPE, causal_batch, planned, random_batch, random_layout
from runtime.compare import (
    TOLERANCE,
    assert_close,
    dense,
    distributed,
    gather,
    random_tensors,
)
from torch.utils.checkpoint import checkpoint

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.blocks import HAS_KV, HAS_Q
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import KEEP, WIRE
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.attention import attention
from dyncp.runtime.transports.local import LocalWorld, run_ranks
from dyncp.strategies import STRATEGIES, lower_layout
from dyncp.strategies.api import Options


def mixed_batch() -> Batch:
    """Lengths and masks of all sorts: one token, many blocks, rows that see nothing."""
    return Batch(
        [
            Sequence(61, masks.causal(61)),
            Sequence(1, masks.full(1)),
            Sequence(40, masks.lambda_(40, 3, 9)),
            Sequence(23, masks.from_slices(23, 23, [[4, 9, 2, 20, "full"], [12, 23, 0, 23, "causal"]])),
            Sequence(30, masks.shared_question(7, [10, 13])),
        ]
    )


@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_equal_dense_attention(strategy, keep):
    batch = mixed_batch()
    tensors = random_tensors(batch, SHAPE)
    plan = planned(batch, 4, strategy, keep=keep).plan
    assert_close(distributed(tensors, plan), dense(tensors), TOLERANCE["float32"])


@pytest.mark.parametrize("wire", WIRE)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_values_of_another_width_softcap_and_sinks(strategy, wire):
    batch, shape = mixed_batch(), AttentionShape(6, 2, 16, 8, "bfloat16")
    tensors = random_tensors(batch, shape)
    plan = planned(batch, 3, strategy, shape, wire=wire).plan
    settings = {"softcap": 4.0, "sinks": torch.linspace(-1, 2, 6), "scale": 0.2}
    assert_close(distributed(tensors, plan, **settings), dense(tensors, **settings), TOLERANCE["bfloat16"])


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kernels", ["reference", "torch_cpu"])
def test_random_batches(seed, kernels):
    batch = random_batch(np.random.default_rng(seed))
    tensors = random_tensors(batch, SHAPE, seed)
    strategy = ("ring", "zigzag")[seed % 2]
    plan = planned(batch, 1 + seed % 5, strategy).plan
    assert_close(distributed(tensors, plan, kernels=kernels), dense(tensors), TOLERANCE["float32"])


@pytest.mark.parametrize("seed", range(9))
def test_any_placement_of_self_and_cross_attention(seed):
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, cross=True)
    cluster = Cluster(1 + seed % 2, int(rng.integers(1, 4)))
    options = Options(block_tokens=9, divisions=3, keep=list(KEEP)[seed % 3])
    layout = random_layout(rng, batch, cluster, options)
    plan = lower_layout(layout, batch, SHAPE, cluster, "random", options)
    tensors = random_tensors(batch, SHAPE, seed)
    assert_close(distributed(tensors, plan), dense(tensors), TOLERANCE["float32"])


def test_more_ranks_than_blocks():
    batch = causal_batch(3, 2)
    plan = planned(batch, 6, "data_parallel").plan
    assert any(len(plan.header.owned(rank)) == 0 for rank in range(6))
    tensors = random_tensors(batch, SHAPE)
    assert_close(distributed(tensors, plan), dense(tensors), TOLERANCE["float32"])


def test_named_masks():
    batch = Batch([Sequence(50, {"window": masks.sliding_window(50, 7), "global": masks.causal(50)})])
    plan, tensors = planned(batch).plan, random_tensors(batch, SHAPE)
    for mask in ("window", "global"):
        assert_close(distributed(tensors, plan, mask=mask), dense(tensors, mask), TOLERANCE["float32"])
    with pytest.raises(ValueError, match=r"the plan has masks window, global; say which with mask=\.\.\."):
        distributed(tensors, plan)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_same_plan_same_bits(strategy):
    batch = mixed_batch()
    tensors, plan = random_tensors(batch, SHAPE), planned(batch, 4, strategy).plan
    first, second = distributed(tensors, plan), distributed(tensors, plan)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_is_kept_changes_no_bit():
    batch = mixed_batch()
    tensors = random_tensors(batch, SHAPE)
    none, *others = (distributed(tensors, planned(batch, 4, "zigzag", keep=keep).plan) for keep in KEEP)
    assert all(torch.equal(none[name], other[name]) for other in others for name in none)


def test_rows_that_see_nothing_are_zero():
    batch = Batch([Sequence(20, masks.from_slices(20, 20, [[10, 20, 0, 5, "full"]]))])
    tensors = random_tensors(batch, SHAPE)
    for sinks in (None, torch.zeros(4)):
        got = distributed(tensors, planned(batch, 2, "ring").plan, sinks=sinks)
        assert got["out"][:10].eq(0).all()
        assert got["dq"][:10].eq(0).all()
        assert got["dk"][5:].eq(0).all()
        assert all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("kernels", ["reference", "torch_cpu"])
def test_scores_with_a_large_common_part(kernels):
    """The range that `attention` states; its hardest case, since the common part of the keys cancels in dQ."""
    batch = causal_batch(200, 30)
    tensors = random_tensors(batch, SHAPE)
    along = torch.full((SHAPE.head_dim,), SHAPE.head_dim**-0.5)
    for tensor, size in ((tensors.q, SHAPE.head_dim**0.5), (tensors.k, 20.0)):  # 20 after the scale
        tensor += (size - tensor @ along).unsqueeze(2) * along
    assert_close(distributed(tensors, planned(batch, 3).plan, kernels=kernels), dense(tensors), TOLERANCE["float32"])


# Under autograd


def own_tensors(tensors, plan, rank):
    q_rows, k_rows = tensors.rows(plan, rank, HAS_Q), tensors.rows(plan, rank, HAS_KV)
    leaves = (
        tensor[rows].requires_grad_()
        for tensor, rows in zip((tensors.q, tensors.k, tensors.v), (q_rows, k_rows, k_rows), strict=True)
    )
    return (*leaves, tensors.do[q_rows])


def run_variant(batch, call, **options):
    """Output and gradients where `call(q, k, v, do, plan, transport)` runs both passes and returns the output; and
    those of a plain call."""
    tensors, plan = random_tensors(batch, SHAPE), planned(batch, **options).plan

    def run(transport):
        q, k, v, do = own_tensors(tensors, plan, transport.rank)
        out = call(q, k, v, do, plan, transport)
        return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}

    return gather(tensors, plan, run_ranks(plan.header.ranks, run)), distributed(tensors, plan)


def assert_same_bits(got, want):
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant, keep):
    def call(q, k, v, do, plan, transport):
        def layer(q, k, v):  # twice, so that what is saved has to be made again
            first = attention(q, k, v, plan, transport)
            return attention(first, k, v, plan, transport)

        plain = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        want = layer(*plain)
        want.backward(do)
        out = checkpoint(layer, q, k, v, use_reentrant=use_reentrant)
        out.backward(do)
        assert torch.equal(out, want)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip((q, k, v), plain, strict=True))
        return out

    run_variant(causal_batch(50, 9), call, ranks=3, keep=keep)


def test_kept_memory_is_dropped_by_checkpointing():
    """Whatever lives from forward to backward is a saved tensor, which checkpointing can see."""
    plan, saved = planned(causal_batch(40), 2, "ring", keep="all").plan, []

    def call(transport):
        q, k, v, do = own_tensors(random_tensors(causal_batch(40), SHAPE), plan, transport.rank)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            attention(q, k, v, plan, transport).backward(do)

    run_ranks(2, call)
    kept = [tensor for tensor in saved if tensor.dtype == torch.uint8]
    assert sorted(map(len, kept)) == sorted(programs[0].forward.kept_bytes for programs in plan.programs)
    assert all(len(tensor) for tensor in kept)


def test_two_plans_at_once_and_backwards_interleaved():
    batches = causal_batch(50, 9), mixed_batch()
    plans = [planned(batch, 3, strategy).plan for batch, strategy in zip(batches, ("zigzag", "ring"), strict=True)]
    tensors = [random_tensors(batch, SHAPE) for batch in batches]

    def run(transport):
        own = [own_tensors(t, plan, transport.rank) for t, plan in zip(tensors, plans, strict=True)]
        outs = [attention(*qkvdo[:3], plan, transport) for qkvdo, plan in zip(own, plans, strict=True)]
        outs += [attention(*qkvdo[:3], plan, transport) for qkvdo, plan in zip(own, plans, strict=True)]
        for number in (1, 2, 0, 3):
            outs[number].backward(own[number % 2][3])
        return [
            {"out": out.detach(), "dq": q.grad / 2, "dk": k.grad / 2, "dv": v.grad / 2}
            for out, (q, k, v, _) in zip(outs, own, strict=False)
        ]

    results = run_ranks(3, run)
    for number in range(2):
        got = gather(tensors[number], plans[number], [result[number] for result in results])
        assert_same_bits(got, distributed(tensors[number], plans[number]))


def test_inputs_need_not_be_contiguous():
    def call(q, k, v, do, plan, transport):
        fused = torch.cat([q, k, v], dim=1)  # [T, all heads, D], as a fused projection gives it
        views = fused.split([q.shape[1], k.shape[1], v.shape[1]], dim=1)
        out = attention(*views, plan, transport)
        transposed = [tensor.transpose(0, 2).contiguous().transpose(0, 2) for tensor in views]
        assert torch.equal(attention(*transposed, plan, transport), out)
        (out * do).sum().backward()
        return out

    assert_same_bits(*run_variant(causal_batch(50, 9), call))


def test_gradients_of_some_inputs_only():
    def call(q, k, v, do, plan, transport):
        out = attention(q.detach(), k, v.detach(), plan, transport)
        out.backward(do)
        q.grad, v.grad = torch.zeros_like(q), torch.zeros_like(v)
        return out

    got, want = run_variant(causal_batch(50, 9), call)
    assert torch.equal(got["dk"], want["dk"])


def test_an_expanded_gradient():
    def call(q, k, v, do, plan, transport):
        out = attention(q, k, v, plan, transport)
        out.sum().backward()
        again = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        attention(*again, plan, transport).backward(torch.ones_like(do))
        assert all(torch.equal(a.grad, b.grad) for a, b in zip((q, k, v), again, strict=True))
        return out

    run_variant(causal_batch(50, 9), call)


def test_no_grad_and_autocast():
    def call(q, k, v, do, plan, transport):
        want = attention(q, k, v, plan, transport)
        with torch.no_grad():
            out = attention(q, k, v, plan, transport)
        assert not out.requires_grad
        assert torch.equal(out, want)
        explicit = {"kernels": "reference", "softcap": 2.0}
        in_fp32 = attention(q, k, v, plan, transport, **explicit)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # what the plan keeps in fp32 stays in fp32
            assert torch.equal(attention(q, k, v, plan, transport, **explicit), in_fp32)
            out = attention(q, k, v, plan, transport)
            out.backward(do)
        assert torch.equal(out, want)
        return out

    assert_same_bits(*run_variant(causal_batch(50, 9), call))


def test_second_derivatives_are_refused():
    plan = planned(causal_batch(8), 1).plan
    q, k, v, _ = own_tensors(random_tensors(causal_batch(8), SHAPE), plan, 0)
    (dq,) = torch.autograd.grad(attention(q, k, v, plan).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


# Bad input


def call(q=(40, 4, 8), k=(40, 2, 8), v=(40, 2, 8), dtype=torch.float32, ranks=1, transport=None, plan=None, **settings):
    plan = plan or planned(causal_batch(40), ranks).plan
    tensors = [np.zeros(1) if size is None else torch.zeros(size, dtype=dtype) for size in (q, k, v)]
    return attention(*tensors, plan, transport, **settings)


def test_one_rank_needs_no_group():
    assert call().shape == (40, 4, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"q": (39, 4, 8)},
            r"q is \[39, 4, 8\], but the plan wants \[tokens, heads, dim\] = \[40, 4, 8\] on rank 0: give it",
        ),
        ({"k": (40, 4, 8)}, r"k is \[40, 4, 8\], but the plan wants \[tokens, heads, dim\] = \[40, 2, 8\]"),
        ({"v": (40, 2, 6)}, r"v is \[40, 2, 6\], .*plan with the AttentionShape of the layer"),
        (
            {"dtype": torch.bfloat16},
            r"q is torch\.bfloat16, but the plan is for float32: cast it, or plan for its dtype",
        ),
        ({"sinks": torch.zeros(3)}, r"sinks is torch\.float32 \[3\] on cpu; expected one logit per .* \[4\] on cpu"),
        ({"mask": "window"}, r"no mask 'window' in this plan; it has default"),
        ({"kernels": "fast"}, r"unknown kernels 'fast'; choose one of auto, reference, torch_cpu"),
        ({"q": None}, r"q is of type ndarray; expected a torch\.Tensor"),
        ({"sinks": [0.0] * 4}, r"sinks is of type list; expected one logit per query head, a floating-point tensor"),
        ({"sinks": torch.zeros(4, dtype=torch.int32)}, r"sinks is torch\.int32 \[4\] on cpu; expected .* \[4\] on cpu"),
        *(
            ({name: value}, rf"{name} is {got}; expected .*{wanted}")
            for name, wanted, bad in (
                ("scale", r"a finite number, or None for 1 / sqrt\(head_dim\); to learn", ()),
                ("softcap", "a positive finite number, or None for no cap", (0.0, -1.0, 1e-40)),
                ("timeout_s", r"seconds, above 0 and at most 1e\+09", (None, 0, -1.0, 1e300)),
            )
            for value, got in (
                *((number, re.escape(repr(number))) for number in (float("inf"), float("nan"), True, "1", *bad)),
                (torch.tensor(0.5, requires_grad=True), "of type Tensor"),
                ([1.0], "of type list"),
            )
        ),
        ({"plan": b"dyncp"}, r"plan is of type bytes; expected a Plan or a RankPlan: decode bytes with"),
        ({"transport": -100}, r"group is -100; expected a process group that this process is in: new_group gives"),
        ({"transport": "world"}, r"group is 'world'; expected a process group"),
        ({"ranks": 2}, r"the plan is for 2 ranks, but torch\.distributed is not initialized: call"),
        (
            {"ranks": 2, "transport": LocalWorld(3).transport(0)},
            r"the plan is for 2 ranks, but the group has 3: plan for",
        ),
        (
            {"plan": planned(causal_batch(40), 2).plan.rank(0), "transport": LocalWorld(2).transport(1)},
            r"got rank 0's part of the plan on rank 1 of the group; use plan\.rank\(1\)",
        ),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises(ValueError, match=message):
        call(**changes)
