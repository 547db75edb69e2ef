"""What lowering knows before it walks over the steps: pieces as numbers, and who does what when, in flat arrays.

A *piece* is the data of one kind of one (token block, head group), a *cell* the pair without the kind. Both are plain
numbers: cell `block * G + group`, piece `kind * B * G + cell`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import HAS_KV, HAS_Q, Blocks
from dyncp.ir.placement import Placement
from dyncp.ir.plan import FORWARD, KEEP, Kind, Pass, PlanHeader, moved
from dyncp.ir.schedule import Schedule, Side, Transfers
from dyncp.planner.sorting import pointers, sort_by


class Pieces(NamedTuple):
    """All pieces of a plan, and what is known of them whatever the rank."""

    blocks: int  # B
    groups: int  # G
    owner: Ints  # int64[B], rank
    row: Ints  # int64[K, B], where the owner's tensors have a kind of a block
    size_bytes: Ints  # int64[2, K, B], of a slot outside and inside a message

    @property
    def total(self) -> int:
        """How many pieces there are, `P = K * B * G`."""
        return len(Kind) * self.blocks * self.groups

    def numbers(self, kind: Ints, block: Ints, group: Ints) -> Ints:
        """int64[n], the numbers of pieces."""
        numbers: Ints = (kind.astype("int64") * self.blocks + block) * self.groups + group
        return numbers

    @classmethod
    def of(cls, header: PlanHeader, blocks: Blocks) -> Pieces:
        """The pieces of a plan."""
        assert (len(header.tokens), header.shape.groups) == (len(blocks.tokens), blocks.groups)
        rows = {of_keys: header.local_rows(HAS_KV if of_keys else HAS_Q) for of_keys in (False, True)}
        return cls(
            blocks=len(header.tokens),
            groups=header.shape.groups,
            owner=header.owner.astype("int64"),
            row=np.array([rows[kind.of_keys] for kind in Kind], "int64"),
            size_bytes=np.array([[header.piece_bytes(kind, wire) for kind in Kind] for wire in (False, True)], "int64"),
        )


KIND = np.dtype([(name, "bool") for name in ("of_keys", "is_partial", "is_kept")])  # is_kept: for the next pass


class PassTable(NamedTuple):
    """`Pass` as arrays, under a plan's `keep`."""

    reads: Ints  # int64[r], Kind
    writes: Ints  # int64[w], Kind
    moves: Ints  # int64[4, m], the kinds that a transfer of each Side carries, then -1
    kinds: Ints  # KIND[K]

    @classmethod
    def of(cls, pass_: Pass, keep: str) -> PassTable:
        """The table of a pass."""
        moves = [moved(pass_, side, keep) for side in Side]
        most = max(map(len, moves))
        kept = KEEP[keep] if pass_ is FORWARD else ()
        return cls(
            reads=np.array(pass_.reads, "int64"),
            writes=np.array(pass_.writes, "int64"),
            moves=np.array([[*kinds, *[-1] * (most - len(kinds))] for kinds in moves], "int64"),
            kinds=np.array([(kind.of_keys, kind.is_partial, kind in kept) for kind in Kind], KIND),
        )


# `start` and `stop` are the bounds of its transfers
MESSAGE = np.dtype([(name, "int64") for name in ("start", "stop", "src", "dst", "step")])


class Traffic(NamedTuple):
    """The transfers of one mask, message by message: all that one rank sends to another at a step is one message, and
    both see its transfers in the same order."""

    transfers: Ints  # int64[T, 2], rows (side, cell)
    messages: Ints  # MESSAGE[M]
    by_rank: Ints  # int64[2M], the messages of each rank, by step, then by peer, of which it receives before it sends
    ptr: Ints  # int64[R + 1], bounds of the ranks in `by_rank`

    @classmethod
    def of(cls, transfers: Transfers, mask: int, blocks: Blocks, ranks: int) -> Traffic:
        """The traffic of one mask.

        Raises:
            ValueError: a transfer that starts too early, goes nowhere, or names what there is not.
        """
        side, cell, src, dst, step = _columns(transfers, mask, blocks, ranks)
        order = sort_by(step, src, dst, side * len(blocks.tokens) * blocks.groups + cell)
        side, cell, src, dst, step = (column[order] for column in (side, cell, src, dst, step))
        bounds = bounds_of(step, src, dst)
        first = bounds[:-1]
        step, src, dst = step[first], src[first], dst[first]
        messages = np.empty(len(first), MESSAGE)
        for name, column in zip(MESSAGE.fields or (), (first, bounds[1:], src, dst, step), strict=True):
            messages[name] = column
        rank, peer = np.append(dst, src), np.append(src, dst)
        ends = sort_by(rank, np.append(step, step), peer)
        by_rank = ends % max(len(messages), 1)
        return cls(np.stack([side, cell], axis=1), messages, by_rank, pointers(rank, ranks))

    def most_messages(self) -> int:
        """The most messages that one rank has."""
        return int(np.diff(self.ptr).max())

    def most_transfers(self) -> int:
        """The most transfers that one rank sends, or that one receives."""
        sizes = self.messages["stop"] - self.messages["start"]
        return int(max(np.bincount(self.messages[end], sizes).max(initial=0) for end in ("src", "dst")))


def _columns(transfers: Transfers, mask: int, blocks: Blocks, ranks: int) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """int64[T] each: side, cell, source, destination and step of the transfers of one mask."""
    rows = np.flatnonzero(transfers.mask == mask)
    side, block, group, src, dst, step = (
        getattr(transfers, name)[rows].astype("int64") for name in ("side", "block", "group", "src", "dst", "step")
    )
    wrong = np.flatnonzero((step < 1) | (src == dst))
    if len(wrong):
        src, dst, step = (int(column[wrong[0]]) for column in (src, dst, step))
        raise ValueError(f"a transfer from rank {src} to rank {dst} at step {step}; steps start at 1, ranks differ")
    for name, column, stop in (
        ("side", side, len(Side)),
        ("block", block, len(blocks.tokens)),
        ("head group", group, blocks.groups),
        ("source", src, ranks),
        ("destination", dst, ranks),
    ):
        check_range(f"the {name} of a transfer", column, stop)
    return side, block * blocks.groups + group, src, dst, step


class Work(NamedTuple):
    """The computation of one mask: rank by rank, step by step, and there head group by head group."""

    rows: Ints  # int64[C, 4], rows (step, row of the rank's Comps, query cell, KV cell)
    ptr: Ints  # int64[R + 1], bounds of the ranks in `rows`
    comps: Ints  # int64[I], rows of Blocks: rank by rank those of its Comps, ascending
    comps_ptr: Ints  # int64[R + 1], bounds of the ranks in `comps`

    @classmethod
    def of(cls, blocks: Blocks, placement: Placement, schedule: Schedule, mask: int, ranks: int) -> Work:
        """The work of one mask.

        Raises:
            ValueError: arrays of another shape, or a block, a rank or a step that there is not.
        """
        part = blocks.of_mask(mask)
        comp_rank, comp_step = _of_comps(blocks, placement, schedule, part, ranks)
        order = sort_by(comp_rank.ravel(), comp_step.ravel())
        group, comp = np.divmod(order, max(part.stop - part.start, 1))
        row, comps, comps_ptr = _comps_of_ranks(comp_rank, ranks)
        q_cell, kv_cell = (
            end[part][comp].astype("int64") * blocks.groups + group for end in (blocks.q_block, blocks.kv_block)
        )
        rows = np.stack([comp_step.ravel()[order], row.ravel()[order], q_cell, kv_cell], axis=1)
        return cls(rows, pointers(comp_rank.ravel(), ranks), comps + part.start, comps_ptr)

    def most_comps(self) -> int:
        """The most blocks that one rank computes."""
        return int(np.diff(self.ptr).max())


def _of_comps(blocks: Blocks, placement: Placement, schedule: Schedule, part: slice, ranks: int) -> tuple[Ints, Ints]:
    """int64[G, n] each: the rank and the step of a part of the computation blocks."""
    arrays = {"placement's comp_rank": placement.comp_rank, "schedule's comp_step": schedule.comp_step}
    for name, array in arrays.items():
        if array.shape != (blocks.groups, len(blocks)):
            raise ValueError(
                f"the {name} is {list(array.shape)}, expected {[blocks.groups, len(blocks)]}: a row for each head "
                "group, a column for each computation block"
            )
    rank, step = (array[:, part].astype("int64") for array in arrays.values())
    for name, numbers, stop in (
        ("query block", blocks.q_block, len(blocks.tokens)),
        ("KV block", blocks.kv_block, len(blocks.tokens)),
        ("rank", rank, ranks),
        ("step", step, int(step.max(initial=0)) + 1),
    ):
        check_range(f"the {name} of a computation block", numbers, stop)
    return rank, step


def _comps_of_ranks(comp_rank: Ints, ranks: int) -> tuple[Ints, Ints, Ints]:
    """Number the computation blocks of each rank, whatever the head group, in ascending order.

    Returns:
        int64[G, n], the number that each has on its rank; int64[I], the columns of `comp_rank` that each rank has, rank
        by rank; and int64[R + 1], the bounds of the ranks in these.
    """
    groups = len(comp_rank)
    rank = comp_rank.T.ravel()
    order = sort_by(rank)
    rank, comp = rank[order], order // groups
    bounds = bounds_of(rank, comp)
    first = bounds[:-1]
    ptr = pointers(rank[first], ranks)
    number = np.empty_like(order)
    number[order] = np.repeat(np.arange(len(first)) - ptr[rank[first]], np.diff(bounds))
    return number.reshape(-1, groups).T, comp[first], ptr


def bounds_of(*columns: Ints) -> Ints:
    """int64[n + 1]: bounds of the runs of rows in which no column changes."""
    changes = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    count = len(columns[0])
    return np.concatenate([np.zeros(min(count, 1), "int64"), np.flatnonzero(changes) + 1, [count]])


def check_range(name: str, values: Ints, stop: int) -> None:
    """Compiled code takes these numbers as they are, so they must be right.

    Raises:
        ValueError: a value outside `[0, stop)`.
    """
    wrong = values[(values < 0) | (values >= stop)]
    if len(wrong):
        raise ValueError(f"broken schedule: {name} is {wrong[0]}, expected 0 to {stop - 1}")
