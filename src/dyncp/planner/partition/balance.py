"""The balance constraints: repairing them, and saying which are not met and why."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.planner.partition.nets import Nets, loads
from dyncp.planner.partition.ownership import even_load


def repair(nets: Nets, block_part: Ints, comp_part: Ints, parts: int, limit: float) -> Ints:
    """int64[C]: `comp_part` with computation blocks moved, at the least bytes per work, from parts whose work is above
    `limit` to parts that have room for it, or at least less load. All blocks are of one mask."""
    comp_part = comp_part.copy()
    load = loads(nets.work, comp_part, parts)
    pins = nets.pin_counts(comp_part, parts)
    owner = nets.owner(block_part)
    owned = np.flatnonzero(owner >= 0)
    pins[owned, owner[owned]] += 1
    stuck = np.zeros(parts, bool)
    while True:
        over = np.where(stuck, -np.inf, load)
        source = int(np.argmax(over))
        if over[source] <= limit * (1 + 1e-9):
            return comp_part
        comps = np.flatnonzero(comp_part == source)
        work = nets.work[comps, None]
        after = load + work
        fits = after <= limit
        if not fits.any():
            fits = after < load[source] * (1 - 1e-9)
        cost = np.zeros((len(comps), parts))
        for edge in (nets.q_edge[comps], nets.kv_edge[comps]):
            size = nets.edge_bytes[edge, None]
            cost += size * (pins[edge] == 0) - size * (pins[edge, source] == 1)[:, None]
        # a gain is worth the more the larger it is; a loss is worth paying once for as much relief as is needed
        relief = np.minimum(work, load[source] - limit)
        rate = np.where(fits, np.where(cost > 0, cost / relief, cost), np.inf)
        best = int(np.argmin(rate))
        if np.isinf(rate.flat[best]):
            stuck[source] = True
            continue
        comp, target = comps[best // parts], best % parts
        for edge in (nets.q_edge[comp], nets.kv_edge[comp]):
            pins[edge, source] -= 1
            pins[edge, target] += 1
        comp_part[comp] = target
        load[source] -= nets.work[comp]
        load[target] += nets.work[comp]
        stuck[:] = False


@dataclass(frozen=True, slots=True)
class Limits:
    """How far above the mean each load may lie."""

    work_nodes: float
    work_ranks: float  # within the node
    tokens_ranks: float


def unmet(blocks: Blocks, placement: Placement, cluster: Cluster, limits: Limits) -> tuple[str, ...]:
    """The constraints that a placement does not meet, with numbers and causes: the worst node or rank of each."""
    notes: list[str] = []
    for mask, name in enumerate(blocks.mask_names):
        part = blocks.of_mask(mask)
        works = np.tile(blocks.pairs[part].astype("float64"), blocks.groups)  # of one mask, so without its weight
        rank = placement.comp_rank[:, part].ravel().astype("int64")
        sequences = np.tile(blocks.tokens.sequence[blocks.q_block[part]], blocks.groups)
        of_ranks = loads(works, rank, cluster.ranks).reshape(cluster.nodes, -1)
        of_nodes = of_ranks.sum(axis=1)
        of_mask = f" under mask {name!r}" if len(blocks.mask_names) > 1 else ""
        for unit, load, mean, limit, members in (
            ("node", of_nodes, of_nodes.mean(), limits.work_nodes, rank // cluster.ranks_per_node),
            ("rank", of_ranks, of_ranks.mean(axis=1, keepdims=True), limits.work_ranks, rank),
        ):
            ratio = (load / np.maximum(mean, 1e-30)).ravel()  # no load, no mean
            worst = int(np.argmax(ratio))
            if ratio[worst] > 1 + limit + 1e-6:
                heaviest = np.flatnonzero(members == worst)
                heaviest = heaviest[np.argmax(works[heaviest])]
                of_worst = np.broadcast_to(mean, load.shape).flat[worst]
                cause = _cause(works[heaviest], of_worst, limit, sequences[heaviest])
                over = int(np.sum(ratio > 1 + limit + 1e-6))
                notes.append(
                    f"computation of {unit} {worst}{of_mask} is {ratio[worst]:.2f} x the mean"
                    f"{' of its node' if unit == 'rank' and cluster.nodes > 1 else ''} (limit {1 + limit:g}"
                    f"{f', {over} {unit}s above' if over > 1 else ''}): {cause}"
                )
    return (*notes, *_unmet_tokens(blocks, placement, cluster, limits.tokens_ranks))


def _cause(heaviest: float, mean: float, limit: float, sequence: int) -> str:
    """Why the load of a node or rank is above the limit, given the pairs of its heaviest block and the mean load."""
    share = heaviest / mean
    what = ""
    if share > 1 + limit:
        what = f"one computation block of sequence {sequence} alone is {share:.2f} x"
    elif share > limit:
        what = f"its computation blocks are up to {share:.2f} x (one of sequence {sequence})"
    return _advice(what, heaviest > 1, mean, limit, "pairs")


def _advice(what: str, divisible: bool, mean: float, limit: float, unit: str) -> str:
    """Names a cause, `what`, and what helps: smaller blocks down to one pair or token, and nothing below that."""
    parts = [f"{what}; use smaller block_tokens"] if what and divisible else []
    if ceil(mean) / mean > 1 + limit:
        parts.append(f"a mean of {mean:.3g} {unit} allows {ceil(mean) / mean:.2f} x at best")
    return ", but ".join(parts) or "no better placement was found"


def _unmet_tokens(blocks: Blocks, placement: Placement, cluster: Cluster, limit: float) -> list[str]:
    tokens = blocks.tokens.tokens
    load = loads(tokens, placement.block_rank, cluster.ranks)
    mean, worst = load.mean(), int(np.argmax(load))
    if load[worst] <= mean * (1 + limit + 1e-6):
        return []
    possible = max(float(tokens.max()), even_load(tokens, cluster.ranks, limit)) / mean
    what = f"token blocks of up to {tokens.max()} allow about {possible:.2f} x" if possible > 1 + limit else ""
    cause = _advice(what, bool(tokens.max() > 1), mean, limit, "tokens")
    return [f"tokens of rank {worst} are {load[worst] / mean:.2f} x the mean (limit {1 + limit:g}): {cause}"]
