"""Plans as bytes and as text, and the digest that tells plans apart. Nothing is executed while reading.

A file is a fixed head, a compressed body (see columns.py) and a checksum. A plan's digest is the SHA-256 of its body.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dyncp.ir.columns import MAX_BYTES, PLAN, RANK, decode_body, encode_body
from dyncp.ir.plan import PLAN_VERSION, Plan, PlanHeader, RankPlan, RankProgram
from dyncp.ir.text import format_plan, parse_plan
from dyncp.ir.validate import validate_plan, validate_rank

MAGIC = b"DYNCPPLN"
HEAD = struct.Struct("<8sHB32sQQ")  # magic, version, kind, digest of the whole plan, body bytes, compressed bytes
CHECKSUM = struct.Struct("<I")  # CRC-32 of all before it
LEVEL = 1  # higher ones take more than twice the time and save less than a tenth of the bytes
CONTENT = ("a whole plan", "one rank's part of a plan")  # by kind


def encode_plan(plan: Plan) -> bytes:
    """A whole plan as bytes.

    Raises:
        ValueError: a digest that is not the plan's, or a plan of more than 1 GiB.
    """
    body = encode_body(PLAN, (plan.header, plan.programs))
    if _body_digest(body) != plan.digest:
        raise ValueError(f"the plan's digest is {plan.digest}, but its content has {_body_digest(body)}: make it anew")
    return _seal(PLAN, plan.digest, body)


def encode_rank(rank_plan: RankPlan) -> bytes:
    """One rank's part of a plan as bytes.

    Raises:
        ValueError: a plan of more than 1 GiB.
    """
    body = encode_body(RANK, (rank_plan.header, rank_plan.rank, rank_plan.programs))
    return _seal(RANK, rank_plan.digest, body)


def decode_plan(data: bytes) -> Plan:
    """The plan of `encode_plan`, validated.

    Raises:
        ValueError: anything that is not such a plan.
    """
    digest_, body = _open(PLAN, data)
    with _damage():
        header, programs = decode_body(PLAN, body)
        plan = Plan(header, programs, digest_)
        validate_plan(plan)
        if _body_digest(body) != digest_:
            raise ValueError(f"its digest is {digest_}, but its content has {_body_digest(body)}")
    return plan


def decode_rank(data: bytes) -> RankPlan:
    """The part of a plan of `encode_rank`, validated.

    Its digest is that of the whole plan, which no part can show to be right: it tells plans apart, and does not guard
    against a part that somebody changed and encoded anew.

    Raises:
        ValueError: anything that is not such a part.
    """
    digest_, body = _open(RANK, data)
    with _damage():
        header, rank, programs = decode_body(RANK, body)
        rank_plan = RankPlan(header, rank, programs, digest_)
        validate_rank(rank_plan)
    return rank_plan


def digest(header: PlanHeader, programs: tuple[tuple[RankProgram, ...], ...]) -> str:
    """What tells plans apart: 64 hexadecimal digits, the same for one plan in every process and on every machine."""
    return _body_digest(encode_body(PLAN, (header, programs)))


def to_text(plan: Plan) -> str:
    """A plan as lines of text, to read and to compare; `from_text` reads it back."""
    return format_plan(plan)


def from_text(text: str) -> Plan:
    """The plan of `to_text`, validated. The line with the digest may be missing.

    Raises:
        ValueError: text of another form, with the number of the line; numbers out of range; or another digest.
    """
    header, programs, claimed = parse_plan(text)
    plan = Plan(header, programs, digest(header, programs))
    validate_plan(plan)
    if claimed not in (None, plan.digest):
        raise ValueError(
            f"the plan's text says digest {claimed}, but its content has {plan.digest}: correct or remove that line"
        )
    return plan


def write_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to a file: as text if its name ends in `.txt`, else as bytes.

    Raises:
        ValueError: a file that cannot be written, or a plan that could not be read back.
    """
    path = Path(path)
    validate_plan(plan)
    data = to_text(plan).encode() if path.suffix == ".txt" else encode_plan(plan)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ValueError(f"cannot write the plan to {path}: {error.strerror}") from None


def read_plan(path: str | Path) -> Plan:
    """Read a plan that `write_plan` wrote.

    Raises:
        ValueError: a file that cannot be read or is no plan; the message begins with its name.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        return from_text(data.decode()) if path.suffix == ".txt" else decode_plan(data)
    except OSError as error:
        raise ValueError(f"{path}: cannot read the plan: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: this is not the text of a dyncp plan: it is not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


# The frame: head, compressed body, checksum


def _seal(kind: int, digest_: str, body: bytes) -> bytes:
    packed = zlib.compress(body, LEVEL)
    data = HEAD.pack(MAGIC, PLAN_VERSION, kind, bytes.fromhex(digest_), len(body), len(packed)) + packed
    return data + CHECKSUM.pack(zlib.crc32(data))


def _open(kind: int, data: bytes) -> tuple[str, bytes]:
    """The digest and the body of a file of that kind."""
    start = bytes(data[: len(MAGIC)])
    if start != MAGIC:
        raise ValueError(f"this is not a dyncp plan file: it starts with {start!r}, expected {MAGIC!r}")
    with _damage():
        if len(data) < HEAD.size:
            raise ValueError(f"it has {len(data)} bytes, expected at least {HEAD.size + CHECKSUM.size}")
        _, version, got_kind, digest_, body_bytes, packed_bytes = HEAD.unpack_from(data)
    if version != PLAN_VERSION:
        raise ValueError(
            f"this dyncp plan file has version {version}, expected {PLAN_VERSION}: plan again with this dyncp"
        )
    with _damage():
        if len(data) != HEAD.size + packed_bytes + CHECKSUM.size:
            raise ValueError(f"it has {len(data)} bytes, expected {HEAD.size + packed_bytes + CHECKSUM.size}")
        (checksum,) = CHECKSUM.unpack_from(data, HEAD.size + packed_bytes)
        actual = zlib.crc32(memoryview(data)[: -CHECKSUM.size])
        if checksum != actual:
            raise ValueError(f"its checksum is {checksum:08x}, expected {actual:08x}")
        if got_kind >= len(CONTENT):
            raise ValueError(f"its kind is {got_kind}, expected {PLAN} or {RANK}")
    if got_kind != kind:
        raise ValueError(f"this dyncp plan file holds {CONTENT[got_kind]}, expected {CONTENT[kind]}")
    with _damage():
        return digest_.hex(), _inflate(memoryview(data)[HEAD.size : -CHECKSUM.size], body_bytes)


def _inflate(packed: memoryview, body_bytes: int) -> bytes:
    if body_bytes > MAX_BYTES:
        raise ValueError(f"its body claims {body_bytes} bytes, expected at most {MAX_BYTES}")
    inflater = zlib.decompressobj()
    try:
        body = inflater.decompress(packed, body_bytes + 1)  # never more memory than claimed
    except zlib.error as error:
        raise ValueError(f"its body cannot be decompressed ({error})") from None
    if len(body) != body_bytes or not inflater.eof or inflater.unused_data:
        raise ValueError(f"its body does not have the {body_bytes} bytes that it claims")
    return body


@contextmanager
def _damage() -> Iterator[None]:
    """Turns a ValueError into one that says that the file is damaged."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"this dyncp plan file is damaged: {error}") from None


def _body_digest(body: bytes) -> str:
    return hashlib.sha256(MAGIC + PLAN_VERSION.to_bytes(2, "little") + body).hexdigest()
