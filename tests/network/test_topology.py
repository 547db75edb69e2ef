"""Names, and on a machine where that can be done, hosts that are made and taken down again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.network import topology

needs_root = pytest.mark.skipif(topology.missing() is not None, reason="needs root, ip and tc")
DEAD = f"{topology.PREFIX}-4194305-1-"  # no such process: numbers end below it

HOLD = """
import sys, time
from benchmarks.network import topology
with topology.network(2, 1e8) as hosts:
    print(topology.own_prefix(), flush=True)
    time.sleep(60)
"""


def test_names_tell_who_made_them():
    assert topology.stale_prefix(f"{topology.own_prefix()}host0") is None
    assert topology.stale_prefix(f"{DEAD}host0") == DEAD
    assert topology.stale_prefix(f"{topology.PREFIX}-mine") is None
    # the number of this process, but another start
    assert topology.stale_prefix(f"{topology.PREFIX}-{os.getpid()}-1-switch") is not None


def test_bursts_are_small_against_messages():
    assert topology.burst_bytes(50e6) == topology.LEAST_BURST_BYTES
    assert topology.burst_bytes(1e9) == 25_000


@needs_root
def test_hosts_reach_each_other_and_leave_nothing_behind():
    with topology.network(2, 1e8) as hosts:
        assert len(topology.namespaces(topology.own_prefix())) == 3
        code = "import socket; socket.create_server(('0.0.0.0', 5000)).accept()[0].sendall(b'x')"
        server = subprocess.Popen(hosts[0].command([sys.executable, "-c", code]))
        client = f"import socket; print(socket.create_connection(('{hosts[0].address}', 5000)).recv(1))"
        for _ in range(50):
            done = subprocess.run(
                hosts[1].command([sys.executable, "-c", client]), capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                break
            time.sleep(0.1)
        assert done.stdout == "b'x'\n"
        assert server.wait(10) == 0
    assert topology.namespaces(topology.own_prefix()) == []


@needs_root
def test_an_error_takes_hosts_and_their_processes_down():
    with pytest.raises(KeyError), topology.network(1, 1e8) as hosts:
        sleeper = subprocess.Popen(hosts[0].command(["sleep", "60"]))
        while not topology._output("ip", "netns", "pids", hosts[0].namespace).split():
            time.sleep(0.01)
        raise KeyError
    assert topology.namespaces(topology.own_prefix()) == []
    assert sleeper.wait(10) == -signal.SIGKILL


@needs_root
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signals_leave_nothing_behind(how):
    root = str(topology.Path(topology.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=root
    )
    prefix = process.stdout.readline().strip()
    assert len(topology.namespaces(prefix)) == 3
    process.send_signal(how)
    process.communicate()
    if how == signal.SIGKILL:  # the next start clears up
        topology.remove_stale()
    assert topology.namespaces(prefix) == []
