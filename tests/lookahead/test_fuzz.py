"""Damaged bytes for everything that planning ahead reads: out of a store, and out of the pipe of a planner process."""

import hashlib

import msgspec
import pytest
from builders import causal_batch
from fuzzing import Decoder, fuzz
from lookahead.loading import planning

from dyncp.ir.codec import encode_batch
from dyncp.lookahead import messages
from dyncp.lookahead.ladder import carry_out
from dyncp.lookahead.messages import Answer, Ask, Beat, Claim, Hello, Pointer, Progress, Task
from dyncp.lookahead.seal import HEAD, TAG_BYTES, Header, Seal

KEY = bytes(range(32))
PLACE = "run/L0/0/7/plan"
BATCH = encode_batch(causal_batch(40, 9))
TASK = Task(planning(2, "dynamic"), BATCH, 1)
MESSAGES = [
    Hello("run", 3, 4, "planned", planning(3)),
    Ask("digest", BATCH),
    Claim("planner"),
    Beat("planner", 7),
    Progress(12),
    Pointer("attempt", "rank 0", "draw", "planned", "digest", "asked"),
    Pointer("", "rank 0", "draw", "planned", failure="no", details="because"),
    TASK,
    carry_out(TASK),
    Answer(error="ValueError", details="Traceback"),
]


def resealed(key):
    """Damage behind the digests, as by somebody who has the key."""
    seal = Seal("job", key)

    def reseal(data, rng):
        *_, size = HEAD.unpack_from(data)
        stop = len(data) - (TAG_BYTES if key else 0)
        header, payload = bytearray(data[HEAD.size : HEAD.size + size]), data[HEAD.size + size : stop]
        if rng.random() < 0.5:
            payload = rng.bytes(int(rng.integers(0, 50)))
            known = msgspec.structs.replace(
                messages.decode(bytes(header), Header), digest=hashlib.sha256(payload).digest()
            )
            header = bytearray(messages.encode(known))
        else:
            header[rng.integers(len(header))] ^= 1 << int(rng.integers(8))
        magic, version, tagged, _ = HEAD.unpack_from(data)
        changed = HEAD.pack(magic, version, tagged, len(header)) + bytes(header) + payload
        return changed + seal._tag(changed)

    return reseal


@pytest.mark.parametrize("key", [None, KEY])
def test_damaged_seals_are_refused(key):
    seal = Seal("job", key)
    inputs = [seal.wrap(PLACE, 7, messages.encode(message)) for message in MESSAGES] + [seal.wrap(PLACE, 7, b"")]
    outcome = fuzz(Decoder(lambda data: seal.unwrap(PLACE, 7, data), inputs, resealed(key)), 4000)
    assert outcome.peak_bytes < 4 << 20
    assert len(outcome.refused) >= 5


@pytest.mark.parametrize("kind", sorted({type(message) for message in MESSAGES}, key=lambda kind: kind.__name__))
def test_damaged_messages_are_refused(kind):
    inputs = [messages.encode(message) for message in MESSAGES if type(message) is kind]
    decoder = Decoder(lambda data: messages.decode(data, kind), inputs, again=messages.encode)
    outcome = fuzz(decoder, 2000)
    assert outcome.refused
    assert outcome.peak_bytes < 4 << 20


@pytest.mark.parametrize("kind", sorted({type(message) for message in MESSAGES}, key=lambda kind: kind.__name__))
def test_messages_of_other_kinds_are_refused_or_whole(kind):
    """Fields are looked up by name, so a message is not taken for another, unless all that it needs is there."""
    for message in MESSAGES:
        data = messages.encode(message)
        try:
            assert type(messages.decode(data, kind)) is kind
        except messages.DecodeError:
            assert type(message) is not kind


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of four billion
        b"\xdf\xff\xff\xff\xff",  # as many pairs
        b"\xc6\xff\xff\xff\xff",  # as many bytes
        b"\x81\xa5parts\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        b"\x81\xa5parts" + b"\x91" * 100_000,
        b"\xa4\xff\xff\xff\xff",  # no UTF-8
    ],
)
@pytest.mark.parametrize("kind", [Answer, Task, Hello, Header])
def test_claims_of_much_take_no_memory(data, kind):
    outcome = fuzz(Decoder(lambda data: _refused(data, kind), [data]), 50)
    assert outcome.peak_bytes < 1 << 20


def _refused(data, kind):
    with pytest.raises(messages.DecodeError):
        messages.decode(data, kind)
