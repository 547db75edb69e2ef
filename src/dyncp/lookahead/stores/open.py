"""Plan stores by address."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

from dyncp.lookahead.stores.api import EXPIRY_S, PlanStore
from dyncp.lookahead.stores.memory import MemoryStore


def open_store(address: str, job: str, *, password: str | None = None, expiry_s: float = EXPIRY_S) -> PlanStore:
    """The plan store at an address. Nothing is connected yet, so it may be down.

    Args:
        address: `memory:`, `file:/folder`, `tcp://host:port` (of `dyncp store`), `redis://host:port/database`, or
            `rediss://` for TLS. Each `memory:` is a store of its own.
        job: prefix of all keys: letters, digits and `. _ -`. Jobs that share a server need different ones.
        password: of a Redis server; the others know none.
        expiry_s: seconds after which a Redis server forgets a value; the others keep it until it is deleted.

    Raises:
        ValueError: an unknown scheme, an address that cannot be one, or a password where there can be none.
    """
    if "@" in address and not address.startswith(("redis:", "rediss:", "file:")):  # it may hold a password: not quoted
        raise ValueError("the plan store's address has a user in it, and only Redis knows users: leave it out")
    scheme = address.partition(":")[0]
    if ":" not in address or scheme not in _OPEN:
        raise ValueError(
            f"the plan store's address begins with {scheme!r}; expected {', '.join(f'{name}:' for name in _OPEN)}"
        )
    redis = scheme in ("redis", "rediss")
    if password is not None and not redis:
        raise ValueError(f"a password was given for the plan store {address}; only redis: and rediss: check one")
    return _OPEN[scheme](address, job, *((password, expiry_s) if redis else ()))


def _memory(address: str, job: str) -> PlanStore:
    if address != "memory:":
        raise ValueError(f"the plan store's address is {address!r}; expected memory: alone")
    return MemoryStore(job)


def _file(address: str, job: str) -> PlanStore:
    parts = urlsplit(address)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
        shown = "one with a host" if "@" in parts.netloc else repr(address)
        raise ValueError(f"the plan store's address is {shown}; expected file:/folder, from the root")
    return _late("file").FileStore(unquote(parts.path), job)


def _tcp(address: str, job: str) -> PlanStore:
    parts = urlsplit(address)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:  # no number, or one above 65535
        host, port = None, None
    if not host or not port or parts.path.strip("/") or parts.query or parts.username is not None:
        raise ValueError(f"the plan store's address is {address!r}; expected tcp://host:port")
    return _late("tcp").TcpStore.connect(host, port, job)


def _redis(address: str, job: str, password: str | None, expiry_s: float) -> PlanStore:
    return _late("redis").RedisStore(address, job, password, expiry_s)


def _late(module: str) -> Any:
    """Imported when it is asked for: torch and redis need time, and not everybody has redis."""
    return importlib.import_module(f"dyncp.lookahead.stores.{module}")


_OPEN: dict[str, Callable[..., PlanStore]] = {
    "memory": _memory,
    "file": _file,
    "tcp": _tcp,
    "redis": _redis,
    "rediss": _redis,
}
