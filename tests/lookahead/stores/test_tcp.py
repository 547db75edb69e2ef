import threading
import time

import pytest
import torch.distributed as dist

from dyncp.ir.errors import DecodeError
from dyncp.lookahead.stores import tcp
from dyncp.lookahead.stores.api import StoreError
from dyncp.lookahead.stores.tcp import TcpStore


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)


def test_a_lost_server_is_a_connection_error(stopped):
    server = stopped("tcp").start()
    store = TcpStore(dist.TCPStore("127.0.0.1", server.port, 1, False))
    store.put("a", b"1")
    assert store.get("a", 20) == b"1"
    killer = threading.Timer(0.2, server.kill)
    killer.start()
    with pytest.raises(
        ConnectionError, match=rf"store tcp://127\.0\.0\.1:{server.port} cannot be reached: Dist\w+Error"
    ):
        store.get("never", 30)
    killer.join()
    for call in (lambda: store.get("a", 1), lambda: store.delete("a"), lambda: store.add("b", b"2")):
        with pytest.raises(StoreError, match="ConnectionRefusedError"):
            call()
    with pytest.raises(StoreError):  # a put returns only once the server has the value
        store.put("b", b"2")


def test_a_store_that_was_given_connects_again(stopped):
    server = stopped("tcp").start()
    store = TcpStore(dist.TCPStore("127.0.0.1", server.port, 1, False))
    store.put("a", b"1")
    server.kill()
    server.start()
    with pytest.raises(StoreError):
        store.get("a", 0)
    with pytest.raises(TimeoutError):
        store.get("a", 0)
    store.put("a", b"2")
    assert store.get("a", 5) == b"2"


def test_deleted_chunks_leave_the_server(server):
    before = server.num_keys()
    store = TcpStore(server)
    store.put("key", b"x" * (tcp.CHUNK_BYTES + 1))
    assert server.num_keys() == before + 3
    store.put("key", b"y" * (tcp.CHUNK_BYTES + 1))
    assert server.num_keys() == before + 3
    store.put("key", b"z")
    assert server.num_keys() == before + 1
    store.delete("key")
    assert server.num_keys() == before


def test_connections_end_with_their_threads(server):
    store = TcpStore(server)
    store.put("key", b"1")
    threads = threading.active_count()
    for _ in range(5):
        thread = threading.Thread(target=store.get, args=("key", 5))
        thread.start()
        thread.join()
    del store, thread
    deadline = time.monotonic() + 20
    while threading.active_count() >= threads:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_process_groups_own_store_serves():
    server = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group("gloo", store=server, rank=0, world_size=1)
    try:
        store = TcpStore.of_default_group("plans")
        assert store.address == f"tcp://127.0.0.1:{server.port}"
        store.put("key", b"1")
        assert store.get("key", 5) == b"1"
        one, two = TcpStore.of_default_group(), TcpStore.of_default_group()  # as a training and an evaluation loader
        one.put("key", b"of one")
        two.put("key", b"of two")
        assert one.get("key", 5) == b"of one"
    finally:
        dist.destroy_process_group()


def test_torchs_other_stores_serve_too(tmp_path):
    store = TcpStore(dist.FileStore(str(tmp_path / "file"), 1), "job")
    assert store.address == "torch:FileStore"
    assert store.add("a", b"1") and not store.add("a", b"1")
    store.put("a", b"x" * (tcp.CHUNK_BYTES + 1))
    assert len(store.get("a", 5)) == tcp.CHUNK_BYTES + 1
    store.delete("a")
    with pytest.raises(TimeoutError):
        store.get("a", 0)


@pytest.mark.parametrize("job", ["", "a/b", "ä", "a b"])
def test_a_job_name_is_a_part_of_keys(server, job):
    with pytest.raises(ValueError, match=r"job is .*; it needs 1 to 100 letters"):
        TcpStore(server, job)


@pytest.mark.parametrize("number", [b"abc", b"", b"-1", b"30000000", b"9" * 5000])
def test_a_number_of_chunks_that_nobody_put_is_refused_at_once(number):
    """Anybody may write to the server, and this is read before any seal is looked at."""
    server = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
    store = TcpStore(server, "job")
    dist.PrefixStore("job", server).set("a", b"c" + bytes(16) + number)
    for call in (lambda: store.get("a", 5), lambda: store.delete("a")):
        with pytest.raises(DecodeError, match="what lies at a in the plan store claims"):
            call()
