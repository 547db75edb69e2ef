"""Kernels on FlexAttention. On the CPU it has no backward, and its forward ignores the tiles, so most tests put a
function in its place that does what the tiles of a `BlockMask` literally say."""

from __future__ import annotations

import gc
import itertools
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from builders import planned, random_batch, random_layout, random_mask
from hypothesis import given
from hypothesis import strategies as st
from runtime.block_plan import block_plan
from runtime.compare import TOLERANCE, assert_close, dense, distributed, random_tensors, relative_error
from torch.fx.experimental.symbolic_shapes import statically_known_true

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.ir.mask import Mask
from dyncp.ir.plan import Attention
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.attention import run_forward
from dyncp.runtime.executor import Executor
from dyncp.runtime.kernels import api
from dyncp.runtime.kernels.api import Score
from dyncp.runtime.kernels.flex import TILE, Flex, compiled_flex, flex
from dyncp.runtime.kernels.flex_tables import EMPTY, FULL, PARTIAL, Axis, classify
from dyncp.runtime.kernels.packing import number
from dyncp.runtime.prepare import prepared_for
from dyncp.runtime.transports.local import LocalWorld
from dyncp.strategies import lower_layout
from dyncp.strategies.api import Options

CPU = torch.device("cpu")
SMALL_TILE = 4
SHAPE = AttentionShape(4, 2, 8, dtype="float32")


def by_tiles(q_BSHD, k_BS1D, v_BS1D, mask, scale, softcap):
    """An `AttentionFunction` in plain torch, that sees what the tiles of the mask say."""
    seen = by_rows(mask)
    assert torch.equal(seen, by_columns(mask))
    q, k, v = (tensor.transpose(1, 2).float() for tensor in (q_BSHD, k_BS1D, v_BS1D))
    scores = q @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    seeing = seen.any(1, keepdim=True)
    scores = scores.masked_fill(~seen, -torch.inf).masked_fill(~seeing, 0.0)
    o = torch.where(seeing, scores.softmax(3) @ v, 0.0)
    lse = torch.where(seeing[:, 0], scores.logsumexp(3), -torch.inf)
    return o.transpose(1, 2).to(q_BSHD.dtype), lse.transpose(1, 2)


def by_rows(mask):
    """bool[S, S] of the tables that the forward reads."""
    return tiles_of(mask, (mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices))


def by_columns(mask):
    """The same of the tables that the backward reads for keys."""
    tables = (mask.q_num_blocks, mask.q_indices), (mask.full_q_num_blocks, mask.full_q_indices)
    return tiles_of(mask, *tables, transposed=True)


def tiles_of(mask, partly, fully, transposed=False):
    (high, wide), tile = mask.seq_lengths, mask.BLOCK_SIZE[0]
    asked = mask.mask_mod(0, 0, torch.arange(high)[:, None], torch.arange(wide)[None])
    seen = torch.zeros(high, wide, dtype=torch.bool)
    for (counts, indices), is_full in ((partly, False), (fully, True)):
        assert counts.dtype == indices.dtype == torch.int32
        for line, count in enumerate(counts[0, 0].tolist()):
            chosen = indices[0, 0, line, :count].tolist()
            assert len(set(chosen)) == count
            for other in chosen:
                row, column = (other, line) if transposed else (line, other)
                area = slice(row * tile, (row + 1) * tile), slice(column * tile, (column + 1) * tile)
                assert not seen[area].any()
                seen[area] = True if is_full else asked[area]
    # FlexAttention on the CPU asks everywhere, so only rows behind a block's last may be seen without
    blind = ~asked.any(1)
    assert torch.equal(seen & ~blind[:, None], asked)
    return seen


@pytest.fixture(autouse=True, scope="module")
def literal_flex():
    """`kernels="flex"` on the CPU, by small tiles."""
    factory = partial(Flex, function=by_tiles, tile=SMALL_TILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dyncp.runtime.prepare.choose_kernels", lambda *_: factory)
        yield


def compare(mask: Mask, cuts: list[int], shape: AttentionShape, seed: int = 0, sinks=None, **settings) -> None:
    batch = Batch([Sequence(mask.q_length, mask, kv_length=mask.k_length)])
    tensors = random_tensors(batch, shape, seed)
    want = dense(tensors, sinks=sinks, **settings)
    got = distributed(tensors, block_plan(mask, cuts, shape), sinks=sinks, kernels="flex", **settings)
    assert_close(got, want, TOLERANCE[shape.dtype])


shapes = st.builds(
    lambda groups, heads, dim, value_dim: AttentionShape(groups * heads, groups, 2 * dim, 2 * value_dim, "float32"),
    *(st.integers(1, 3), st.integers(1, 3), st.integers(1, 10), st.integers(1, 10)),
)


@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    cuts=st.lists(st.integers(1, 39), max_size=3),
    shape=shapes,
    softcap=st.sampled_from([None, 0.5, 5.0]),
    with_sinks=st.booleans(),
)
def test_any_mask_any_shape(seed, lengths, cuts, shape, softcap, with_sinks):
    mask = random_mask(np.random.default_rng(seed), *lengths)
    sinks = torch.linspace(-2, 3, shape.q_heads) if with_sinks else None
    compare(mask, cuts, shape, seed % 1000, sinks, softcap=softcap)


@pytest.mark.parametrize("scale", [1.0, 0.0, -0.3, 1e-42])
def test_scale(scale):
    compare(masks.causal(50), [20], AttentionShape(2, 1, 8, dtype="float32"), scale=scale)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype):
    compare(masks.lambda_(200, 5, 60), [70, 150], AttentionShape(4, 2, 16, 8, dtype))


def test_rows_that_see_nothing():
    compare(masks.from_slices(30, 30, [[0, 5, 0, 9, "causal"], [9, 12, 3, 30, "full"]]), [8, 20], SHAPE)
    compare(masks.from_slices(30, 30, []), [8], SHAPE)


@pytest.mark.parametrize("strategy", ["ring", "zigzag", "allgather", "ulysses", "data_parallel", "dynamic"])
def test_whole_plans(strategy):
    """Divisions with many blocks, of one head group and of several, on several ranks."""
    batch = Batch([Sequence(61, masks.causal(61)), Sequence(37, masks.lambda_(37, 3, 10)), Sequence(9, masks.full(9))])
    tensors = random_tensors(batch, SHAPE)
    got = distributed(tensors, planned(batch, 2, strategy).plan, kernels="flex")
    assert_close(got, dense(tensors), TOLERANCE["float32"])


@given(seed=st.integers(0, 2**32 - 1))
def test_any_placement(seed):
    """Head groups with blocks of their own, some with as many as others."""
    rng = np.random.default_rng(seed)
    batch, cluster = random_batch(rng, cross=True), Cluster(1, int(rng.integers(1, 4)))
    options = Options(block_tokens=9, divisions=2)
    layout = random_layout(rng, batch, cluster, options)
    tensors = random_tensors(batch, SHAPE)
    got = distributed(tensors, lower_layout(layout, batch, SHAPE, cluster, "random", options), kernels="flex")
    assert_close(got, dense(tensors), TOLERANCE["float32"])


def test_the_same_bits_again():
    batch = Batch([Sequence(61, masks.causal(61))])
    tensors, plan = random_tensors(batch, SHAPE), planned(batch, 2).plan
    first, second = (distributed(tensors, plan, kernels="flex") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_bad_gradient_stays_in_its_row():
    mask = masks.causal(40)
    tensors = random_tensors(Batch([Sequence(40, mask, kv_length=40)]), SHAPE)
    want = distributed(tensors, block_plan(mask, [20], SHAPE), kernels="flex")
    tensors.do[7, 1, 3] = torch.nan
    got = distributed(tensors, block_plan(mask, [20], SHAPE), kernels="flex")
    assert not got["dq"][7, 1].isfinite().any()
    got["dq"][7, 1] = want["dq"][7, 1]
    assert torch.equal(got["dq"], want["dq"])


def only_forward(tensors, plan, make, score):
    """Output of a plan for one rank, whose kernels `make` makes."""
    rank = plan.rank(0)
    made = prepared_for(rank, "default", "flex", CPU)
    object.__setattr__(made, "kernels", make(plan.header, rank.program("default"), CPU))
    executor = Executor(rank, "default", made, LocalWorld(1).transport(0), score, 30.0)
    return run_forward(executor, tensors.q, tensors.k, tensors.v, None).out


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("tile", [16, 128])
def test_flex_attention_itself(tile, softcap):
    """The forward of FlexAttention, eager, which evaluates the mask function for all pairs."""
    batch = Batch([Sequence(37, masks.lambda_(37, 3, 10)), Sequence(21, random_mask(np.random.default_rng(2), 21, 21))])
    shape = AttentionShape(4, 2, 24, 10, dtype="float32")
    tensors = random_tensors(batch, shape)
    plan = planned(batch, 1, "data_parallel", shape, block_tokens=16).plan
    got = only_forward(tensors, plan, partial(Flex, function=flex, tile=tile), Score(0.3, softcap))
    assert relative_error(got, dense(tensors, scale=0.3, softcap=softcap)["out"]) < 1e-5


def test_flex_attention_itself_backward(monkeypatch):
    """FlexAttention's own gradient, as traced for a GPU, where the log-sum-exp has a gradient too."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    monkeypatch.setattr(
        "dyncp.runtime.prepare.choose_kernels", lambda *_: partial(Flex, function=compiled_flex("aot_eager"))
    )
    compare(random_mask(np.random.default_rng(3), 40, 30), [8, 20], AttentionShape(4, 2, 8, 18, "float32"))
    compare(random_mask(np.random.default_rng(4), 40, 30), [8, 20], AttentionShape(4, 2, 8, 18, "float32"), softcap=2.0)


def test_other_plans_take_no_other_compiled_function():
    compiled = []

    def backend(graph, _):
        (call,) = (node for node in graph.graph.nodes if "flex_attention" in str(node.target))
        for tensor in call.args[:3]:  # then the kernels check no bounds
            assert statically_known_true(tensor.meta["example_value"].shape[2] % TILE == 0)
        compiled.append(call)
        return graph.forward

    function = compiled_flex(backend)
    for lengths, block_tokens in (((37, 21), 16), ((9,), 8), ((300,), 150), ((140, 140), 140)):
        batch = Batch([Sequence(length, masks.lambda_(length, 3, length // 3)) for length in lengths])
        plan = planned(batch, 1, "data_parallel", block_tokens=block_tokens).plan
        for scale in (0.3, 0.5):
            only_forward(random_tensors(batch, SHAPE), plan, partial(Flex, function=function), Score(scale))
    assert len(compiled) == 1
    only_forward(random_tensors(batch, SHAPE), plan, partial(Flex, function=function), Score(0.3, softcap=3.0))
    assert len(compiled) == 2


def calls_of(plan, rank=0):
    """The calls of each forward division."""
    program = plan.programs[rank][0]
    kernels = Flex(plan.header, program, CPU, by_tiles, SMALL_TILE)
    return [kernels._calls[part] for part in program.forward.instructions if isinstance(part, Attention)]


def test_head_groups_with_the_same_blocks_are_one_call():
    batch = Batch([Sequence(32, masks.causal(32))])
    shape = AttentionShape(6, 3, 8, dtype="float32")
    ring = calls_of(planned(batch, 2, "ring", shape).plan)
    assert all(len(calls) == 1 for calls in ring)
    assert {len(calls[0].queries.slots) for calls in ring} == {3}
    # each block is packed once, whatever the number of computation blocks
    whole = calls_of(planned(batch, 1, "data_parallel", shape).plan)
    assert [(len(call.queries.rows), len(call.keys.rows)) for calls in whole for call in calls] == [(4, 4)]


def test_forward_and_backward_share_masks():
    plan = planned(Batch([Sequence(32, masks.causal(32))]), 1).plan
    kernels = Flex(plan.header, plan.programs[0][0], CPU, by_tiles, SMALL_TILE)
    assert len({id(call.mask) for calls in kernels._calls.values() for call in calls}) == 1
    assert len(kernels._calls) == 2


def test_full_tiles_ask_no_mask():
    plan = planned(Batch([Sequence(32, masks.causal(32))]), 1, "data_parallel", block_tokens=16).plan
    (call,) = calls_of(plan)[0]
    kinds = [(mask.sum().item()) for mask in (call.mask.kv_num_blocks, call.mask.full_kv_num_blocks)]
    assert kinds == [8, 28]  # of 8 by 8 tiles: the diagonal, and what is below it


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 30), keys=st.integers(1, 30), tile=st.integers(1, 9))
def test_kinds_of_tiles(seed, rows, keys, tile):
    mask = random_mask(np.random.default_rng(seed), rows, keys)
    seen, kinds = mask.dense(), classify(mask.rows(0, rows), keys, tile)
    assert kinds.shape == (-(-rows // tile), -(-keys // tile))
    for i, j in itertools.product(*map(range, kinds.shape)):
        part = seen[i * tile : (i + 1) * tile, j * tile : (j + 1) * tile]
        whole = part.all() and part.shape[1] == tile
        assert kinds[i, j] == (FULL if whole else PARTIAL if part.any() else EMPTY)


def test_a_tile_beyond_the_last_row_may_be_full():
    """Beyond the last key it may not, as a full tile asks no mask."""
    assert classify(masks.full(7, 9).rows(0, 7), 9, 4).tolist() == [[FULL, FULL, PARTIAL]] * 2


def test_axis():
    axis = Axis(np.array([3, 8, 5]), 4)
    assert (axis.length, axis.padding.tolist()) == (20, [1, 0, 3])
    block, row = axis.positions()
    assert block.tolist() == [0] * 4 + [1] * 8 + [2] * 8
    assert row.tolist() == [*range(4), *range(8), *range(8)]
    short = Axis(np.array([3]), 4)
    assert (short.length, short.padding.tolist()) == (8, [5])
    assert [part.tolist() for part in short.positions()] == [[0] * 4 + [1] * 4, [*range(4), *range(4)]]


def test_number():
    rows, of_each = number(np.array([[5, 1], [2, 9], [5, 1], [2, 8]]))
    assert rows.tolist() == [[5, 1], [2, 9], [2, 8]]
    assert of_each.tolist() == [0, 1, 0, 2]


def test_what_is_prepared_goes_with_its_plan():
    plan = block_plan(masks.causal(8), [3], SHAPE)
    gone = weakref.ref(prepared_for(plan.rank(0), "default", "flex", CPU).kernels)
    del plan
    gc.collect()
    assert gone() is None


def test_only_on_cuda():
    with pytest.raises(ValueError, match="kernels 'flex' do not run on cpu, but on cuda; use kernels='auto'"):
        api.choose_kernels("flex", CPU, AttentionShape(1, 1, 64))


def test_nothing_to_compute():
    plan = block_plan(masks.causal(8), [3], SHAPE)
    program = plan.programs[0][0]
    empty = Attention(np.empty(0), np.empty((0, 2)), np.empty((0, 1)), [])
    forward = type(program.forward)(program.forward.slots, (empty,), program.forward.arena_bytes, 0)
    kernels = Flex(plan.header, type(program)(program.comps, forward, program.backward), CPU, by_tiles)
    assert kernels._calls[empty] == []
