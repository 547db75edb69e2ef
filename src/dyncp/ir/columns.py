"""The body of a file: records taken apart into columns of numbers, and put together again.

The instances of a class lie field by field: all values of `Slots.kind`, of all programs, make one column, stored in the
narrowest integers that hold them. `CLASSES` says which classes a body may hold; the rest follows from their fields.
Equal values have equal bodies.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, get_args, get_origin, get_type_hints

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import TokenBlocks
from dyncp.ir.plan import (
    Attention,
    CommLaunch,
    CommWait,
    Comps,
    Copy,
    Instruction,
    PlanHeader,
    Program,
    RankProgram,
    Reduction,
    Slots,
)
from dyncp.ir.shape import AttentionShape

COLUMN = struct.Struct("<BQ")  # index into STORED, number of values
PLAN, RANK = 0, 1  # kinds of bodies
MAX_BYTES = 1 << 30  # of a body, and of all that is made from it
STORED = tuple(np.dtype(name) for name in ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<i8", "<f8"))
BYTE, FLOAT = 0, len(STORED) - 1
# Bytes that Python takes for what is made of one number, beside the number itself: at least these, so that a file of
# many tiny things takes no more memory than one of a few large ones.
NUMBER_BYTES, TAG_BYTES, ITEM_BYTES, ARRAY_BYTES = 40, 96, 16, 176
LIMITS = tuple((int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)) for dtype in STORED[:FLOAT])


@dataclass(frozen=True, slots=True)
class Array:
    """Form of an array field: its dtype and number of dimensions, and the bytes of what else its user makes of each of
    its numbers.
    """

    dtype: str
    ndim: int = 1
    use_bytes: int = 0


SLICES = Array("int32", ndim=2, use_bytes=4)  # validation needs them as int64
I4, I8, U1, I4_ROWS = Array("int32"), Array("int64"), Array("uint8"), Array("int32", ndim=2)

# Every class that a file may hold, with the forms that its annotations do not tell. The order of the classes' fields
# and of the instructions is part of the format: whoever changes it raises PLAN_VERSION.
CLASSES: dict[type, dict[str, Any]] = {
    AttentionShape: {"v_head_dim": int},
    TokenBlocks: {"sequence": I4, "start": I8, "stop": I8, "role": U1},
    PlanHeader: {"owner": I4},
    Comps: {"index": I4, "q_block": I4, "kv_block": I4, "slice_ptr": I4, "slices": SLICES},
    Slots: {"kind": U1, "block": I4, "group": I4, "place": U1, "wire": U1, "offset": I8},
    Attention: {"comp": I4, "reads": I4_ROWS, "writes": I4_ROWS, "fresh": I4},
    Reduction: {"src": I4, "dst": I4, "fresh": I4},
    Copy: {"src": I4, "dst": I4},
    CommLaunch: {"peer": I4, "send": U1, "ptr": I4, "slots": I4},
    CommWait: {},
    Program: {},
    RankProgram: {},
}
PROGRAMS = tuple[RankProgram, ...]
BODIES: tuple[dict[str, Any], ...] = (  # by kind of plan file
    {"header": PlanHeader, "programs": tuple[PROGRAMS, ...]},
    {"header": PlanHeader, "rank": int, "programs": PROGRAMS},
)


@dataclass(frozen=True, slots=True)
class Column:
    """All values of one field of one class, in the order they are come upon."""

    name: str
    dtype: np.dtype[Any]
    made_bytes: int  # of what is made of one value: the value in its dtype, and objects


class ColumnReader:
    """Hands out the values of a column from the first to the last."""

    __slots__ = ("name", "numbers", "position", "values")

    def __init__(self, column: Column, values: Ints) -> None:
        self.name, self.values, self.position = column.name, values, 0
        self.numbers: list[Any] | None = None

    def take(self, count: int) -> Ints:
        """The next values, without a copy."""
        stop = self.position + count
        if stop > len(self.values):
            raise ValueError(f"{self.name} has {len(self.values)} values, expected at least {stop}")
        start, self.position = self.position, stop
        return self.values[start:stop]

    def one(self) -> Any:
        """The next value, as a Python number."""
        if self.numbers is None:
            self.numbers = self.values.tolist()
        if self.position >= len(self.numbers):
            raise ValueError(f"{self.name} has {len(self.numbers)} values, expected more")
        self.position += 1
        return self.numbers[self.position - 1]


Written = list[list[Any]]  # per column: numbers or arrays
Read = list[ColumnReader]


class Form(Protocol):
    """How values of one type go into columns and come back."""

    def put(self, value: Any, out: Written) -> None: ...

    def get(self, source: Read) -> Any: ...


@dataclass(frozen=True, slots=True)
class Number:
    """An int or a float."""

    column: int

    def put(self, value: Any, out: Written) -> None:
        out[self.column].append(value)

    def get(self, source: Read) -> Any:
        return source[self.column].one()


@dataclass(frozen=True, slots=True)
class ArrayForm:
    """An array: its values in one column, its shape in another."""

    sizes: int
    column: int
    ndim: int

    def put(self, value: Any, out: Written) -> None:
        assert value.ndim == self.ndim
        out[self.sizes].extend(value.shape)
        out[self.column].append(value if self.ndim == 1 else value.ravel())

    def get(self, source: Read) -> Any:
        if self.ndim == 1:
            return source[self.column].take(source[self.sizes].one())
        shape = [source[self.sizes].one() for _ in range(self.ndim)]
        return source[self.column].take(math.prod(shape)).reshape(shape)


@dataclass(frozen=True, slots=True)
class Text:
    """A string, as an array of its UTF-8 bytes."""

    letters: ArrayForm

    def put(self, value: Any, out: Written) -> None:
        self.letters.put(np.frombuffer(value.encode(), np.uint8), out)

    def get(self, source: Read) -> Any:
        return self.letters.get(source).tobytes().decode()


@dataclass(frozen=True, slots=True)
class Many:
    """A tuple of any length."""

    count: int
    item: Form

    def put(self, value: Any, out: Written) -> None:
        out[self.count].append(len(value))
        for item in value:
            self.item.put(item, out)

    def get(self, source: Read) -> Any:
        # Every item takes at least one value from a column, so a false count ends in an error, not in a long loop.
        return tuple(self.item.get(source) for _ in range(source[self.count].one()))


@dataclass(frozen=True, slots=True)
class Record:
    """A dataclass, field by field."""

    cls: type
    names: tuple[str, ...]
    forms: tuple[Form, ...]

    def put(self, value: Any, out: Written) -> None:
        for name, form in zip(self.names, self.forms, strict=True):
            form.put(getattr(value, name), out)

    def get(self, source: Read) -> Any:
        return self.cls(*[form.get(source) for form in self.forms])


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of several dataclasses, told apart by a tag."""

    tag: int
    records: tuple[Record, ...]
    tags: dict[type, int]

    def put(self, value: Any, out: Written) -> None:
        tag = self.tags[type(value)]
        out[self.tag].append(tag)
        self.records[tag].put(value, out)

    def get(self, source: Read) -> Any:
        tag = source[self.tag].one()
        if tag >= len(self.records):
            raise ValueError(f"{source[self.tag].name} is {tag}, expected below {len(self.records)}")
        return self.records[tag].get(source)


class Schema:
    """The columns of one kind of body, and the forms that fill them."""

    def __init__(self, types: Mapping[str, Any], what: str = "plan", remedy: str = "use larger blocks") -> None:
        self.what, self.remedy = what, remedy  # for the error of one that is too large
        self.columns: list[Column] = []
        self.records: dict[type, Record] = {}
        self.forms = tuple(self.form(type_, name) for name, type_ in types.items())

    def form(self, type_: Any, name: str) -> Form:
        """The form of values of a type; `name` says where they are found."""
        if isinstance(type_, Array):
            sizes = self.add(f"{name} sizes", "uint32", ARRAY_BYTES)
            return ArrayForm(sizes, self.add(name, type_.dtype, type_.use_bytes), type_.ndim)
        if type_ in (int, float):
            return Number(self.add(name, "int64" if type_ is int else "float64", NUMBER_BYTES))
        if type_ is str:
            return Text(ArrayForm(self.add(f"{name} sizes", "uint32", ARRAY_BYTES), self.add(name, "uint8", 4), 1))
        if get_origin(type_) is tuple:
            return Many(self.add(f"{name} count", "uint32", ITEM_BYTES), self.form(get_args(type_)[0], f"{name}[]"))
        if type_ == Instruction:
            members = get_args(type_)
            tags = {member: tag for tag, member in enumerate(members)}
            return OneOf(self.add(f"{name} tag", "uint8", TAG_BYTES), tuple(map(self.record, members)), tags)
        return self.record(type_)

    def record(self, cls: type) -> Record:
        """The form of a class; its instances share columns wherever they are found."""
        if cls not in self.records:
            types = get_type_hints(cls) | CLASSES[cls]
            names = tuple(field.name for field in fields(cls))
            forms = tuple(self.form(types[name], f"{cls.__name__}.{name}") for name in names)
            self.records[cls] = Record(cls, names, forms)
        return self.records[cls]

    def add(self, name: str, dtype: str, objects_bytes: int) -> int:
        self.columns.append(Column(name, np.dtype(dtype), np.dtype(dtype).itemsize + objects_bytes))
        return len(self.columns) - 1


SCHEMAS = tuple(Schema(types) for types in BODIES)  # by kind of plan file


def encode_body(schema: Schema, values: Sequence[Any]) -> bytes:
    """The values of a schema's types: a table of columns, and their numbers.

    Raises:
        ValueError: more than `MAX_BYTES`, as they are written or as they would be read.
    """
    out: Written = [[] for _ in schema.columns]
    for form, value in zip(schema.forms, values, strict=True):
        form.put(value, out)
    heads, data, made_bytes = [], [], 0
    for column, parts in zip(schema.columns, out, strict=True):
        stored, numbers = _pack(column, parts)
        made_bytes += numbers.size * column.made_bytes
        heads.append(COLUMN.pack(stored, numbers.size))
        data.append(numbers.tobytes())
    body = b"".join(heads + data)
    if (size_bytes := max(len(body), made_bytes)) > MAX_BYTES:
        raise ValueError(
            f"the {schema.what} takes {size_bytes} bytes, at most {MAX_BYTES} can be written: {schema.remedy}"
        )
    return body


def decode_body(schema: Schema, body: bytes, max_bytes: int = MAX_BYTES) -> list[Any]:
    """The values that `encode_body` made `body` of; their arrays share the memory of their columns, read-only.

    Raises:
        ValueError: anything that `encode_body` does not make, or what would take more than `max_bytes`.
    """
    columns = _decode_columns(schema.columns, body, max_bytes)
    source = [ColumnReader(column, values) for column, values in zip(schema.columns, columns, strict=True)]
    values = [form.get(source) for form in schema.forms]
    for reader in source:
        if reader.position != len(reader.values):
            raise ValueError(f"{reader.name} has {len(reader.values)} values, expected {reader.position}")
    return values


def _decode_columns(columns: Sequence[Column], body: bytes, max_bytes: int) -> list[Ints]:
    """The values of all columns, read-only."""
    position = COLUMN.size * len(columns)
    if len(body) < position:
        raise ValueError(f"its body has {len(body)} bytes, expected at least {position}")
    heads = [COLUMN.unpack_from(body, COLUMN.size * index) for index in range(len(columns))]
    for column, (stored, _) in zip(columns, heads, strict=True):
        if stored >= len(STORED):
            raise ValueError(f"{column.name} is stored as dtype {stored}, expected below {len(STORED)}")
    claimed = position + sum(STORED[stored].itemsize * count for stored, count in heads)
    if claimed != len(body):
        raise ValueError(f"its columns claim {claimed} bytes, expected {len(body)}")
    needed = sum(column.made_bytes * count for column, (_, count) in zip(columns, heads, strict=True))
    if needed > max_bytes:
        raise ValueError(f"its arrays take {needed} bytes, expected at most {max_bytes}")
    result = []
    for column, (stored, count) in zip(columns, heads, strict=True):
        raw = np.frombuffer(body, STORED[stored], count, position)
        position += raw.nbytes
        result.append(_restore(column, raw, stored))
    return result


def _pack(column: Column, parts: list[Any]) -> tuple[int, Ints]:
    """The numbers of a column as they are stored; `parts` are numbers or arrays."""
    if column.dtype.kind == "f":
        return FLOAT, np.array(parts, STORED[FLOAT])
    if not parts:
        return BYTE, np.empty(0, STORED[BYTE])
    if not isinstance(parts[0], np.ndarray):
        stored = _narrowest(min(parts), max(parts))
        return stored, np.array(parts, STORED[stored])
    numbers = np.concatenate(parts) if len(parts) > 1 else parts[0]
    stored = BYTE if column.dtype == STORED[BYTE] else _narrowest(*_range(numbers))
    return stored, numbers.astype(STORED[stored], copy=False)


def _restore(column: Column, raw: Ints, stored: int) -> Ints:
    """Stored values in their own dtype, if they fit it and are stored the one way that equal plans share."""
    fits, expected = True, BYTE
    if column.dtype.kind == "f":
        fits, expected = stored == FLOAT or not raw.size, FLOAT
    elif stored == FLOAT:
        fits = not raw.size
    elif stored != BYTE:  # bytes fit every dtype, and are the narrowest
        (low, high), limits = _range(raw), np.iinfo(column.dtype)
        fits, expected = limits.min <= low and high <= limits.max, _narrowest(low, high)
    if not fits:
        raise ValueError(f"{column.name} holds values that are no {column.dtype}")
    if stored != expected:
        raise ValueError(f"{column.name} is stored as {STORED[stored]}, expected {STORED[expected]}")
    values = raw.astype(column.dtype)
    values.flags.writeable = False
    return values


def _range(values: Ints) -> tuple[int, int]:
    """The least and the largest number, 0 if there are none."""
    if not values.size:
        return 0, 0
    return int(np.minimum.reduce(values)), int(np.maximum.reduce(values))


def _narrowest(low: int, high: int) -> int:
    """Index into STORED of the narrowest dtype that holds numbers from `low` to `high`."""
    for index, (least, most) in enumerate(LIMITS):
        if least <= low and high <= most:
            return index
    raise ValueError(f"numbers from {low} to {high} do not fit into 64 bits")
