"""A plan as a picture: who computes what, and what each rank does and receives step by step."""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dyncp.ir.arrays import Ints, ragged_ranges
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import HAS_KV, HAS_Q
from dyncp.ir.plan import CommLaunch
from dyncp.report.summary import computed_pairs, launch_bytes, plan_figures
from dyncp.report.table import format_bytes
from dyncp.strategies import Planned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PIXELS = 1400  # of the matrix, each way
GROUP = 0  # the head group that the matrix shows
INK, LINE, EMPTY = "#333333", "#b8b8b8", "#f4f4f2"
STRIP = 0.022  # width of the owners' strips, as a part of the matrix
RGB = tuple[float, float, float]


def plan_picture(planned: Planned, path: str | Path, mask: str | None = None) -> None:
    """Draw the forward pass of a plan into a PNG file.

    On the left the batch's (query, key) matrix in the colours of the ranks that compute it, with the owners of the
    tokens along the edges; on the right ranks by steps, shaded by the pairs computed in a step, with the bytes that
    arrive for it, and each rank's share of the work and of the tokens. All of it is of one mask.

    Args:
        planned: the plan and what it was made from.
        path: of the PNG file.
        mask: which of the batch's masks; the first when left out.

    Raises:
        ValueError: matplotlib is missing, or a mask that the batch does not have.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("no matplotlib, which draws pictures; install it with: pip install 'dyncp[viz]'") from None
    header = planned.plan.header
    name = header.mask_names[0] if mask is None else mask
    if name not in header.mask_names:
        raise ValueError(f"no mask {name!r} in this plan; it has {', '.join(header.mask_names)}")
    index = header.mask_names.index(name)
    colours = rank_colours(header.nodes, header.ranks_per_node)
    pairs, arrived = step_grid(planned, index)
    height_in = min(14.0, max(6.0, 1.2 + 0.4 * header.ranks))
    matrix_in, steps_in = height_in - 0.2, 2.0 + 0.78 * min(16, pairs.shape[1])
    figure = Figure(figsize=(matrix_in + steps_in, height_in), layout="constrained", dpi=130)
    left, right = figure.subplots(1, 2, width_ratios=[matrix_in, steps_in])
    _draw_matrix(left, planned, index, colours)
    _draw_steps(right, planned, (pairs, arrived), colours)
    _draw_shares(right, planned, index, pairs.shape[1])
    figure.suptitle(_title(planned, name), fontsize=11, color=INK)
    figure.savefig(path, format="png")


def rank_colours(nodes: int, ranks_per_node: int) -> list[RGB]:
    """One colour for each rank: a hue for each node, shades of it for the node's ranks (hues for a single node)."""
    if nodes == 1:
        return [colorsys.hls_to_rgb(0.58 + rank / ranks_per_node, 0.58, 0.55) for rank in range(ranks_per_node)]
    colours = []
    for node in range(nodes):
        for rank in range(ranks_per_node):
            along = rank / max(1, ranks_per_node - 1)
            hue = 0.58 + (node + 0.45 * (along - 0.5)) / nodes
            colours.append(colorsys.hls_to_rgb(hue % 1, 0.40 + 0.36 * along, 0.62))
    return colours


def rank_matrix(planned: Planned, mask: int, pixels: int) -> Ints:
    """int[pixels, pixels]: the rank that computes each (query, key) of one head group, -1 where the mask has none; the
    sequences of the batch stand one behind the other along both sides."""
    batch, blocks = planned.batch, planned.layout.blocks
    name = blocks.mask_names[mask]
    q_sequence, q_token = _sampled(np.array([sequence.length for sequence in batch.sequences]), pixels)
    k_sequence, k_token = _sampled(np.array([sequence.keys for sequence in batch.sequences]), pixels)
    seen = np.zeros((pixels, pixels), bool)
    for y, (sequence, token) in enumerate(zip(q_sequence.tolist(), q_token.tolist(), strict=True)):
        own = np.flatnonzero(k_sequence == sequence)
        rows = batch.sequences[sequence].masks[name].rows(token, token + 1)
        for lo, hi in rows[0]:
            seen[y, own[(k_token[own] >= lo) & (k_token[own] < hi)]] = True
    q_block = _block_at(planned, HAS_Q, q_sequence, q_token)
    kv_block = _block_at(planned, HAS_KV, k_sequence, k_token)
    here = blocks.of_mask(mask)
    keys = blocks.q_block[here].astype(np.int64) * len(blocks.tokens) + blocks.kv_block[here]
    order = np.argsort(keys)
    at = np.nonzero(seen)
    found = order[np.searchsorted(keys, q_block[at[0]] * len(blocks.tokens) + kv_block[at[1]], sorter=order)]
    ranks = np.full((pixels, pixels), -1)
    ranks[at] = planned.layout.placement.comp_rank[GROUP, here][found]
    return ranks


def step_grid(planned: Planned, mask: int) -> tuple[Ints, Ints]:
    """(pairs computed, bytes received for it), each float64[R, steps], of the forward pass, over all head groups."""
    blocks, header = planned.layout.blocks, planned.plan.header
    here = blocks.of_mask(mask)
    comp_step = planned.layout.schedule.comp_step[:, here]
    programs = [programs[mask].forward for programs in planned.plan.programs]
    launches = [
        (rank, program, instruction)
        for rank, program in enumerate(programs)
        for instruction in program.instructions
        if isinstance(instruction, CommLaunch)
    ]
    steps = 1 + max([int(comp_step.max(initial=0)), *(launch.step for _, _, launch in launches)])
    pairs = np.zeros((header.ranks, steps))
    comp_rank = planned.layout.placement.comp_rank[:, here]
    np.add.at(pairs, (comp_rank, comp_step), np.broadcast_to(blocks.pairs[here], comp_step.shape))
    arrived = np.zeros((header.ranks, steps))
    for rank, program, launch in launches:
        arrived[rank, launch.step] += launch_bytes(header, program, launch, send=False)[2].sum()
    return pairs, arrived


def _draw_matrix(axes: Axes, planned: Planned, mask: int, colours: list[RGB]) -> None:
    batch = planned.batch
    ranks = rank_matrix(planned, mask, PIXELS)
    palette = np.array([*colours, (1.0, 1.0, 1.0)])  # -1, the last one, is white
    axes.imshow(palette[ranks], extent=(0, 1, 1, 0), interpolation="nearest", aspect="equal")
    owners = {role: _owner_strip(planned, role) for role in (HAS_Q, HAS_KV)}
    axes.imshow(palette[owners[HAS_Q]][:, None], extent=(-2 * STRIP, -STRIP, 1, 0), interpolation="nearest")
    axes.imshow(palette[owners[HAS_KV]][None], extent=(0, 1, -STRIP, -2 * STRIP), interpolation="nearest")
    q_edges, k_edges = _edges(batch)
    for number, sequence in enumerate(batch.sequences):
        (top, bottom), (start, stop) = q_edges[number : number + 2], k_edges[number : number + 2]
        axes.plot([start, stop, stop, start, start], [top, top, bottom, bottom, top], color=LINE, linewidth=0.7)
        if bottom - top > 0.022:
            axes.text(-2.6 * STRIP, (top + bottom) / 2, f"{sequence.length:,}", ha="right", va="center", fontsize=8)
    axes.set(xlim=(-2 * STRIP, 1.005), ylim=(1.005, -2 * STRIP), xticks=[], yticks=[])
    groups = planned.layout.blocks.groups
    which = f", head group {GROUP + 1} of {groups}" if groups > 1 else ""
    axes.set_title(f"who computes which (query, key){which}", fontsize=9, color=INK)
    axes.set_xlabel("keys, sequence by sequence (edge strips: owners of the tokens)", fontsize=9, color=INK)
    axes.set_ylabel("queries", fontsize=9, color=INK, labelpad=46)
    axes.spines[:].set_visible(False)


def _draw_steps(axes: Axes, planned: Planned, grids: tuple[Ints, Ints], colours: list[RGB]) -> None:
    pairs, arrived = grids
    header = planned.plan.header
    ranks, steps = pairs.shape
    share = pairs / max(1.0, float(pairs.max()))
    shade = np.where(pairs > 0, 0.12 + 0.88 * share, 0)[..., None]
    empty = np.array([int(EMPTY[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    image = shade * np.array(colours)[:, None] + (1 - shade) * empty
    axes.imshow(image, aspect="auto", interpolation="nearest")
    for rank, step in zip(*np.nonzero(arrived), strict=True):
        bright = float(image[rank, step] @ (0.299, 0.587, 0.114))
        colour = INK if bright > 0.55 else "white"
        text = format_bytes(arrived[rank, step])
        axes.text(step, rank, text, ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(np.arange(-0.5, steps), minor=True)
    axes.set_yticks(np.arange(-0.5, ranks), minor=True)
    axes.grid(which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="both", length=0, labelsize=8, labelcolor=INK)
    axes.set_xticks(range(steps))
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    for node in range(1, header.nodes):
        axes.axhline(node * header.ranks_per_node - 0.5, color=INK, linewidth=1)
    axes.set_xlabel("step (shade: pairs computed; number: bytes that arrive for it)", fontsize=9, color=INK)
    axes.set_title("what each rank does, forward", fontsize=9, color=INK)
    axes.spines[:].set_visible(False)


def _draw_shares(axes: Axes, planned: Planned, mask: int, steps: int) -> None:
    """Two columns beside the steps: each rank's work under the mask and its tokens, over the mean."""
    header = planned.plan.header
    work = computed_pairs(planned.plan, planned.layout.blocks)[mask]
    tokens = np.bincount(header.owner, header.tokens.tokens, minlength=header.ranks)
    for column, (name, share) in enumerate((("work", work), ("tokens", tokens))):
        x = steps - 0.05 + 0.62 * column
        axes.text(x, -0.62, name, ha="center", va="bottom", fontsize=8, color=INK)
        for rank, value in enumerate(share / max(1e-9, float(share.mean()))):
            axes.text(x, rank, f"{value:.2f}", ha="center", va="center", fontsize=8, color=INK)
    axes.set_xlim(-0.5, steps + 0.95)


def _title(planned: Planned, mask: str) -> str:
    figures = plan_figures(planned.plan, planned.layout.blocks)
    count, names = figures["sequences"], planned.plan.header.mask_names
    drawn = figures["masks"][mask] if len(names) > 1 else figures
    under = f" under mask {mask!r} (one of {len(names)})" if len(names) > 1 else ""
    return (
        f"{figures['strategy']}: {count} sequence{'s' * (count > 1)}, {figures['tokens']:,} tokens, "
        f"{figures['ranks']} ranks on {figures['nodes']} node{'s' * (figures['nodes'] > 1)}; "
        f"{format_bytes(drawn['total_bytes'])} move forward{under}"
    )


def _edges(batch: Batch) -> tuple[Any, Any]:
    """Where each sequence starts and ends along the queries and along the keys, from 0 to 1."""
    sides = (
        [sequence.length for sequence in batch.sequences],
        [sequence.keys for sequence in batch.sequences],
    )
    q_edges, k_edges = (np.concatenate([[0], np.cumsum(lengths)]) / sum(lengths) for lengths in sides)
    return q_edges, k_edges


def _sampled(lengths: Ints, pixels: int) -> tuple[Ints, Ints]:
    """(int[pixels] sequence, int[pixels] token in it) at the middle of each pixel."""
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    at = ((np.arange(pixels) + 0.5) * len(sequence) / pixels).astype(np.int64)
    return sequence[at], ragged_ranges(lengths)[at]


def _block_at(planned: Planned, role: int, sequence: Ints, token: Ints) -> Ints:
    """int64: the token block with that role in which each token lies."""
    tokens = planned.layout.blocks.tokens
    blocks = np.flatnonzero(tokens.role & role)
    order = blocks[np.lexsort((tokens.start[blocks], tokens.sequence[blocks]))]
    span = int(tokens.stop.max()) + 1
    starts = tokens.sequence[order].astype(np.int64) * span + tokens.start[order]
    return order[np.searchsorted(starts, sequence * span + token, side="right") - 1]


def _owner_strip(planned: Planned, role: int) -> Ints:
    batch = planned.batch
    lengths = [sequence.length if role == HAS_Q else sequence.keys for sequence in batch.sequences]
    return planned.plan.header.owner[_block_at(planned, role, *_sampled(np.array(lengths), PIXELS))]
