"""Files taken apart, into bodies and columns, and made again of any columns, with right checksums."""

from __future__ import annotations

import zlib

import numpy as np
from fuzzing import NUMBERS, damage

from dyncp.ir.columns import COLUMN, STORED, Schema
from dyncp.ir.frame import CHECKSUM, HEAD, Format


def body_of(data: bytes) -> bytes:
    return zlib.decompress(data[HEAD.size : -CHECKSUM.size])


def framed(format_: Format, kind: int, body: bytes, version: int | None = None, claim: int | None = None) -> bytes:
    """A file with that body, its digest and its checksum."""
    packed, digest = zlib.compress(body), bytes.fromhex(format_.digest(body))
    version, claim = format_.version if version is None else version, len(body) if claim is None else claim
    data = HEAD.pack(format_.magic, version, kind, digest, claim, len(packed)) + packed
    return data + CHECKSUM.pack(zlib.crc32(data))


def columns_of(schema: Schema, body: bytes) -> list[np.ndarray]:
    """The numbers of each column of a body, in a wide dtype."""
    heads = [COLUMN.unpack_from(body, COLUMN.size * index) for index in range(len(schema.columns))]
    position, result = COLUMN.size * len(heads), []
    for stored, count in heads:
        numbers = np.frombuffer(body, STORED[stored], count, position)
        result.append(numbers.astype(np.float64 if numbers.dtype.kind == "f" else np.int64))
        position += numbers.nbytes
    return result


def body_from(columns: list[np.ndarray]) -> bytes:
    """The body with these columns, each stored in the narrowest dtype."""
    heads, data = [], []
    for numbers in columns:
        fitting = [i for i, dtype in enumerate(STORED) if (dtype.kind == "f") == (numbers.dtype.kind == "f")]
        same = (i for i in fitting if np.array_equal(numbers.astype(STORED[i]), numbers, equal_nan=len(fitting) == 1))
        stored = next(same)
        heads.append(COLUMN.pack(stored, len(numbers)))
        data.append(numbers.astype(STORED[stored]).tobytes())
    return b"".join(heads + data)


def resealed(format_: Format, kind: int, schema: Schema, data: bytes, rng: np.random.Generator) -> bytes:
    """The file with a damaged body behind a right head: other numbers in its columns, or other bytes."""
    body = body_of(data)
    if rng.random() < 0.15:
        return framed(format_, kind, damage(body, [body], rng))
    if rng.random() < 0.1:  # the table of columns
        changed = bytearray(body)
        stored, count = int(rng.integers(len(STORED) + 1)), abs(NUMBERS[rng.integers(len(NUMBERS))])
        COLUMN.pack_into(changed, COLUMN.size * int(rng.integers(len(schema.columns))), stored, count)
        return framed(format_, kind, bytes(changed))
    columns = columns_of(schema, body)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = int(rng.integers(len(columns)))
        columns[at] = _damaged(columns, at, rng)
    return framed(format_, kind, body_from(columns))


def _damaged(columns: list[np.ndarray], at: int, rng: np.random.Generator) -> np.ndarray:
    numbers = columns[at].copy()
    is_float = numbers.dtype.kind == "f"
    extremes = (0.0, -1.0, 5e-324, np.inf, np.nan, 1e308) if is_float else NUMBERS
    value, place = extremes[rng.integers(len(extremes))], int(rng.integers(max(len(numbers), 1)))
    match rng.integers(7):
        case 0:
            return np.append(numbers, numbers.dtype.type(value))
        case 1:
            return np.delete(numbers, place) if len(numbers) else numbers
        case 2 if not is_float:
            return columns[rng.integers(len(columns))].astype(np.int64, copy=True) if _is_tame(columns) else numbers
        case 3:
            numbers[:] = value
        case 4 if len(numbers):
            numbers[place] = numbers[rng.integers(len(numbers))]
        case 5 if len(numbers) and not is_float:
            numbers[place] = np.clip(int(numbers[place]) + int(rng.choice([-1, 1])), -(2**63), 2**63 - 1)
        case _ if len(numbers):
            numbers[place] = value
    return numbers


def _is_tame(columns: list[np.ndarray]) -> bool:
    return all(column.dtype.kind != "f" or (np.abs(column) < 2**53).all() for column in columns)
