"""The loop over instructions: what it says when a transfer fails, and the comparison of plans over ranks."""

from __future__ import annotations

import threading

import pytest
import torch
from builders import SHAPE, causal_batch, planned
from runtime.compare import random_tensors, rank_attention

from dyncp.ir.blocks import HAS_Q
from dyncp.runtime.attention import attention
from dyncp.runtime.executor import compare_plans
from dyncp.runtime.transports.api import TransportError
from dyncp.runtime.transports.local import LocalWorld, run_ranks

BATCH = causal_batch(40)


def test_a_lost_message_names_rank_pass_instruction_and_peers():
    tensors, plan = random_tensors(BATCH, SHAPE), planned(BATCH).plan
    world = LocalWorld(3)  # the other ranks never come
    with pytest.raises(TransportError) as caught:
        rank_attention(tensors, plan, world.transport(0), timeout_s=0.05)
    message = str(caught.value)
    assert message.startswith("rank 0, forward pass, mask 'default', instruction ")
    assert "(CommWait of step 1, peers 1, 2): rank 0 received nothing from rank 2 within 0.05 s" in message


def test_a_peer_that_fails_in_the_backward_is_named():
    tensors, plan = random_tensors(BATCH, SHAPE), planned(BATCH).plan
    forward_done, errors = threading.Barrier(3), {}

    def fail_before_backward(transport):
        own = tensors.rows(plan, transport.rank, HAS_Q)
        q, k, v = (tensor[own].requires_grad_() for tensor in (tensors.q, tensors.k, tensors.v))
        out = attention(q, k, v, plan, transport, timeout_s=30.0)
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
        assert message.startswith(f"rank {rank}, backward pass, mask 'default', instruction ")
        assert "but rank 1 failed" in message


class Unreachable:
    """A transport whose peers are gone before anything starts."""

    rank, world_size = 0, 3

    def start(self, sends, recvs):
        raise TransportError("connection refused")

    def wait(self, handle, timeout_s):
        raise AssertionError("nothing was started")


def test_a_message_that_cannot_start_is_named_too():
    with pytest.raises(
        TransportError, match=r"rank 0, forward pass.*\(CommLaunch of step 1, peers 1, 2\): connection ref"
    ):
        rank_attention(random_tensors(BATCH, SHAPE), planned(BATCH).plan, Unreachable())


def test_ranks_with_the_same_plan_agree():
    plan = planned(BATCH).plan
    run_ranks(3, lambda transport: compare_plans(plan.rank(transport.rank), transport, torch.device("cpu"), 10))


def test_ranks_with_different_plans_are_told():
    plans = [planned(BATCH).plan, planned(BATCH).plan, planned(causal_batch(39)).plan]
    assert plans[0] == plans[1] != plans[2]
    errors = {}

    def compare(transport):
        try:
            compare_plans(plans[transport.rank].rank(transport.rank), transport, torch.device("cpu"), 10)
        except ValueError as error:
            errors[transport.rank] = str(error)

    run_ranks(3, compare)
    own, other = plans[0].digest[:12], plans[2].digest[:12]
    assert errors[0].startswith(
        f"rank 0 holds plan {own} but rank 2 holds {other}: give every rank its part of one plan"
    )
    assert errors[2].startswith(f"rank 2 holds plan {other} but rank 0 holds {own}")
    assert errors.keys() == {0, 1, 2}
