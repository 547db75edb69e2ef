"""Damage for decoders: changes of valid input, with the same seed always the same, and the loop that tries them.

A decoder may refuse, with exactly a `DecodeError`, or take what it gets for good; then that must be a whole value.
"""

from __future__ import annotations

import re
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dyncp.ir.errors import DecodeError

Damage = Callable[[bytes, np.random.Generator], bytes]
NUMBERS = (0, 1, -1, 2, 127, 128, 255, 256, 65_535, 2**31 - 1, 2**31, 2**32 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63))
SMALL_NUMBERS = (0, 1, 2, 3, 7, 40, 255, 65_536, 10**30, -1)  # where a number may be honest, and cost what it says


class Decoder(NamedTuple):
    """What is tried.

    Args:
        decode: raises a `DecodeError`, or returns a value.
        inputs: valid bytes, at least one.
        reseal: damages what lies behind checksums and lengths, and makes these anew.
        again: whatever must work with a value that came out.
    """

    decode: Callable[[bytes], Any]
    inputs: Sequence[bytes]
    reseal: Damage | None = None
    again: Callable[[Any], Any] = repr


@dataclass
class Outcome:
    """How often damage was taken for good, and the kinds of refusals, without their numbers."""

    taken: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0


def fuzz(decoder: Decoder, count: int, seed: int = 0) -> Outcome:
    """Try `count` damaged inputs; with `reseal`, half of them are damaged behind their checksum. The peak of memory is
    that of the first tenth: to trace it takes several times as long as to decode.
    """
    rng, outcome = np.random.default_rng(seed), Outcome()
    for data in decoder.inputs:
        decoder.again(decoder.decode(data))
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(count):
                if number == count // 10:
                    outcome.peak_bytes = tracemalloc.get_traced_memory()[1]
                    tracemalloc.stop()
                data = decoder.inputs[rng.integers(len(decoder.inputs))]
                inside = decoder.reseal is not None and rng.random() < 0.5
                _try(decoder, decoder.reseal(data, rng) if inside else damage(data, decoder.inputs, rng), outcome)
    finally:
        tracemalloc.stop()
    return outcome


def _try(decoder: Decoder, data: bytes, outcome: Outcome) -> None:
    try:
        value = decoder.decode(data)
    except DecodeError as error:
        kind = re.sub(r"[0-9a-f]{8,}|-?[0-9.]+|'.*'|b'.*'|\".*\"", "#", str(error))[:160]
        outcome.refused[kind] = outcome.refused.get(kind, 0) + 1
    except BaseException:
        print("the damaged input:", data[:4000])
        raise
    else:
        decoder.again(value)
        outcome.taken += 1


def damage(data: bytes, others: Sequence[bytes], rng: np.random.Generator) -> bytes:
    """One to three changes of bytes, at any place."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        data = CHANGES[rng.integers(len(CHANGES))](data, others, rng)
    return data


def _flip(data: bytes, others: Sequence[bytes], rng: np.random.Generator) -> bytes:
    changed = bytearray(data)
    for at in rng.integers(0, len(data), rng.integers(1, 4)) if data else ():
        changed[at] ^= 1 << int(rng.integers(8))
    return bytes(changed)


def _truncate(data: bytes, others: Sequence[bytes], rng: np.random.Generator) -> bytes:
    return data[: rng.integers(0, len(data) + 1)]


def _cut(data: bytes, others: Sequence[bytes], rng: np.random.Generator) -> bytes:
    start, stop = np.sort(rng.integers(0, len(data) + 1, 2))
    return data[:start] + data[stop:]


def _insert(data: bytes, others: Sequence[bytes], rng: np.random.Generator) -> bytes:
    at = rng.integers(0, len(data) + 1)
    return data[:at] + rng.bytes(int(rng.integers(1, 20))) + data[at:]


def _splice(data: bytes, others: Sequence[bytes], rng: np.random.Generator) -> bytes:
    other = others[rng.integers(len(others))]
    if rng.random() < 0.5:  # at the same place, so that heads stay heads
        at = rng.integers(0, min(len(data), len(other)) + 1)
        return data[:at] + other[at:]
    return data[: rng.integers(0, len(data) + 1)] + other[rng.integers(0, len(other) + 1) :]


def _swap(data: bytes, others: Sequence[bytes], rng: np.random.Generator) -> bytes:
    a, b, c, d = np.sort(rng.integers(0, len(data) + 1, 4))
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def _repeat(data: bytes, others: Sequence[bytes], rng: np.random.Generator) -> bytes:
    start, stop = np.sort(rng.integers(0, len(data) + 1, 2))
    return data[:stop] + data[start:stop] * int(rng.integers(1, 4)) + data[stop:]


def _number(data: bytes, others: Sequence[bytes], rng: np.random.Generator) -> bytes:
    size = int(rng.choice([1, 2, 4, 8]))
    number = NUMBERS[rng.integers(len(NUMBERS))] % (1 << 8 * size)
    at = rng.integers(0, max(len(data) - size, 0) + 1)
    return data[:at] + number.to_bytes(size, "little") + data[at + size :]


def _noise(data: bytes, others: Sequence[bytes], rng: np.random.Generator) -> bytes:
    keep = int(rng.choice([0, 8, 60]))  # nothing, a magic word, or about a whole head
    return data[:keep] + rng.bytes(int(rng.integers(0, 200)))


CHANGES = (_flip, _truncate, _cut, _insert, _splice, _swap, _repeat, _number, _noise)


def damage_text(data: bytes, rng: np.random.Generator, numbers: Sequence[int] = NUMBERS) -> bytes:
    """Another number or word at some places of a text, or lines removed, doubled and swapped."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        lines, words = data.split(b"\n"), list(re.finditer(rb"-?[0-9]+|[A-Za-z_]+", data))
        match rng.integers(6):
            case 0 if words:
                word, other = (words[rng.integers(len(words))] for _ in range(2))
                data = data[: word.start()] + other[0] + data[word.end() :]
            case 1:
                at, other = rng.integers(0, len(lines), 2)
                lines[at] = lines[other]
                data = b"\n".join(lines)
            case 2:
                del lines[rng.integers(len(lines))]
                data = b"\n".join(lines)
            case _ if found := [word for word in words if word[0][-1:].isdigit()]:
                word = found[rng.integers(len(found))]
                number = str(numbers[rng.integers(len(numbers))]).encode()
                data = data[: word.start()] + number + data[word.end() :]
    return data
