"""What lies in a plan store is wrapped, so that nothing else is taken for it: another job's, another iteration's, a
damaged or a forged value is refused with the reason.

A wrapped value is a fixed head, a header (`Header`, MessagePack), the payload and, with a key, an HMAC-SHA256 of all
before it. The digest in the header finds damage; only the HMAC shows that a holder of the key wrote it.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from dyncp.ir.errors import DecodeError
from dyncp.lookahead.messages import Message, decode, encode

MAGIC = b"DYNCPMSG"
VERSION = 1
HEAD = struct.Struct("<8sHBI")  # magic, version, whether there is an HMAC, bytes of the header
TAG_BYTES = hashlib.sha256().digest_size
MAX_HEADER_BYTES = 1 << 16
MAX_PAYLOAD_BYTES = 256 << 20  # of one rank's part, or one batch
LEAST_KEY_BYTES = 16


class SealError(DecodeError):
    """A value in a plan store is not what should be there."""


class Header(Message, frozen=True):
    """Whose value it is. `place` is its key in the store, without the job; `iteration` is -1 where there is none."""

    job: str
    place: str
    iteration: int
    digest: bytes  # SHA-256 of the payload


class Seal:
    """Wraps and unwraps the values of one job.

    Args:
        job: its name.
        key: what all processes of the job know and nobody else does, at least 16 bytes; without one, values are guarded
            against mistakes and damage, not against forgery.

    Raises:
        ValueError: a key that is too short.
    """

    def __init__(self, job: str, key: bytes | None = None) -> None:
        if key is not None and (not isinstance(key, bytes) or len(key) < LEAST_KEY_BYTES):
            got = f"{len(key)} bytes" if isinstance(key, bytes) else f"of type {type(key).__name__}"
            raise ValueError(f"the key is {got}; expected at least {LEAST_KEY_BYTES} bytes: secrets.token_bytes(32)")
        self.job = job
        self._key = key

    def wrap(self, place: str, iteration: int, payload: bytes) -> bytes:
        """A payload with all that says whose it is."""
        header = encode(Header(self.job, place, iteration, hashlib.sha256(payload).digest()))
        data = HEAD.pack(MAGIC, VERSION, self._key is not None, len(header)) + header + payload
        return data + self._tag(data)

    def unwrap(self, place: str, iteration: int, data: bytes) -> bytes:
        """The payload that was wrapped for this job, place and iteration.

        Raises:
            SealError: it was not; says what is wrong.
        """
        try:
            return self._unwrap(place, iteration, data)
        except SealError as error:
            raise SealError(f"what lies at {place} in the plan store is refused: {error}") from None

    def _unwrap(self, place: str, iteration: int, data: bytes) -> bytes:
        header_bytes = self._check_head(data)
        body = memoryview(data)
        start = HEAD.size + header_bytes
        stop = len(data) - (TAG_BYTES if self._key else 0)
        # First of all, so that nothing else is believed of what nobody vouches for.
        if self._key and not hmac.compare_digest(self._tag(body[:stop]), body[stop:]):
            raise SealError("its HMAC is wrong: it was written with another key, or changed since")
        try:
            header = decode(body[HEAD.size : start], Header)
        except DecodeError as error:
            raise SealError(f"its header is damaged ({error})") from None
        for name, got, expected in (
            ("job", header.job, self.job),
            ("place", header.place, place),
            ("iteration", header.iteration, iteration),
        ):
            if got != expected:
                raise SealError(f"its {name} is {got!r}, expected {expected!r}")
        payload = bytes(body[start:stop])
        if hashlib.sha256(payload).digest() != header.digest:
            raise SealError("its content is damaged: it does not have the digest that its header says")
        return payload

    def _check_head(self, data: bytes) -> int:
        """The bytes of the header, if there can be one."""
        if len(data) < HEAD.size:
            raise SealError(f"it has {len(data)} bytes, expected at least {HEAD.size}")
        magic, version, has_tag, header_bytes = HEAD.unpack_from(data)
        if magic != MAGIC:
            raise SealError(f"it starts with {magic!r}, expected {MAGIC!r}: something else writes to this store")
        if version != VERSION:
            raise SealError(f"it has version {version}, expected {VERSION}: use the same dyncp everywhere")
        if has_tag != (self._key is not None):
            have = ("without a key", "with a key")
            raise SealError(f"it was written {have[bool(has_tag)]}, and this process is {have[self._key is not None]}")
        tag_bytes = TAG_BYTES if has_tag else 0
        if header_bytes > MAX_HEADER_BYTES or len(data) < HEAD.size + header_bytes + tag_bytes:
            raise SealError(f"its header claims {header_bytes} bytes, and all of it has {len(data)}")
        if len(data) - HEAD.size - header_bytes - tag_bytes > MAX_PAYLOAD_BYTES:
            raise SealError(f"it has {len(data)} bytes, expected at most {MAX_PAYLOAD_BYTES} of content")
        return int(header_bytes)

    def _tag(self, data: bytes | memoryview) -> bytes:
        return hmac.digest(self._key, data, "sha256") if self._key else b""
