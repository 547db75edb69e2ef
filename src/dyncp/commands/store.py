"""`dyncp store`: a server that hosts plans."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Annotated

from tyro.conf import arg

BACKLOG = 1024  # connections that may wait while the server is busy: every rank has several


@dataclass(frozen=True)
class Command:
    """Host plans for planners and trainers on other machines, until ctrl-C.

    Prints the address to give them. Everything is kept in memory, and there is no password: whoever reaches the port
    can read and write plans, so open it on a trusted network only. docs/stores.md compares stores.
    """

    port: int
    """To listen on; 0 takes a free one."""
    host: Annotated[str | None, arg(metavar="HOST")] = None
    """Name or address of this machine to listen on; all of its addresses when left out."""


def run(command: Command) -> int:
    """Run `dyncp store`."""
    if not 0 <= command.port <= 65535:
        raise ValueError(f"--port is {command.port}; it needs a number from 0 to 65535")
    server, port = _listen(command.host, command.port)
    with _end() as end:
        print(f"tcp://{_shown(command.host or socket.gethostname())}:{port}", flush=True)
        end.recv(1)
    del server  # it serves for as long as somebody holds it
    return 0


def _listen(host: str | None, port: int) -> tuple[object, int]:
    """A server and its port. torch would listen on all addresses, so it gets a socket that listens already."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined] # late: other commands need not wait

    try:
        listener = _socket(host, port)
    except OSError as error:
        where = f"port {port}" if host is None else f"{host}, port {port}"
        raise ValueError(f"cannot listen on {where}: {error}; choose another --host or --port") from error
    port = listener.getsockname()[1]
    server = TCPStore(
        host or "localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return server, port


def _socket(host: str | None, port: int) -> socket.socket:
    if host is None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


@contextmanager
def _end() -> Iterator[socket.socket]:
    """A socket that a byte can be read from after ctrl-C or a polite kill: the usual ways to end a server, no failures.

    Not an Event: a handler that sets one while the same thread is inside its `wait` may wait for itself.
    """

    def end(number: int, frame: FrameType | None) -> None:
        pass  # Python has written the number of the signal into the socket

    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)
        old = signal.set_wakeup_fd(writer.fileno())
        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield reader
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(old)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
