"""Batches as bytes: they come back as they were, equal batches have equal bytes, and all that is read is checked."""

from __future__ import annotations

import time

import numpy as np
import pytest
from builders import assert_same_elsewhere, causal_batch, random_batch
from hypothesis import given
from hypothesis import strategies as st
from ir.bodies import body_from, body_of, columns_of, framed

from dyncp import masks
from dyncp.ir import codec
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.batch_codec import FORMAT, SCHEMA
from dyncp.ir.errors import DecodeError
from dyncp.ir.mask import Mask


def assert_same(a: Batch, b: Batch) -> None:
    assert a == b
    assert a.mask_names == b.mask_names
    for one, other in zip(a.sequences, b.sequences, strict=True):
        for name, mask in one.masks.items():
            again = other.masks[name]
            assert (again.slices.dtype, again.slices.shape) == (mask.slices.dtype, mask.slices.shape)
            assert not again.slices.flags.writeable
            assert hash(again) == hash(mask)


@given(st.integers(0, 10**6))
def test_round_trip(seed):
    batch = random_batch(np.random.default_rng(seed), names=("b", "a", "\u00e4")[: 1 + seed % 3], cross=seed % 2 == 0)
    data = codec.encode_batch(batch)
    assert_same(batch, codec.decode_batch(data))
    assert codec.encode_batch(codec.decode_batch(memoryview(data))) == data


def test_oddities():
    nothing = masks.from_dense(np.zeros((5, 5), bool))
    for batch in (
        causal_batch(1),
        Batch([Sequence(3, masks.full(3, 3), 3), Sequence(3, masks.full(3))], {"default": 1 / 3}),
        Batch([Sequence(5, nothing)]),
        Batch(
            [Sequence(5, {"a": nothing, "b": masks.causal(5)}), Sequence(1, {"b": masks.full(1), "a": masks.full(1)})]
        ),
        Batch([Sequence(2**31 - 1, masks.causal(2**31 - 1))]),
        Batch([Sequence(40, masks.from_dense(np.random.default_rng(0).random((40, 40)) < 0.5))]),
    ):
        assert_same(batch, codec.decode_batch(codec.encode_batch(batch)))
    batch = codec.decode_batch(
        codec.encode_batch(Batch([Sequence(3, masks.full(3, 3), 3), Sequence(3, masks.full(3))]))
    )
    assert [sequence.kv_length for sequence in batch.sequences] == [3, None]


def digest():
    return (codec.batch_digest(causal_batch(9, 5)),)


def test_equal_batches_have_equal_bytes():
    one, other = masks.causal(4), masks.full(4)
    a = Batch([Sequence(4, {"x": one, "y": other}), Sequence(4, {"y": other, "x": one})], {"y": 2, "x": 1.0})
    b = Batch([Sequence(4, {"x": masks.causal(4), "y": other})] * 2, {"x": np.float32(1), "y": 2.0})
    assert a == b
    assert codec.encode_batch(a) == codec.encode_batch(b)
    assert codec.batch_digest(a) == codec.batch_digest(b)
    assert_same_elsewhere(digest)
    named_otherwise = Batch([Sequence(4, {"y": other, "x": masks.causal(4)})] * 2, {"x": 1, "y": 2})
    changes = (
        named_otherwise,
        Batch(a.sequences, {"x": 1, "y": 3}),
        Batch(a.sequences[:1], a.weights),
        Batch([Sequence(4, {"x": one, "z": other})] * 2, {"x": 1, "z": 2}),
        Batch([Sequence(4, {"x": one, "y": one})] * 2, a.weights),
        Batch([Sequence(4, {"x": one, "y": other}, 4)] * 2, a.weights),
    )
    assert len({codec.batch_digest(batch) for batch in (a, *changes)}) == 1 + len(changes)


def test_a_mask_is_there_once():
    mask = masks.from_dense(np.random.default_rng(0).random((60, 60)) < 0.5)
    one, many = (codec.encode_batch(Batch([Sequence(60, mask)] * count)) for count in (1, 50))
    assert len(many) < len(one) + 100
    sequences = codec.decode_batch(many).sequences
    assert len({id(sequence.masks["default"]) for sequence in sequences}) == 1


@pytest.mark.parametrize(
    ("column", "numbers", "message"),
    [
        ("length", [4, 0], "q_length is 0; a mask has 1 to"),
        ("length", [4, -3], "q_length is -3"),
        ("length", [3, 3], r"slice 0 of the mask.* its rows must lie in \[0, 3\)"),
        ("kv_length", [0, -1], "k_length is -1"),
        ("kv_length", [9, 0], "mask 'b' is 4 queries by 9 keys"),
        ("weights[]", [0.0, 1.0], "the weight of mask 'a' is 0.0; expected a positive"),
        ("weights[]", [1.0, np.nan], "the weight of mask 'b' is nan"),
        ("weights[]", [1.0, 1e10], "the weight of mask 'b' is 10000000000.0"),
        ("names[]", [97, 97], "1 different mask names of 2, and 2 weights"),
        ("names[]", [97, 10], "a mask's name is '.n'; expected a string of printable characters"),
        ("names[]", [97, 255], "can't decode byte 0xff"),
        ("masks", [0, 1, 0, 3], "masks are not numbered as its sequences use them"),
        ("masks", [1, 0, 2, 1], "masks are not numbered as its sequences use them"),
        ("masks", [0, 1, -1, 1], "masks are not numbered as its sequences use them"),
        ("masks", [0, 1, 0, 1], "masks are not numbered as its sequences use them"),
        ("slice_counts", [2, -1, 3], r"its masks have 4 slices, expected \[4, 6\]"),
        ("slice_counts", [1, 1, 1], r"its masks have 3 slices, expected \[4, 6\]"),
        ("slice_counts", [2**31 - 1, 2**31 - 1, 3], r"its masks have 4294967297 slices, expected \[4, 6\]"),
    ],
)
def test_every_column_is_checked(column, numbers, message):
    batch = Batch(
        [
            Sequence(4, {"a": masks.full(4), "b": masks.causal(4)}),
            Sequence(4, {"a": masks.sliding_window(4, 1), "b": masks.causal(4)}),
        ]
    )
    body = body_of(codec.encode_batch(batch))
    columns = columns_of(SCHEMA, body)
    index = [each.name for each in SCHEMA.columns].index(column)
    assert columns[index].shape == np.shape(numbers)
    columns[index] = np.array(numbers, columns[index].dtype)
    with pytest.raises(DecodeError, match=f"this dyncp batch file is damaged: .*({message})"):
        codec.decode_batch(framed(FORMAT, 0, body_from(columns)))


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([[0, 5, 0, 0, 1, 0]], r"slice 0 of the mask.*its rows must lie in \[0, 4\)"),
        ([[0, 4, 0, 0, 5, 0]], r"its keys must lie in \[0, 4\)"),
        ([[0, 4, 0, 0, 0, 0]], "every row must see a key"),
        ([[0, 4, 0, 0, 1, 2]], "steps must be 0 or 1"),
        ([[2, 2, 0, 0, 1, 0]], "q_start must be below q_stop"),
        ([[2**31 - 1, -(2**31), 0, 0, 1, 0]], "q_start must be below q_stop"),
        ([[2**63 - 1, -(2**63), 0, 0, 1, 0]], "slices holds values that are no int32"),
        ([[1, 2, 0, 0, 1, 0], [0, 1, 0, 0, 1, 0]], "its slices are not sorted"),
        ([[0, 1, 2, 0, 3, 0], [0, 1, 0, 0, 1, 0]], "its slices are not sorted"),
        ([[0, 1, 0, 0, 1, 1]], "a single row has a step"),
    ],
)
def test_every_slice_is_checked(slices, message):
    """Also those whose differences do not fit into 64 bits, and so would look as if they were in order."""
    columns = columns_of(SCHEMA, body_of(codec.encode_batch(causal_batch(4))))
    names = [each.name for each in SCHEMA.columns]
    for column, numbers in (
        ("slices", np.ravel(slices)),
        ("slices sizes", [len(slices), 6]),
        ("slice_counts", [len(slices)]),
    ):
        columns[names.index(column)] = np.array(numbers, np.int64)
    with pytest.raises(DecodeError, match=f"this dyncp batch file is damaged: .*{message}"):
        codec.decode_batch(framed(FORMAT, 0, body_from(columns)))


def test_other_files():
    batch = codec.encode_batch(causal_batch(4))
    with pytest.raises(DecodeError, match="this is not a dyncp plan file: it starts with b'DYNCPBAT'"):
        codec.decode_plan(batch)
    with pytest.raises(DecodeError, match="this is not a dyncp batch file: it starts with b'PK"):
        codec.decode_batch(b"PK\3\4")
    with pytest.raises(DecodeError, match="version 9, expected 1: write it again"):
        codec.decode_batch(framed(FORMAT, 0, body_of(batch), version=9))
    with pytest.raises(DecodeError, match="damaged: its kind is 1, expected 0"):
        codec.decode_batch(framed(FORMAT, 1, body_of(batch)))
    with pytest.raises(DecodeError, match=r"damaged: its body claims .* bytes, expected at most 10"):
        codec.decode_batch(batch, 10)


def test_is_fast():
    """Far above what it takes, for slow machines: 0.1 and 0.4 ms, and 0.4 and 1.1 ms on one core of a server."""
    causal = causal_batch(*range(1000, 41_000, 1000))
    windows = Batch([Sequence(2000 + at, _many_slices(2000 + at, 250)) for at in range(40)])
    for batch, most_s in ((causal, 0.005), (windows, 0.02)):
        data = codec.encode_batch(batch)
        for work, given_ in ((codec.encode_batch, batch), (codec.decode_batch, data)):
            taken_s = []
            for _ in range(5):
                start_s = time.perf_counter()
                work(given_)
                taken_s.append(time.perf_counter() - start_s)
            assert min(taken_s) < most_s


def _many_slices(length: int, count: int) -> Mask:
    at = np.arange(count) * 8
    return Mask(length, length, np.stack([at, at + 8, at * 0, at * 0, at + 8, at * 0], axis=1))
