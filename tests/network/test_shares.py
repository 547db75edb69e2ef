"""Control groups: made, joined and removed; on trees of files that stand for both versions, and in earnest as root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.network import shares, topology

SPIN = """
import os, sys, threading, time
from pathlib import Path
from benchmarks.network import shares
from benchmarks.network.pieces import spinning_share
shares.join(Path(sys.argv[1]), os.getpid(), threading.get_native_id())
print(spinning_share(0.5))
"""
HOLD = """
import time
from benchmarks.network import shares, topology
with shares.shares(2, 0.3):
    print(topology.own_prefix(), flush=True)
    time.sleep(60)
"""
ROOT = Path(shares.__file__).parents[2]
DEAD = f"{topology.PREFIX}-4194305-1-"  # no such process: numbers end below it


def root() -> Path:
    return shares.V1 if (shares.V1 / "tasks").exists() else shares.V2


def can_make_groups() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    with shares.shares(1, 0.3) as held:
        return held.lacking is None


needs_groups = pytest.mark.skipif(not can_make_groups(), reason="needs control groups that can be written")


@pytest.fixture
def version_1(tmp_path, monkeypatch):
    """A folder in the place of the controller; here it has no files of its own, and removing takes what was written."""
    (tmp_path / "tasks").touch()
    monkeypatch.setattr(shares, "V1", tmp_path)
    return tmp_path


@pytest.fixture
def version_2(tmp_path, monkeypatch):
    (tmp_path / "cgroup.subtree_control").write_text("memory\n")
    monkeypatch.setattr(shares, "V1", tmp_path / "absent")
    monkeypatch.setattr(shares, "V2", tmp_path)
    return tmp_path


def test_in_version_1_a_group_has_a_quota_and_one_thread(version_1):
    (version_1 / "group").mkdir()
    shares._limit(version_1, version_1 / "group", 3500)
    assert (version_1 / "group/cpu.cfs_period_us").read_text() == "10000"
    assert (version_1 / "group/cpu.cfs_quota_us").read_text() == "3500"
    shares.join(version_1 / "group", 7, 8)
    assert (version_1 / "group/tasks").read_text() == "8"


def test_in_version_2_the_thread_is_in_a_group_within_that_of_its_process(version_2):
    group = version_2 / "group"
    group.mkdir()
    (group / "cgroup.subtree_control").touch()
    shares._limit(version_2, group, 3500)
    assert (version_2 / "cgroup.subtree_control").read_text() == "+cpu"
    assert (group / "computing/cgroup.type").read_text() == "threaded"
    assert (group / "computing/cpu.max").read_text() == "3500 10000"
    shares.join(group, 7, 8)
    assert (group / "cgroup.procs").read_text() == "7"
    assert (group / "computing/cgroup.threads").read_text() == "8"


def test_where_groups_cannot_be_made_hosts_share(version_1, monkeypatch):
    def refused(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refused)
    with shares.shares(3, 0.3) as held:
        assert list(held.folders) == [None] * 3
        assert held.lacking.startswith("Permission denied: ")


def test_groups_of_dead_processes_are_removed(version_1):
    stale, alive = version_1 / f"{DEAD}host0", version_1 / f"{topology.own_prefix()}host0"
    stale.mkdir()
    alive.mkdir()
    shares.remove_stale(version_1)
    assert (stale.exists(), alive.exists()) == (False, True)


def test_the_share_leaves_room_for_messages(monkeypatch):
    monkeypatch.setattr(shares.os, "cpu_count", lambda: 2)
    assert shares.share_of(4) == 0.35
    assert shares.share_of(1) == 1.0


@needs_groups
def test_a_thread_is_held_to_its_share():
    with shares.shares(1, 0.3) as held:
        words = [sys.executable, "-c", SPIN, str(held.folders[0])]
        paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": paths})
        assert 0.0 < float(done.stdout) < 0.36  # less where other work takes the rest
    assert shares.groups(root(), topology.own_prefix()) == []


@needs_groups
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_leave_nothing_behind(how):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    )
    prefix = process.stdout.readline().strip()
    assert len(shares.groups(root(), prefix)) == 2
    process.send_signal(how)
    process.communicate()
    if how == signal.SIGKILL:  # the next start clears up
        shares.remove_stale(root())
    assert shares.groups(root(), prefix) == []


@needs_groups
def test_what_runs_in_a_group_ends_with_it():
    with shares.shares(1, 0.3) as held:
        sleeper = subprocess.Popen(["sleep", "60"])
        shares.join(held.folders[0], sleeper.pid, sleeper.pid)
    assert sleeper.wait(10) == -signal.SIGKILL
    assert shares.groups(root(), topology.own_prefix()) == []
