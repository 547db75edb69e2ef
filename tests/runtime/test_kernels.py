"""Both kernels, block by block, against dense attention: any mask, grouped heads, values of another width."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from builders import planned, random_mask
from hypothesis import given
from hypothesis import strategies as st
from runtime.block_plan import block_plan
from runtime.compare import compare, dense, distributed, random_tensors, relative_error

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.kernels import api
from dyncp.runtime.kernels.reference import merge, visible
from dyncp.runtime.kernels.torch_cpu import STRIP_ROWS, TorchCpu, cut_into_strips
from dyncp.runtime.prepare import prepare, prepared_for

KERNELS = ["reference", "torch_cpu", "triton"]


shapes = st.builds(
    lambda groups, heads, dim, value_dim: AttentionShape(groups * heads, groups, 2 * dim, 2 * value_dim, "float32"),
    *(st.integers(1, 3), st.integers(1, 3), st.integers(1, 8), st.integers(1, 8)),
)


@pytest.mark.parametrize("kernels", KERNELS)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    cuts=st.lists(st.integers(1, 39), max_size=3),
    shape=shapes,
    softcap=st.sampled_from([None, 0.5, 5.0]),
    with_sinks=st.booleans(),
)
def test_any_mask_any_shape(kernels, seed, lengths, cuts, shape, softcap, with_sinks):
    mask = random_mask(np.random.default_rng(seed), *lengths)
    sinks = torch.linspace(-2, 3, shape.q_heads) if with_sinks else None
    compare(mask, cuts, shape, seed % 1000, sinks, kernels=kernels, softcap=softcap)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(kernels, dtype):
    if (kernels, dtype) == ("triton", "bfloat16"):
        pytest.skip("Triton's interpreter does not compute in bfloat16")
    compare(masks.lambda_(200, 5, 60), [70, 150], AttentionShape(4, 2, 16, 8, dtype), kernels=kernels)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("scale", [0.05, 1.0, 0.0, -0.0, -0.3, -2, 1e-42, -1e-42, 1e-60])
@pytest.mark.parametrize("name", ["full", "causal", "causal, fewer keys", "window", "blind rows", "one row"])
def test_scale(name, scale, kernels):
    """Any number; also those with which the operator's own causal mask gives NaN."""
    mask = {
        "full": masks.full(50),
        "causal": masks.causal(50),
        "causal, fewer keys": masks.causal(50).crop(0, 50, 0, 30),
        "window": masks.sliding_window(50, 7),
        "blind rows": masks.from_slices(50, 50, [[0, 5, 0, 9, "causal"], [9, 12, 3, 50, "full"]]),
        "one row": masks.full(1),
    }[name]
    compare(mask, [20], AttentionShape(2, 1, 8, dtype="float32"), scale=scale, kernels=kernels)


LONG = 2 * STRIP_ROWS + 77
LONG_MASKS = {
    "causal": masks.causal(LONG),
    "causal, fewer keys than rows": masks.causal(LONG).crop(0, LONG, 0, LONG - 300),
    "causal, more keys than rows": masks.causal(LONG).crop(300, LONG, 0, LONG),
    "window": masks.sliding_window(LONG, 33),
    "first strip blind": masks.from_slices(LONG, LONG, [[STRIP_ROWS + 3, LONG, 600, 700, "full"]]),
    "rows that see only late keys": masks.from_slices(LONG, LONG, [[0, 9, 0, 1, "full"], [9, LONG, 900, 990, "full"]]),
    "nothing": masks.from_slices(LONG, LONG, []),
    "blind rows between": masks.from_slices(LONG, LONG, [[0, 5, 0, 9, "causal"], [9, 12, 3, LONG, "full"]]),
}


@pytest.mark.parametrize("name", LONG_MASKS)
def test_torch_cpu_on_long_blocks(name):
    compare(LONG_MASKS[name], [], AttentionShape(2, 1, 8, dtype="float32"), kernels="torch_cpu")


def test_masks_beyond_the_cache_are_made_anew(monkeypatch):
    room_bytes = 4 * 90 * 30  # of three patterns, as large at most
    monkeypatch.setattr("dyncp.runtime.kernels.torch_cpu.CACHED_MASK_BYTES", room_bytes)
    mask, shape = random_mask(np.random.default_rng(0), 90, 90), AttentionShape(2, 1, 8, dtype="float32")
    plan = block_plan(mask, [30, 60], shape)
    kernels = prepared_for(plan.rank(0), "default", "torch_cpu", torch.device("cpu")).kernels
    masked = [strip for strips in kernels._strips for strip in strips if strip.intervals is not None]
    cached = [strip.mask for strip in masked if strip.mask is not None]
    assert 0 < len(cached) < len(masked)
    assert sum(4 * mask.numel() for mask in cached) <= room_bytes
    compare(mask, [30, 60], shape, kernels="torch_cpu")


@pytest.mark.parametrize(
    ("name", "calls"), [("causal", 1), ("causal, fewer keys than rows", 1), ("window", 3), ("nothing", 0)]
)
def test_strips(name, calls):
    mask = LONG_MASKS[name]
    strips = cut_into_strips(mask.rows(0, mask.q_length))
    assert len(strips) == calls
    assert all(strip.causal == name.startswith("causal") for strip in strips)
    if name == "window":  # keys that no row of a strip sees are left out
        assert all(strip.keys.stop - strip.keys.start <= STRIP_ROWS + 32 for strip in strips)


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 30), keys=st.integers(1, 30))
def test_strips_say_what_the_mask_says(seed, rows, keys):
    mask = random_mask(np.random.default_rng(seed), rows, keys)
    seen = np.zeros((rows, keys), dtype=bool)
    for strip in cut_into_strips(mask.rows(0, rows)):
        part = seen[strip.rows, strip.keys]
        additive = strip.additive_mask()
        part[:] = (
            np.tri(*part.shape, dtype=bool) if strip.causal else True if additive is None else additive.numpy() == 0
        )
    assert (seen == mask.dense()).all()


@pytest.mark.parametrize("size", [1e-25, 1e-10, 1e10])
def test_backward_of_gradients_of_any_size(size):
    """`TorchCpu` forms a stand-in for the output from dO and delta, which must not over- or underflow."""
    mask, shape = masks.causal(40), AttentionShape(2, 1, 8, dtype="float32")
    tensors = random_tensors(Batch([Sequence(40, mask, kv_length=40)]), shape)
    tensors.do *= size
    tensors.do[3:7] = 0
    got, want = distributed(tensors, block_plan(mask, [11], shape), kernels="torch_cpu"), dense(tensors)
    for name in ("dq", "dk", "dv"):
        assert relative_error(got[name] / size, want[name] / size) < 1e-5


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("ratio", [1e-15, 1e-22, 1e-30, 1e-36])
def test_backward_of_rows_of_any_size_beside_each_other(kernels, ratio):
    """Each row's dQ is right by itself, also where other rows of the block have far larger gradients."""
    mask, shape = masks.causal(40), AttentionShape(2, 1, 8, dtype="float32")
    tensors = random_tensors(Batch([Sequence(40, mask, kv_length=40)]), shape)
    size = torch.ones(40, 1, 1)
    size[1::2] = ratio
    tensors.do *= size
    got, want = distributed(tensors, block_plan(mask, [11], shape), kernels=kernels), dense(tensors)
    for rows in (slice(0, None, 2), slice(1, None, 2)):
        assert relative_error((got["dq"] / size)[rows], (want["dq"] / size)[rows]) < 1e-5


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, in Triton's interpreter
def test_a_bad_gradient_stays_in_its_row(kernels, bad):
    """dQ of the other rows is what it would be without it."""
    mask, shape = masks.causal(40), AttentionShape(2, 1, 8, dtype="float32")
    tensors = random_tensors(Batch([Sequence(40, mask, kv_length=40)]), shape)
    want = distributed(tensors, block_plan(mask, [20], shape), kernels=kernels)
    tensors.do[7, 1, 3] = bad
    got = distributed(tensors, block_plan(mask, [20], shape), kernels=kernels)
    assert not got["dq"][7, 1].isfinite().any()
    assert not (got["dk"].isfinite().all() or got["dv"].isfinite().all())
    got["dq"][7, 1] = want["dq"][7, 1]
    assert torch.equal(got["dq"], want["dq"])


def test_merge_of_nothing():
    """(0, -inf) is the neutral element, also merged with itself."""
    nothing = torch.zeros(1, 1, 2), torch.full((1, 1, 1), -torch.inf)
    some = torch.full((1, 1, 2), 3.0), torch.full((1, 1, 1), 0.5)
    for first, second, want in ((nothing, nothing, nothing), (nothing, some, some), (some, nothing, some)):
        o, lse = first[0].clone(), first[1].clone()
        merge(o, lse, *second)
        assert torch.equal(o, want[0])
        assert torch.equal(lse, want[1])


def test_merge_of_scores_far_apart():
    o, lse = torch.full((1, 1, 2), 1.0), torch.full((1, 1, 1), 200.0)
    merge(o, lse, torch.full((1, 1, 2), 5.0), torch.full((1, 1, 1), -200.0))
    assert o.eq(1.0).all()
    assert lse.item() == 200.0


def test_visible_keys_of_a_range():
    intervals = torch.tensor([[[0, 2], [4, 6]], [[0, 0], [0, 0]]], dtype=torch.int32)
    assert visible(intervals, 1, 6).tolist() == [[True, False, False, True, True], [False] * 5]


def test_blocks_with_the_same_mask_share_a_pattern():
    plan = block_plan(masks.full(8, 8), [2, 4, 6], AttentionShape(2, 1, 8, dtype="float32"))
    of_comp, patterns = api.mask_patterns(plan.programs[0][0].comps, plan.header.tokens)
    assert of_comp == [0, 0, 0, 0]
    assert len(patterns) == 1


def test_no_computation_blocks():
    plan = block_plan(masks.full(8, 8), [], AttentionShape(2, 1, 8, dtype="float32"))
    comps = plan.programs[0][0].comps
    empty = type(comps)([], [], [], [0], np.empty((0, 6)))
    assert api.mask_patterns(empty, plan.header.tokens) == ([], [])


def test_choice_of_kernels(caplog):
    shape, wide, cpu, gpu = (
        AttentionShape(1, 1, 64),
        AttentionShape(1, 1, 64, 512),
        torch.device("cpu"),
        torch.device("cuda", 3),
    )
    api.fastest_kernels.cache_clear()
    with caplog.at_level("INFO", "dyncp"):
        assert api.choose_kernels("auto", cpu, shape) is TorchCpu
        assert api.choose_kernels("auto", gpu, shape).__name__ == "Triton"
        assert api.choose_kernels("auto", gpu, wide).__name__ == "Reference"
        assert api.choose_kernels("auto", torch.device("meta"), shape).__name__ == "Reference"
    assert caplog.messages == [
        "kernels for tensors on cpu, heads of 64: torch_cpu",
        "kernels for tensors on cuda:3, heads of 64: triton",
        "kernels for tensors on cuda:3, heads of 512: reference; kernels 'triton' have head dims up to 256, not 512",
        "kernels for tensors on meta, heads of 64: reference",
    ]


@pytest.mark.parametrize(
    ("name", "device", "dim", "message"),
    [
        ("fast", "cpu", 64, "unknown kernels 'fast'; choose one of auto, reference, torch_cpu, flex, flash, triton"),
        ("torch_cpu", "cuda", 64, "kernels 'torch_cpu' do not run on cuda, but on cpu; use kernels='auto'"),
        ("triton", "cuda", 320, "kernels 'triton' have head dims up to 256, not 320; use kernels='auto'"),
    ],
)
def test_kernels_that_cannot_be_had(name, device, dim, message):
    with pytest.raises(ValueError, match=message):
        api.choose_kernels(name, torch.device(device), AttentionShape(1, 1, dim))


def test_kernels_whose_package_is_missing_or_whose_gpu_is_too_old(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert api.objection_to(api.KERNELS["triton"], device, 64) == "need compute capability 8.0, not 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert api.objection_to(api.KERNELS["triton"], device, 64) is None
    missing = api.KERNELS["triton"]._replace(package="there_is_no_such_package")
    assert api.objection_to(missing, device, 64) == "need the package there_is_no_such_package, which is not installed"


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_is_prepared_goes_with_its_plan(kernels):
    plan, cpu = block_plan(masks.causal(8), [3], AttentionShape(2, 1, 8, dtype="float32")), torch.device("cpu")
    prepare(plan.rank(0), cpu, kernels)
    first = prepared_for(plan.rank(0), "default", kernels, cpu)
    assert prepared_for(plan.rank(0), "default", kernels, cpu) is first
    assert prepared_for(plan.rank(0), "default", "reference" if kernels != "reference" else "auto", cpu) is not first
    gone = weakref.ref(first.kernels)
    del plan, first
    gc.collect()
    assert gone() is None


def test_preparing_ahead():
    """All masks, once, whichever thread comes first; training finds what was made."""
    batch = Batch([Sequence(8, {"a": masks.causal(8), "b": masks.full(8)})])
    part, cpu = planned(batch, 1).plan.rank(0), torch.device("cpu")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: prepare(part, "cpu"), range(8)))
        made = set(pool.map(lambda _: prepared_for(part, "a", "auto", cpu), range(8)))
    assert len(made) == 1
    assert prepared_for(part, "b", "auto", cpu) not in made


def test_what_auto_stands_for_is_prepared_once():
    part, cpu = block_plan(masks.causal(8), [3], AttentionShape(2, 1, 8, dtype="float32")).rank(0), torch.device("cpu")
    prepare(part, cpu)
    assert prepared_for(part, "default", "auto", cpu) is prepared_for(part, "default", "torch_cpu", cpu)


def test_preparing_for_what_is_not_there(monkeypatch):
    plan = block_plan(masks.causal(8), [3], AttentionShape(2, 1, 8, dtype="float32"))
    with pytest.raises(ValueError, match=r"plan is of type Plan; expected one rank's part, as plan.rank\(rank\)"):
        prepare(plan, "cpu")
    with pytest.raises(ValueError, match="device is cuda:0, but PyTorch sees no GPU"):
        prepare(plan.rank(0), "cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="device is cuda, of which each thread has its own idea; say which GPU"):
        prepare(plan.rank(0), "cuda")
