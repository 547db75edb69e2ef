import pytest

from dyncp.ir.errors import DecodeError
from dyncp.lookahead import messages
from dyncp.lookahead.messages import Answer, Ask, Pointer
from dyncp.lookahead.seal import HEAD, Seal, SealError

KEY = bytes(range(32))
PLACE = "run/L0/0/7/plan"


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 300])
def test_what_is_wrapped_is_unwrapped(key, payload):
    assert Seal("job", key).unwrap(PLACE, 7, Seal("job", key).wrap(PLACE, 7, payload)) == payload


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize(
    ("job", "place", "iteration", "message"),
    [
        ("other", PLACE, 7, "its job is 'job', expected 'other'"),
        ("job", "run/L0/0/8/plan", 7, "its place is 'run/L0/0/7/plan', expected 'run/L0/0/8/plan'"),
        ("job", PLACE, 8, "its iteration is 7, expected 8"),
    ],
)
def test_what_was_wrapped_for_another_is_refused(key, job, place, iteration, message):
    data = Seal("job", key).wrap(PLACE, 7, b"content")
    with pytest.raises(SealError, match=message):
        Seal(job, key).unwrap(place, iteration, data)


@pytest.mark.parametrize(
    ("writer", "reader", "message"),
    [
        (KEY, bytes(32), "its HMAC is wrong: it was written with another key, or changed since"),
        (None, KEY, "it was written without a key, and this process is with a key"),
        (KEY, None, "it was written with a key, and this process is without a key"),
    ],
)
def test_another_key_is_refused(writer, reader, message):
    data = Seal("job", writer).wrap(PLACE, 7, b"content")
    with pytest.raises(SealError, match=f"what lies at {PLACE} in the plan store is refused: {message}"):
        Seal("job", reader).unwrap(PLACE, 7, data)


def test_another_version_is_refused_by_name():
    magic, version, tagged, size = HEAD.unpack_from(data := Seal("job").wrap(PLACE, 7, b"content"))
    data = HEAD.pack(magic, version + 1, tagged, size) + data[HEAD.size :]
    with pytest.raises(SealError, match="it has version 2, expected 1: use the same dyncp everywhere"):
        Seal("job").unwrap(PLACE, 7, data)


@pytest.mark.parametrize("key", [None, KEY])
def test_no_byte_can_be_changed(key):
    data = Seal("job", key).wrap(PLACE, 7, b"content")
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 0x40
        with pytest.raises(SealError):
            Seal("job", key).unwrap(PLACE, 7, bytes(changed))
    for length in range(len(data)):
        with pytest.raises(SealError):
            Seal("job", key).unwrap(PLACE, 7, data[:length])


@pytest.mark.parametrize("key", [b"short", "a word of sixteen letters", 16])
def test_a_bad_key_is_refused(key):
    with pytest.raises(ValueError, match="expected at least 16 bytes"):
        Seal("job", key)


def test_messages_come_back_and_others_are_refused():
    pointer = Pointer("a", "rank 0", "d", "p", failure="no", details="because")
    assert messages.decode(messages.encode(pointer), Pointer) == pointer
    answer = Answer([b"", b"\0" * 10], "d", 0.5, 1)
    assert messages.decode(messages.encode(answer), Answer) == answer
    for data in (b"", b"\xc1", messages.encode(Ask("d", b"")), b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(DecodeError, match="not a message of kind Pointer"):
            messages.decode(data, Pointer)
