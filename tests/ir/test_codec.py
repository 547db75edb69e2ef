"""Plans as bytes: they come back as they were, and whatever is no plan ends in a ValueError."""

from __future__ import annotations

import itertools
import pickle
import random
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from builders import causal_batch, planned, random_batch
from hypothesis import given
from hypothesis import strategies as st
from ir.bodies import body_from, body_of, columns_of, framed
from ir.handmade import assert_same, edited, handmade

from dyncp import masks
from dyncp.ir import codec
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.ir.codec import CHECKSUM, HEAD, MAGIC
from dyncp.ir.columns import COLUMN, PLAN, RANK, SCHEMAS, STORED
from dyncp.ir.placement import Placement
from dyncp.ir.plan import PLAN_VERSION, PlanHeader, RankPlan
from dyncp.ir.shape import AttentionShape
from dyncp.planner.blockgen import make_blocks, uniform_cut
from dyncp.planner.lower import lower
from dyncp.planner.scheduling.greedy import greedy_schedule
from dyncp.strategies import make_plan
from dyncp.strategies.api import Options

DECODE = {PLAN: codec.decode_plan, RANK: codec.decode_rank}
ENCODE = {PLAN: codec.encode_plan, RANK: codec.encode_rank}


def sealed(kind: int, body: bytes, version: int | None = None, claim: int | None = None) -> bytes:
    return framed(codec.FORMAT, kind, body, version, claim)


def small_plans():
    yield handmade()
    yield planned(causal_batch(9, 5), ranks=2, keep="kv").plan


@given(
    st.integers(0, 10**6),
    st.sampled_from(["dynamic", "ring", "zigzag", "data_parallel"]),
    st.sampled_from(["none", "kv", "all"]),
)
def test_round_trip(seed, strategy, keep):
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, names=("a", "b")[: 1 + seed % 2], cross=seed % 3 == 0)
    plan = planned(batch, int(rng.integers(1, 4)), strategy, keep=keep, wire=("model", "float32")[seed % 2]).plan
    assert_same(plan, codec.decode_plan(codec.encode_plan(plan)))
    for rank in range(plan.header.ranks):
        assert_same(plan.rank(rank), codec.decode_rank(codec.encode_rank(plan.rank(rank))))


def test_round_trip_by_hand():
    plan = handmade()
    data = codec.encode_plan(plan)
    assert_same(plan, codec.decode_plan(data))
    assert codec.decode_plan(bytearray(data)) == plan == codec.decode_plan(memoryview(data))
    for rank in range(2):
        assert_same(plan.rank(rank), codec.decode_rank(codec.encode_rank(plan.rank(rank))))
    body = body_of(data)
    assert body_from(columns_of(SCHEMAS[PLAN], body)) == body, "the tests' own writer of bodies is wrong"


def test_digest_is_stable():
    """A change here is a change of the format: raise PLAN_VERSION, and then correct the number."""
    code = "from ir.handmade import handmade; print(handmade().digest)"
    path = [str(Path(__file__).parents[1]), *sys.path]
    other = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (
        handmade().digest == other.stdout.strip() == "10fd4d29dbb442c35f62bcbc39302b8450904ca1e7d5a374304ef9f46667eedb"
    )


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("header.strategy", "by hands"),
        ("header.shape.dtype", "bfloat16"),
        ("header.mask_weights", (2.0, 0.5)),
        ("header.owner", [0, 1, 0, 0]),
        ("programs.0.0.forward.slots.offset", lambda offset: offset + 8),
        ("programs.0.0.forward.arena_bytes", 769),
        ("programs.0.0.forward.instructions", lambda instructions: instructions[::-1]),
        ("programs.0.0.comps.slices", lambda slices: slices[:, ::-1]),
        ("programs", lambda programs: programs[::-1]),
    ],
)
def test_digest_tells_plans_apart(path, value):
    plan = handmade()
    other = edited(plan, path, value)
    assert codec.digest(other.header, other.programs) != plan.digest
    with pytest.raises(ValueError, match=r"the plan's digest is .*: make it anew"):
        codec.encode_plan(other)


def test_size_of_a_large_plan():
    """131,072 tokens on 32 ranks, at most 100 KB a rank; with scattered computation, which compresses worst."""
    batch, shape, cluster, options = causal_batch(131_072), AttentionShape(4, 1, 128), Cluster(4, 8), Options()
    blocks = make_blocks(batch, shape.groups, uniform_cut(1024))
    rng = np.random.default_rng(0)
    placement = Placement(np.arange(len(blocks.tokens)) % 32, rng.integers(0, 32, (blocks.groups, len(blocks))))
    schedule = greedy_schedule(blocks, placement, shape, cluster, options)
    header = PlanHeader(
        *("random", shape, 4, 8, "none", "model", blocks.mask_names, blocks.mask_weights),
        *(blocks.tokens, placement.block_rank),
    )
    plan = lower(header, batch, blocks, placement, schedule)
    data = [codec.encode_rank(plan.rank(rank)) for rank in range(32)]
    assert max(map(len, data)) < 100_000
    assert codec.decode_rank(data[31]).digest == plan.digest


@pytest.mark.parametrize("kind", [PLAN, RANK])
def test_truncated_and_flipped(kind):
    plan = handmade()
    data = ENCODE[kind](plan if kind == PLAN else plan.rank(0))
    for stop in range(len(data)):
        with pytest.raises(ValueError, match=r"not a dyncp plan file|damaged: it has"):
            DECODE[kind](data[:stop])
    with pytest.raises(ValueError, match=f"damaged: it has {len(data) + 1} bytes, expected {len(data)}"):
        DECODE[kind](data + b"\0")
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="dyncp plan file"):
            DECODE[kind](bytes(flipped))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", r"this is not a dyncp plan file: it starts with b'', expected b'DYNCPPLN'"),
        (b"PK\3\4 and more", r"this is not a dyncp plan file: it starts with b'PK"),
        (pickle.dumps([1, 2, 3]), "this is not a dyncp plan file"),
        (codec.to_text(handmade()).encode(), "this is not a dyncp plan file: it starts with b'dyncp pl'"),
        (sealed(PLAN, b"", version=9), f"has version 9, expected {PLAN_VERSION}: plan again"),
        (sealed(7, b""), "damaged: its kind is 7"),
        (codec.encode_rank(handmade().rank(0)), "holds one rank's part of a plan, expected a whole plan"),
        (sealed(PLAN, b""), "damaged: its body has 0 bytes, expected at least"),
        (sealed(PLAN, b"", claim=1 << 40), "damaged: its body claims 1099511627776 bytes, expected at most"),
        (sealed(PLAN, b"", claim=1 << 29), "damaged: its body does not have the 536870912 bytes"),
        (sealed(PLAN, b"12", claim=1), "damaged: its body does not have the 1 bytes"),
        (sealed(PLAN, bytes(COLUMN.size * len(SCHEMAS[PLAN].columns))), "damaged: PlanHeader.mask_weights.* as uint8"),
        (sealed(PLAN, b"\xff" * COLUMN.size * len(SCHEMAS[PLAN].columns)), "damaged: .* stored as dtype 255"),
    ],
    ids=itertools.count(),
)
def test_no_plan_at_all(data, message):
    with pytest.raises(ValueError, match=message):
        codec.decode_plan(data)


def test_other_faults_of_the_frame():
    rank_plan = handmade().rank(0)
    with pytest.raises(ValueError, match="holds a whole plan, expected one rank's part of a plan"):
        codec.decode_rank(codec.encode_plan(handmade()))
    head = HEAD.pack(MAGIC, PLAN_VERSION, RANK, bytes(32), 10, 3) + b"abc"
    with pytest.raises(ValueError, match="damaged: its body cannot be decompressed"):
        codec.decode_rank(head + CHECKSUM.pack(zlib.crc32(head)))
    data = codec.encode_plan(handmade())
    data = data[:11] + bytes(32) + data[43 : -CHECKSUM.size]
    with pytest.raises(ValueError, match=r"damaged: its digest is 0000.*, but its content has"):
        codec.decode_plan(data + CHECKSUM.pack(zlib.crc32(data)))
    assert codec.decode_rank(codec.encode_rank(RankPlan(rank_plan.header, 0, rank_plan.programs, "ab" * 32))).digest


def test_claims_of_gigabytes_take_no_memory():
    body = body_of(codec.encode_rank(handmade().rank(0)))
    files = [sealed(RANK, body, claim=(1 << 30) - 1)]
    for index, column in enumerate(SCHEMAS[RANK].columns):
        columns = columns_of(SCHEMAS[RANK], body)
        head = bytearray(body)
        COLUMN.pack_into(head, COLUMN.size * index, head[COLUMN.size * index], 1 << 30)
        files.append(sealed(RANK, bytes(head)))
        if column.name.endswith((" sizes", " count")) and len(columns[index]):
            columns[index][-1] = (1 << 32) - 1
            files.append(sealed(RANK, body_from(columns)))
    tracemalloc.start()
    for data in files:
        with pytest.raises(ValueError, match="damaged"):
            codec.decode_rank(data)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4_000_000


def test_a_bomb_is_bounded():
    """Zeros compress a thousandfold, and become eight times as many bytes in an int64 column."""
    columns = SCHEMAS[RANK].columns
    wide = next(index for index, column in enumerate(columns) if column.name == "Slots.offset")
    heads = [COLUMN.pack(0, (1 << 18) if index == wide else 0) for index in range(len(columns))]
    with pytest.raises(ValueError, match=r"damaged: its arrays take 2097152 bytes, expected at most 1048576"):
        codec.decode_rank(sealed(RANK, b"".join(heads) + bytes(1 << 18)), max_bytes=1 << 20)


@pytest.mark.parametrize("kind", [PLAN, RANK])
def test_changed_bytes_behind_a_right_checksum(kind):
    """Whatever comes out is either a ValueError or a plan that has exactly those bytes."""
    rng = random.Random(kind)
    for plan in small_plans():
        body = body_of(ENCODE[kind](plan if kind == PLAN else plan.rank(0)))
        for _ in range(600):
            changed = bytearray(body)
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                changed[rng.randrange(len(body))] = rng.choice((rng.randrange(256), 0, 1, 127, 128, 255))
            if rng.random() < 0.05:
                del changed[rng.randrange(len(changed)) :]
            try:
                decoded = DECODE[kind](sealed(kind, bytes(changed)))
            except ValueError as error:
                assert "\n" not in str(error)
                continue
            assert body_of(ENCODE[kind](decoded)) == changed


@pytest.mark.parametrize("index", range(len(SCHEMAS[RANK].columns)), ids=[c.name for c in SCHEMAS[RANK].columns])
def test_every_column_is_checked(index):
    """No column takes the largest number of its dtype, a negative one, or one number more or less than there are."""
    column = SCHEMAS[RANK].columns[index]
    body = body_of(codec.encode_rank(handmade().rank(0)))
    columns = columns_of(SCHEMAS[RANK], body)
    numbers = columns[index]
    assert len(numbers), "the plan made by hand leaves no column empty"
    wrong = (np.inf, np.nan, 0) if column.dtype.kind == "f" else (np.iinfo(column.dtype).max, -1)
    broken = [numbers[:-1], np.append(numbers, numbers[-1:])]
    for value in wrong:
        changed = numbers.copy()
        changed[-1] = value
        broken.append(changed)
    for changed in broken:
        columns[index] = changed
        with pytest.raises(ValueError, match="damaged"):
            codec.decode_rank(sealed(RANK, body_from(columns)))


def test_one_way_to_store_a_number():
    """A wider dtype than needed would give one plan two digests."""
    body = body_of(codec.encode_plan(handmade()))
    columns = columns_of(SCHEMAS[PLAN], body)
    index = next(i for i, column in enumerate(SCHEMAS[PLAN].columns) if column.name == "Slots.block")
    start = COLUMN.size * len(columns) + sum(
        STORED[body[COLUMN.size * i]].itemsize * len(columns[i]) for i in range(index)
    )
    wide = columns[index].astype(STORED[2]).tobytes()
    heads = bytearray(body[: COLUMN.size * len(columns)])
    heads[COLUMN.size * index] = 2
    body = bytes(heads) + body[len(heads) : start] + wide + body[start + len(columns[index]) :]
    with pytest.raises(ValueError, match=r"damaged: Slots.block is stored as uint16, expected uint8"):
        codec.decode_plan(sealed(PLAN, body))


def test_too_large_to_write(monkeypatch):
    monkeypatch.setattr("dyncp.ir.columns.MAX_BYTES", 100)
    with pytest.raises(ValueError, match="at most 100 can be written: use larger blocks"):
        codec.encode_rank(handmade().rank(0))


@pytest.mark.parametrize("name", ["plan.bin", "plan.txt"])
def test_files(tmp_path, name):
    plan, path = handmade(), tmp_path / name
    codec.write_plan(plan, path)
    assert_same(plan, codec.read_plan(str(path)))
    assert path.read_bytes().startswith(b"dyncp plan" if name.endswith(".txt") else MAGIC)


def test_files_that_are_no_plans(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.bin: cannot read the plan: No such file"):
        codec.read_plan(tmp_path / "nowhere.bin")
    with pytest.raises(ValueError, match=r"cannot write the plan to .*: Is a directory"):
        codec.write_plan(handmade(), tmp_path)
    (tmp_path / "foreign.bin").write_bytes(b"%PDF-1.7")
    with pytest.raises(ValueError, match=r"foreign.bin: this is not a dyncp plan file: it starts with b'%PDF-1.7'"):
        codec.read_plan(tmp_path / "foreign.bin")
    (tmp_path / "binary.txt").write_bytes(codec.encode_plan(handmade()))
    with pytest.raises(ValueError, match=r"binary.txt: this is not the text of a dyncp plan: it is not UTF-8"):
        codec.read_plan(tmp_path / "binary.txt")
    (tmp_path / "other.txt").write_text("hello\n")
    with pytest.raises(ValueError, match=r"other.txt: line 1 of the plan's text: got 'hello', expected 'dyncp plan"):
        codec.read_plan(tmp_path / "other.txt")


def test_steps_stay_python_ints():
    steps = [i.step for i in codec.decode_plan(codec.encode_plan(handmade())).programs[0][0].backward.instructions[1:]]
    assert steps == [7, 7]
    assert all(type(step) is int for step in steps)


def test_a_plan_that_could_not_be_read_is_not_written(tmp_path):
    """Slices of more rows than a reader accepts."""
    length = 12_000_000
    batch = Batch([Sequence(length, masks.lambda_(length, 64, 4096))])
    plan = make_plan(batch, AttentionShape(1, 1, 2), Cluster(1, 1), "data_parallel", Options(block_tokens=length))
    with pytest.raises(ValueError, match="rows, expected at most"):
        codec.write_plan(plan, tmp_path / "plan")
    assert not (tmp_path / "plan").exists()
