"""A plan store on torch's key-value store: what torchrun and every process group already have."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

_numbers = count()  # of the stores made without a job name in this process
CHUNK_BYTES = 4 << 20  # the server refuses values above 8 MiB, and a handle that sent one is dead
LONGEST_PAUSE_S = 0.02  # between two looks at whether a value has come


class TcpStore:
    """`PlanStore` over a `torch.distributed` store that can be cloned (TCPStore).

    Args:
        store: the store that all ranks are connected to.
        job: prefix of all keys; loaders that share a store need different ones.
    """

    def __init__(self, store: Store, job: str = "dyncp") -> None:
        self._store = PrefixStore(job, store)
        self._of_thread = threading.local()

    @classmethod
    def of_default_group(cls, job: str | None = None) -> TcpStore:
        """On the store that `torch.distributed.init_process_group` was set up with.

        Without a `job`, the n-th such store of a process shares its keys with the n-th of every other process, so all
        ranks must make theirs in the same order, as with process groups.
        """
        return cls(_get_default_store(), f"dyncp.{next(_numbers)}" if job is None else job)

    def put(self, key: str, value: bytes) -> None:
        """See `PlanStore.put`."""
        with _connected():
            store = self._handle()
            chunks = range(0, len(value), CHUNK_BYTES)
            for number, start in enumerate(chunks):
                store.set(f"{key}.{number}", value[start : start + CHUNK_BYTES])  # type: ignore[arg-type]
            store.set(key, str(len(chunks)))  # last: who sees it finds the chunks

    def get(self, key: str, timeout_s: float) -> bytes:
        """See `PlanStore.get`."""
        deadline, pause_s = time.monotonic() + timeout_s, 0.001
        with _connected():
            store = self._handle()
            # Not torch's own wait: it sees no ctrl-C, and prints warnings when its time is over.
            while not store.check([key]):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"key {key!r} did not come within {timeout_s:g} s")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            return b"".join(store.get(f"{key}.{number}") for number in range(int(store.get(key))))

    def delete(self, key: str) -> None:
        """See `PlanStore.delete`."""
        with _connected():
            store = self._handle()
            if store.check([key]):
                for number in range(int(store.get(key))):
                    store.delete_key(f"{key}.{number}")
                store.delete_key(key)

    def _handle(self) -> Store:
        # A call holds its handle's lock until the server answers, so every thread has its own connection.
        if not hasattr(self._of_thread, "store"):
            self._of_thread.store = self._store.clone()  # type: ignore[attr-defined]
        handle: Store = self._of_thread.store
        return handle


@contextmanager
def _connected() -> Iterator[None]:
    """Inside, what torch raises becomes the ConnectionError that `PlanStore` promises."""
    try:
        yield
    except DistError as error:
        reason = str(error).partition("\n")[0]
        raise ConnectionError(f"torch's store cannot be reached: {type(error).__name__}: {reason}") from error
