"""A plan store inside one process."""

from __future__ import annotations

import threading

from dyncp.lookahead.stores.api import check_small


class MemoryStore:
    """`PlanStore` for one rank, or for several ranks that are threads of one process.

    Args:
        job: only a name here: each `MemoryStore` has keys of its own.
    """

    def __init__(self, job: str = "") -> None:
        self.address = "memory"
        self.lasting = False
        self.job = job
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._values)

    def put(self, key: str, value: bytes) -> None:
        """See `PlanStore.put`."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def add(self, key: str, value: bytes) -> bool:
        """See `PlanStore.add`."""
        check_small(key, value)
        with self._changed:
            if key in self._values:
                return False
            self._values[key] = value
            self._changed.notify_all()
            return True

    def get(self, key: str, timeout_s: float) -> bytes:
        """See `PlanStore.get`."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout_s):
                raise TimeoutError(f"key {key!r} did not come within {timeout_s:g} s")
            return self._values[key]

    def delete(self, key: str) -> None:
        """See `PlanStore.delete`."""
        with self._changed:
            self._values.pop(key, None)
