"""Small files that would be large in memory: what reading takes is a small multiple of what the reader allows."""

from __future__ import annotations

import functools
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from ir.handmade import NOTHING, edited, handmade, make_header

from dyncp.ir import batch_codec, codec
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.blocks import HAS_KV, HAS_Q, TokenBlocks
from dyncp.ir.columns import PLAN, RANK
from dyncp.ir.errors import DecodeError
from dyncp.ir.frame import CHECKSUM, HEAD
from dyncp.ir.mask import Mask
from dyncp.ir.plan import (
    Attention,
    CommLaunch,
    CommWait,
    Comps,
    Copy,
    Plan,
    Program,
    RankPlan,
    RankProgram,
    Reduction,
    Slots,
)

MAX_BYTES = 8 << 20
PEAK_BYTES = 64 << 20
SWOLLEN_BYTES = 1 << 28
FORWARD = "programs.0.forward"


def part(path, value):
    """The part of rank 0 of a plan by hand, with something else in it."""
    return codec.encode_rank(edited(handmade().rank(0), path, value))


def many_blocks(count):
    at = np.arange(count)
    tokens = TokenBlocks(np.zeros(count), at, at + 1, np.full(count, HAS_Q | HAS_KV))
    header = make_header(tokens=tokens, owner=at % 2)
    return codec.encode_rank(RankPlan(header, 0, (NOTHING, NOTHING), "0" * 64))


def many_comps(count):
    at = np.arange(count)
    slices = np.tile([0, 4, 0, 0, 1, 0], (count, 1))
    slices[:, 4] += at % 4  # of four kinds
    comps = Comps(at, at * 0, at * 0, np.arange(count + 1), slices)
    return part("programs.0", RankProgram(comps, NOTHING.forward, NOTHING.backward))


def many_slices(count):
    """In one computation block, staggered, so that many have rows in common."""
    at = np.arange(count)
    slices = np.stack([at, at + 20, 2 * at, at * 0, 2 * at + 1, at * 0], axis=1)
    size = 2 * count + 20
    tokens = TokenBlocks([0, 0, 1, 1], [0, size, 0, 0], [size, size + 1, 3, 5], [3, 3, 1, 2])
    comps = Comps([0], [0], [0], [0, count], slices)
    header, programs = make_header(tokens=tokens), (RankProgram(comps, NOTHING.forward, NOTHING.backward), NOTHING)
    return codec.encode_rank(RankPlan(header, 0, programs, "0" * 64))


def many_slots(count):
    zeros = np.zeros(count, np.int64)
    program = Program(Slots(zeros, zeros, zeros, zeros, zeros, zeros), (), 0, 0)
    return part("programs.0", RankProgram(NOTHING.comps, program, program))


def many_instructions(make):
    def grown(count):
        count += count % 2
        return part(f"{FORWARD}.instructions", tuple(make(at) for at in range(count)))

    return grown


def launch_and_wait(at):
    return CommWait(at // 2) if at % 2 else CommLaunch(at // 2, [1], [0], [0, 1], [3])


def many_numbers(count):
    return part(f"{FORWARD}.instructions", (Copy(np.zeros(count), np.zeros(count)),))


def many_names(count):
    names = tuple(f"{at}" for at in range(count))
    header = make_header(mask_names=names, mask_weights=(1.0,) * count)
    return codec.encode_rank(RankPlan(header, 0, (NOTHING,) * count, "0" * 64))


def many_ranks(count):
    header, programs = make_header(ranks_per_node=count), ((NOTHING, NOTHING),) * count
    return codec.encode_plan(Plan(header, programs, codec.digest(header, programs)))


def long_name(count):
    header = make_header(mask_names=("\U0001f300" * count, "\U0001f301" * count))
    return codec.encode_rank(RankPlan(header, 0, (NOTHING, NOTHING), "0" * 64))


def many_sequences(count):
    return codec.encode_batch(Batch([Sequence(1 + at % 200, ONES[at % 200]) for at in range(count)]))


def many_masks(count):
    return codec.encode_batch(
        Batch([Sequence(2, Mask(2, 1 + at, [[0, 1, at, 0, at + 1, 0]]), 1 + at) for at in range(count)])
    )


def many_mask_names(count):
    return codec.encode_batch(Batch([Sequence(1, {f"{at}": ONES[0] for at in range(count)})]))


def many_batch_slices(count):
    at = np.arange(count)
    slices = np.stack([at, at + 1, at, at * 0, at + 1, at * 0], axis=1)
    return codec.encode_batch(Batch([Sequence(count, Mask(count, count, slices))]))


ONES = [Mask(1 + at, 1 + at, [[0, 1, 0, 0, 1, 0]]) for at in range(200)]
GROWING = {
    "blocks": (codec.decode_rank, many_blocks),
    "comps": (codec.decode_rank, many_comps),
    "slices": (codec.decode_rank, many_slices),
    "slots": (codec.decode_rank, many_slots),
    "attentions": (codec.decode_rank, many_instructions(lambda at: Attention([0], [[0, 2]], [[4]], []))),
    "reductions": (codec.decode_rank, many_instructions(lambda at: Reduction([7], [9], []))),
    "launches": (codec.decode_rank, many_instructions(launch_and_wait)),
    "numbers": (codec.decode_rank, many_numbers),
    "names": (codec.decode_rank, many_names),
    "ranks": (codec.decode_plan, many_ranks),
    "a long name": (codec.decode_rank, long_name),
    "sequences": (codec.decode_batch, many_sequences),
    "masks": (codec.decode_batch, many_masks),
    "mask names": (codec.decode_batch, many_mask_names),
    "slices of a batch": (codec.decode_batch, many_batch_slices),
}


@pytest.mark.parametrize("name", GROWING)
def test_the_most_that_is_allowed(name):
    decode, make = GROWING[name]
    few, more = (needed_bytes(decode, make(count)) for count in (1000, 2000))
    data = make(1000 + int((0.96 * MAX_BYTES - few) / (more - few) * 1000))
    tracemalloc.start()
    decode(data, MAX_BYTES)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < PEAK_BYTES
    with pytest.raises(DecodeError, match=r"takes? [0-9]+ bytes, expected at most 7000000|claims"):
        decode(data, 7_000_000)


def needed_bytes(decode, data):
    """What reading a file takes, from the error of a reader that allows no more than its body."""
    body_bytes = HEAD.unpack_from(data)[4]
    with pytest.raises(DecodeError, match=r"its arrays take \d+ bytes") as caught:
        decode(data, body_bytes)
    return int(str(caught.value).split("its arrays take ")[1].split()[0])


@functools.cache
def packed_zeros():
    packer = zlib.compressobj(1)
    return b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(SWOLLEN_BYTES >> 20)), packer.flush()])


def swollen(format_, kind, claim):
    """A file of very many zeros, which claims that many bytes."""
    packed = packed_zeros()
    data = HEAD.pack(format_.magic, format_.version, kind, bytes(32), claim, len(packed)) + packed
    return data + CHECKSUM.pack(zlib.crc32(data))


BOMBS = """
import resource, sys
from pathlib import Path
from dyncp.ir import codec
from dyncp.ir.errors import DecodeError
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20),) * 2)
decoders = {"plan": codec.decode_plan, "rank": codec.decode_rank, "batch": codec.decode_batch}
for path in sorted(Path(sys.argv[1]).iterdir()):
    for limits in ((8 << 20,), ()):
        try:
            decoders[path.suffix[1:]](path.read_bytes(), *limits)
        except DecodeError as error:
            print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="how much memory is in use is read from /proc")
def test_bombs_where_memory_is_short(tmp_path):
    kinds = (("plan", codec.FORMAT, PLAN), ("rank", codec.FORMAT, RANK), ("batch", batch_codec.FORMAT, 0))
    for name, format_, kind in kinds:
        for claim in (1000, 8 << 20, SWOLLEN_BYTES, 1 << 40):
            (tmp_path / f"{claim:020}.{name}").write_bytes(swollen(format_, kind, claim))
    source = str(Path(codec.__file__).parents[2])
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r}){BOMBS}", str(tmp_path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) == 24
    assert all("file is damaged: " in line for line in lines)
    assert sum("it takes more memory than there is" in line for line in lines) == 3, (
        "those that the default limit allows"
    )


def test_slices_of_millions_of_rows_take_little():
    """Looking for overlaps row by row took a gigabyte for two slices."""
    size, edge = 1 << 30, 1 << 23
    tokens = TokenBlocks([0, 0, 1, 1], [0, size, 0, 0], [size, size + 1, 3, 5], [3, 3, 1, 2])
    for lo, refused in ((edge, False), (edge - 1, True)):
        comps = Comps([0], [0], [0], [0, 2], [[0, edge, 0, 0, 1, 1], [0, edge, lo, 0, lo + 1, 0]])
        programs = (RankProgram(comps, NOTHING.forward, NOTHING.backward), NOTHING)
        data = codec.encode_rank(RankPlan(make_header(tokens=tokens), 0, programs, "0" * 64))
        tracemalloc.start()
        if refused:
            with pytest.raises(DecodeError, match=f"row {edge - 1} sees .* which overlap"):
                codec.decode_rank(data)
        else:
            codec.decode_rank(data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 1_000_000


def test_what_cannot_be_read_is_not_written(monkeypatch):
    """Many tiny instructions are small as bytes, and large as objects."""
    monkeypatch.setattr("dyncp.ir.columns.MAX_BYTES", 1_000_000)
    with pytest.raises(ValueError, match="at most 1000000 can be written: use larger blocks"):
        GROWING["attentions"][1](2000)
    with pytest.raises(ValueError, match=r"the batch takes .* at most 1000000 can be written: give it in parts"):
        many_sequences(5000)
