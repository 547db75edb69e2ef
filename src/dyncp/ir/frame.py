"""Files of compressed columns: a fixed head, a compressed body (see columns.py) and a checksum.

The head holds the SHA-256 that tells contents apart, and how long the body is, so that nothing is unpacked beyond what
is claimed, nor what is claimed beyond what the reader allows.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from contextlib import AbstractContextManager
from dataclasses import dataclass

from dyncp.ir.errors import DecodeError, decoding

HEAD = struct.Struct("<8sHB32sQQ")  # magic, version, kind, digest of the whole, body bytes, compressed bytes
CHECKSUM = struct.Struct("<I")  # CRC-32 of all before it
LEVEL = 1  # higher ones take more than twice the time and save less than a tenth of the bytes


@dataclass(frozen=True, slots=True)
class Format:
    """One format of files.

    Args:
        magic: the first 8 bytes of its files.
        version: of the format; a reader takes no other.
        name: of what it holds, for error messages.
        remedy: what to do about a file of another version.
        contents: what there is in a file, by kind.
    """

    magic: bytes
    version: int
    name: str
    remedy: str
    contents: tuple[str, ...]

    def damage(self) -> AbstractContextManager[None]:
        """Errors in it become a `DecodeError` that says that the file is damaged."""
        return decoding(f"this dyncp {self.name} file is damaged: ")

    def digest(self, body: bytes) -> str:
        """64 hexadecimal digits of a body, in this version of this format."""
        return hashlib.sha256(self.magic + self.version.to_bytes(2, "little") + body).hexdigest()

    def seal(self, kind: int, digest: str, body: bytes) -> bytes:
        """The file with that body; `digest` is that of the whole of which the body may be a part."""
        packed = zlib.compress(body, LEVEL)
        head = HEAD.pack(self.magic, self.version, kind, bytes.fromhex(digest), len(body), len(packed))
        return head + packed + CHECKSUM.pack(zlib.crc32(packed, zlib.crc32(head)))

    def open(self, kind: int, data: bytes, max_bytes: int) -> tuple[str, bytes]:
        """The digest and the body of a file of that kind.

        Raises:
            DecodeError: anything that `seal` does not make, or a body of more than `max_bytes`.
        """
        start = bytes(data[: len(self.magic)])
        if start != self.magic:
            raise DecodeError(
                f"this is not a dyncp {self.name} file: it starts with {start!r}, expected {self.magic!r}"
            )
        with self.damage():
            if len(data) < HEAD.size:
                raise ValueError(f"it has {len(data)} bytes, expected at least {HEAD.size + CHECKSUM.size}")
            _, version, got_kind, digest, body_bytes, packed_bytes = HEAD.unpack_from(data)
        if version != self.version:
            raise DecodeError(
                f"this dyncp {self.name} file has version {version}, expected {self.version}: {self.remedy}"
            )
        with self.damage():
            self._check(data, got_kind, packed_bytes)
        if got_kind != kind:
            raise DecodeError(
                f"this dyncp {self.name} file holds {self.contents[got_kind]}, expected {self.contents[kind]}"
            )
        with self.damage():
            return digest.hex(), _inflate(memoryview(data)[HEAD.size : -CHECKSUM.size], body_bytes, max_bytes)

    def _check(self, data: bytes, kind: int, packed_bytes: int) -> None:
        """Length, checksum and kind."""
        if len(data) != HEAD.size + packed_bytes + CHECKSUM.size:
            raise ValueError(f"it has {len(data)} bytes, expected {HEAD.size + packed_bytes + CHECKSUM.size}")
        (checksum,) = CHECKSUM.unpack_from(data, HEAD.size + packed_bytes)
        actual = zlib.crc32(memoryview(data)[: -CHECKSUM.size])
        if checksum != actual:
            raise ValueError(f"its checksum is {checksum:08x}, expected {actual:08x}")
        if kind >= len(self.contents):
            known = " or ".join(map(str, range(len(self.contents))))
            raise ValueError(f"its kind is {kind}, expected {known}")


def _inflate(packed: memoryview, body_bytes: int, max_bytes: int) -> bytes:
    if body_bytes > max_bytes:
        raise ValueError(f"its body claims {body_bytes} bytes, expected at most {max_bytes}")
    inflater = zlib.decompressobj()
    try:
        body = inflater.decompress(packed, body_bytes + 1)  # never more memory than claimed
    except zlib.error as error:
        raise ValueError(f"its body cannot be decompressed ({error})") from None
    if len(body) != body_bytes or not inflater.eof or inflater.unused_data:
        raise ValueError(f"its body does not have the {body_bytes} bytes that it claims")
    return body
