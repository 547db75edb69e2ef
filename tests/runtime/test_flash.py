"""Kernels on FlashAttention, with a stand-in for its operators, which run on CUDA only."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from builders import causal_batch, planned, random_batch, random_mask
from hypothesis import given
from hypothesis import strategies as st
from runtime.block_plan import block_plan
from runtime.compare import TOLERANCE, assert_close, dense, distributed, random_tensors, relative_error

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.mask import Mask
from dyncp.ir.plan import Attention
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.kernels import api
from dyncp.runtime.kernels.flash import TORCH_OPS, Flash, FlashOps, Form, form_of, other_kernels
from dyncp.runtime.kernels.reference import Reference
from dyncp.runtime.prepare import prepared_for

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 8, dtype="float32")


def arguments_of(operator, *given, **named):
    """The arguments by name, checked as PyTorch checks those of its operator."""
    schema = operator.default._schema
    names = [argument.name for argument in schema.arguments]
    values = dict(zip(names, given, strict=False)) | named
    assert set(values) <= set(names)
    for argument in schema.arguments:
        assert argument.name in values or argument.has_default_value(), argument.name
        if "Tensor" in str(argument.type) and values.get(argument.name) is not None:
            assert values[argument.name].stride(-1) == 1
    return values


def sequences_of(values):
    """(rows, keys, visible pairs) of each sequence."""
    q_bounds, k_bounds = (values[name] for name in ("cum_seq_q", "cum_seq_k"))
    assert q_bounds.dtype == k_bounds.dtype == torch.int32
    assert (q_bounds.diff().max(), k_bounds.diff().max()) == (values["max_q"], values["max_k"])
    assert (q_bounds[-1], k_bounds[-1]) == (len(values["query"]), len(values["key"]))
    assert values["dropout_p"] == 0.0
    for i in range(len(q_bounds) - 1):
        rows, keys = slice(*q_bounds[i : i + 2].tolist()), slice(*k_bounds[i : i + 2].tolist())
        shape = rows.stop - rows.start, keys.stop - keys.start
        # FlashAttention counts the diagonal from the last row and the last key.
        pairs = torch.ones(shape, dtype=torch.bool)
        yield rows, keys, pairs.tril(shape[1] - shape[0]) if values["is_causal"] else pairs


def probabilities(values, rows, keys, pairs):
    """Scores [H, Q, K] and what they are made of, in fp32."""
    q, k, v = (values[name].float() for name in ("query", "key", "value"))
    q_HQD, k_1KD, v_1KD = q[rows].transpose(0, 1), k[keys].transpose(0, 1), v[keys].transpose(0, 1)
    scores = (q_HQD @ k_1KD.transpose(1, 2)) * values["scale"]
    return scores.masked_fill(~pairs, -torch.inf), q_HQD, k_1KD, v_1KD


def dense_forward(*given, **named):
    values = arguments_of(TORCH_OPS.forward, *given, **named)
    out = torch.empty_like(values["query"])
    lse = out.new_empty(out.shape[:2], dtype=torch.float32).t().contiguous()
    for rows, keys, pairs in sequences_of(values):
        scores, _, _, v = probabilities(values, rows, keys, pairs)
        out[rows] = (scores.softmax(2) @ v).transpose(0, 1).to(out.dtype)
        lse[:, rows] = scores.logsumexp(2)
    return out, lse, torch.empty(2), torch.empty(0), torch.empty(0)


def dense_backward(*given, **named):
    values = arguments_of(TORCH_OPS.backward, *given, **named)
    lse, do, out = values["logsumexp"], values["grad_out"], values["out"]
    assert lse.is_contiguous()
    assert out.dtype == values["query"].dtype
    dq, dk, dv = (torch.empty_like(values[name]) for name in ("query", "key", "value"))
    for rows, keys, pairs in sequences_of(values):
        scores, q, k, v = probabilities(values, rows, keys, pairs)
        do_HQD = do[rows].float().transpose(0, 1)
        delta = (do_HQD * out[rows].float().transpose(0, 1)).sum(2, keepdim=True)
        p = (scores - lse[:, rows].unsqueeze(2)).exp()
        ds = p * (do_HQD @ v.transpose(1, 2) - delta) * values["scale"]
        dq[rows] = (ds @ k).transpose(0, 1).to(dq.dtype)
        dk[keys] = (ds.transpose(1, 2) @ q).sum(0).unsqueeze(1).to(dk.dtype)
        dv[keys] = (p.transpose(1, 2) @ do_HQD).sum(0).unsqueeze(1).to(dv.dtype)
    return dq, dk, dv


DENSE_OPS = FlashOps(dense_forward, dense_backward, (torch.float16, torch.bfloat16, torch.float32))


class Counting(Reference):
    """`Reference`, that counts the divisions that are left to it."""

    divisions = 0

    def attend(self, buffers, instruction, score):
        Counting.divisions += 1
        super().attend(buffers, instruction, score)


@pytest.fixture(autouse=True, scope="module")
def dense_flash():
    """`kernels="flash"` on the CPU."""
    factory = partial(Flash, ops=DENSE_OPS, others=Counting)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dyncp.runtime.prepare.choose_kernels", lambda *_: factory)
        yield


def left_to_others(tensors, plan, **settings):
    """Output and gradients, compared with dense attention; and how many forward divisions others have computed."""
    Counting.divisions = 0
    got = distributed(tensors, plan, kernels="flash", **settings)
    assert_close(got, dense(tensors, **settings), TOLERANCE[plan.header.shape.dtype])
    return Counting.divisions


def compare(mask: Mask, cuts: list[int], shape: AttentionShape, seed: int = 0, **settings) -> int:
    batch = Batch([Sequence(mask.q_length, mask, kv_length=mask.k_length)])
    return left_to_others(random_tensors(batch, shape, seed), block_plan(mask, cuts, shape), **settings)


shapes = st.builds(
    lambda groups, heads, dim: AttentionShape(groups * heads, groups, 8 * dim, dtype="float32"),
    *(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2)),
)


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    cuts=st.lists(st.integers(1, 39), max_size=3),
    shape=shapes,
    softcap=st.sampled_from([None, None, 5.0]),
)
def test_any_mask_any_shape(seed, lengths, cuts, shape, softcap):
    mask = random_mask(np.random.default_rng(seed), *lengths)
    compare(mask, cuts, shape, seed % 1000, softcap=softcap)


@given(rows=st.integers(1, 40), keys=st.integers(1, 40), cuts=st.lists(st.integers(1, 39), max_size=3), shape=shapes)
def test_full_blocks_of_any_size(rows, keys, cuts, shape):
    assert compare(masks.full(rows, keys), cuts, shape) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    assert compare(masks.full(90, 200), [70, 150], AttentionShape(4, 2, 16, dtype=dtype)) == 0
    assert compare(masks.causal(90), [], AttentionShape(4, 2, 16, dtype=dtype)) == 0


@pytest.mark.parametrize("strategy", ["ring", "zigzag", "allgather", "ulysses", "data_parallel", "dynamic"])
def test_whole_plans(strategy):
    """Divisions with many blocks, of one head group and of several, on several ranks."""
    batch = causal_batch(64, 32, 8)
    plan = planned(batch, 2, strategy).plan
    assert left_to_others(random_tensors(batch, SHAPE), plan) == 0


def test_two_causal_blocks_of_the_same_keys():
    mask = masks.from_slices(16, 16, [[0, 8, 0, 8, "causal"], [8, 16, 0, 8, "causal"]])
    batch = Batch([Sequence(16, mask)])
    assert left_to_others(random_tensors(batch, SHAPE), planned(batch, 1, "data_parallel").plan) == 0


@given(seed=st.integers(0, 2**32 - 1))
def test_any_batch(seed):
    batch = random_batch(np.random.default_rng(seed), cross=True)
    left_to_others(random_tensors(batch, SHAPE), planned(batch, 2, "zigzag").plan)


OTHERS = {
    "softcap": (masks.full(40), SHAPE, {"softcap": 3.0}),
    "scale of 0": (masks.full(40), SHAPE, {"scale": 0.0}),
    "negative scale": (masks.full(40), SHAPE, {"scale": -0.3}),
    "a mask": (masks.sliding_window(40, 7), SHAPE, {}),
    "rows that see nothing": (masks.from_slices(40, 40, [[3, 40, 0, 40, "full"]]), SHAPE, {}),
    "causal, fewer keys": (masks.causal(40).crop(0, 40, 0, 30), SHAPE, {}),
    "causal, more keys": (masks.causal(40).crop(10, 40, 0, 40), SHAPE, {}),
    "narrower values": (masks.full(40), AttentionShape(4, 2, 16, 8, "float32"), {}),
    "an odd head dim": (masks.full(40), AttentionShape(4, 2, 12, dtype="float32"), {}),
    "too wide a head": (masks.full(40), AttentionShape(1, 1, 264, dtype="float32"), {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_left_to_others(name):
    mask, shape, settings = OTHERS[name]
    assert compare(mask, [], shape, **settings) == shape.groups


def test_fp32_is_left_to_others():
    plan = block_plan(masks.full(40), [], SHAPE)
    assert Flash(plan.header, plan.programs[0][0], CPU, others=Reference)._calls == {}


def test_a_bad_gradient_stays_in_its_row():
    mask = masks.causal(40)
    tensors = random_tensors(Batch([Sequence(40, mask, kv_length=40)]), SHAPE)
    want = distributed(tensors, block_plan(mask, [], SHAPE), kernels="flash")
    tensors.do[7, 1, 3] = torch.nan
    got = distributed(tensors, block_plan(mask, [], SHAPE), kernels="flash")
    assert not got["dq"][7, 1].isfinite().any()
    got["dq"][7, 1] = want["dq"][7, 1]
    assert torch.equal(got["dq"], want["dq"])


@pytest.mark.parametrize("ratio", [1e-15, 1e-36])
def test_backward_of_rows_of_any_size_beside_each_other(ratio):
    mask = masks.causal(40)
    tensors = random_tensors(Batch([Sequence(40, mask, kv_length=40)]), SHAPE)
    size = torch.ones(40, 1, 1)
    size[1::2] = ratio
    tensors.do *= size
    got, want = distributed(tensors, block_plan(mask, [], SHAPE), kernels="flash"), dense(tensors)
    for rows in (slice(0, None, 2), slice(1, None, 2)):
        assert relative_error((got["dq"] / size)[rows], (want["dq"] / size)[rows]) < 1e-5


def calls_of(plan, rank=0):
    """The calls of each forward division."""
    program = plan.programs[rank][0]
    kernels = Flash(plan.header, program, CPU, DENSE_OPS, Reference)
    return [kernels._calls[part] for part in program.forward.instructions if isinstance(part, Attention)]


def test_query_blocks_that_see_the_same_keys_are_one_sequence():
    batch = causal_batch(64)
    second = calls_of(planned(batch, 2, "zigzag", AttentionShape(2, 1, 8, dtype="float32")).plan, rank=1)[1]
    (call,) = second  # all blocks from the other rank are full
    assert not call.is_causal
    assert len(call.queries.bounds) - 1 < len(call.queries.rows)
    shared = calls_of(planned(Batch([Sequence(64, masks.full(64))]), 1, "data_parallel").plan)[0]
    assert [part.bounds.tolist() for part in (shared[0].queries, shared[0].keys)] == [[0, 64, 128]] * 2


def test_two_calls_at_most():
    (division,) = calls_of(planned(causal_batch(64), 1, "data_parallel").plan)
    assert [call.is_causal for call in division] == [False, True]


@pytest.mark.parametrize(
    ("mask", "form"),
    [
        (masks.full(5, 7), Form.FULL),
        (masks.causal(5), Form.CAUSAL),
        (masks.full(1), Form.FULL),
        (masks.causal(5).crop(0, 5, 0, 3), Form.OTHER),
        (masks.causal(5).crop(2, 5, 0, 5), Form.OTHER),
        (masks.sliding_window(5, 2), Form.OTHER),
        (masks.from_slices(5, 5, []), Form.OTHER),
        (masks.from_dense(np.tri(5, dtype=bool)[:, ::-1]), Form.OTHER),
    ],
)
def test_forms(mask, form):
    assert form_of(mask.rows(0, mask.q_length), mask.k_length) is form


def test_other_kernels(monkeypatch):
    cuda = torch.device("cuda")
    assert other_kernels(cuda, SHAPE).__name__ == "Triton"
    monkeypatch.setitem(api.KERNELS, "triton", api.KERNELS["triton"]._replace(package="not_installed"))
    api.fastest_kernels.cache_clear()
    assert other_kernels(cuda, SHAPE) is Reference
    api.fastest_kernels.cache_clear()


def test_what_is_prepared_goes_with_its_plan():
    plan = block_plan(masks.causal(8), [3], SHAPE)
    gone = weakref.ref(prepared_for(plan.rank(0), "default", "flash", CPU).kernels)
    del plan
    gc.collect()
    assert gone() is None


def test_only_on_cuda():
    with pytest.raises(ValueError, match="kernels 'flash' do not run on cpu, but on cuda; use kernels='auto'"):
        api.choose_kernels("flash", CPU, AttentionShape(1, 1, 64))
