"""What a plan store is."""

from __future__ import annotations

from typing import Protocol


class PlanStore(Protocol):
    """Keys and bytes, shared by all ranks. Every method may be called from several threads at once.

    A key is put once, fetched by one reader, and deleted by it. Loaders count themselves on the store object that they
    are given, so it must be hashable and allow weak references, as objects of plain classes do.

    Every method raises ConnectionError when the store cannot be reached any more.
    """

    def put(self, key: str, value: bytes) -> None:
        """Store a value of any size."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value of a key, as soon as it is there. A loader asks again and again, for half a second each time.

        Raises:
            TimeoutError: the key did not come within `timeout_s`; it may still come.
        """

    def delete(self, key: str) -> None:
        """Forget a key; nothing happens when it is not there."""
