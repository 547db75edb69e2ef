"""Hosts on one machine: network namespaces, each joined by a shaped link to a bridge in one namespace more.

    host 0                       switch                      host 1
    eth0 ---- tbf -> / <- tbf ---- port0 = bridge = port1 ---- tbf -> / <- tbf ---- eth0

A host's link is full duplex: what it sends waits at its own end for the rate, what it receives at the switch's. Every
name holds the number and the start of the process that made it, so that what a dead process left can be told from what
is in use. Needs Linux, root, and `ip` and `tc` of iproute2. Nothing outside of the new namespaces is changed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PREFIX = "dyncp-net"
INTERFACE = "eth0"
MTU_BYTES = 1500
# Packets of one connection leave in packs of at most this size, so that a burst is not one whole pack of 64 kB.
PACK_BYTES = 7500
LEAST_BURST_BYTES = 10_000
BURST_S = 2e-4  # what a timer that is late may catch up with
# More than all windows together, so nothing is ever dropped, as in networks with flow control.
QUEUE_BYTES = 16 << 20
# Windows above rate x round trip, but so small that what waits at a port is little and flows share it fairly.
WINDOW_PACKETS = 24
TCP = {
    "net.ipv4.tcp_congestion_control": "reno",
    "net.ipv4.tcp_wmem": "4096 65536 262144",
    "net.ipv4.tcp_rmem": "4096 131072 524288",
    "net.ipv4.tcp_slow_start_after_idle": "0",
    "net.ipv4.tcp_no_metrics_save": "1",
}
MOST_HOSTS = 200


@dataclass(frozen=True, slots=True)
class Host:
    """One host: its namespace and the address of its interface."""

    number: int
    namespace: str
    address: str

    def command(self, command: Sequence[str]) -> list[str]:
        """A command that runs on this host."""
        return ["ip", "netns", "exec", self.namespace, *command]


def missing() -> str | None:
    """What this machine or process lacks for a network of namespaces, in one line; None if nothing."""
    if sys.platform != "linux":
        return f"bench-network needs Linux (network namespaces), but this is {sys.platform}"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"bench-network needs {' and '.join(absent)}: install iproute2"
    if os.geteuid() != 0:
        return "bench-network needs root, to make network namespaces: run it with sudo"
    try:
        with network(1, 1e8):
            return None
    except RuntimeError as error:  # as in a container that may not
        return f"bench-network cannot make hosts here: {error}"


def burst_bytes(rate_bits_per_s: float) -> int:
    """How much may leave at once: small against the messages that are measured, enough for late timers."""
    return max(LEAST_BURST_BYTES, round(rate_bits_per_s / 8 * BURST_S))


@contextlib.contextmanager
def network(hosts: int, rate_bits_per_s: float) -> Iterator[list[Host]]:
    """Hosts on links of a rate, for the time of a `with` block; all is taken down again however it ends.

    What dead processes left behind is removed first. SIGTERM and SIGHUP end the block as ctrl-C does.

    Raises:
        ValueError: no hosts, or too many.
        RuntimeError: `ip` or `tc` failed.
    """
    if not 1 <= hosts <= MOST_HOSTS:
        raise ValueError(f"{hosts} hosts; expected 1 to {MOST_HOSTS}")
    remove_stale()
    own = own_prefix()
    with signals_exit():
        try:
            yield _make(own, hosts, rate_bits_per_s)
        finally:
            with signals_ignored():
                remove(own)


def own_prefix() -> str:
    """What the names of this process's namespaces begin with."""
    return f"{PREFIX}-{os.getpid()}-{_start_of(os.getpid())}-"


def remove(prefix: str) -> None:
    """Remove all namespaces whose names begin so, and end what runs in them."""
    for name in namespaces(prefix):
        for pid in _output("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _output("ip", "netns", "del", name)


def remove_stale() -> None:
    """Remove the namespaces of processes of this benchmark that are no more."""
    stale = {prefix for name in namespaces(f"{PREFIX}-") if (prefix := stale_prefix(name))}
    for prefix in sorted(stale):
        remove(prefix)


def stale_prefix(name: str) -> str | None:
    """The prefix of a namespace's name if the process that made it has ended; None if it lives, or is not ours."""
    parts = name.removeprefix(f"{PREFIX}-").split("-")
    if len(parts) != 3 or not parts[0].isdigit() or not parts[1].isdigit():
        return None
    return None if _start_of(int(parts[0])) == int(parts[1]) else f"{PREFIX}-{parts[0]}-{parts[1]}-"


def namespaces(prefix: str) -> list[str]:
    """The names of namespaces that begin so."""
    names = [line.split()[0] for line in _output("ip", "netns", "list").splitlines() if line.strip()]
    return sorted(name for name in names if name.startswith(prefix))


def _make(own: str, hosts: int, rate_bits_per_s: float) -> list[Host]:
    switch = f"{own}switch"
    _output("ip", "netns", "add", switch)
    _output("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _output("ip", "-n", switch, "link", "set", "bridge", "up")
    made = [Host(number, f"{own}host{number}", f"10.0.0.{number + 1}") for number in range(hosts)]
    for host in made:
        _join(host, switch, rate_bits_per_s)
    return made


def _join(host: Host, switch: str, rate_bits_per_s: float) -> None:
    """Make a host and its link to the switch."""
    port, name = f"port{host.number}", host.namespace
    _output("ip", "netns", "add", name)
    mtu, pack = str(MTU_BYTES), str(PACK_BYTES)
    peer = ("peer", "name", INTERFACE, "mtu", mtu, "netns", name)
    _output("ip", "-n", switch, "link", "add", port, "mtu", mtu, "type", "veth", *peer)
    for namespace, interface in ((switch, port), (name, INTERFACE)):
        _output("ip", "-n", namespace, "link", "set", interface, "gso_max_size", pack)
        shape = ("rate", f"{rate_bits_per_s:.0f}bit", "burst", str(burst_bytes(rate_bits_per_s)))
        queue = ("limit", str(QUEUE_BYTES))
        _output("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *shape, *queue)
        _output("ip", "-n", namespace, "link", "set", interface, "up")
    _output("ip", "-n", switch, "link", "set", port, "master", "bridge")
    _output("ip", "-n", name, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
    route = ("10.0.0.0/24", "dev", INTERFACE, "src", host.address)
    _output("ip", "-n", name, "route", "replace", *route, "cwnd", "lock", str(WINDOW_PACKETS))
    _output("ip", "-n", name, "link", "set", "lo", "up")
    settings = [f"{key}={value}" for key, value in TCP.items()]
    _output(*host.command(["sysctl", "-q", "-w", *settings]))


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _start_of(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])


@contextlib.contextmanager
def signals_exit() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise SystemExit, so that `finally` runs (in the main thread alone)."""
    with _handled(lambda number, frame: sys.exit(128 + number), signal.SIGTERM, signal.SIGHUP):
        yield


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Inside, no signal to end interrupts what must be done to the end."""
    with _handled(signal.SIG_IGN, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        yield


@contextlib.contextmanager
def _handled(handler, *numbers: signal.Signals) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.signal(number, handler)) for number in numbers]
    try:
        yield
    finally:
        for number, old in before:
            signal.signal(number, old)
