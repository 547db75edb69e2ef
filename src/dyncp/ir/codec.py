"""Plans as bytes and as text, and the digest that tells plans apart. Nothing is executed while reading.

A file is a frame (see frame.py) around columns (see columns.py). A plan's digest is the SHA-256 of its body. Batches as
bytes are made the same way, in batch_codec.py; their functions are here too, so that one module has all of them.
"""

from __future__ import annotations

from pathlib import Path

from dyncp.ir.batch_codec import batch_digest, decode_batch, encode_batch
from dyncp.ir.columns import MAX_BYTES, PLAN, RANK, SCHEMAS, decode_body, encode_body
from dyncp.ir.errors import DecodeError, decoding
from dyncp.ir.frame import CHECKSUM, HEAD, Format
from dyncp.ir.plan import PLAN_VERSION, Plan, PlanHeader, RankPlan, RankProgram
from dyncp.ir.runnable import validate_runnable
from dyncp.ir.text import format_plan, parse_plan
from dyncp.ir.validate import validate_plan, validate_rank

__all__ = [
    "CHECKSUM",
    "DecodeError",
    "HEAD",
    "MAGIC",
    "MAX_BYTES",
    "batch_digest",
    "decode_batch",
    "decode_plan",
    "decode_rank",
    "digest",
    "encode_batch",
    "encode_plan",
    "encode_rank",
    "from_text",
    "read_plan",
    "to_text",
    "write_plan",
]

MAGIC = b"DYNCPPLN"
CONTENTS = ("a whole plan", "one rank's part of a plan")  # by kind
FORMAT = Format(MAGIC, PLAN_VERSION, "plan", "plan again with this dyncp", CONTENTS)


def encode_plan(plan: Plan) -> bytes:
    """A whole plan as bytes.

    Raises:
        ValueError: a digest that is not the plan's, or a plan of more than 1 GiB.
    """
    body = encode_body(SCHEMAS[PLAN], (plan.header, plan.programs))
    if FORMAT.digest(body) != plan.digest:
        raise ValueError(f"the plan's digest is {plan.digest}, but its content has {FORMAT.digest(body)}: make it anew")
    return FORMAT.seal(PLAN, plan.digest, body)


def encode_rank(rank_plan: RankPlan) -> bytes:
    """One rank's part of a plan as bytes.

    Raises:
        ValueError: a plan of more than 1 GiB.
    """
    body = encode_body(SCHEMAS[RANK], (rank_plan.header, rank_plan.rank, rank_plan.programs))
    return FORMAT.seal(RANK, rank_plan.digest, body)


def decode_plan(data: bytes, max_bytes: int = MAX_BYTES) -> Plan:
    """The plan of `encode_plan`, validated.

    Args:
        data: the bytes.
        max_bytes: the most that its body may unpack to, and the most that may be made of it; reading takes a small
            multiple of that.

    Raises:
        DecodeError: anything that is not such a plan, or a larger one.
    """
    digest_, body = FORMAT.open(PLAN, data, max_bytes)
    with FORMAT.damage():
        header, programs = decode_body(SCHEMAS[PLAN], body, max_bytes)
        plan = Plan(header, programs, digest_)
        _validate(plan)
        if FORMAT.digest(body) != digest_:
            raise ValueError(f"its digest is {digest_}, but its content has {FORMAT.digest(body)}")
    return plan


def decode_rank(data: bytes, max_bytes: int = MAX_BYTES) -> RankPlan:
    """The part of a plan of `encode_rank`, validated.

    Its digest is that of the whole plan, which no part can show to be right: it tells plans apart, and does not guard
    against a part that somebody changed and encoded anew.

    Args:
        data: the bytes.
        max_bytes: as in `decode_plan`.

    Raises:
        DecodeError: anything that is not such a part, or a larger one.
    """
    digest_, body = FORMAT.open(RANK, data, max_bytes)
    with FORMAT.damage():
        header, rank, programs = decode_body(SCHEMAS[RANK], body, max_bytes)
        rank_plan = RankPlan(header, rank, programs, digest_)
        validate_rank(rank_plan)
        validate_runnable(header, rank, programs)
    return rank_plan


def digest(header: PlanHeader, programs: tuple[tuple[RankProgram, ...], ...]) -> str:
    """What tells plans apart: 64 hexadecimal digits, the same for one plan in every process and on every machine."""
    return FORMAT.digest(encode_body(SCHEMAS[PLAN], (header, programs)))


def to_text(plan: Plan) -> str:
    """A plan as lines of text, to read and to compare; `from_text` reads it back."""
    return format_plan(plan)


def from_text(text: str) -> Plan:
    """The plan of `to_text`, validated. The line with the digest may be missing.

    Raises:
        DecodeError: text of another form, with the number of the line; numbers out of range; or another digest.
    """
    with decoding():
        header, programs, claimed = parse_plan(text)
        plan = Plan(header, programs, digest(header, programs))
        _validate(plan)
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
    _validate(plan)
    data = to_text(plan).encode() if path.suffix == ".txt" else encode_plan(plan)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ValueError(f"cannot write the plan to {path}: {error.strerror}") from None


def read_plan(path: str | Path) -> Plan:
    """Read a plan that `write_plan` wrote.

    Raises:
        ValueError: a file that cannot be read.
        DecodeError: a file that is no plan; the message begins with its name.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        return from_text(data.decode()) if path.suffix == ".txt" else decode_plan(data)
    except OSError as error:
        raise ValueError(f"{path}: cannot read the plan: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DecodeError(f"{path}: this is not the text of a dyncp plan: it is not UTF-8") from None
    except DecodeError as error:
        raise DecodeError(f"{path}: {error}") from None


def _validate(plan: Plan) -> None:
    validate_plan(plan)
    for rank, programs in enumerate(plan.programs):
        validate_runnable(plan.header, rank, programs)
