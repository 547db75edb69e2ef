"""A plan store on a Redis server."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from dyncp.lookahead.stores.api import EXPIRY_S, RefusedError, StoreError, check_name, check_small, wait_for

PORT = 6379
LARGEST_BYTES = 512 << 20  # of a value, by Redis's own limit
TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


class RedisStore:
    """`PlanStore` on a Redis server. It connects on first use.

    Args:
        url: `redis://host:port/database`, or `rediss://` for TLS; port 6379 and database 0 when left out, and
            `user@` before the host for a user of an access list. The options of TLS are files, as in
            `?ssl_ca_certs=/folder/ca.pem`: `ssl_ca_certs`, `ssl_certfile` and `ssl_keyfile`.
        job: prefix of all keys.
        password: of the server, or of the user in the URL.
        expiry_s: the server forgets a value so many seconds after it was put.
        timeout_s: how long one request to the server may take.

    Raises:
        ValueError: a URL, a job name or a time that cannot be one, or the package redis is missing.
    """

    def __init__(
        self,
        url: str,
        job: str,
        password: str | None = None,
        expiry_s: float = EXPIRY_S,
        timeout_s: float = 10.0,
    ) -> None:
        if not expiry_s >= 0.001:
            raise ValueError(f"expiry_s is {expiry_s!r}; it needs seconds above 0")
        parts = _split(url)
        host, port, database = parts.hostname or "", parts.port or PORT, int(parts.path.strip("/") or 0)
        self.address = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}/{database}"
        self.job = check_name("job", job)
        self.lasting = True
        self._expiry_ms = round(1000 * expiry_s)
        self._secret = password
        self._redis = _package()
        backoff = importlib.import_module("redis.backoff")
        self._client = self._redis.Redis(
            host=host,
            port=port,
            db=database,
            username=unquote(parts.username) if parts.username else None,
            password=password,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # Who retries is `Patient`, so that all stores do it alike.
            retry=importlib.import_module("redis.retry").Retry(backoff.NoBackoff(), 0),
            **_tls(parts),
        )

    def put(self, key: str, value: bytes) -> None:
        """See `PlanStore.put`.

        Raises:
            ValueError: more than Redis takes.
        """
        if len(value) > LARGEST_BYTES:
            raise ValueError(
                f"key {key!r} was put with {len(value)} bytes; Redis takes at most {LARGEST_BYTES}: use larger blocks, "
                "or another store"
            )
        with self._reached():
            self._client.set(self._name(key), value, px=self._expiry_ms)

    def add(self, key: str, value: bytes) -> bool:
        """See `PlanStore.add`."""
        check_small(key, value)
        with self._reached():
            return bool(self._client.set(self._name(key), value, px=self._expiry_ms, nx=True))

    def get(self, key: str, timeout_s: float) -> bytes:
        """See `PlanStore.get`."""

        def look() -> bytes | None:
            with self._reached():
                value: bytes | None = self._client.get(self._name(key))
                return value

        return wait_for(look, key, timeout_s)

    def delete(self, key: str) -> None:
        """See `PlanStore.delete`."""
        with self._reached():
            self._client.unlink(self._name(key))  # frees large values in the background

    def _name(self, key: str) -> str:
        return f"{self.job}/{key}"

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Inside, what redis raises becomes the StoreError that `PlanStore` promises."""
        errors = self._redis.exceptions
        try:
            yield
        except errors.RedisError as error:
            cause = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if self._secret:
                cause = cause.replace(self._secret, "***")
            if isinstance(error, (errors.AuthenticationError, errors.NoPermissionError)) or "NOAUTH" in cause:
                problem = "wants another password or user" if self._secret else "wants a password"
                raise RefusedError(f"the plan store {self.address} {problem}: {cause}") from error
            if isinstance(error, errors.OutOfMemoryError):
                problem = "has no room (see its maxmemory)"
            else:
                problem = "cannot be reached"
            raise StoreError(f"the plan store {self.address} {problem}: {cause}") from error


def _package() -> Any:
    try:
        return importlib.import_module("redis")
    except ImportError as error:
        raise ValueError("a Redis plan store needs the package redis: pip install 'dyncp[redis]'") from error


def _split(url: str) -> SplitResult:
    expected = "expected redis://host:port/database or rediss://host:port/database"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # it quotes a part of the address, which may be one of a password
        raise ValueError(f"a Redis address that cannot be read; {expected}") from None
    if parts.password is not None:  # not quoted here: it would stand in logs
        raise ValueError("a Redis address with a password in it, which lists of processes show; give it as password=")
    if "@" in parts.path + parts.query + parts.fragment:
        raise ValueError(f"a Redis address with an @ behind its host, as of a password with a / in it; {expected}")
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or port == 0:
        raise ValueError(f"the Redis address is {url!r}; {expected}")
    database = parts.path.strip("/")
    if database and not (database.isascii() and database.isdigit()):
        raise ValueError(f"the database in the Redis address {url!r} is {database!r}; it needs a number from 0")
    return parts


def _tls(parts: SplitResult) -> dict[str, Any]:
    """Arguments of the client for TLS.

    Raises:
        ValueError: an unknown option, one without TLS, or a file that is not there.
    """
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := [name for name in options if name not in TLS_FILES]:
        raise ValueError(f"the Redis address has the option {unknown[0]!r}; known are {', '.join(TLS_FILES)}")
    if parts.scheme == "redis":
        if options:
            raise ValueError(f"the Redis address has {next(iter(options))} without TLS; write rediss:// for TLS")
        return {}
    for name, file in options.items():
        if not Path(file).is_file():
            raise ValueError(f"{name} of the Redis address is {file!r}, which is no file here")
    return {"ssl": True, "ssl_cert_reqs": "required", "ssl_check_hostname": True, **options}
