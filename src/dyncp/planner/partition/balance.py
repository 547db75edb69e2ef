"""The balance constraints: of what, repairing them, and saying which are not met and why."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

import numpy as np

from dyncp.cost.model import block_seconds
from dyncp.cost.roofline import Roofline
from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.shape import AttentionShape
from dyncp.planner.partition.aims import Aims
from dyncp.planner.partition.estimate import compute_seconds
from dyncp.planner.partition.nets import Nets, loads
from dyncp.planner.partition.refine import Limits

TOLERANCES = 0.02, 0.25  # on computation, where it is chosen
MESSAGE_BYTES = 1 << 20  # of a typical message between nodes


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


class Items(NamedTuple):
    """What is shared out to ranks, in pairs or tokens."""

    unit: str
    block: str  # what one of them is called
    size: Ints  # [n]
    sequence: Ints  # [n]
    rank: Ints  # [n]


def chosen_epsilon(batch: Batch, shape: AttentionShape, cluster: Cluster, aims: Aims) -> float:
    """The tolerance on computation, as a fraction: what is asked for or, for `auto`, what a message between nodes takes
    of the time that a rank computes in a layer, within bounds: so much computation in vain may save a message."""
    if aims.epsilon != "auto":
        return aims.epsilon
    if cluster.nodes == 1:
        return TOLERANCES[0]
    weights = batch.weights or {}
    pairs = sum(weights[name] * mask.pairs() for one in batch.sequences for name, mask in one.masks.items())
    mean_s = compute_seconds(shape.groups * pairs / sum(weights.values()) / cluster.ranks, shape, cluster)
    message_s = cluster.inter_latency_s + MESSAGE_BYTES / cluster.message_bytes_per_s
    return float(np.clip(message_s / max(mean_s, 1e-30), *TOLERANCES))


def asked_epsilon(aims: Aims) -> float:
    """The tolerance that is asked for; the least for one that has not been chosen."""
    return TOLERANCES[0] if aims.epsilon == "auto" else aims.epsilon


def balanced_work(blocks: Blocks, shape: AttentionShape, cluster: Cluster, aims: Aims) -> Ints:
    """float64[N]: what is to be balanced of each computation block of one head group, times the layers that use its
    mask: pairs or, by the cost model, the seconds of both passes as a number of pairs of large blocks."""
    if aims.balance == "pairs":
        return blocks.work
    work_s = block_seconds(blocks, shape, Roofline.of(cluster)) * np.asarray(blocks.mask_weights)[blocks.mask]
    work: Ints = work_s / compute_seconds(1.0, shape, cluster)
    return work


def unmet(blocks: Blocks, placement: Placement, cluster: Cluster, limits: Limits, work: Ints) -> tuple[str, ...]:
    """The constraints that a placement does not meet, with numbers and causes: the fullest rank of each. Computation,
    which `work`, float64[N], says as `balanced_work` does, is compared mask by mask; the mean is that of all ranks."""
    notes = []
    for mask, name in enumerate(blocks.mask_names):
        part, groups = blocks.of_mask(mask), blocks.groups
        pairs = np.tile(work[part], groups) / blocks.mask_weights[mask]  # of one mask, so without its weight
        sequence = np.tile(blocks.tokens.sequence[blocks.q_block[part]], groups)
        comps = Items("pairs", "computation block", pairs, sequence, placement.comp_rank[:, part].ravel())
        of_mask = f" under mask {name!r}" if len(blocks.mask_names) > 1 else ""
        notes.append(_note(f"computation of rank {{}}{of_mask} is", comps, cluster.ranks, limits.work))
    tokens = Items("tokens", "token block", blocks.tokens.tokens, blocks.tokens.sequence, placement.block_rank)
    notes.append(_note("tokens of rank {} are", tokens, cluster.ranks, limits.tokens))
    return tuple(note for note in notes if note)


def _note(subject: str, items: Items, ranks: int, epsilon: float) -> str:
    """What is above the limit, or nothing; `subject` has a place for the rank."""
    load = loads(items.size, items.rank, ranks)
    mean, limit = max(1e-30, float(load.mean())), 1 + epsilon  # no load, no mean
    ratio = load / mean
    over, worst = int(np.sum(ratio > limit + 1e-6)), int(np.argmax(ratio))
    if not over:
        return ""
    others = f", {over} ranks above" if over > 1 else ""
    cause = _cause(items, worst, mean, epsilon, float(ratio[worst]))
    return f"{subject.format(worst)} {ratio[worst]:.2f} x the mean (limit {limit:g}{others}): {cause}"


def _cause(items: Items, rank: int, mean: float, epsilon: float, ratio: float) -> str:
    """Why a rank is above the limit, and what helps: smaller blocks, down to one pair or token and to what the mean
    allows."""
    mine = np.flatnonzero(items.rank == rank)
    heaviest = mine[np.argmax(items.size[mine])]
    size, sequence = int(items.size[heaviest]), items.sequence[heaviest]
    share, best = size / mean, ceil(mean) / mean
    causes = []
    if size > 1 and ratio > best + 1e-6 and share > epsilon:
        alone = f"one {items.block} of sequence {sequence} alone is {share:.2f} x"
        several = f"its {items.block}s are up to {share:.2f} x (one of sequence {sequence})"
        causes.append(f"{alone if share > 1 + epsilon else several}; use smaller block_tokens")
    if best > 1 + epsilon:
        causes.append(f"a mean of {mean:.3g} {items.unit} allows {best:.2f} x at best")
    return ", but ".join(causes) or "no better placement was found"
