"""A plan written by hand, with every instruction and every kind of oddity in it, and what tests do to plans."""

from __future__ import annotations

import dataclasses

import numpy as np

from dyncp.ir import codec
from dyncp.ir.blocks import HAS_KV, HAS_Q, TokenBlocks
from dyncp.ir.plan import (
    Attention,
    CommLaunch,
    CommWait,
    Comps,
    Copy,
    Kind,
    Place,
    Plan,
    PlanHeader,
    Program,
    RankProgram,
    Reduction,
    Slots,
)
from dyncp.ir.shape import AttentionShape

LOCAL, ARENA, KEPT = Place
NOTHING = RankProgram(
    Comps([], [], [], [0], np.empty((0, 6))), *(Program(Slots([], [], [], [], [], []), (), 0, 0) for _ in range(2))
)


def slots(*rows: tuple[Kind, int, int, Place, int, int]) -> Slots:
    return Slots(*zip(*rows, strict=True))


def make_header(**changes) -> PlanHeader:
    """Two ranks. Blocks 0 and 1: self-attention of 7 tokens; blocks 2 and 3: 3 queries and 5 other keys."""
    both = HAS_Q | HAS_KV
    fields = {
        "strategy": "by hand",
        "shape": AttentionShape(4, 2, 8, 4, "float32"),
        "nodes": 1,
        "ranks_per_node": 2,
        "keep": "kv",
        "wire": "model",
        "mask_names": ("near", 'odd "n\u00e4me"\n'),
        "mask_weights": (2.0, 1 / 3),
        "tokens": TokenBlocks([0, 0, 1, 1], [0, 4, 0, 0], [4, 7, 3, 5], [both, both, HAS_Q, HAS_KV]),
        "owner": [0, 1, 0, 1],
    }
    return PlanHeader(**(fields | changes))


def handmade() -> Plan:
    """A structurally valid plan (it computes nothing sensible). Bytes per token: Q 64, KV 48, OUT 40, DO 32, STATS 16,
    DQ 64, DKV 48."""
    comps = Comps([0, 5], [0, 2], [0, 3], [0, 1, 3], [[0, 4, 0, 0, 1, 1], [0, 2, 0, 1, 2, 0], [1, 3, 4, 0, 5, 0]])
    forward = Program(
        slots(
            (Kind.Q, 0, 0, LOCAL, 0, 0),
            (Kind.Q, 2, 1, LOCAL, 0, 4),
            (Kind.KV, 0, 0, LOCAL, 0, 0),
            (Kind.KV, 3, 1, ARENA, 0, 0),
            (Kind.OUT, 0, 0, LOCAL, 0, 0),
            (Kind.OUT, 2, 1, LOCAL, 0, 4),
            (Kind.KV, 3, 1, KEPT, 0, 128),
            (Kind.OUT, 1, 0, ARENA, 1, 240),
            (Kind.KV, 0, 0, ARENA, 0, 384),
            (Kind.OUT, 1, 0, ARENA, 0, 640),
        ),
        (
            Copy([2], [8]),
            CommLaunch(1, [1, 1], [0, 1], [0, 2, 3], [3, 7, 8]),
            Attention([0], [[0, 2]], [[4]], []),
            CommWait(1),
            Copy([3], [6]),
            Copy([], []),
            Reduction([7], [9], [9]),
            Attention([1, 0], [[1, 6], [0, 2]], [[5], [4]], [5]),
        ),
        arena_bytes=768,
        kept_bytes=384,
    )
    backward = Program(
        slots(
            (Kind.Q, 2, 1, LOCAL, 0, 4),
            (Kind.DO, 2, 1, LOCAL, 0, 4),
            (Kind.STATS, 2, 1, LOCAL, 0, 4),
            (Kind.KV, 3, 1, KEPT, 0, 128),
            (Kind.DQ, 2, 1, LOCAL, 0, 4),
            (Kind.DKV, 3, 1, ARENA, 0, 0),
        ),
        (
            Attention([1], [[0, 1, 2, 3]], [[4, 5]], [5]),
            CommLaunch(7, [1], [1], [0, 1], [5]),
            CommWait(7),
        ),
        arena_bytes=256,
        kept_bytes=384,
    )
    header = make_header()
    programs = ((RankProgram(comps, forward, backward), NOTHING), (NOTHING, NOTHING))
    return Plan(header, programs, codec.digest(header, programs))


def edited(record, path: str, value):
    """`record` with the field at a path like `programs.0.forward.slots.block` replaced by `value`, or, where that is a
    function, by what it makes of the field (of a copy, for an array)."""
    head, _, rest = path.partition(".")
    if isinstance(record, tuple):
        items = list(record)
        items[int(head)] = edited(items[int(head)], rest, value) if rest else value
        return tuple(items)
    old = getattr(record, head)
    if rest:
        new = edited(old, rest, value)
    else:
        new = value(np.array(old) if isinstance(old, np.ndarray) else old) if callable(value) else value
    return dataclasses.replace(record, **{head: new})


def assert_same(a, b) -> None:
    """Equal in every field, dtype and shape; and arrays are read-only."""
    assert type(a) is type(b)
    if dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert not b.flags.writeable
        np.testing.assert_array_equal(a, b)
    else:
        assert a == b
