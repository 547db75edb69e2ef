"""When everything happens, greedily (paper, section 4.3 and Listing 3).

Differences to the listing:
- a rank for which no block fits leaves a division, and the others go on; and what one rank may send to another in a
  division is never below the need of any one block. So no division stays empty for want of budget;
- data crosses the boundary of a node once where that can be: while one rank takes a piece across, the others of its
  node wait for the next division and have it from there.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple, Protocol

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.plan import PASSES, side_token_bytes
from dyncp.ir.schedule import Schedule, Side, Transfers
from dyncp.ir.shape import AttentionShape


class Divisions(Protocol):
    """The options that the schedule reads, see `strategies.api.Options`."""

    @property
    def divisions(self) -> int: ...
    @property
    def keep(self) -> str: ...
    @property
    def wire(self) -> str: ...


class Inputs(NamedTuple):
    """What the computation blocks of one mask read, as numbered pieces: (side, token block, head group)."""

    rank: Ints  # int64[C], rank of each computation block; block n of head group g is g * N + n
    work: Ints  # float64[C], pairs
    pieces: Ints  # int64[C, 2], its query piece and its KV piece
    owner: Ints  # int64[P], rank of each piece
    size_bytes: Ints  # int64[P], what moves of it in both passes
    side: Ints  # int64[P], Side
    block: Ints  # int64[P]
    group: Ints  # int64[P]


def greedy_schedule(
    blocks: Blocks, placement: Placement, shape: AttentionShape, cluster: Cluster, options: Divisions
) -> Schedule:
    """Steps of all computation blocks, and all transfers.

    Division t of the listing is step t. Division 0 needs nothing from other ranks; the last, `divisions - 1` but at
    least 1, takes what is left. An input moves at the step of its first use (before the last division also a step
    earlier, see `bring_in`). It comes from its owner or, when that is on another node, from a rank of the same node
    that has had it since an earlier step. Partial results go to their owners two steps after the last computation.
    """
    comp_step = np.zeros((blocks.groups, len(blocks)), "int64")
    moves: list[Transfers] = []
    for mask in range(len(blocks.mask_names)):
        part = blocks.of_mask(mask)
        inputs = inputs_of(blocks, placement, part, shape, options)
        steps, arrivals = divide(inputs, cluster, options.divisions)
        comp_step[:, part] = steps.reshape(blocks.groups, -1)
        moves += [input_moves(inputs, arrivals, cluster, mask), output_moves(inputs, steps, mask)]
    transfers = Transfers.concatenate(moves)
    columns = (transfers.group, transfers.block, transfers.side, transfers.dst, transfers.src, transfers.step)
    return Schedule(comp_step, transfers.take(np.lexsort((*columns, transfers.mask))))


def inputs_of(blocks: Blocks, placement: Placement, part: slice, shape: AttentionShape, options: Divisions) -> Inputs:
    """The inputs of the computation blocks of one mask."""
    groups, count = blocks.groups, len(blocks.tokens)
    group = np.repeat(np.arange(groups), part.stop - part.start)
    q_piece, kv_piece = (np.tile(end[part], groups) * groups + group for end in (blocks.q_block, blocks.kv_block))
    pieces = np.stack([q_piece, count * groups + kv_piece], axis=1)
    per_token = np.sum([side_token_bytes(shape, pass_, options.keep, options.wire) for pass_ in PASSES], axis=0)
    side, block, group = np.indices((2, count, groups)).reshape(3, -1)
    side = np.array([Side.Q_IN, Side.KV_IN])[side]
    size_bytes = per_token[side] * blocks.tokens.tokens[block]
    rank = placement.comp_rank[:, part].ravel().astype("int64")
    work = np.tile(blocks.pairs[part].astype("float64"), groups)
    return Inputs(rank, work, pieces, placement.block_rank[block].astype("int64"), size_bytes, side, block, group)


class _Arrivals:
    """When each rank, and each node, first has each piece that it does not own."""

    def __init__(self, inputs: Inputs, cluster: Cluster, divisions: int) -> None:
        self.per_node, self.ranks = cluster.ranks_per_node, cluster.ranks
        self.owner, self.size_bytes = inputs.owner.tolist(), inputs.size_bytes.tolist()
        self.at_rank: dict[tuple[int, int], int] = {}  # (piece, rank) -> step
        self.at_node: dict[tuple[int, int], int] = {}  # (piece, node) -> step, from another node
        self.budget = budgets(inputs, self.ranks, divisions)
        self.left: list[float] = []

    def start(self) -> None:
        """Begin a division."""
        self.left = self.budget.copy()

    def missing(self, pieces: tuple[int, ...], rank: int) -> list[int]:
        """Those of the pieces that the rank does not have yet."""
        return [piece for piece in pieces if (piece, rank) not in self.at_rank]

    def fits(self, pieces: list[int], rank: int, step: int) -> bool:
        """Whether the rank may fetch the pieces in this division: within the budgets, and not across the boundary of a
        node that another rank takes them across in the same division, because in the next it can have them from there.
        """
        cost: dict[int, float] = {}
        for piece in pieces:
            pair = self.owner[piece] * self.ranks + rank
            cost[pair] = cost.get(pair, 0) + self.size_bytes[piece]
            if self.at_node.get((piece, rank // self.per_node)) == step:
                return False
        return all(size <= self.left[pair] for pair, size in cost.items())

    def fetch(self, piece: int, rank: int, step: int) -> None:
        """Let a piece arrive at a rank."""
        node = rank // self.per_node
        self.at_rank[piece, rank] = step
        if self.owner[piece] // self.per_node != node:
            self.at_node.setdefault((piece, node), step)
        if self.left:
            self.left[self.owner[piece] * self.ranks + rank] -= self.size_bytes[piece]


Waiting = list[tuple[int, tuple[int, ...]]]  # computation blocks of a rank, and the pieces they need from other ranks


def divide(inputs: Inputs, cluster: Cluster, divisions: int) -> tuple[Ints, Ints]:
    """int64[C], the step of each computation block, and int64[M, 3], all (piece, rank, step) of arrivals."""
    remote = inputs.owner[inputs.pieces] != inputs.rank[:, None]
    away = np.flatnonzero(remote.any(axis=1))
    last = max(1, min(divisions - 1, len(away)))  # each division has at least one of them
    waiting: list[Waiting] = [[] for _ in range(cluster.ranks)]
    for comp, rank, pieces, far in zip(
        away.tolist(), inputs.rank[away].tolist(), inputs.pieces[away].tolist(), remote[away].tolist(), strict=True
    ):
        waiting[rank].append((comp, tuple(piece for piece, is_far in zip(pieces, far, strict=True) if is_far)))
    steps = np.zeros(len(inputs.rank), "int64")
    steps[away] = last
    arrivals = _Arrivals(inputs, cluster, divisions)
    load = np.bincount(inputs.rank[steps == 0], inputs.work[steps == 0], cluster.ranks).tolist()
    for step in range(1, last):
        if not any(waiting):
            break
        fill(waiting, arrivals, inputs, load, steps, step)
    if last > 1:
        bring_in(waiting, arrivals, last - 1)
    for rank, blocks in enumerate(waiting):
        for _, pieces in blocks:
            for piece in arrivals.missing(pieces, rank):
                arrivals.fetch(piece, rank, last)
    rows = [(piece, rank, step) for (piece, rank), step in arrivals.at_rank.items()]
    return steps, np.array(sorted(rows), "int64").reshape(-1, 3)


def fill(
    waiting: list[Waiting], arrivals: _Arrivals, inputs: Inputs, load: list[float], steps: Ints, step: int
) -> None:
    """One division: the rank with the least computation so far takes its next block that fits, until none does.

    A block that is passed over does not fit later in the division either: what another one brings of its inputs takes
    as much from the budget as from its need.
    """
    arrivals.start()
    turns = [(load[rank], rank, 0) for rank in range(len(waiting)) if waiting[rank]]
    heapq.heapify(turns)
    while turns:
        _, rank, first = heapq.heappop(turns)
        blocks = waiting[rank]
        for place in range(first, len(blocks)):
            comp, pieces = blocks[place]
            missing = arrivals.missing(pieces, rank)
            if arrivals.fits(missing, rank, step):
                for piece in missing:
                    arrivals.fetch(piece, rank, step)
                steps[comp] = step
                load[rank] += float(inputs.work[comp])
                del blocks[place]
                heapq.heappush(turns, (load[rank], rank, place))
                break


def bring_in(waiting: list[Waiting], arrivals: _Arrivals, step: int) -> None:
    """Let what several ranks of a node will need in the last division, and no rank of it has, arrive at one of them a
    division earlier, so that it crosses the boundary of the node once; budgets are left aside for that."""
    users: dict[tuple[int, int], list[int]] = {}
    for rank, blocks in enumerate(waiting):
        node = rank // arrivals.per_node
        for piece in sorted({piece for _, pieces in blocks for piece in arrivals.missing(pieces, rank)}):
            if arrivals.owner[piece] // arrivals.per_node != node and (piece, node) not in arrivals.at_node:
                users.setdefault((piece, node), []).append(rank)
    brought: dict[int, float] = {}
    for (piece, _), ranks in users.items():
        if len(ranks) > 1:
            rank = min(ranks, key=lambda rank: (brought.get(rank, 0), rank))
            brought[rank] = brought.get(rank, 0) + arrivals.size_bytes[piece]
            arrivals.fetch(piece, rank, step)


def budgets(inputs: Inputs, ranks: int, divisions: int) -> list[float]:
    """[R * R], the bytes that rank `src` may send to rank `dst` in a division, at `src * R + dst`: its part of all that
    `src` owns and `dst` needs, but at least what one computation block needs of that."""
    needed = np.unique(inputs.pieces * ranks + inputs.rank[:, None])
    piece, rank = needed // ranks, needed % ranks
    total = np.bincount(inputs.owner[piece] * ranks + rank, inputs.size_bytes[piece], ranks * ranks)
    pair = inputs.owner[inputs.pieces] * ranks + inputs.rank[:, None]
    size_bytes = inputs.size_bytes[inputs.pieces]
    of_one_owner = pair[:, :1] == pair[:, 1:]
    least = np.zeros(ranks * ranks)
    np.maximum.at(least, pair, np.where(of_one_owner, size_bytes.sum(axis=1, keepdims=True), size_bytes))
    return np.maximum(total / divisions, least).tolist()


def input_moves(inputs: Inputs, arrivals: Ints, cluster: Cluster, mask: int) -> Transfers:
    """A transfer for each arrival, from the owner or from the rank of the node where the piece arrived first."""
    piece, rank, step = arrivals[np.lexsort((arrivals[:, 1], arrivals[:, 2], arrivals[:, 0]))].T
    node, owner = rank // cluster.ranks_per_node, inputs.owner[piece]
    _, first, group = np.unique(piece * cluster.nodes + node, return_index=True, return_inverse=True)
    holder = first[group]
    passed_on = (step > step[holder]) & (owner // cluster.ranks_per_node != node)
    src = np.where(passed_on, rank[holder], owner)
    mask_column = np.full(len(piece), mask)
    return Transfers(mask_column, inputs.side[piece], inputs.block[piece], inputs.group[piece], src, rank, step)


def output_moves(inputs: Inputs, steps: Ints, mask: int) -> Transfers:
    """Every partial result that was computed away from its owner, once, after all computation."""
    used = np.unique(np.stack([inputs.pieces.ravel(), np.repeat(inputs.rank, 2)]), axis=1)
    piece, rank = used[:, inputs.owner[used[0]] != used[1]]
    side = np.where(inputs.side[piece] == Side.Q_IN, Side.Q_OUT, Side.KV_OUT)
    step = np.full(len(piece), int(steps.max(initial=0)) + 2)
    return Transfers(
        np.full(len(piece), mask), side, inputs.block[piece], inputs.group[piece], rank, inputs.owner[piece], step
    )
