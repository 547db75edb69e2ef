"""The transport between threads: order, time-outs, and how failures spread."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

from dyncp.runtime.transports.api import TransportError
from dyncp.runtime.transports.local import LocalWorld, run_ranks


def message(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_results_come_by_rank():
    assert run_ranks(3, lambda transport: (transport.rank, transport.world_size)) == [(0, 3), (1, 3), (2, 3)]


def test_messages_of_a_pair_arrive_in_the_order_of_their_start():
    def exchange(transport):
        peer = 1 - transport.rank
        received = [message(0), message(0, 0)]
        first = transport.start([(peer, message(transport.rank + 10))], [(peer, received[0])])
        second = transport.start([(peer, message(transport.rank + 20, 7))], [(peer, received[1])])
        transport.wait(second, 10)  # waiting in another order changes nothing
        transport.wait(first, 10)
        return [tensor.tolist() for tensor in received]

    assert run_ranks(2, exchange) == [[[11], [21, 7]], [[10], [20, 7]]]


def test_a_message_is_what_it_was_when_sent():
    def exchange(transport):
        data = message(5)
        if transport.rank == 0:
            handle = transport.start([(1, data)], [])
            data.zero_()
        else:
            time.sleep(0.05)
            handle = transport.start([], [(0, data.zero_())])
        transport.wait(handle, 10)
        return data.item()

    assert run_ranks(2, exchange) == [0, 5]


def test_time_out_names_rank_and_peer():
    transport = LocalWorld(3).transport(2)
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"rank 2 received nothing from rank 1 within 0\.05 s"):
        transport.wait(transport.start([], [(1, message(0))]), 0.05)
    assert time.monotonic() - started < 5


def test_sizes_must_agree():
    world = LocalWorld(2)
    world.transport(0).start([(1, message(1, 2))], [])
    receiver = world.transport(1)
    with pytest.raises(TransportError, match="rank 1 expects 3 bytes from rank 0 but was sent 2"):
        receiver.wait(receiver.start([], [(0, message(0, 0, 0))]), 1)


def test_the_first_error_is_raised_and_the_others_stop_waiting():
    seen = []

    def fail_on_one(transport):
        if transport.rank == 1:
            time.sleep(0.05)
            raise KeyError("broken")
        try:
            transport.wait(transport.start([], [(1, message(0))]), 60)
        except TransportError as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError) as caught:
        run_ranks(3, fail_on_one)
    assert caught.value.__notes__ == ["(on rank 1 of 3)"]
    assert sorted(seen) == [f"rank {rank} waits for a message from rank 1, but rank 1 failed" for rank in (0, 2)]


def test_an_interrupt_ends_the_waiting():
    def call(transport):
        if transport.rank == 0:
            time.sleep(0.1)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        transport.wait(transport.start([], [(1 - transport.rank, message(0))]), 60)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(2, call)
    assert time.monotonic() - started < 30


def test_what_was_sent_before_a_failure_still_arrives():
    world = LocalWorld(2)
    world.transport(0).start([(1, message(9))], [])
    world.fail(0)
    data = message(0)
    receiver = world.transport(1)
    receiver.wait(receiver.start([], [(0, data)]), 1)
    assert data.item() == 9


def test_grad_mode_is_the_callers():
    with torch.no_grad():
        assert run_ranks(2, lambda transport: torch.is_grad_enabled()) == [False, False]
    assert run_ranks(2, lambda transport: torch.is_grad_enabled()) == [True, True]


def test_a_world_has_ranks():
    with pytest.raises(ValueError, match="world size is 0"):
        LocalWorld(0)
