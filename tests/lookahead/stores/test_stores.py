"""What holds for every store."""

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch.distributed as dist
from lookahead.stores.servers import SOURCE

from dyncp.lookahead.stores.api import ADD_BYTES
from dyncp.lookahead.stores.memory import MemoryStore
from dyncp.lookahead.stores.open import open_store
from dyncp.lookahead.stores.patient import Patient
from dyncp.lookahead.stores.tcp import CHUNK_BYTES, TcpStore

NAMES = ["memory", "file", "own tcp", "tcp", "redis", "rediss", "patient"]
_jobs = count()


@pytest.fixture
def job():
    return f"job{next(_jobs)}"


@pytest.fixture(params=NAMES)
def place(request, tmp_path, running):
    """A place for stores of several jobs: how one is opened, and by which address and password by another process."""
    server = None
    match request.param:
        case "memory":
            return lambda job: MemoryStore(job), None, None
        case "file" | "patient":
            address, password = f"file:{tmp_path}", None
        case "own tcp":
            server = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)
            return lambda job: TcpStore(server, job), f"tcp://127.0.0.1:{server.port}", None
        case kind:
            address, password = running(kind).address, running(kind).password
    wrap = Patient if request.param == "patient" else lambda store: store
    return lambda job: wrap(open_store(address, job, password=password)), address, password


@pytest.fixture
def store(place, job):
    return place[0](job)


@pytest.mark.parametrize("size", [0, 1, ADD_BYTES, ADD_BYTES + 1, CHUNK_BYTES, 2 * CHUNK_BYTES + 12345])
def test_what_is_put_is_got(store, size):
    value = bytes(range(251)) * (size // 251 + 1)
    value = value[:size]  # the last one is above 8 MiB
    store.put("a", value)
    assert store.get("a", 5) == value
    assert store.get("a", 0) == value


@pytest.mark.parametrize("old, new", [(1, 2), (1, ADD_BYTES + 1), (CHUNK_BYTES + 1, 3), (ADD_BYTES + 1, ADD_BYTES + 1)])
def test_a_put_takes_the_place_of_what_was_there(store, old, new):
    store.put("a", b"o" * old)
    store.put("a", b"n" * new)
    assert store.get("a", 5) == b"n" * new
    store.delete("a")
    with pytest.raises(TimeoutError):
        store.get("a", 0)


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


def test_only_the_first_add_stores(store):
    assert store.add("a", b"1")
    assert not store.add("a", b"2")
    assert not store.add("a", b"1")  # also with the same value
    assert store.get("a", 5) == b"1"
    store.put("a", b"3")
    assert not store.add("a", b"1")
    store.delete("a")
    assert store.add("a", b"4") and store.get("a", 5) == b"4"
    store.put("b", b"")
    assert not store.add("b", b"1")  # an empty value is there too
    assert store.add("c", b"x" * ADD_BYTES) and not store.add("c", b"")
    with pytest.raises(ValueError, match="'d' was added with 65537 bytes; at most 65536 fit"):
        store.add("d", b"x" * (ADD_BYTES + 1))


def test_one_of_many_threads_adds(store):
    with ThreadPoolExecutor(8) as pool:
        start = threading.Barrier(8)

        def add(number):
            start.wait()
            return [store.add(f"claims/{claim}", b"mine") for claim in range(20)]

        won = list(pool.map(add, range(8)))
    assert [sum(column) for column in zip(*won, strict=True)] == [1] * 20


CLAIMS = """
import sys
from dyncp.lookahead.stores.open import open_store
address, job, password, number = sys.argv[1:]
store = open_store(address, job, password=password or None)
store.put(f"ready/{number}", b"")
store.get("go", 60)
print(*(claim for claim in range(100) if store.add(f"claims/{claim}", b"mine")))
"""


def test_one_of_several_processes_adds(place, job, store):
    _, address, password = place
    if address is None:
        pytest.skip("a MemoryStore has one process")
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", CLAIMS, address, job, password or ""]
    children = [
        subprocess.Popen([*command, str(number)], env=environment, stdout=subprocess.PIPE, text=True)
        for number in range(3)
    ]
    try:
        for number in range(3):
            store.get(f"ready/{number}", 60)
        store.put("go", b"")
        won = [child.communicate(timeout=60)[0].split() for child in children]
    finally:
        for child in children:
            child.kill()
    assert sorted(int(claim) for claims in won for claim in claims) == list(range(100))


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


def test_readers_never_see_half_a_value(store):
    large, done = [letter * (CHUNK_BYTES + 5) for letter in (b"a", b"b")], threading.Event()
    store.put("a", large[0])

    def write():
        for number in range(6):
            store.put("a", large[number % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        assert store.get("a", 20) in large
    writer.join()


def test_ctrl_c_ends_a_wait(store):
    started = time.monotonic()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        store.get("never", 30)
    assert time.monotonic() - started < 30
    timer.join()
    store.put("a", b"1")
    assert store.get("a", 5) == b"1"


def test_a_wait_is_silent(store, capfd, caplog):
    """torch's own wait prints a warning when its time is over, and a loader asks twice a second."""
    with pytest.raises(TimeoutError):
        store.get("never", 0.05)
    assert capfd.readouterr() == ("", "") and caplog.text == ""


def test_jobs_do_not_meet(place, job):
    one, two = place[0](job), place[0](f"{job}.2")
    assert (one.job, two.job) == (job, f"{job}.2")
    one.put("key", b"1")
    assert two.add("key", b"2")
    assert one.get("key", 5) == b"1"
    two.delete("key")
    assert one.get("key", 5) == b"1"


def test_keys_may_begin_with_other_keys(store):
    keys = ["a1b2/L0/3/17/plan", "a1b2/L0/3/17", "a1b2/L0/3/17/plan/0", "a1b2", "a1b2.0", "..", "../a", ".a/-_", "a//b"]
    for key in keys:
        assert store.add(key, key.encode())
    for key in keys:
        assert store.get(key, 5) == key.encode()
        store.delete(key)
    for key in keys:
        with pytest.raises(TimeoutError):
            store.get(key, 0)


def test_a_store_says_whether_it_outlives_a_job(request, store):
    assert store.lasting is (request.node.callspec.params["place"] not in ("memory", "own tcp"))


def test_loaders_can_count_themselves_on_a_store(store):
    assert weakref.WeakKeyDictionary({store: 1})[store] == 1


def test_the_address_is_for_people(place, store):
    _, address, password = place
    assert store.address == ("memory" if address is None else address.partition("?")[0])
    assert password is None or password not in store.address
