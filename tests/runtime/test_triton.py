"""Triton's kernels in its interpreter, against dense attention: odd sizes, whole plans, and what goes beside them."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton.language as tl
from builders import causal_batch, planned, random_batch, random_layout, random_mask
from runtime.block_plan import block_plan
from runtime.compare import TOLERANCE, assert_close, compare, dense, distributed, random_tensors
from runtime.watched import watched
from triton import jit

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import BACKWARD, Attention, Copy, Kind, Place, Program, RankProgram, Reduction, Slots
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.attention import attention
from dyncp.runtime.buffers import Buffers, Layout, allocate
from dyncp.runtime.kernels import configs, triton
from dyncp.runtime.kernels.api import Score, mask_patterns
from dyncp.runtime.kernels.move_tables import Chunks, reduction_tables
from dyncp.runtime.kernels.reference import Reference
from dyncp.runtime.kernels.tables import Masks, SlotTable, backward_tables
from dyncp.runtime.kernels.tiles import Patterns, Tiling
from dyncp.runtime.kernels.triton import Triton
from dyncp.runtime.kernels.triton_attention import row_pointers
from dyncp.strategies import lower_layout
from dyncp.strategies.api import Options

CPU = torch.device("cpu")
BACKWARD_KINDS = [(Kind.Q, 0), (Kind.DO, 0), (Kind.STATS, 0), (Kind.KV, 1), (Kind.DQ, 0), (Kind.DKV, 1)]
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


@pytest.mark.parametrize("softcap", [0.3, 5.0, 50.0, 1e4, 1e9])
def test_softcap_of_any_size(softcap):
    compare(masks.causal(40), [11], AttentionShape(2, 1, 16, dtype="float32"), kernels="triton", softcap=softcap)


# What a GPU would do silently


@pytest.mark.parametrize("dims", [(3, 1, 8, 8, "float32"), (2, 2, 24, 10, "float16"), (5, 5, 6, 6, "float16")])
@pytest.mark.parametrize(("seed", "keep"), [(0, "none"), (1, "all")])
def test_kernels_touch_what_they_may(seed, keep, dims, monkeypatch):
    """On plans in which nearly everything moves, in pieces of odd sizes, into memory that is kept too."""
    rng, shape, cluster = np.random.default_rng(seed + 10), AttentionShape(*dims), Cluster(1, 3)
    mask = random_mask(rng, 20, 20)
    batch, options = Batch([Sequence(20, mask), *causal_batch(6).sequences]), Options(block_tokens=7, keep=keep)
    layout = random_layout(rng, batch, cluster, options, shape)
    plan = lower_layout(layout, batch, shape, cluster, "random", options)
    tensors = random_tensors(batch, shape)
    with watched(monkeypatch) as launches:
        assert_close(distributed(tensors, plan, kernels="triton"), dense(tensors), TOLERANCE[shape.dtype])
    assert len(launches) > 5


def test_kernels_touch_what_they_may_with_large_tiles(monkeypatch):
    monkeypatch.setattr(triton, "tiles_of", lambda shape, _: configs.tiles_of(shape, 90))
    with watched(monkeypatch):
        mask = random_mask(np.random.default_rng(1), 150, 140)
        compare(mask, [50], AttentionShape(3, 1, 16, dtype="float16"), kernels="triton")


@jit
def addresses(out, local, memory, place, position, pitch, head_pitch, head, first, COUNT: tl.constexpr):
    """The addresses of packed rows of a slot with 3 heads of dim 8."""
    field, both = (local, pitch, head_pitch), (memory, memory)
    rows = row_pointers(field, both, place, position, head, first, COUNT, 3, 8, 16)
    tl.store(out + tl.arange(0, COUNT), rows.to(tl.int64, bitcast=True))


@pytest.mark.parametrize(
    ("place", "pitch", "head_pitch", "head", "first", "position"),
    [
        (Place.LOCAL, 24, 8, 6, 40, 1 << 27),  # a row far behind
        (Place.LOCAL, 8, (1 << 31) - 8, 60, 40, 3),  # heads far apart
        (Place.LOCAL, 1 << 26, 8, 6, 1 << 20, 3),  # a tile far into a block
        (Place.ARENA, 24, 8, 6, 1 << 30, 5),
        (Place.ARENA, 24, 8, 6, 40, (1 << 31) - 1),
    ],
)
def test_addresses_beyond_32_bits(place, pitch, head_pitch, head, first, position):
    local, memory, out = torch.zeros(1, dtype=torch.float16), torch.zeros(1, dtype=torch.uint8), torch.zeros(16).long()
    addresses[(1,)](out, local, memory, int(place), position, pitch, head_pitch, head, first, 16)
    for m, address in enumerate(out.tolist(), first):
        if place == Place.LOCAL:
            want = local.data_ptr() + 2 * ((position + m // 3) * pitch + (head + m % 3) * head_pitch)
        else:
            want = memory.data_ptr() + 16 * position + 2 * 8 * m
        assert address == want


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
                (made.attend_backward if backward else made.attend)(buffers, instruction, Score(0.3))
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
    of_sums = kinds[0][0] != Kind.OUT  # in the same order, so the same bits
    assert_same(one_instruction(instruction, slots, header, comps, total, local_tensors(shape), filled), exact=of_sums)


def test_attention_clears_what_it_does_not_write(monkeypatch):
    header, comps, shape = block_parts("float32")
    memory, total = laid_out(header, [(Kind.OUT, 0, 0, 0), (Kind.OUT, 0, 1, 0)])
    slots = [*memory, (Kind.Q, 0, 0, Place.LOCAL, 0, 0), (Kind.KV, 1, 0, Place.LOCAL, 0, 0)]
    instruction = Attention([0], [[2, 3]], [[0]], [0, 1])
    local = {name: tensor.float() for name, tensor in local_tensors(shape).items()}
    filled = arena_of(header, slots, total)
    with watched(monkeypatch):
        assert_same(one_instruction(instruction, slots, header, comps, total, local, filled), exact=False)


def test_the_backward_clears_what_it_does_not_write(monkeypatch):
    header, comps, shape = block_parts("float32")
    memory, total = laid_out(
        header, [(kind, block, group, 0) for kind, block in BACKWARD_KINDS[4:] for group in (0, 1)]
    )
    local = {name: tensor.float() for name, tensor in local_tensors(shape).items()}
    slots = [*memory, *((kind, block, 0, Place.LOCAL, 0, 0) for kind, block in BACKWARD_KINDS[:4])]
    instruction = Attention([0], [[4, 5, 6, 7]], [[0, 2]], [0, 1, 2, 3])
    filled = arena_of(header, slots, total)
    with watched(monkeypatch):
        assert_same(one_instruction(instruction, slots, header, comps, total, local, filled), exact=False)


@pytest.mark.parametrize(
    ("instruction", "parts"),
    [
        (Reduction([0, 1], [1, 2], []), [(Kind.DQ, 0, 0, 0)] * 3),  # one after the other
        (Reduction([0], [1], [2]), [(Kind.DQ, 0, 0, 0), (Kind.DQ, 0, 1, 0), (Kind.DQ, 0, 0, 1)]),  # cleared in half
        (Reduction([0], [1], []), [(Kind.DQ, 0, 0, 0), (Kind.DQ, 0, 0, 1)]),  # into half precision
        (Copy([0, 1], [1, 2]), [(Kind.Q, 0, 0, 0)] * 3),
        (Copy([0, 1], [2, 2]), [(Kind.Q, 0, 0, 0)] * 3),
    ],
)
def test_moves_that_the_kernels_do_not_have(instruction, parts):
    header, comps, shape = block_parts()
    slots, total = laid_out(header, parts)
    filled = arena_of(header, slots, total)
    results = one_instruction(instruction, slots, header, comps, total, local_tensors(shape), filled)
    assert_same(results, exact=True)


@pytest.mark.parametrize(
    ("instruction", "parts"),
    [
        (Attention([0], [[3, 4]], [[0]], [0, 1]), [(Kind.OUT, 0, 0, 0), (Kind.OUT, 0, 0, 1), (Kind.OUT, 0, 1, 0)]),
        (Attention([0, 1], [[3, 4], [0, 5]], [[1], [1]], [1]), [(Kind.Q, 0, 0, 0), *[(Kind.OUT, 0, 0, 0)] * 2]),
    ],
)
def test_attention_that_the_kernels_do_not_have(instruction, parts):
    """Such as of two copies of the queries of one output."""
    header, comps, shape = block_parts()
    memory, total = laid_out(header, parts)
    local = [(Kind.Q, 0, 0, 0), (Kind.KV, 1, 0, 0), (Kind.KV, 2, 0, 11)]
    slots = [*memory, *((kind, block, group, Place.LOCAL, 0, row) for kind, block, group, row in local)]
    filled = arena_of(header, slots, total)
    results = one_instruction(instruction, slots, header, comps, total, local_tensors(shape), filled)
    assert_same(results, exact=True)


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
    table = SlotTable(header, Program(slots, (), 2**37, 2**20))
    assert table.unit(np.array([0]), 0) == 16
    with pytest.raises(ValueError, match="131073 MiB of scratch and kept memory are more than the tables of GPU"):
        table.operands(Kind.Q, np.array([0]), 16)


def test_positions_count_in_the_largest_unit_that_fits_all():
    header, _, _ = block_parts()
    slots = Slots([Kind.Q, Kind.KV, Kind.STATS], [0, 1, 0], [0, 0, 0], [Place.ARENA] * 3, [0] * 3, [64, 24, 4])
    table = SlotTable(header, Program(slots, (), 2**20, 0))
    assert table.unit(np.array([0, 2]), 0) == 16  # statistics count 4 bytes anyway
    assert table.unit(np.array([0, 1, 2]), 0) == 8
    assert table.operands(Kind.Q, np.array([0, -1]), 8).tolist() == [[Place.ARENA, 8], [0, 0]]
    assert table.operands(Kind.STATS, np.array([2]), 8).tolist() == [[Place.ARENA, 1, 1 + 80]]


@pytest.mark.parametrize(("heads", "units"), [(1, (16, 4, 8)), (2, (16, 8, 16)), (4, (16, 16, 16)), (7, (16, 4, 8))])
def test_units_depend_on_the_layer(heads, units):
    """And not on whether rows happen to be even in number: no kernel is compiled anew in the middle of training."""
    header = block_plan(masks.causal(40), [], AttentionShape(heads, 1, 64)).header
    for place, offset in ((Place.LOCAL, 3), (Place.ARENA, 128)):
        table = SlotTable(header, Program(Slots([Kind.Q], [0], [0], [place], [0], [offset]), (), 2**20, 0))
        assert tuple(table.unit(np.array([0]), statistics) for statistics in (0, 1, 2)) == units


@pytest.mark.parametrize("odd", range(len(BACKWARD_KINDS)))
def test_one_slot_at_an_odd_place_makes_the_unit_smaller(odd):
    """Of all that a division of the backward reads and writes, but for statistics."""
    header, comps, _ = block_parts()
    offsets = [(1 << 16) * (n + 1) + 4 * (n == odd) for n in range(len(BACKWARD_KINDS))]
    slots = Slots(
        *zip(*((k, b, 0, Place.ARENA, 0, at) for (k, b), at in zip(BACKWARD_KINDS, offsets, strict=True)), strict=True)
    )
    instruction = Attention([0], [[0, 1, 2, 3]], [[4, 5]], [])
    table = SlotTable(header, Program(slots, (instruction,), 1 << 20, 0))
    of_comp, found = mask_patterns(comps, header.tokens)
    both = Tiling(2, 16, 16, True), Tiling(2, 16, 16, False)
    tables = backward_tables(table, instruction, Masks(BACKWARD, np.array(of_comp), Patterns.of(found)), *both)
    assert tables.unit == (16 if BACKWARD_KINDS[odd][0] == Kind.STATS else 4)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_one_slot_of_a_reduction_at_an_odd_place_makes_the_unit_smaller(odd):
    header, _, _ = block_parts()
    offsets = [(1 << 16) * (n + 1) + 4 * (n == odd) for n in range(3)]
    slots = Slots([Kind.DQ] * 3, [0] * 3, [0] * 3, [Place.ARENA] * 3, [1, 0, 0], offsets)
    instruction = Reduction([0], [1], [2])
    table = SlotTable(header, Program(slots, (instruction,), 1 << 20, 0))
    assert reduction_tables(table, instruction, Chunks(16, 16)).unit == 4
