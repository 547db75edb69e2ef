"""A plan store on torch's key-value store: what torchrun and every process group already have."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from dyncp.ir.errors import DecodeError
from dyncp.lookahead.stores.api import ADD_BYTES, StoreError, check_name, check_small, wait_for

_numbers = count()  # of the stores made without a job name in this process
CHUNK_BYTES = 4 << 20  # the server refuses values above 8 MiB, and a handle that sent one is dead
MOST_CHUNKS = 1024  # of a value, which is 4 GiB
ANSWER_S = 30.0  # how long one request to the server may take
CONNECT_S = 5.0  # how long the server may take to accept a connection
# What is stored under a key: a kind, random bytes that no other entry has, and the value or the number of its chunks.
WHOLE, CHUNKED, MARK_BYTES = b"v", b"c", 16
NOBODYS = b"dyncp: a value that nobody stores"


class TcpStore:
    """`PlanStore` over a `torch.distributed` store that can be cloned (TCPStore). It connects on first use.

    Args:
        store: the store that all ranks are connected to.
        job: prefix of all keys; loaders that share a store need different ones.
        timeout_s: how long one request to the server may take before it counts as lost.

    Raises:
        ValueError: a job name that cannot be one.
    """

    def __init__(self, store: Store | _Server, job: str = "dyncp", timeout_s: float = ANSWER_S) -> None:
        self.job = check_name("job", job)
        self.lasting = isinstance(store, _Server)
        self._store = store
        self._timeout_s = timeout_s
        self._server = _server(store)
        self.address = _address(*self._server) if self._server else f"torch:{type(_innermost(store)).__name__}"
        self._of_thread = threading.local()

    @classmethod
    def of_default_group(cls, job: str | None = None) -> TcpStore:
        """On the store that `torch.distributed.init_process_group` was set up with.

        Without a `job`, the n-th such store of a process shares its keys with the n-th of every other process, so all
        ranks must make theirs in the same order, as with process groups.
        """
        return cls(_get_default_store(), f"dyncp.{next(_numbers)}" if job is None else job)

    @classmethod
    def connect(cls, host: str, port: int, job: str, timeout_s: float = ANSWER_S) -> TcpStore:
        """On a server elsewhere, as `dyncp store` starts one. It may start, and start again, later than this."""
        return cls(_Server(host, port, timeout_s), job, timeout_s)

    def put(self, key: str, value: bytes) -> None:
        """See `PlanStore.put`."""
        with self._line() as line:
            if len(value) <= ADD_BYTES:
                old = _exchange(line, key, WHOLE + os.urandom(MARK_BYTES) + value)
            else:
                mark = os.urandom(MARK_BYTES)
                starts = range(0, len(value), CHUNK_BYTES)
                for name, start in zip(_chunks(key, mark, len(starts)), starts, strict=True):
                    line.call("set", name, value[start : start + CHUNK_BYTES])
                old = _exchange(line, key, CHUNKED + mark + b"%d" % len(starts))  # last: who sees it finds the chunks
            _drop_chunks(line, key, old)

    def add(self, key: str, value: bytes) -> bool:
        """See `PlanStore.add`."""
        check_small(key, value)
        entry = WHOLE + os.urandom(MARK_BYTES) + value  # nobody else's, so the answer says who was first
        with self._line() as line:
            return bool(line.call("compare_set", key, "", entry) == entry)

    def get(self, key: str, timeout_s: float) -> bytes:
        """See `PlanStore.get`."""

        # Not torch's own wait: it sees no ctrl-C, and prints warnings when its time is over.
        def look() -> bytes | None:
            with self._line() as line:
                return _value(line, key)

        return wait_for(look, key, timeout_s)

    def delete(self, key: str) -> None:
        """See `PlanStore.delete`."""
        with self._line() as line:
            entry = _look(line, key)
            line.call("delete_key", key)
            _drop_chunks(line, key, entry)

    @contextmanager
    def _line(self) -> Iterator[_Line]:
        """This thread's connection; what torch raises inside becomes the StoreError that `PlanStore` promises.

        A call holds its handle's lock until the server answers, so every thread has its own. One that failed stays
        dead, so the next call makes another.
        """
        try:
            if not hasattr(self._of_thread, "line"):
                self._of_thread.line = self._connect()
            yield self._of_thread.line
        except (DistError, OSError) as error:
            self._of_thread.__dict__.pop("line", None)
            cause = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise StoreError(f"the plan store {self.address} cannot be reached: {cause}") from error

    def _connect(self) -> _Line:
        if self._server:  # torch would try for as long as its time-out, and write pages of warnings meanwhile
            socket.create_connection(self._server, min(CONNECT_S, self._timeout_s)).close()
        return _Line(self._store, self.job, self._timeout_s)


@dataclass(frozen=True, slots=True)
class _Server:
    """Makes connections to a server, as `TCPStore.clone` does, but needs none itself."""

    host: str
    port: int
    timeout_s: float

    def clone(self) -> Store:
        return TCPStore(
            self.host, self.port, None, False, timeout=timedelta(seconds=self.timeout_s), wait_for_workers=False
        )


class _Line:
    """A connection, used by a thread of its own: a host that vanishes never answers, and torch would wait for ever."""

    def __init__(self, store: Store | _Server, job: str, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        arguments = (store, job, self._requests)
        threading.Thread(target=_serve, args=arguments, name="dyncp-store", daemon=True).start()

    def call(self, method: str, *arguments: Any) -> Any:
        """What a method of the torch store gives.

        Raises:
            DistError: the server is lost.
            ConnectionError: no answer in time.
        """
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put((method, arguments, answers))
        try:
            result, error = answers.get(timeout=self._timeout_s)
        except queue.Empty:
            raise ConnectionError(f"no answer within {self._timeout_s:g} s") from None
        if error is not None:
            raise error
        return result

    def __del__(self) -> None:
        self._requests.put(None)


def _serve(store: Store | _Server, job: str, requests: queue.SimpleQueue[Any]) -> None:
    handle: Store | None = None
    while (request := requests.get()) is not None:
        method, arguments, answers = request
        try:
            if handle is None:
                handle = PrefixStore(job, store.clone())  # type: ignore[union-attr]
            answers.put((getattr(handle, method)(*arguments), None))
        except Exception as error:  # noqa: BLE001 raised by the thread that asked
            answers.put((None, error))


def _look(line: _Line, key: str) -> bytes:
    """What is stored under a key, or nothing: in one request, and without waiting as torch's `get` does."""
    there: bytes = line.call("compare_set", key, NOBODYS, NOBODYS)
    return b"" if there == NOBODYS else there


def _exchange(line: _Line, key: str, entry: bytes) -> bytes:
    """Store an entry, and return the one that was there, or nothing. The server answers, so it has got it."""
    expected = b""
    while (there := line.call("compare_set", key, expected, entry)) != entry:
        expected = b"" if there == expected else there  # what was expected comes back where the key is gone
    return expected


def _value(line: _Line, key: str) -> bytes | None:
    entry = _look(line, key)
    if not entry:
        return None
    if entry[:1] == WHOLE:
        return entry[1 + MARK_BYTES :]
    chunks = [_look(line, name) for name in _chunks_of(key, entry)]
    return b"".join(chunks) if all(chunks) else None  # another value took its place meanwhile


def _drop_chunks(line: _Line, key: str, entry: bytes) -> None:
    for name in _chunks_of(key, entry):
        line.call("delete_key", name)


def _chunks_of(key: str, entry: bytes) -> list[str]:
    if entry[:1] != CHUNKED:
        return []
    number = entry[1 + MARK_BYTES :]
    if not number.isdigit() or len(number) > len(str(MOST_CHUNKS)) or int(number) > MOST_CHUNKS:
        raise DecodeError(f"what lies at {key} in the plan store claims {number[:20]!r} chunks of a value")
    return _chunks(key, entry[1 : 1 + MARK_BYTES], int(number))


def _chunks(key: str, mark: bytes, number: int) -> list[str]:
    return [f"{key}.{mark.hex()}.{chunk}" for chunk in range(number)]


def _innermost(store: Any) -> Any:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _server(store: Store | _Server) -> tuple[str, int] | None:
    """Host and port of a TCPStore, or of what makes one."""
    inner = _innermost(store)
    return (inner.host, inner.port) if isinstance(inner, (TCPStore, _Server)) else None


def _address(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
