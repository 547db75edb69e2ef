"""A table of measured times of attention, for the simulator: see `dyncp.cost.profiled.Profiled`.

Seconds of one item (a computation block of one head group) by sizes of its queries and keys, form of mask and pass. An
item alone does not fill a GPU: a block of 512 rows and 4 query heads has 16 tiles of work for 132 multiprocessors. So
a launch has as many items as fill it several times over, and its time is divided by their number. That is what an item
adds to a launch that is full anyway, and what the simulator adds up. It is too little for a division with few items:
such a launch takes as long as one item takes alone, which may be several times what the table says of all of them.
How few are too few is measured as well: `few` has launches of 1, 2, 4, ... items beside what the table says of them. A
plan whose divisions have fewer should have fewer divisions or smaller blocks; the simulator does not see it.

A launch's own cost is apart: `launch_s` is the time from one launch to the next where there is next to nothing to
compute, `instruction_s` the same of copies. On a GPU that is what the host takes, or the device, whichever is longer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.gpu.cases import one_rank
from benchmarks.gpu.clock import Deadline, spread
from benchmarks.gpu.moves import counted_bytes_per_s
from benchmarks.gpu.pieces import Piece, moving, piece_of, repeated
from benchmarks.gpu.session import Findings, Row, Session
from benchmarks.network.calibrate import Cell, grids
from benchmarks.network.pieces import form_masks
from dyncp.cost.model import FORMS, Work
from dyncp.cost.profiled import Profiled
from dyncp.ir.mask import Mask
from dyncp.ir.plan import FORWARD, PASSES, Attention, Kind, Pass
from dyncp.ir.shape import AttentionShape

TILE = 128
MOST_COPIES = 8192  # of a block
FEW = (1, 2, 4, 8, 16, 32, 64)  # sequences of one block
REPEATS = 5


def table(session: Session, deadline: Deadline, found: Findings) -> None:
    """Measure and write the table, and launches with few items beside it. A table with holes would be of no use: where
    time runs out, its largest blocks are left out, queries and keys alike."""
    scale = session.scale
    cells: list[Cell] = []
    numbers = range(len(scale.table_sizes))
    for last in deadline.in_time(numbers, lambda at: f"blocks of {scale.table_sizes[at]:,}", found.left_out):
        cells += measured_border(session, last)
    sizes = scale.table_sizes[: len(numbers) - len(found.left_out)]
    if not sizes:
        return
    session.table = Profiled(
        sizes,
        sizes,
        grids(cells, len(sizes)),
        bytes_per_s=counted_bytes_per_s(session),
        launch_s=launch_s(session),
        instruction_s=instruction_s(session),
    )
    session.table_path.parent.mkdir(parents=True, exist_ok=True)
    session.table.write(session.table_path)
    found.rows += [fixed_costs(session), *few(session, sizes)]


def measured_border(session: Session, last: int) -> list[Cell]:
    """The cells by which a table of sizes up to number `last` is larger than one without it."""
    sizes, shape = session.scale.table_sizes, session.scale.shape
    places = [(last, j) for j in range(last + 1)] + [(i, last) for i in range(last)]
    cells = []
    for form in FORMS:
        for i, j in places:
            if form == "causal" and i != j:
                continue
            made = form_masks(form, sizes[i], sizes[j])
            for pass_ in PASSES:
                seconds = [item_s(session, mask, copies_of(session, mask, shape), pass_) for mask in made]
                cells.append((pass_.name, form, i, j, float(np.mean(seconds))))
    return cells


def copies_of(session: Session, mask: Mask, shape: AttentionShape) -> int:
    """Sequences of one block that fill the chip: by tiles of rows, by tiles of keys, and by bytes."""
    rows, keys = mask.q_length, mask.k_length
    tiles = min(shape.q_heads * -(-rows // TILE), shape.kv_heads * -(-keys // TILE))
    row_bytes = 2 * shape.q_heads * (shape.head_dim + shape.value_dim)
    key_bytes = 2 * shape.kv_heads * (shape.head_dim + shape.value_dim)
    by_bytes = -(-session.scale.fill_bytes // (rows * row_bytes + keys * key_bytes))
    return min(MOST_COPIES, max(1, -(-session.scale.fill_tiles // tiles), by_bytes))


def attention_piece(session: Session, mask: Mask, copies: int, pass_: Pass, times: int = 1) -> Piece:
    """One launch for some sequences of a single block each, or many such launches."""
    part = one_rank(mask, session.scale.shape, max(mask.q_length, mask.k_length), copies)
    part = repeated(part, times) if times > 1 else part
    return piece_of(part, pass_, session.kernels[0], session.device)


def item_s(session: Session, mask: Mask, copies: int, pass_: Pass) -> float:
    """Device seconds of one item of a launch of `copies` blocks of all head groups."""
    piece = attention_piece(session, mask, copies, pass_)
    (launch,) = piece.instructions()
    assert isinstance(launch, Attention)
    times = session.clock.times(piece.run, min(REPEATS, session.scale.repeats))
    return float(np.median(times)) / len(launch.comp)


def launch_s(session: Session) -> float:
    """Of launches of one tiny block, in a row, the mean of both passes."""
    (mask,) = form_masks("full", 1, 1)
    times = session.scale.tiny_launches
    pieces = [attention_piece(session, mask, 1, pass_, times) for pass_ in PASSES]
    return sum(row_s(session, piece) for piece in pieces) / (len(pieces) * times)


def instruction_s(session: Session) -> float:
    """Of copies of one row, in a row."""
    times = session.scale.tiny_launches
    part = repeated(moving(Kind.Q, False, 1, 1, session.scale.shape), times)
    piece = piece_of(part, FORWARD, session.kernels[0], session.device)
    return row_s(session, piece) / times


def row_s(session: Session, piece: Piece) -> float:
    """Seconds of a program, without a head start, between two moments at which the device is idle."""
    piece.run()
    return float(np.median([session.clock.wall_s(piece.run) for _ in range(min(REPEATS, session.scale.repeats))]))


def fixed_costs(session: Session) -> Row:
    """What the table has beside its grids."""
    made = session.table
    assert made is not None
    names = ("launch_s", "instruction_s", "bytes_per_s")
    return {"sizes": list(made.q_tokens), **{name: getattr(made, name) for name in names}}


def few(session: Session, sizes: tuple[int, ...]) -> list[Row]:
    """Launches of few items of a middling block, by the clock and by the table."""
    shape, size = session.scale.shape, sizes[len(sizes) // 2]
    (mask,) = form_masks("full", size, size)
    rows: list[dict[str, Any]] = []
    for copies in FEW[: len(FEW) if session.scale.judged else 2]:
        for pass_ in PASSES:
            piece = attention_piece(session, mask, copies, pass_)
            took = spread(session.clock.times(piece.run, min(REPEATS, session.scale.repeats)))
            items = copies * shape.groups
            row = {"few": items, "block_tokens": size, "pass": pass_.name, **took}
            rows.append(row | {"table_s": priced_s(session, mask, items, pass_)})
    return rows


def priced_s(session: Session, mask: Mask, items: int, pass_: Pass) -> float:
    """What the table says of a launch, without its fixed cost."""
    made = session.table
    assert made is not None
    ones = np.ones(items, "int64")
    work = Work(0 * ones, np.arange(items), mask.q_length * ones, mask.k_length * ones, mask.pairs() * ones)
    return float(made.attention_s(pass_, session.scale.shape, work, 1)[0]) - made.launch_s
