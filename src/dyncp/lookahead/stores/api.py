"""What a plan store is."""

from __future__ import annotations

from typing import Protocol


class PlanStore(Protocol):
    """Keys and bytes, shared by all ranks. Every method may be called from several threads at once.

    A key is put once, fetched by one reader, and deleted by it.
    """

    def put(self, key: str, value: bytes) -> None:
        """Store a value of any size."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value of a key, as soon as it is there.

        Raises:
            TimeoutError: the key did not come within `timeout_s`.
        """

    def delete(self, key: str) -> None:
        """Forget a key; nothing happens when it is not there."""
