"""First placements, for the local search to improve.

What belongs together is a *unit*: the blocks of a sequence that computation joins (all of them under a causal mask,
each document under a document mask), or what a node has of them. Units are shared out first: short ones go whole to one
part, long ones to as few parts as have room, in work and in tokens at once. Then every long one is cut among its parts
in whichever of three ways costs least:

- tiles of its matrix (`tiling`), computed away from where the tokens are, for units on many parts;
- rows, two runs of tokens per part, one from each end, which balances causal masks; computed where the tokens are;
- rows, one run of tokens per part, for masks that see near by.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import Blocks
from dyncp.jit import jit
from dyncp.planner.partition.moves import Problem
from dyncp.planner.partition.nets import Nets
from dyncp.planner.partition.refine import cost_scale, edge_energy, fit_tokens
from dyncp.planner.partition.tiling import tile

SMALL = 1 / 8  # of what a part can have: units of which there may be thousands
MOST_SHARES = 3  # of a unit that could go whole to an empty part
EXCESS_PRICE = 4.0  # of work above its share, in `cost_scale` per unit of work, when ways to cut a unit are compared

Places = tuple[Ints, Ints]  # int[B] and int[C], parts of token blocks and of computation blocks


class Units(NamedTuple):
    """What may go whole to one part."""

    of_block: Ints  # int64[B]
    of_comp: Ints  # int64[C]
    node: Ints  # int64[U]
    work: Ints  # float64[U]
    tokens: Ints  # float64[U]


class Shares(NamedTuple):
    """How units are shared out: in pieces, unit after unit."""

    unit: Ints  # int64[P]
    part: Ints  # int64[P]
    share: Ints  # float64[P], of the unit's work and tokens
    first: Ints  # int64[U], the first piece of each unit
    pieces: Ints  # int64[U], how many each unit has


def start(blocks: Blocks, nets: Nets, problem: Problem, places: Places, nodes: int) -> Places:
    """(int64[B], int64[C]): a part for everything that has been given to nodes; with one node, parts may also be nodes
    themselves."""
    units = _make_units(blocks, nets, places, nodes)
    shares = share_out(units, problem, nodes)
    block_node, comp_node = places
    tiles = _tiles(blocks, nets, units, shares)
    one_part = np.where(shares.pieces[units.of_block] == 1, shares.part[shares.first[units.of_block]], -1)
    owners = [fit_tokens(problem, block_node if nodes > 1 else np.full(len(block_node), -1), one_part, tiles)]
    owners += [_rows(nets, units, shares, zigzag) for zigzag in (True, False)]
    q_block, kv_block = (np.tile(end, blocks.groups) for end in (blocks.q_block, blocks.kv_block))
    ways: list[Places] = []
    costs: list[Ints] = []
    for owner in owners:
        at_keys = np.where(block_node[kv_block] == comp_node, owner[kv_block], tiles)
        rows = np.where(block_node[q_block] == comp_node, owner[q_block], at_keys)
        # of each unit under each mask, whichever costs less
        by_mask = [_unit_costs(problem, units, shares, (owner, comps)) for comps in (tiles, rows)]
        better = by_mask[1] < by_mask[0]
        ways.append((owner, np.where(better[nets.mask, units.of_comp], rows, tiles)))
        costs.append(np.minimum(*by_mask).sum(axis=0))
    best = np.argmin(costs, axis=0)
    block_part, comp_part = (
        np.choose(best[of], [way[side] for way in ways]) for side, of in enumerate((units.of_block, units.of_comp))
    )
    return block_part, comp_part


def by_heads(blocks: Blocks, nets: Nets, problem: Problem) -> Places:
    """(int32[B], int64[C]): all computation of one head group after the other, in tiles, to one part after the other:
    so every piece of data moves once or little more, which is good for many head groups and bad for few."""
    units = _make_units(blocks, nets, anywhere(nets), 1)
    group = np.repeat(np.arange(blocks.groups), len(blocks))
    comp_part = np.zeros(len(nets), "int64")
    for mask in np.unique(nets.mask):
        part, comps = nets.of_mask(mask)
        sheet = group[comps] * len(units.work) + units.of_comp[comps]
        comp_part[comps] = tile(part, sheet, np.ones(len(problem.rank_price)))
    nobody = np.full(len(nets.tokens), -1)
    return fit_tokens(problem, nobody, nobody, comp_part), comp_part


def in_a_line(blocks: Blocks, nets: Nets, problem: Problem) -> Places:
    """(int32[B], int64[C]): units that fit go whole to a part each, the heaviest first; the tokens of all others, one
    after the other, to the parts in order, as far as each has room. Computation is where its queries are."""
    parts = len(problem.rank_price)
    units = _make_units(blocks, nets, anywhere(nets), 1)
    total = np.array([[max(float(units.work.sum()), 1e-30)], [float(units.tokens.sum())]])
    size = np.stack([units.work, units.tokens]) * parts / total  # of an even share
    unit_part, full = np.full(len(units.work), -1), np.zeros((2, parts))
    for unit in np.argsort(-units.work, kind="stable").tolist():
        after = (full + size[:, unit, None]).max(axis=0)
        if after.min() <= 1:
            unit_part[unit] = np.argmin(after)
            full[:, unit_part[unit]] += size[:, unit]
    whole = unit_part[units.of_block]
    tokens = np.where(whole < 0, nets.tokens, 0).astype("float64")
    ends = np.cumsum(np.maximum(1 - full[1], 1e-9))
    middle = (np.cumsum(tokens) - tokens / 2) / max(float(tokens.sum()), 1.0)
    in_order = np.minimum(np.searchsorted(ends, middle * ends[-1]), parts - 1)
    block_part = np.where(whole >= 0, whole, in_order)
    return block_part.astype("int32"), np.tile(block_part[blocks.q_block], blocks.groups)


def anywhere(nets: Nets) -> Places:
    """(int64[B], int64[C]): everything on one node, for placements that nodes make no difference to."""
    return np.zeros(len(nets.tokens), "int64"), np.zeros(len(nets), "int64")


def _make_units(blocks: Blocks, nets: Nets, places: Places, nodes: int) -> Units:
    whole = components(blocks)
    count = int(whole.max()) + 1
    of_block = places[0].astype("int64") * count + whole
    of_comp = places[1].astype("int64") * count + np.tile(whole[blocks.q_block], blocks.groups)
    work, tokens = (
        np.bincount(of, size, nodes * count) for of, size in ((of_comp, nets.work), (of_block, nets.tokens))
    )
    return Units(of_block, of_comp, np.repeat(np.arange(nodes), count), work, tokens)


def components(blocks: Blocks) -> Ints:
    """int64[B]: which token blocks computation joins, under any mask, numbered in the order of their first blocks."""
    root = np.arange(len(blocks.tokens))
    _join(blocks.q_block.astype("int64"), blocks.kv_block.astype("int64"), root)
    numbers: Ints = np.unique(root, return_inverse=True)[1]
    return numbers


@jit
def _join(one: Ints, other: Ints, root: Ints) -> None:
    """Fill in the first of all that each is joined to."""
    for edge in range(len(one)):
        a, b = one[edge], other[edge]
        while root[a] != a:
            root[a] = root[root[a]]
            a = root[a]
        while root[b] != b:
            root[b] = root[root[b]]
            b = root[b]
        root[max(a, b)] = min(a, b)
    for item in range(len(root)):  # roots come before what hangs on them
        root[item] = root[root[item]]


def share_out(units: Units, problem: Problem, nodes: int) -> Shares:
    """Which parts have which units: the heaviest first.

    One that is too much for a part goes in equal shares to as few parts of its node as have room for it, the emptiest.
    The others go whole to the part that ends least full, of work or of tokens; or, where none has room, in shares as
    large as the room of those with most.
    """
    parts = len(problem.rank_price)
    per_node = parts // nodes
    most = float(problem.work_limit.sum()) * parts / max(float(problem.work.sum()), 1e-30)
    work_limit = np.maximum(most * np.bincount(units.node, units.work, nodes) / per_node, 1e-30)[units.node]
    size = np.stack([units.work / work_limit, units.tokens / max(problem.token_limit, 1.0)])  # of what a part can have
    full = np.zeros((2, parts))
    order = np.argsort(-units.work, kind="stable")
    largest = size.max(axis=0)
    pieces: list[tuple[Ints, Ints, Ints]] = []  # unit, part, share of the unit
    for unit in order[largest[order] > SMALL].tolist():
        near = units.node[unit] * per_node + np.arange(per_node)
        chosen, share = _parts_of(size[:, unit], full[:, near])
        full[:, near[chosen]] += size[:, unit, None] * share
        by_part = np.argsort(chosen)
        pieces.append((np.full(len(chosen), unit), near[chosen[by_part]], share[by_part]))
    small = order[(largest[order] > 0) & (largest[order] <= SMALL)]
    part = np.zeros(len(small), "int64")
    _fill(per_node * units.node[small], per_node, np.ascontiguousarray(size[:, small]), part, full)
    pieces.append((small, part, np.ones(len(small))))
    unit, part, share = (np.concatenate(column) for column in zip(*pieces, strict=True))
    count = np.bincount(unit, minlength=len(units.work))
    by_part = np.argsort(np.where(count[unit] > 1, -1, part), kind="stable")  # what is whole after what is not
    unit, part, share = unit[by_part], part[by_part], share[by_part]
    first = np.zeros(len(count), "int64")
    first[unit[::-1]] = np.arange(len(unit))[::-1]
    return Shares(unit, part, share, first, count)


def _parts_of(size: Ints, full: Ints) -> tuple[Ints, Ints]:
    """The parts that a unit goes to, and float64, its shares; `size`, float64[2], is what it has of the work and of the
    tokens that a part can have, and `full`, float64[2, parts], what they have already."""
    after = (full + size[:, None]).max(axis=0)
    if after.min() <= 1:
        return np.array([np.argmin(after)]), np.ones(1)
    if size.max() > 1:
        near = np.argsort(full.max(axis=0), kind="stable")
        more = size[:, None] / np.arange(1, len(near) + 1)
        fits = (full[:, near] + more).max(axis=0) <= 1  # the last of so many parts is the fullest
        if fits.any():
            count = int(np.argmax(fits)) + 1
            return near[:count], np.full(count, 1 / count)
    room = np.maximum(((1 - full) / np.maximum(size, 1e-30)[:, None]).min(axis=0), 1e-9)
    near = np.argsort(-room, kind="stable")
    count = min(len(near), int(np.searchsorted(np.cumsum(room[near]), 1.0)) + 1)
    if count > MOST_SHARES and size.max() <= 1:  # rather too full a part than crumbs everywhere
        return np.array([np.argmin(after)]), np.ones(1)
    return near[:count], room[near[:count]] / room[near[:count]].sum()


@jit
def _fill(first_part: Ints, per_node: int, size: Ints, part: Ints, full: Ints) -> None:
    """Fill in the part of each small unit, among those of its node, and how full parts are then."""
    for item in range(len(part)):
        best, least = first_part[item], np.inf
        for candidate in range(first_part[item], first_part[item] + per_node):
            after = max(full[0, candidate] + size[0, item], full[1, candidate] + size[1, item])
            if after < least:
                best, least = candidate, after
        part[item] = best
        full[:, best] += size[:, item]


def _tiles(blocks: Blocks, nets: Nets, units: Units, shares: Shares) -> Ints:
    """int64[C]: all units cut into tiles; these follow each other as pieces do, so that a unit is cut among its
    parts."""
    sheet = shares.first[units.of_comp] * blocks.groups + np.repeat(np.arange(blocks.groups), len(blocks))
    comp_part = np.zeros(len(nets), "int64")
    for mask in np.unique(nets.mask):
        part, comps = nets.of_mask(mask)
        have = np.bincount(units.of_comp[comps], nets.work[comps], len(units.work))
        targets = have[shares.unit] * shares.share
        piece = tile(part, sheet[comps], targets)
        # a tile may begin a little early or end a little late
        unit = units.of_comp[comps]
        piece = np.clip(piece, shares.first[unit], shares.first[unit] + shares.pieces[unit] - 1)
        comp_part[comps] = shares.part[piece]
    return comp_part


def _rows(nets: Nets, units: Units, shares: Shares, zigzag: bool) -> Ints:
    """int64[B]: the tokens of each unit in one run for each of its parts or, with `zigzag`, in two."""
    order = np.argsort(units.of_block, kind="stable")
    tokens, unit = nets.tokens[order].astype("float64"), units.of_block[order]
    before = np.cumsum(tokens) - tokens
    before -= before[np.searchsorted(unit, unit)]
    place = (before + tokens / 2) / units.tokens[unit]  # in its unit, from 0 to 1
    if zigzag:  # the second half comes back
        place = 1 - np.abs(2 * place - 1)
    ends = np.cumsum(shares.share)
    start = ends[shares.first[unit]] - shares.share[shares.first[unit]]
    last = shares.first[unit] + shares.pieces[unit] - 1
    piece = np.clip(np.searchsorted(ends, start + place, "right"), shares.first[unit], last)
    part = np.empty(len(order), "int64")
    part[order] = shares.part[piece]
    return part


def _unit_costs(problem: Problem, units: Units, shares: Shares, places: Places) -> Ints:
    """float64[M, U]: what each unit costs under each mask, with a price on work of one part above its share."""
    parts, count, masks = len(problem.rank_price), len(units.work), len(problem.work_limit)
    energy = edge_energy(problem, *places)
    mask = np.zeros(len(energy), "int64")
    mask[problem.q_edge] = mask[problem.kv_edge] = problem.mask
    cost = np.bincount(mask * count + units.of_block[problem.edge_token], energy, masks * count)
    cost = cost.astype("float64").reshape(masks, count)  # of nothing, bincount counts integers
    have = np.bincount(problem.mask * count + units.of_comp, problem.work, masks * count).reshape(masks, count)
    price = EXCESS_PRICE * cost_scale(problem) / max(float(problem.work.sum()), 1e-30)
    for number in range(masks):
        comps = problem.mask == number
        keys = [units.of_comp[comps] * parts + places[1][comps], shares.unit * parts + shares.part]
        sizes = [problem.work[comps], -have[number, shares.unit] * shares.share]
        found, which = np.unique(np.concatenate(keys), return_inverse=True)  # few of all units at all parts
        over = np.maximum(np.bincount(which, np.concatenate(sizes), len(found)), 0)
        cost[number] += price * np.bincount(found // parts, over, count)
    return cost
