"""Triton's kernels in its interpreter, against dense attention: odd sizes, whole plans, and what goes beside them."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from builders import causal_batch, planned, random_batch, random_layout, random_mask
from runtime.block_plan import block_plan
from runtime.compare import TOLERANCE, assert_close, compare, dense, distributed, random_tensors

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import Attention, Copy, Kind, Place, Program, RankProgram, Reduction, Slots
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.attention import attention
from dyncp.runtime.buffers import Buffers, Layout, allocate
from dyncp.runtime.kernels import configs, triton
from dyncp.runtime.kernels.api import Score
from dyncp.runtime.kernels.reference import Reference
from dyncp.runtime.kernels.tables import SlotTable
from dyncp.runtime.kernels.triton import Triton
from dyncp.strategies import lower_layout
from dyncp.strategies.api import Options

CPU = torch.device("cpu")
ODD_MASKS = {
    "causal": masks.causal(150),
    "full, not square": masks.full(70, 131),
    "lambda": masks.lambda_(140, 5, 30),
    "causal blockwise": masks.causal_blockwise(130, 16, 1, 2),
    "shared question": masks.shared_question(*masks.shared_question_split(133)),
    "document": masks.document([3, 60, 1, 65]),
    "blind rows between": masks.from_slices(90, 70, [[0, 5, 0, 9, "causal"], [9, 80, 3, 60, "full"]]),
    "nothing": masks.from_slices(20, 20, []),
    "steps both ways": masks.from_slices(70, 70, [[0, 70, 0, 70, "inv_causal"]]),
}


@pytest.mark.parametrize("name", ODD_MASKS)
def test_masks(name):
    compare(ODD_MASKS[name], [33, 64], AttentionShape(2, 1, 16, dtype="float32"), kernels="triton")


@pytest.mark.parametrize(
    ("heads", "groups", "dim", "value_dim", "dtype"),
    [
        (3, 1, 16, 16, "float32"),  # tiles of 64 packed rows do not end with a row
        (5, 1, 32, 32, "float16"),
        (8, 1, 16, 16, "float32"),
        (4, 4, 64, 64, "float16"),
        (2, 1, 24, 16, "float32"),  # 16 + 8
        (2, 1, 48, 32, "float16"),  # 32 + 16
        (2, 1, 12, 40, "float32"),  # below and between powers of two
        (2, 1, 192, 128, "float16"),  # 128 + 64
        (1, 1, 256, 256, "float32"),
        (2, 1, 2, 2, "float32"),
    ],
)
def test_shapes(heads, groups, dim, value_dim, dtype):
    compare(masks.causal(75), [33], AttentionShape(heads, groups, dim, value_dim, dtype), kernels="triton")


@pytest.mark.parametrize("wire", ["model", "float32"])
def test_half_precision_on_the_wire_or_not(wire):
    mask, shape = masks.lambda_(90, 5, 60), AttentionShape(4, 2, 16, dtype="float16")
    tensors = random_tensors(Batch([Sequence(90, mask)]), shape)
    got = distributed(tensors, block_plan(mask, [30, 50], shape, wire), kernels="triton")
    assert_close(got, dense(tensors), TOLERANCE["float16"])


@pytest.mark.parametrize(
    ("strategy", "keep"),
    [("ring", "none"), ("ring", "kv"), ("zigzag", "all"), ("head_ring", "none"), ("dynamic", "kv")],
)
def test_plans(strategy, keep):
    batch, shape = causal_batch(27, 5, 16), AttentionShape(4, 2, 16, dtype="float32")
    tensors = random_tensors(batch, shape)
    plan = planned(batch, 2, strategy, shape, keep=keep, block_tokens=16).plan
    assert_close(distributed(tensors, plan, kernels="triton"), dense(tensors), 1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_plans_in_which_nearly_everything_moves(seed):
    rng, shape, cluster = np.random.default_rng(seed), AttentionShape(4, 2, 8, dtype="float32"), Cluster(1, 3)
    batch, options = random_batch(rng, cross=seed % 2 > 0), Options(block_tokens=8)
    plan = lower_layout(random_layout(rng, batch, cluster, options), batch, shape, cluster, "random", options)
    tensors = random_tensors(batch, shape)
    assert_close(distributed(tensors, plan, kernels="triton"), dense(tensors), 1e-5)


@pytest.mark.parametrize(
    "tiles",
    [
        configs.Tiles(configs.Forward(16, 64, 4, 1), configs.Backward(16, 64, 64, 16, 4, 1)),
        configs.Tiles(configs.Forward(128, 16, 4, 1), configs.Backward(128, 16, 16, 128, 4, 1)),
    ],
)
def test_any_tiles(tiles, monkeypatch):
    monkeypatch.setattr(triton, "tiles_of", lambda *_: tiles)
    mask = random_mask(np.random.default_rng(5), 80, 60)
    compare(mask, [17, 50], AttentionShape(3, 1, 16, dtype="float32"), kernels="triton", softcap=3.0)


def test_the_tiles_of_a_gpu_on_256_tokens(monkeypatch):
    shape = AttentionShape(2, 1, 32, dtype="float16")
    monkeypatch.setattr(triton, "tiles_of", lambda *_: configs.tiles_of(shape, 90))
    compare(masks.causal(256), [100], shape, kernels="triton")


def test_the_same_bits_again():
    mask, shape = masks.lambda_(100, 5, 40), AttentionShape(2, 1, 16, dtype="float16")
    tensors, plan = random_tensors(Batch([Sequence(100, mask)]), shape), block_plan(mask, [30, 70], shape, "model")
    first, again = (distributed(tensors, plan, kernels="triton") for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_tensors_in_strided_memory():
    """As slices of a fused projection have it: neither rows nor heads side by side."""
    mask, shape = masks.causal(50), AttentionShape(4, 2, 16, dtype="float32")
    tensors, plan = random_tensors(Batch([Sequence(50, mask)]), shape), block_plan(mask, [20], shape)
    want = distributed(tensors, plan, kernels="triton")
    fused = torch.zeros(50, 12, 24)
    fused[:, 1:5, :16], fused[:, 6:8, 4:20], fused[:, 9:11, :16] = tensors.q, tensors.k, tensors.v
    q, k, v = fused[:, 1:5, :16], fused[:, 6:8, 4:20], fused[:, 9:11, :16]
    out = attention(q, k, v, plan, kernels="triton")
    assert torch.equal(out, want["out"])
    wide = torch.zeros(50, 4, 20)
    wide[..., :16] = tensors.do
    leaves = [tensor.clone().requires_grad_() for tensor in (tensors.q, tensors.k, tensors.v)]
    out = attention(*leaves, plan, kernels="triton")
    for name, grad in zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, wide[..., :16]), strict=True):
        assert torch.equal(grad, want[name])


# Single instructions against the reference


def one_instruction(instruction, slots, header, comps, arena_bytes, local, filled):
    """What is in memory after an instruction, by the reference and by Triton."""
    program = Program(Slots(*zip(*slots, strict=True)), (instruction,), arena_bytes, 0)
    nothing = Program(Slots([], [], [], [], [], []), (), 0, 0)
    backward = any(kind in (Kind.DQ, Kind.DKV) for kind, *_ in slots)
    rank = RankProgram(comps, *((nothing, program) if backward else (program, nothing)))
    results = []
    for kernels in (Reference, Triton):
        buffers = Buffers(Layout(header, program), {name: x.clone() for name, x in local.items()}, allocate(0, CPU))
        buffers.arena.copy_(filled)
        made = kernels(header, rank, CPU)
        match instruction:
            case Attention():
                made.attend(buffers, instruction, Score(0.3))
            case Reduction():
                made.reduce(buffers, instruction)
            case Copy():
                made.copy(buffers, instruction)
        results.append((buffers.arena, buffers.local))
    return results


def block_parts(dtype="float16", wire="model"):
    shape = AttentionShape(4, 2, 16, 8, dtype)
    plan = block_plan(masks.causal(40), [11, 30], shape, wire)
    return plan.header, plan.programs[0][0].comps, shape


def local_tensors(shape, rows=40):
    g = torch.Generator().manual_seed(3)
    sizes = {"q": (4, 16), "k": (2, 16), "v": (2, 8), "do": (4, 8)}
    made = {name: torch.randn(rows, *size, generator=g).half() for name, size in sizes.items()}
    for name, size in {"o": (4, 8), "lse": (4, 1), "delta": (4, 1), "dq": (4, 16), "dk": (2, 16), "dv": (2, 8)}.items():
        made[name] = torch.randn(rows, *size, generator=g)
    return made


def arena_of(header, slots, total):
    """Memory in which all partial results and inputs of slots are plausible numbers."""
    program = Program(Slots(*zip(*slots, strict=True)), (), total, 0)
    g = torch.Generator().manual_seed(4)
    buffers = Buffers(Layout(header, program), {}, allocate(0, CPU))
    buffers.arena.zero_()
    for number, (_, _, _, place, *_) in enumerate(slots):
        if place != Place.LOCAL:
            for field in buffers.fields(number):
                field.copy_(torch.randn(field.shape, generator=g))
    return buffers.arena


def laid_out(header, parts):
    """Slots one behind the other in the arena, for (kind, block, group, wire); and their size."""
    slots, at = [], 0
    for kind, block, group, wire in parts:
        slots.append((kind, block, group, Place.ARENA, wire, at))
        at += int(header.piece_bytes(kind, bool(wire))[block])
    return slots, at


def assert_same(results, exact: bool):
    (want, want_local), (got, got_local) = results
    if exact:
        assert torch.equal(want, got)
    else:
        assert torch.allclose(want.view(torch.float32), got.view(torch.float32), rtol=1e-5, atol=1e-5, equal_nan=True)
    for name in want_local:
        assert torch.allclose(want_local[name].float(), got_local[name].float(), rtol=1e-5, atol=1e-5), name


def test_copy_of_every_kind():
    """Inputs as they are, partial results cast both ways; slots that lie at odd places."""
    header, comps, shape = block_parts()
    kinds = [(Kind.Q, 0), (Kind.KV, 1), (Kind.DO, 0), (Kind.STATS, 0)]
    local = [(kind, block, group, Place.LOCAL, 0, 0 if block == 0 else 5) for kind, block in kinds for group in (0, 1)]
    partial = [(Kind.OUT, 0), (Kind.DQ, 0), (Kind.DKV, 2)]
    sources = [(kind, block, group, wire) for kind, block in partial for group in (0, 1) for wire in (0, 1)]
    targets = [(kind, block, group, 0) for kind, block in kinds for group in (0, 1)]
    flipped = [(kind, block, group, 1 - wire) for kind, block, group, wire in sources]
    memory, total = laid_out(header, [*sources, *targets, *flipped])
    slots = [*local, *memory]
    src = [*range(len(local)), *range(len(local), len(local) + len(sources))]
    instruction = Copy(src, np.arange(len(src)) + len(local) + len(sources))
    filled = arena_of(header, slots, total)
    assert_same(one_instruction(instruction, slots, header, comps, total, local_tensors(shape), filled), exact=True)


@pytest.mark.parametrize("kinds", [[(Kind.OUT, 0)], [(Kind.DQ, 0), (Kind.DKV, 1), (Kind.DKV, 3)]])
def test_reduction_of_several_into_one(kinds):
    """In order, from both dtypes, into the caller's tensors and memory, onto something or nothing; a slot is cleared
    without a source, and parts that saw nothing change nothing."""
    header, comps, shape = block_parts()
    rows = {0: 0, 1: 0, 3: 30}
    parts = [(kind, block, 1, wire) for kind, block in kinds for wire in (1, 0, 1)]
    targets = [(kind, block, group, 0) for kind, block in kinds for group in (0, 1)]
    memory, total = laid_out(header, [*parts, *targets])
    local = [(kind, block, 1, Place.LOCAL, 0, rows[block]) for kind, block in kinds]
    slots = [*memory, *local]
    src, dst, fresh = [], [], []
    for n in range(len(kinds)):
        into_memory, into_caller = len(parts) + 2 * n + 1, len(memory) + n
        src += [3 * n, 3 * n, 3 * n + 1, 3 * n + 2]
        dst += [into_memory, into_caller, into_memory, into_caller]
        fresh += [into_memory, into_memory - 1]
    filled = arena_of(header, slots, total)
    if kinds[0][0] == Kind.OUT:
        view = Buffers(Layout(header, Program(Slots(*zip(*slots, strict=True)), (), total, 0)), {}, allocate(0, CPU))
        view.arena.copy_(filled)
        o, lse = view.fields(0)
        o[:9], lse[:9] = 0, -torch.inf
        filled = view.arena.clone()
    instruction = Reduction(src, dst, fresh)
    assert_same(one_instruction(instruction, slots, header, comps, total, local_tensors(shape), filled), exact=False)


def test_attention_clears_what_it_does_not_write():
    header, comps, shape = block_parts("float32")
    memory, total = laid_out(header, [(Kind.OUT, 0, 0, 0), (Kind.OUT, 0, 1, 0)])
    slots = [*memory, (Kind.Q, 0, 0, Place.LOCAL, 0, 0), (Kind.KV, 1, 0, Place.LOCAL, 0, 0)]
    instruction = Attention([0], [[2, 3]], [[0]], [0, 1])
    local = {name: tensor.float() for name, tensor in local_tensors(shape).items()}
    filled = arena_of(header, slots, total)
    assert_same(one_instruction(instruction, slots, header, comps, total, local, filled), exact=False)


def test_copies_that_the_kernels_do_not_have_are_done_all_the_same():
    header, comps, shape = block_parts()
    memory, total = laid_out(header, [(Kind.Q, 0, 0, 0)])
    slots = [*memory, (Kind.Q, 0, 1, Place.LOCAL, 0, 0)]
    filled = arena_of(header, slots, total)
    results = one_instruction(Copy([0], [1]), slots, header, comps, total, local_tensors(shape), filled)
    assert_same(results, exact=True)
    assert not torch.equal(results[0][1]["q"], local_tensors(shape)["q"])


# What cannot be


def test_a_cpu_without_the_interpreter_is_refused():
    script = (
        "import torch; from dyncp.runtime.kernels.triton import capability_of\n"
        "try:\n    capability_of(torch.device('cpu'))\nexcept ValueError as error:\n    print(error)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("kernels 'triton' got tensors on a CPU, where they run only to be tested")


def test_memory_beyond_the_tables():
    header, _, _ = block_parts()
    slots = Slots([Kind.Q], [0], [0], [Place.ARENA], [0], [2**37])
    table = SlotTable(header, Program(slots, (), 2**37 + 2**20, 0))
    assert table.unit(np.array([0])) == 16
    with pytest.raises(ValueError, match="scratch memory of 131073 MiB is more than the tables of GPU kernels can"):
        table.operands(Kind.Q, np.array([0]), 16)


def test_positions_count_in_the_largest_unit_that_fits_all():
    header, _, _ = block_parts()
    slots = Slots([Kind.Q, Kind.KV, Kind.STATS], [0, 1, 0], [0, 0, 0], [Place.ARENA] * 3, [0] * 3, [64, 24, 4])
    table = SlotTable(header, Program(slots, (), 2**20, 0))
    assert table.unit(np.array([0, 2])) == 16  # statistics count 4 bytes anyway
    assert table.unit(np.array([0, 1, 2])) == 8
    assert table.operands(Kind.Q, np.array([0, -1]), 8).tolist() == [[Place.ARENA, 8], [0, 0]]
    assert table.operands(Kind.STATS, np.array([2]), 8).tolist() == [[Place.ARENA, 1, 1 + 80]]
