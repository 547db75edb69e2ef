import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from dyncp.lookahead.stores import tcp
from dyncp.lookahead.stores.memory import MemoryStore
from dyncp.lookahead.stores.tcp import TcpStore


@pytest.fixture(params=["memory", "tcp"])
def store(request):
    if request.param == "memory":
        return MemoryStore()
    return TcpStore(dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False), "job")


@pytest.mark.parametrize("size", [0, 1, tcp.CHUNK_BYTES, 2 * tcp.CHUNK_BYTES + 12345])  # the last one is above 8 MiB
def test_what_is_put_is_got(store, size):
    value = bytes(range(251)) * (size // 251 + 1)
    value = value[:size]
    store.put("a", value)
    assert store.get("a", 5) == value
    assert store.get("a", 5) == value


def test_a_key_is_gone_after_delete_and_deleting_it_again_does_nothing(store):
    store.put("a", b"1" * 100)
    store.put("b", b"2")
    store.delete("a")
    store.delete("a")
    with pytest.raises(TimeoutError, match=r"'a' did not come within 0\.05 s"):
        store.get("a", 0.05)
    assert store.get("b", 5) == b"2"  # the handle still works after a time-out
    store.put("a", b"3")
    assert store.get("a", 5) == b"3"


def test_get_waits_for_a_put_of_another_thread(store):
    got = []
    reader = threading.Thread(target=lambda: got.append(store.get("later", 20)))
    reader.start()
    time.sleep(0.1)
    assert got == []
    # while the reader blocks, this thread's handle is free
    store.put("other", b"x")
    assert store.get("other", 5) == b"x"
    store.put("later", b"y")
    reader.join()
    assert got == [b"y"]


def test_ctrl_c_ends_a_wait(store):
    started = time.monotonic()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        store.get("never", 30)
    assert time.monotonic() - started < 30
    timer.join()


def test_a_wait_is_silent(capfd):
    """torch's own wait prints a warning when its time is over, and a loader asks twice a second."""
    store = TcpStore(dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False))
    with pytest.raises(TimeoutError):
        store.get("never", 0.05)
    assert capfd.readouterr() == ("", "")


def test_a_lost_server_is_a_connection_error():
    code = (
        "import time; import torch.distributed as dist; "
        "server = dist.TCPStore('127.0.0.1', 0, 1, True, wait_for_workers=False); "
        "print(server.port, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as host:
        store = TcpStore(dist.TCPStore("127.0.0.1", int(host.stdout.readline()), 1, False))
        store.put("a", b"1")
        assert store.get("a", 20) == b"1"
        killer = threading.Timer(0.2, host.kill)
        killer.start()
        with pytest.raises(ConnectionError, match="torch's store cannot be reached: DistNetworkError: "):
            store.get("never", 30)
        for call in (lambda: store.get("a", 1), lambda: store.delete("a")):
            with pytest.raises(ConnectionError):
                call()
        with pytest.raises(ConnectionError):
            for _ in range(100):  # a put returns before the server has seen it
                store.put("b", b"2")


def test_tcp_stores_of_different_jobs_do_not_meet():
    server = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    one, two = TcpStore(server, "one"), TcpStore(server, "two")
    one.put("key", b"1")
    two.put("key", b"2")
    assert one.get("key", 5) == b"1"
    two.delete("key")
    assert one.get("key", 5) == b"1"


def test_deleted_chunks_leave_the_server():
    server = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    before = server.num_keys()
    store = TcpStore(server)
    store.put("key", b"x" * (tcp.CHUNK_BYTES + 1))
    store.get("key", 5)  # a put returns before the server has seen it
    assert server.num_keys() == before + 3
    store.delete("key")
    assert server.num_keys() == before


def test_the_process_groups_own_store_serves(tmp_path):
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
    try:
        store = TcpStore.of_default_group("plans")
        store.put("key", b"1")
        assert store.get("key", 5) == b"1"
        one, two = TcpStore.of_default_group(), TcpStore.of_default_group()  # as a training and an evaluation loader
        one.put("key", b"of one")
        two.put("key", b"of two")
        assert one.get("key", 5) == b"of one"
    finally:
        dist.destroy_process_group()
