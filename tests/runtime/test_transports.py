"""How torch.distributed is called for GPUs, seen without one: CPU tensors stand for the GPU's.

A process group of torch's "fake" backend has any number of ranks and one process, which can be each of them in turn.
What would reach NCCL is noted and goes nowhere. `tests/dist` sends real messages the same way.
"""

from __future__ import annotations

import gc
import itertools
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
from builders import SHAPE, causal_batch, planned, random_layout
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import PASSES, CommLaunch
from dyncp.runtime.attention import run_backward, run_forward
from dyncp.runtime.buffers import Buffers, Layout, allocate
from dyncp.runtime.executor import Executor
from dyncp.runtime.kernels.api import Score
from dyncp.runtime.prepare import Prepared, prepared_for
from dyncp.runtime.transports import torch_dist
from dyncp.runtime.transports.api import TransportError
from dyncp.runtime.transports.torch_dist import TorchDistTransport, by_peer
from dyncp.strategies import lower_layout
from dyncp.strategies.api import Options

RANKS = 3
BATCH = causal_batch(61, 20, 7)
CPU = torch.device("cpu")


class Queued:
    """Work on a stream: to wait for it with a time-out would block the host."""

    def wait(self):
        return True


class Calls(list):
    """What was called, by name and what it was given; `fail` raises instead, at a call or at its wait."""

    def __init__(self, monkeypatch):
        self.fail, self.greatest = {}, None
        monkeypatch.setattr(torch_dist, "is_gpu", lambda device: True)
        monkeypatch.setattr(dist, "batch_isend_irecv", self.batch_isend_irecv)
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(dist, "all_to_all_single", self.all_to_all_single)

    def note(self, name, *given):
        self.append((name, *given))
        if name in self.fail:
            raise self.fail[name]
        work = Queued()
        if f"{name} wait" in self.fail:
            work.wait = lambda: (_ for _ in ()).throw(self.fail[f"{name} wait"])
        return work

    def batch_isend_irecv(self, ops):
        return [self.note("batch", [(op.group_peer, op.op is dist.isend, len(op.tensor)) for op in ops])]

    def all_reduce(self, numbers, op, group, async_op):
        assert async_op
        assert op == dist.ReduceOp.MAX
        if self.greatest is not None and len(numbers) > 1:
            numbers.copy_(torch.tensor(self.greatest))
        return self.note("all_reduce")

    def all_to_all_single(self, output, data, received, sent, group, async_op):
        assert async_op
        assert (len(output), len(data)) == (sum(received), sum(sent))
        return self.note("all_to_all", received, sent)

    def named(self, name):
        return [given for each, *given in self if each == name]


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


@contextmanager
def member(rank, ranks=RANKS):
    """This process as one rank of the default group."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class NoKernels:
    """Compute nothing."""

    def attend(self, *given): ...

    attend_backward = reduce = copy = attend


def run(plan, transport):
    """Both passes of a rank, without computing."""
    part = plan.rank(transport.rank)
    programs = part.program("default").forward, part.program("default").backward
    layouts = tuple(Layout(plan.header, program) for program in programs)
    executor = Executor(part, "default", Prepared(NoKernels(), layouts), transport, Score(1.0), 10.0)
    for pass_, program, layout in zip(PASSES, programs, layouts, strict=True):
        executor.run(pass_, Buffers(layout, {}, allocate(program.kept_bytes, CPU)))


def last_steps(plan):
    """Of each pass, the last step in which any rank has messages."""
    programs = [plan.rank(rank).program("default") for rank in range(plan.header.ranks)]
    passes = ([each.forward for each in programs], [each.backward for each in programs])
    return [max(len(steps(program)) and steps(program)[-1] for program in pass_) for pass_ in passes]


def steps(program):
    return [each.step for each in program.instructions if isinstance(each, CommLaunch)]


def random_plan(length):
    """With blocks placed at random. Of 20 tokens, rank 0 has no messages in steps 2 and 3, and nobody has in 4; of 16,
    rank 0 has none at all."""
    batch, cluster, options = causal_batch(length), Cluster(1, RANKS), Options(block_tokens=8)
    layout = random_layout(np.random.default_rng(6), batch, cluster, options)
    return lower_layout(layout, batch, SHAPE, cluster, "random", options)


# Point to point


def test_a_step_is_one_batch_in_one_order_on_both_sides(calls):
    plan, batches = random_plan(20), {}
    for rank in range(RANKS):
        calls.clear()
        with member(rank):
            run(plan, TorchDistTransport())
        batches[rank] = [batch for (batch,) in calls.named("batch")]
        program = plan.rank(rank).program("default")
        assert 0 < len(batches[rank]) == len(steps(program.forward)) + len(steps(program.backward))

    def between(rank, peer):
        """Whether rank sends, and how much, in each batch with messages to or from peer."""
        own = [[(is_send, size) for other, is_send, size in batch if other == peer] for batch in batches[rank]]
        return [batch for batch in own if batch]

    for low, high in itertools.combinations(range(RANKS), 2):
        mirrored = [[(not is_send, size) for is_send, size in batch] for batch in between(high, low)]
        assert between(low, high) == mirrored


def test_all_ranks_join_once_before_the_first_message(calls):
    """Also one that has no messages."""
    plan = random_plan(16)
    for rank in range(RANKS):
        calls.clear()
        with member(rank):
            run(plan, TorchDistTransport())
            run(plan, TorchDistTransport())
        assert calls[0] == ("all_reduce",)
        assert len(calls.named("all_reduce")) == 1
        assert bool(calls.named("batch")) == (rank > 0)


def test_each_group_is_joined_anew(calls):
    plans = {ranks: planned(BATCH, ranks).plan for ranks in (2, 3)}
    for _ in range(2):  # the same default group by name, rank and size
        with member(1):
            run(plans[3], TorchDistTransport())
            group = dist.new_group([0, 1])
            run(plans[2], TorchDistTransport(group))
            run(plans[2], TorchDistTransport(group))
            del group
    assert len(calls.named("all_reduce")) == 4
    gc.collect()
    assert not torch_dist._known


def test_peers_are_named_by_their_rank_in_the_world(calls, monkeypatch):
    ops = []
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda given: ops.extend(given) or [])
    with member(2):
        data = torch.zeros(4, dtype=torch.uint8)
        TorchDistTransport(dist.new_group([1, 2])).start([(0, data)], [(0, data)])
    assert [(op.peer, op.op is dist.isend) for op in ops] == [(1, False), (1, True)]


def test_on_a_cpu_ranks_need_not_join(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", None)
    with member(1):
        run(planned(BATCH, RANKS).plan, TorchDistTransport())


def test_one_rank_needs_nobody(calls):
    with member(0, 1):
        for exchange in torch_dist.EXCHANGES:
            run(planned(BATCH, 1).plan, TorchDistTransport(exchange=exchange))
    assert calls == []


def test_a_device_that_is_not_the_current_one_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert torch_dist.is_gpu(torch.device("cuda", 1))
    assert not torch_dist.is_gpu(CPU)
    with member(1):
        expected = r"tensors are on cuda:0, but the current device .* is cuda:1: call torch\.cuda\.set_device\(0\)"
        with pytest.raises(ValueError, match=expected):
            TorchDistTransport().begin("program", (1, 1), torch.device("cuda", 0), 1.0)


# All to all


def test_all_ranks_take_part_in_all_steps(calls):
    plan = random_plan(20)
    calls.greatest = last_steps(plan)
    received, sent = [], []  # by rank, then by call, then by peer
    for rank in range(RANKS):
        calls.clear()
        with member(rank):
            run(plan, TorchDistTransport(exchange="all_to_all"))
        assert [name for name, *_ in calls[:2]] == ["all_reduce", "all_reduce"]  # to connect, and to agree
        assert [name for name, *_ in calls[2:]] == ["all_to_all"] * sum(calls.greatest)
        received.append([call[1] for call in calls[2:]])
        sent.append([call[2] for call in calls[2:]])
    assert np.array_equal(np.array(received), np.array(sent).transpose(2, 1, 0))
    busy = np.array(sent).any(2) | np.array(received).any(2)
    assert busy[:, :5].tolist() == [[True, False, False, False, True]] + [[True, True, True, False, True]] * 2


def test_ranks_agree_once_per_program_and_forget_alike(calls, monkeypatch):
    monkeypatch.setattr(torch_dist, "REMEMBERED_PROGRAMS", 2)
    calls.greatest = (5, 7)
    with member(1):
        agreed = []
        for program in "aabbacab":  # c puts a out, a puts b out, b puts c out
            assert TorchDistTransport(exchange="all_to_all").begin(program, (1, 2), CPU, 1.0) == (5, 7)
            agreed.append(len(calls.named("all_reduce")) - 1)
    assert agreed == [1, 1, 2, 2, 2, 3, 4, 5]


def test_an_unknown_exchange_is_refused():
    with pytest.raises(ValueError, match="unknown exchange 'ring'; choose one of p2p, all_to_all"):
        TorchDistTransport(exchange="ring")


def test_messages_lie_by_peer_in_the_order_given():
    data = [torch.full((1,), i) for i in range(4)]
    ordered = by_peer([(2, data[0]), (1, data[1]), (2, data[2])], [(0, data[3])])
    assert [(peer, is_send, int(value)) for peer, is_send, value in ordered] == [
        (0, False, 3), (1, True, 1), (2, True, 0), (2, True, 2),
    ]  # fmt: skip


# What both have in common


@pytest.mark.parametrize(
    ("exchange", "name", "where"),
    [
        ("p2p", "batch", r"instruction 1 of \d+ \(CommLaunch of step 1, peers 0, 2\): rank 1: .* could not start"),
        ("p2p", "batch wait", r"instruction \d+ of \d+ \(CommWait of step 1, peers 0, 2\): rank 1: .* failed"),
        ("all_to_all", "all_to_all", r"instruction 1 of .*step 1, peers 0, 2\): rank 1: .* could not start"),
        ("all_to_all", "all_to_all wait", r"instruction \d+ of .*step 1, peers 0, 2\): rank 1: .* failed"),
    ],
)
def test_errors_name_rank_and_peers(calls, exchange, name, where):
    plan = planned(BATCH, RANKS).plan
    calls.greatest = last_steps(plan)
    calls.fail[name] = dist.DistBackendError("NCCL error")
    with member(1), pytest.raises(TransportError, match=f"rank 1, forward pass, mask 'default', {where}") as caught:
        run(plan, TorchDistTransport(exchange=exchange))
    words = str(caught.value)
    assert "send to rank 2 (" in words
    assert "receive from rank 0 (" in words
    assert words.endswith("NCCL error")


@pytest.mark.parametrize("name", ["all_reduce", "all_reduce wait"])
def test_a_rank_that_does_not_join_is_an_error(calls, name):
    calls.fail[name] = dist.DistBackendError("NCCL error")
    expected = (
        r"rank 1, forward pass, .* before instruction 0 of \d+ \(making ready for messages\): rank 1: an exchange"
    )
    with member(1), pytest.raises(TransportError, match=expected):
        run(planned(BATCH, RANKS).plan, TorchDistTransport())


class NothingWaits(TorchDispatchMode):
    """Fail where the host would wait for a GPU, or data would go between host and GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [each for each in (*args, out) if isinstance(each, torch.Tensor)]
        assert all(each.is_meta for each in tensors), func  # so nothing came from the host, or went there
        assert "lift" not in str(func), "a tensor was made of Python numbers"
        return out


@pytest.mark.parametrize("exchange", torch_dist.EXCHANGES)
@pytest.mark.parametrize("strategy", ["ring", "zigzag"])
def test_nothing_waits_for_the_gpu(calls, strategy, exchange):
    """Meta tensors have no values: whatever asks for one fails. So a pass can be captured as a CUDA graph, too."""
    plan = planned(BATCH, RANKS, strategy).plan
    calls.greatest = last_steps(plan)
    with member(1):
        part = plan.rank(1)
        rows = len(plan.header.local_tokens(1)[0])
        q = torch.empty(rows, SHAPE.q_heads, SHAPE.head_dim, device="meta")
        k, v = (torch.empty(rows, SHAPE.kv_heads, SHAPE.head_dim, device="meta") for _ in range(2))
        transport = TorchDistTransport(exchange=exchange)
        transport.known.last_steps[f"{plan.digest} default"] = tuple(calls.greatest)  # as after a first call
        prepared = prepared_for(part, "default", "reference", q.device)
        executor = Executor(part, "default", prepared, transport, Score(0.3), 10.0)
        with NothingWaits():
            done = run_forward(executor, q, k, v, None)
            run_backward(executor, q, k, v, None, done, q)
    assert calls.named("batch" if exchange == "p2p" else "all_to_all")
