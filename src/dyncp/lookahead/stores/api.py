"""What a plan store is."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Protocol

ADD_BYTES = 64 << 10  # most that `PlanStore.add` takes
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.02  # between two looks at whether a value has come
EXPIRY_S = 3600.0  # after which a server that can forget values forgets them


class StoreError(ConnectionError):
    """A plan store cannot be reached, or has no room; names its address and the cause."""


class RefusedError(StoreError):
    """A plan store does not let this process in, and will not later."""


class PlanStore(Protocol):
    """Keys and bytes, shared by all ranks. Every method may be called from several threads at once.

    Keys are ASCII letters, digits and `/ . _ -`, as in "a1b2/L0/3/17/plan". Loaders count themselves on the store
    object that they are given, so it must be hashable and allow weak references, as objects of plain classes do.

    Every method raises `StoreError`, a ConnectionError, when the store cannot be reached or has no room. The next call
    tries afresh.

    Attributes:
        address: for people and logs: "tcp://host:port", say; never with a password.
        job: what all keys are put under, so that jobs that share a server do not meet.
        lasting: whether what one start of a job left may be found by the next.
    """

    address: str
    job: str
    lasting: bool

    def put(self, key: str, value: bytes) -> None:
        """Store a value of any size, in place of what was there. Once this returns, every reader finds it."""

    def add(self, key: str, value: bytes) -> bool:
        """Store a value of at most 64 KiB unless the key is there, in one step: of many that add a key one succeeds.

        Returns:
            Whether this call did.
        """

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value of a key, as soon as it is there; `timeout_s=0` looks once.

        Raises:
            TimeoutError: the key did not come within `timeout_s`; it may still come.
        """

    def delete(self, key: str) -> None:
        """Forget a key; nothing happens when it is not there."""


def wait_for(look: Callable[[], bytes | None], key: str, timeout_s: float) -> bytes:
    """What `look` finds, asked again and again until it is not None.

    Raises:
        TimeoutError: it found nothing within `timeout_s`.
    """
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    while (value := look()) is None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"key {key!r} did not come within {timeout_s:g} s")
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return value


def check_name(what: str, name: str) -> str:
    """A name that becomes a part of keys, such as that of a job, as it was given.

    Raises:
        ValueError: it is empty, or has a `/`, which ends it within a key, or anything else that not every store takes.
    """
    if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9._-]{1,100}", name)):
        raise ValueError(f"{what} is {name!r}; it needs 1 to 100 letters, digits, or any of . _ -")
    return name


def check_small(key: str, value: bytes) -> None:
    """Whether `PlanStore.add` takes a value.

    Raises:
        ValueError: it is too large.
    """
    if len(value) > ADD_BYTES:
        raise ValueError(f"key {key!r} was added with {len(value)} bytes; at most {ADD_BYTES} fit, so put it instead")
