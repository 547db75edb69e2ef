"""A plan store on torch's key-value store: what torchrun and every process group already have."""

from __future__ import annotations

import threading
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

CHUNK_BYTES = 4 << 20  # the server refuses values above 8 MiB, and a handle that sent one is dead


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
    def of_default_group(cls, job: str = "dyncp") -> TcpStore:
        """On the store that `torch.distributed.init_process_group` was set up with."""
        return cls(_get_default_store(), job)

    def put(self, key: str, value: bytes) -> None:
        """See `PlanStore.put`."""
        store = self._handle()
        chunks = range(0, len(value), CHUNK_BYTES)
        for number, start in enumerate(chunks):
            store.set(f"{key}.{number}", value[start : start + CHUNK_BYTES])  # type: ignore[arg-type]
        store.set(key, str(len(chunks)))  # last: who sees it finds the chunks

    def get(self, key: str, timeout_s: float) -> bytes:
        """See `PlanStore.get`."""
        store = self._handle()
        try:
            store.wait([key], timedelta(seconds=timeout_s))
        except DistStoreError as error:
            raise TimeoutError(f"key {key!r} did not come within {timeout_s:g} s") from error
        return b"".join(store.get(f"{key}.{number}") for number in range(int(store.get(key))))

    def delete(self, key: str) -> None:
        """See `PlanStore.delete`."""
        store = self._handle()
        if store.check([key]):
            for number in range(int(store.get(key))):
                store.delete_key(f"{key}.{number}")
            store.delete_key(key)

    def _handle(self) -> Store:
        # A blocking wait holds its handle's lock, so every thread has its own connection.
        if not hasattr(self._of_thread, "store"):
            self._of_thread.store = self._store.clone()  # type: ignore[attr-defined]
        handle: Store = self._of_thread.store
        return handle
