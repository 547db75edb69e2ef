"""The loop over instructions: what it says when a transfer fails, and the comparison of plans over ranks."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from builders import SHAPE, causal_batch, planned
from runtime.compare import assert_close, dense, gather, random_tensors, rank_attention

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.blocks import HAS_Q
from dyncp.ir.plan import FORWARD
from dyncp.runtime.attention import attention
from dyncp.runtime.buffers import Buffers, Layout, allocate
from dyncp.runtime.executor import COMPARED_BYTES, Executor, Traffic, compare_ranks
from dyncp.runtime.kernels.api import Score
from dyncp.runtime.prepare import Prepared
from dyncp.runtime.transports.api import TransportError
from dyncp.runtime.transports.local import LocalWorld, run_ranks

BATCH = causal_batch(40)


def test_a_lost_message_names_rank_pass_instruction_and_peers():
    tensors, plan = random_tensors(BATCH, SHAPE), planned(BATCH).plan
    world = LocalWorld(3)  # the other ranks never come
    with pytest.raises(TransportError) as caught:
        rank_attention(tensors, plan, world.transport(0), timeout_s=0.05, compare_digests=False)
    message = str(caught.value)
    assert message.startswith("rank 0, forward pass, mask 'default', instruction ")
    assert "(CommWait of step 1, peers 1, 2): rank 0 received nothing from rank 2 within 0.05 s" in message


@pytest.mark.parametrize("compare", [False, True])
def test_a_peer_that_fails_in_the_backward_is_named(compare):
    tensors, plan = random_tensors(BATCH, SHAPE), planned(BATCH).plan
    forward_done, errors = threading.Barrier(3), {}

    def fail_before_backward(transport):
        own = tensors.rows(plan, transport.rank, HAS_Q)
        q, k, v = (tensor[own].requires_grad_() for tensor in (tensors.q, tensors.k, tensors.v))
        out = attention(q, k, v, plan, transport, timeout_s=30.0, compare_digests=compare)
        forward_done.wait(30)
        if transport.rank == 1:
            raise ZeroDivisionError("between the passes")
        try:
            out.sum().backward()
        except TransportError as error:
            errors[transport.rank] = str(error)
            raise

    with pytest.raises(ZeroDivisionError) as caught:
        run_ranks(3, fail_before_backward)
    assert caught.value.__notes__ == ["(on rank 1 of 3)"]
    assert errors.keys() == {0, 2}
    for rank, message in errors.items():
        step = "before instruction 0 of" if compare else "instruction "
        assert message.startswith(f"rank {rank}, backward pass, mask 'default', {step}")
        assert "but rank 1 failed" in message


class Unreachable:
    """A transport whose peers are gone before anything starts."""

    rank, world_size = 0, 3

    def begin(self, program, last_steps, device, timeout_s):
        return (0,) * len(last_steps)

    def start(self, sends, recvs):
        raise TransportError("connection refused")

    def wait(self, handle, timeout_s):
        raise AssertionError("nothing was started")


def test_a_message_that_cannot_start_is_named_too():
    with pytest.raises(
        TransportError, match=r"rank 0, forward pass.*\(CommLaunch of step 1, peers 1, 2\): connection ref"
    ):
        rank_attention(random_tensors(BATCH, SHAPE), planned(BATCH).plan, Unreachable(), compare_digests=False)


class Log(list):
    """Kernels and a transport that only note what they are asked for; all ranks take part in six steps."""

    rank, world_size = 0, 3

    def begin(self, program, last_steps, device, timeout_s):
        assert last_steps == (2, 4)
        return (6, 6)

    def start(self, sends, recvs):
        self.append(f"start {len(sends)} {len(recvs)}")
        return len([each for each in self if each.startswith("start")])

    def wait(self, handle, timeout_s):
        self.append(f"wait {handle}")

    def attend(self, buffers, instruction, score):
        self.append("attend")

    def reduce(self, buffers, instruction): ...

    copy = reduce


def test_steps_without_messages_start_as_soon_as_those_before_them():
    """So that no rank waits for another one that computes; and nobody waits for them before there is need."""
    plan, log = planned(BATCH).plan, Log()
    program = plan.rank(2).program("default")
    layouts = Layout(plan.header, program.forward), Layout(plan.header, program.backward)
    executor = Executor(plan.rank(2), "default", Prepared(log, layouts), log, Score(1.0), 1.0)
    executor.run(FORWARD, Buffers(layouts[0], {}, allocate(program.forward.kept_bytes, torch.device("cpu"))))
    idle = ["start 0 0"] * 4
    assert log == [
        *("start 1 1", "attend", "wait 1", "start 1 1", *idle, "attend", "wait 2", "attend"),
        *("wait 3", "wait 4", "wait 5", "wait 6"),
    ]
    assert Traffic(layouts[0]).idle_steps(6) == {0: 0, 1: 0, 2: 4}
    assert Traffic(layouts[0]).idle_steps(0) == {}


def test_memory_that_is_used_again_is_one_piece():
    plan = planned(causal_batch(160), 8).plan
    layout = Layout(plan.header, plan.rank(3).program("default").forward)
    traffic = Traffic(layout)
    runs = {launch.step: runs for launch, runs in layout.messages.items()}
    assert len(traffic.pieces) < sum(map(len, runs.values())) / 2
    for step, (sends, recvs) in traffic.launches.items():
        found = [(peer, is_send, *traffic.pieces[n][2:]) for is_send in (1, 0) for peer, n in (recvs, sends)[is_send]]
        assert sorted(found) == sorted(tuple(run) for run in runs[step])


def test_a_comparison_that_fails_says_where():
    where = r"rank 0, forward pass, mask 'default', before instruction 0 of \d+ \(comparing plans with all ranks\): "
    tensors, plan = random_tensors(BATCH, SHAPE), planned(BATCH).plan
    with pytest.raises(TransportError, match=where + "connection refused"):
        rank_attention(tensors, plan, Unreachable())
    with pytest.raises(TransportError, match=where + r"rank 0 received nothing from rank 1 within 0\.05 s"):
        rank_attention(tensors, plan, LocalWorld(3).transport(0), timeout_s=0.05)


# Ranks that come apart

TWO_MASKS = Batch([Sequence(40, {"a": masks.causal(40), "b": masks.full(40)})])
PLAN = planned(TWO_MASKS).plan
OTHER_PLAN = planned(TWO_MASKS, strategy="zigzag").plan


def runs(transport, *calls, backward=()):
    """The calls one after the other, each with its own settings; then backwards in the given order."""
    tensors, outs = random_tensors(TWO_MASKS, SHAPE), []
    for settings in calls:
        plan = settings.get("plan", PLAN)
        own = tensors.rows(plan, transport.rank, HAS_Q)
        qkv = (tensor[own].requires_grad_() for tensor in (tensors.q, tensors.k, tensors.v))
        others = {name: value for name, value in settings.items() if name != "plan"}
        outs.append(attention(*qkv, plan, transport, **({"mask": "a", "timeout_s": 30.0} | others)))
    for number in backward:
        outs[number].sum().backward()


@pytest.mark.parametrize(
    ("common", "odd", "words", "odd_words"),
    [
        ({}, {"plan": OTHER_PLAN}, PLAN.digest[:12], OTHER_PLAN.digest[:12]),
        ({}, {"mask": "b"}, "mask 'a', scale 0.353553", "mask 'b', scale 0.353553"),
        ({}, {"scale": 0.5}, "scale 0.353553, softcap None", "scale 0.5, softcap None"),
        ({}, {"softcap": 3.0}, "softcap None, no sinks", "softcap 3.0, no sinks"),
        ({"sinks": torch.zeros(4)}, {}, "softcap None, sinks", "softcap None, no sinks"),
    ],
)
def test_ranks_with_other_calls_are_told(common, odd, words, odd_words):
    errors = {}

    def call(transport):
        try:
            runs(transport, odd if transport.rank == 2 else common)
        except ValueError as error:
            errors[transport.rank] = str(error)

    run_ranks(3, call)
    assert errors.keys() == {0, 1, 2}
    own, theirs, forward = re.escape(words), re.escape(odd_words), "runs the forward pass of plan"
    for rank in (0, 1):
        assert re.match(
            f"rank {rank} {forward} .*{own}.*; but rank 2 {forward} .*{theirs}.*: make the same", errors[rank]
        )
    assert re.match(f"rank 2 {forward} .*{theirs}.*; but rank 0 {forward} .*{own}", errors[2])


@pytest.mark.parametrize(
    ("common", "odd", "message"),
    [
        ((0, 1), (1, 0), r"the backward pass of plan .* mask 'a', .*; but rank 2 runs the backward pass .* mask 'b'"),
        ((0,), (), r"the backward pass of plan .* mask 'a', .*; but rank 2 runs the forward pass .* mask 'a'"),
    ],
)
def test_ranks_with_another_order_of_passes_are_told(common, odd, message):
    errors = {}

    def call(transport):
        try:
            runs(transport, {}, {"mask": "b"}, backward=odd if transport.rank == 2 else common)
            runs(transport, {})
        except ValueError as error:
            errors[transport.rank] = str(error)

    run_ranks(3, call)
    assert errors.keys() == {0, 1, 2}
    assert all(re.search(message, errors[rank]) for rank in (0, 1))


def test_without_the_comparison_ranks_are_trusted():
    """What the comparison is for: sizes agree, and numbers are wrong."""
    run_ranks(3, lambda transport: runs(transport, {"mask": "ab"[transport.rank // 2], "compare_digests": False}))


def test_a_call_after_a_refused_one_is_right():
    tensors = random_tensors(TWO_MASKS, SHAPE)

    def call(transport):
        with pytest.raises(ValueError, match="make the same calls"):
            runs(transport, {"mask": "ab"[transport.rank // 2]})
        return rank_attention(tensors, PLAN, transport, mask="b")

    assert_close(gather(tensors, PLAN, run_ranks(3, call)), dense(tensors, "b"), 1e-5)


def test_words_longer_than_the_message_are_compared_whole():
    def compare(transport, last):
        words = "x" * 2 * COMPARED_BYTES + last
        compare_ranks(words, "digest", transport, torch.device("cpu"), 10)

    run_ranks(2, lambda transport: compare(transport, "same"))
    with pytest.raises(ValueError, match=r"but rank . runs xxx"):
        run_ranks(2, lambda transport: compare(transport, str(transport.rank)))
