import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dyncp.lookahead.stores import file as module
from dyncp.lookahead.stores.api import StoreError
from dyncp.lookahead.stores.file import FileStore


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def store(tmp_path):
    return FileStore(tmp_path, "job")


def test_folders_come_and_go_with_their_keys(store, tmp_path):
    store.put("a/b/c", b"1")
    store.put("a/b", b"2")
    assert files(tmp_path) == ["job", "job/a", "job/a/b", "job/a/b/c=", "job/a/b="]
    store.delete("a/b/c")
    assert files(tmp_path) == ["job", "job/a", "job/a/b="]
    store.delete("a/b")
    assert files(tmp_path) == []
    assert tmp_path.is_dir()


def test_puts_and_deletes_in_one_folder_do_not_disturb_each_other(tmp_path):
    """A folder goes with its last key at the moment when another thread writes into it."""

    def work(number):
        store = FileStore(tmp_path, "job")
        try:
            for step in range(150):
                store.put(f"a/b/{number}", b"%d" % step)
                assert store.get(f"a/b/{number}", 0) == b"%d" % step
                store.delete(f"a/b/{number}")
        except BaseException as error:  # noqa: BLE001 it is raised below
            failures.append(error)

    failures = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    FileStore(tmp_path, "job")._sweep_now_and_then()
    assert files(tmp_path) == []


def test_a_missing_folder_is_named_and_not_made(tmp_path):
    store = FileStore(tmp_path / "not-mounted", "job")
    for call in (lambda: store.put("a", b""), lambda: store.add("a", b""), lambda: store.get("a", 5)):
        with pytest.raises(StoreError, match=r"file:/.*not-mounted cannot be reached: there is no folder"):
            call()
    with pytest.raises(StoreError, match="mount the shared file system"):
        store.delete("a")
    assert files(tmp_path) == []
    store._folder.mkdir()
    store.put("a", b"1")
    assert store.get("a", 0) == b"1"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("method", ["put", "add"])
def test_a_full_disk_leaves_no_half_file(store, tmp_path, monkeypatch, number, method):
    class Full:
        def __init__(self, path, mode):
            self.file = open(path, mode)  # noqa: SIM115 closed on exit

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, value):
            self.file.write(value[: len(value) // 2])
            self.file.flush()
            raise OSError(number, os.strerror(number))

    store.put("a", b"old")
    monkeypatch.setattr(module, "open", Full, raising=False)
    with pytest.raises(StoreError, match=rf"has no room: .*; free some in {tmp_path}"):
        getattr(store, method)("b" if method == "add" else "a", b"new value")
    monkeypatch.undo()
    assert files(tmp_path) == ["job", "job/a="]
    assert store.get("a", 0) == b"old"
    store.put("b", b"1")  # and it goes on
    assert store.get("b", 0) == b"1"


def test_a_really_full_disk(tmp_path):
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("may not mount a file system")
    try:
        store = FileStore(tmp_path, "job")
        store.put("a", b"1" * 1000)
        with pytest.raises(StoreError, match="has no room"):
            store.put("b", b"2" * 100_000)
        assert files(tmp_path) == ["job", "job/a="]
        store.put("c", b"3" * 1000)
        assert store.get("a", 0) == b"1" * 1000 and store.get("c", 0) == b"3" * 1000
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


KILLED = """
import os, sys
from dyncp.lookahead.stores import file
file._replace = lambda draft, path: os._exit(1)
file.FileStore(sys.argv[1], "job").put("a/b", b"1")
"""


def test_drafts_of_killed_writers_do_no_harm_and_go(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(module.__file__).parents[3])}
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=environment, check=False)
    (draft,) = (tmp_path / "job" / "a").iterdir()
    store = FileStore(tmp_path, "job")
    store.put("a/b", b"2")
    assert store.get("a/b", 0) == b"2"
    assert draft.exists()  # its writer may still be at it
    store.delete("a/b")
    old = time.time() - 2 * module.STALE_S
    os.utime(draft, (old, old))
    FileStore(tmp_path, "job").put("c", b"3")
    assert files(tmp_path) == ["job", "job/c="]


def test_a_sweep_goes_by_the_clock_of_the_file_system(tmp_path, monkeypatch):
    store = FileStore(tmp_path, "job")
    store.put("a", b"1")
    draft = tmp_path / "job" / ".draft-of-a-living-writer"
    draft.touch()
    monkeypatch.setattr(time, "time", lambda: 1e12)  # a host whose clock is wrong
    FileStore(tmp_path, "job").put("b", b"1")
    assert draft.exists()


def test_a_draft_that_is_swept_too_early_is_written_again(store, monkeypatch):
    replace, swept = module._replace, []

    def sweep_first(draft, path):
        if not swept:
            swept.append(draft)
            draft.unlink()
        return replace(draft, path)

    monkeypatch.setattr(module, "_replace", sweep_first)
    store.put("a", b"1")
    assert swept and store.get("a", 0) == b"1"


def test_an_add_that_was_repeated_by_the_file_system_knows_that_it_won(store, monkeypatch):
    hardlink_to = Path.hardlink_to

    def twice(path, draft):
        hardlink_to(path, draft)
        hardlink_to(path, draft)

    monkeypatch.setattr(Path, "hardlink_to", twice)
    assert store.add("a", b"1")
    assert not store.add("a", b"1")


def test_a_time_out_of_the_file_system_is_an_outage(store, monkeypatch):
    store.put("a", b"1")

    def fail(path):
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(StoreError, match=r"cannot be reached: .*timed out"):
        store.get("a", 5)
