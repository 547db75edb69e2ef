"""Slots become the right views of the right memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dyncp.ir.blocks import HAS_KV, HAS_Q, TokenBlocks
from dyncp.ir.plan import Kind, Place, PlanHeader, Program, Slots
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.buffers import Arenas, Buffers, Layout, Run, allocate

SHAPE = AttentionShape(4, 2, 6, 2, "bfloat16")
TOKENS = TokenBlocks([0, 0, 0], [0, 3, 8], [3, 8, 10], [HAS_Q | HAS_KV] * 3)
HEADER = PlanHeader("by hand", SHAPE, 1, 1, "none", "model", ("default",), (1.0,), TOKENS, [0, 0, 0])
# kind, block, group, place, wire, offset
SLOTS = [
    (Kind.Q, 1, 1, Place.LOCAL, 0, 3),
    (Kind.KV, 1, 1, Place.LOCAL, 0, 3),
    (Kind.OUT, 2, 0, Place.ARENA, 0, 0),  # fp32: 2 tokens x 2 heads x (2 + 1) x 4 = 48 bytes
    (Kind.OUT, 2, 0, Place.ARENA, 1, 48),  # wire: 2 x 2 x (2 * 2 + 4) = 32 bytes
    (Kind.KV, 0, 0, Place.ARENA, 0, 80),  # 3 x (6 + 2) x 2 = 48 bytes
    (Kind.DQ, 2, 0, Place.KEPT, 0, 16),
]


@pytest.fixture
def buffers():
    local = {
        "q": torch.arange(10 * 4 * 6).view(10, 4, 6).bfloat16(),
        "k": torch.arange(10 * 2 * 6).view(10, 2, 6).bfloat16(),
        # as in a slice of a fused projection: neither rows nor heads lie one behind the other
        "v": torch.arange(10 * 2 * 5).view(10, 2, 5).bfloat16()[:, :, 1:3],
    }
    program = Program(Slots(*zip(*SLOTS, strict=True)), (), 128, 112)
    return Buffers(Layout(HEADER, program), local, allocate(112, torch.device("cpu"))), local


def test_local_slots_are_views_of_rows_and_heads(buffers):
    buffers, local = buffers
    (q,) = buffers.fields(0)
    assert torch.equal(q, local["q"][3:8, 2:4])
    k, v = buffers.fields(1)
    assert torch.equal(k, local["k"][3:8, 1:2])
    assert torch.equal(v, local["v"][3:8, 1:2])
    q.zero_()
    assert local["q"][3:8, 2:4].eq(0).all()
    assert local["q"][3:8, :2].ne(0).any()


def test_fields_lie_one_behind_the_other(buffers):
    buffers, _ = buffers
    o, lse = buffers.fields(2)
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == ((2, 2, 2), torch.float32, (2, 2, 1), torch.float32)
    assert lse.data_ptr() - o.data_ptr() == o.numel() * 4
    o, lse = buffers.fields(3)
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    k, v = buffers.fields(4)
    assert (k.shape, v.shape) == ((3, 1, 6), (3, 1, 2))
    assert buffers.fields(4)[0] is k


def test_a_message_is_the_memory_of_its_slots(buffers):
    buffers, _ = buffers
    o, lse = buffers.fields(3)
    k, _ = buffers.fields(4)
    place, start, stop = buffers.layout.run([3, 4])
    data = buffers.message(Run(0, True, place, start, stop))
    assert data.shape == (32 + 48,)
    assert data.data_ptr() == o.data_ptr()
    o.fill_(1.5)
    lse.fill_(2.0)
    k.fill_(3.0)
    received = data.clone()
    assert received[:16].view(torch.bfloat16).eq(1.5).all()
    assert received[16:32].view(torch.float32).eq(2).all()
    assert received[32:68].view(torch.bfloat16).eq(3).all()


@pytest.mark.parametrize("slots", [[3, 2], [2, 4], [3, 5], [0]])
def test_slots_apart_are_no_message(buffers, slots):
    with pytest.raises(AssertionError, match=r"lie one behind the other|packed into scratch"):
        buffers[0].layout.run(slots)


def test_nothing_is_zero_and_minus_infinity(buffers):
    buffers, _ = buffers
    for slot in (2, 5):
        for field in buffers.fields(slot):
            field.fill_(7)
    buffers.clear(np.array([2, 5]))
    o, lse = buffers.fields(2)
    assert o.eq(0).all()
    assert lse.eq(-torch.inf).all()
    assert buffers.fields(5)[0].eq(0).all()


class OneStream(Arenas):
    """As on a GPU, whose current stream is always the same."""

    def _of_stream(self, device):
        return self._free.setdefault((device, 0), [])


def test_passes_hand_scratch_memory_on():
    arenas, cpu = OneStream(), torch.device("cpu")
    first, second = arenas.take(100, cpu), arenas.take(50, cpu)  # of two threads, say
    assert first.data_ptr() != second.data_ptr()
    arenas.give(first)
    assert arenas.take(60, cpu) is first
    arenas.give(first)
    arenas.give(second)
    larger = arenas.take(200, cpu)  # those that are too small go
    assert len(larger) == 200
    assert len(arenas.take(10, cpu)) == 10


def test_memory_on_a_cpu_is_not_handed_on():
    arenas, cpu = Arenas(), torch.device("cpu")
    memory = arenas.take(100, cpu)
    arenas.give(memory)
    assert arenas.take(100, cpu) is not memory
