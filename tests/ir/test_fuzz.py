"""Bytes and text from elsewhere: a decoder takes damaged input for good or refuses it with a DecodeError, in bounded
memory.
"""

from __future__ import annotations

import contextlib
import functools
import json

import numpy as np
import pytest
from builders import causal_batch, planned, random_batch
from fuzzing import SMALL_NUMBERS, Decoder, damage_text, fuzz
from ir.bodies import resealed
from ir.handmade import handmade

from dyncp import masks
from dyncp.batch_file import batch_from_dict, batch_to_dict, read_batch
from dyncp.ir import batch_codec, codec
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.check import check_plan
from dyncp.ir.columns import PLAN, RANK, SCHEMAS
from dyncp.ir.errors import DecodeError, decoding
from dyncp.ir.plan import PlanError
from dyncp.ir.validate import validate_plan, validate_rank

MAX_BYTES = 8 << 20
PEAK_BYTES = 64 << 20


def plans():
    yield handmade()
    yield planned(causal_batch(9, 5), ranks=2, keep="kv").plan
    yield planned(
        random_batch(np.random.default_rng(3), names=("a", "b"), cross=True), ranks=3, strategy="dynamic"
    ).plan


def batches():
    yield causal_batch(1, 9, 9, 4)
    for seed in range(3):
        yield random_batch(np.random.default_rng(seed), names=("a", "b"), cross=True)
    yield Batch([Sequence(3, masks.full(3, 5), 5), Sequence(40, masks.lambda_(40, 3, 7))], {"default": 1 / 3})


def plan_again(plan):
    validate_plan(plan)
    with contextlib.suppress(PlanError):  # a plan that computes something else, and nothing worse
        check_plan(plan)
    assert codec.decode_plan(codec.encode_plan(plan)) == plan == codec.from_text(codec.to_text(plan))


def rank_again(part):
    validate_rank(part)
    again = codec.encode_rank(part)
    assert codec.encode_rank(codec.decode_rank(again)) == again


def batch_again(batch):
    data = codec.encode_batch(batch)
    again = codec.decode_batch(data)
    assert again == batch
    assert again.mask_names == batch.mask_names
    assert codec.encode_batch(again) == data


def text_of(plan):
    title, _, *lines = codec.to_text(plan).split("\n")  # the digest would catch everything
    return "\n".join([title, *lines]).encode()


def read_text(data):
    return codec.from_text(data.decode(errors="surrogateescape"))


@pytest.fixture
def decoders(tmp_path):
    def read_json(data):
        path = tmp_path / "batch.json"
        path.write_bytes(data)
        return read_batch(path)

    def reseal(format_, kind, schema):
        return functools.partial(resealed, format_, kind, schema)

    parts = [plan.rank(rank) for plan in plans() for rank in range(min(plan.header.ranks, 2))]
    files = [json.dumps(batch_to_dict(batch)).encode() for batch in batches()]
    spec = {"kind": "shared_question", "question": 2, "answers": [3, 4]}
    files.append(json.dumps({"sequences": [{"length": 9, "masks": {"a": spec, "b": {"kind": "causal"}}}]}).encode())
    files.append(b'{"sequences": [{"length": 7, "mask": {"kind": "document", "lengths": [3, 4]}}], "weights": {}}')
    return {
        "plan": Decoder(
            lambda data: codec.decode_plan(data, MAX_BYTES),
            [codec.encode_plan(plan) for plan in plans()],
            reseal(codec.FORMAT, PLAN, SCHEMAS[PLAN]),
            plan_again,
        ),
        "rank": Decoder(
            lambda data: codec.decode_rank(data, MAX_BYTES),
            [codec.encode_rank(part) for part in parts],
            reseal(codec.FORMAT, RANK, SCHEMAS[RANK]),
            rank_again,
        ),
        "batch": Decoder(
            lambda data: codec.decode_batch(data, MAX_BYTES),
            [codec.encode_batch(batch) for batch in batches()],
            reseal(batch_codec.FORMAT, 0, batch_codec.SCHEMA),
            batch_again,
        ),
        "text": Decoder(read_text, [text_of(plan) for plan in plans()], damage_text, plan_again),
        # No large numbers: a batch file may name masks that take memory in their length.
        "json": Decoder(
            read_json,
            files,
            lambda data, rng: damage_text(data, rng, SMALL_NUMBERS),
            lambda batch: batch_again(batch_from_dict(batch_to_dict(batch))),
        ),
    }


@pytest.mark.parametrize(
    ("name", "count", "refusals"),
    [("plan", 3000, 60), ("rank", 4000, 60), ("batch", 6000, 25), ("text", 2000, 40), ("json", 4000, 25)],
)
def test_damaged_input(decoders, name, count, refusals):
    outcome = fuzz(decoders[name], count)
    assert outcome.taken < 0.5 * count
    assert len(outcome.refused) >= refusals, "damage gets past the checksum, to all kinds of checks"
    assert outcome.peak_bytes < PEAK_BYTES


@pytest.mark.parametrize("depth", [*range(100, 1000, 45), 100_000])
@pytest.mark.parametrize(
    "form", ['{"sequences": %s}', '{"sequences": [{"length": %s}]}', '{"sequences": [{"mask": %s}]}', "%s"]
)
def test_nesting_of_any_depth(tmp_path, form, depth):
    """What json still reads may be too deep for the error message that shows it."""
    path = tmp_path / "batch.json"
    path.write_text(form % ("[" * depth + "]" * depth))
    with pytest.raises(DecodeError):
        read_batch(path)


def test_files_say_whether_they_could_be_read_at_all(tmp_path):
    for read in (codec.read_plan, read_batch):
        with pytest.raises(ValueError, match="cannot read") as caught:
            read(tmp_path / "nowhere.txt")
        assert caught.type is ValueError
        (tmp_path / "noise.txt").write_bytes(b"\xff\xfe noise")
        with pytest.raises(DecodeError, match=r"noise\.txt"):
            read(tmp_path / "noise.txt")


def test_memory_that_is_not_there():
    with pytest.raises(DecodeError, match=r"^here: it takes more memory than there is$"), decoding("here: "):
        raise MemoryError
    with pytest.raises(KeyError), decoding():  # a fault of the reader is no fault of the bytes
        raise KeyError("a bug")
