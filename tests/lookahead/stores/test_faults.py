"""Servers that are not there yet, that go and come back, that go for good, and that hang."""

import threading
import time

import pytest
from lookahead.stores.servers import LONG_S

from dyncp.lookahead.stores.api import StoreError
from dyncp.lookahead.stores.open import open_store
from dyncp.lookahead.stores.patient import Patient
from dyncp.lookahead.stores.redis import RedisStore
from dyncp.lookahead.stores.tcp import TcpStore


def later(call):
    thread = threading.Timer(0.3, call)
    thread.start()
    return thread


def opened(server, job="job"):
    return open_store(server.address, job, password=server.password)


@pytest.mark.parametrize("kind", ["tcp", "redis"])
def test_a_server_may_start_later_and_start_again(stopped, kind):
    server = stopped(kind)
    plain, store = opened(server), Patient(opened(server), LONG_S)
    with pytest.raises(StoreError, match=rf"{server.address} cannot be reached: .*refused"):
        plain.put("a", b"1")
    starter = later(server.start)
    store.put("a", b"1")
    assert (plain.get("a", 5), store.outages) == (b"1", 1)
    starter.join()

    server.kill()
    starter = later(server.start)
    with pytest.raises(TimeoutError):  # the new server has forgotten
        store.get("a", 0)
    starter.join()
    assert store.outages == 2
    store.put("a", b"2")
    assert store.get("a", 5) == b"2"
    assert store.outages == 2


@pytest.mark.parametrize("kind", ["tcp", "redis"])
def test_waits_in_several_threads_survive_a_restart(stopped, kind):
    server = stopped(kind).start()
    store, got = Patient(opened(server), LONG_S), []
    readers = [threading.Thread(target=lambda: got.append(store.get("later", LONG_S))) for _ in range(3)]
    for reader in readers:
        reader.start()
    time.sleep(0.2)
    server.kill()
    server.start()
    store.put("later", b"x")
    for reader in readers:
        reader.join()
    assert got == [b"x"] * 3


@pytest.mark.parametrize("kind", ["tcp", "redis"])
def test_a_server_that_is_gone_for_good_ends_the_patience(stopped, kind):
    server = stopped(kind).start()
    store = Patient(opened(server), 1.0)
    store.put("a", b"1")
    server.kill()
    started = time.monotonic()
    with pytest.raises(
        StoreError, match=rf"{server.address} was out of reach for \d+\.\d s and \d+ tries; the last one: "
    ):
        store.get("a", 60)
    assert time.monotonic() - started < LONG_S


@pytest.mark.parametrize("kind", ["tcp", "redis"])
def test_a_server_that_hangs_is_out_of_reach(stopped, kind):
    server = stopped(kind).start()
    if kind == "tcp":
        store = TcpStore.connect("127.0.0.1", server.port, "job", timeout_s=0.5)
    else:
        store = RedisStore(server.address, "job", server.password, timeout_s=0.5)
    store.put("a", b"1")
    with server.frozen():
        for _ in range(2):  # on the connection that it has, and on a new one
            with pytest.raises(StoreError, match="cannot be reached: "):
                store.get("a", 5)
    assert Patient(store).get("a", 5) == b"1"


def test_a_host_that_nobody_knows_is_out_of_reach():
    with pytest.raises(StoreError, match=r"tcp://no-such-host\.invalid:29400 cannot be reached"):
        open_store("tcp://no-such-host.invalid:29400", "job").get("a", 0)
