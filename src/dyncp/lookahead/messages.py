"""What processes and hosts say to each other while planning ahead: typed messages as MessagePack, and nothing executed.

A message is decoded into the class that is expected there, field by field; whatever does not fit is a `DecodeError`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec

from dyncp.ir.errors import DecodeError
from dyncp.lookahead.config import MOST_KAPPA, Planning

MAX_BYTES = 1 << 30  # of one message; a plan of 1,024 ranks takes some 50 MB


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Hello(Message, frozen=True):
    """What a loader is about, for planners on other hosts.

    `run` tells one start of the job from the next; `latest` is the number of the pass that began last, and `kappa` how
    many batches may be asked for ahead of the one due. `planned` is the digest of the settings that ranks compare.
    """

    run: str
    latest: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
    kappa: Annotated[int, msgspec.Meta(ge=0, le=MOST_KAPPA)]
    planned: str
    planning: Planning


class Ask(Message, frozen=True):
    """A batch to plan. `draw` is the digest of its samples and lengths, `batch` what `encode_batch` makes of it."""

    draw: str
    batch: bytes


class Claim(Message, frozen=True):
    """Which planner took a batch."""

    planner: str


class Progress(Message, frozen=True):
    """How far a pass is: `reached` batches have been begun."""

    reached: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class Beat(Message, frozen=True):
    """A sign of life; `count` goes up."""

    planner: str
    count: int


class Pointer(Message, frozen=True):
    """Says that a plan is there, and where: the parts of the ranks lie under `attempt`. Or why there is none, then
    `failure` is not empty. `draw` is the digest of the samples it was made for, `planned` that of what was asked of the
    planner, `rung` how far it had to give way (a member of `ladder.RUNGS`)."""

    attempt: str
    planner: str
    draw: str
    planned: str
    digest: str = ""
    rung: str = ""
    failure: str = ""
    details: str = ""


class Task(Message, frozen=True):
    """What a planner process is to do: plan an encoded batch, on a rung of the ladder."""

    planning: Planning
    batch: bytes
    rung: int


class Answer(Message, frozen=True):
    """What it made of it: the encoded part of every rank; or an error, and the lines that say where it came from."""

    parts: list[bytes] = []
    digest: str = ""
    seconds: float = 0.0
    memory_bytes: int = 0  # that the process holds
    error: str = ""
    details: str = ""


Kind = TypeVar("Kind", bound=Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview, kind: type[Kind]) -> Kind:
    """The message of `encode`.

    Raises:
        DecodeError: anything that is not a message of that kind.
    """
    if len(data) > MAX_BYTES:
        raise DecodeError(f"a message of {len(data)} bytes; expected at most {MAX_BYTES}")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DecodeError(f"this is not a message of kind {kind.__name__}: {error}") from None


def planning_bytes(planning: Planning) -> bytes:
    """Equal bytes for equal settings."""
    return msgspec.msgpack.encode(planning, order="deterministic")


def planning_digest(planning: Planning, weights: Mapping[str, float]) -> str:
    """What tells settings apart, the weights of masks among them."""
    more = repr(sorted((name, float(weight)) for name, weight in weights.items()))
    return hashlib.sha256(planning_bytes(planning) + more.encode()).hexdigest()
