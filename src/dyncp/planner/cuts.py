"""Where to cut sequences into token blocks: evenly, but along the edges of their masks.

A block that a mask's edge runs through is fetched whole for the sake of a part: of an attention sink of 64 tokens, the
other 960 of its block. So long edges become bounds, and what lies between is cut into even blocks, at shorter edges
where there are any nearby.
"""

from __future__ import annotations

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch
from dyncp.ir.mask import Mask
from dyncp.ir.slices import HI, HI_STEP, LO, LO_STEP, Q_START, Q_STOP

LONG = 1 / 2  # of a block: edges that are worth a bound of their own, the longest as many as there are blocks
NEAR = 1 / 4  # of a block: how far an even cut moves to lie on an edge


def cut_along_masks(batch: Batch, block_tokens: int) -> list[tuple[Ints, Ints]]:
    """For each sequence the bounds, int64[n + 1], of its blocks of queries and of its blocks of keys, of at most
    `block_tokens` tokens each (the same bounds in self-attention)."""
    known: dict[int, tuple[Ints, Ints]] = {}  # short sequences, of which there can be thousands, by length
    bounds: list[tuple[Ints, Ints]] = []
    for sequence in batch.sequences:
        if sequence.kv_length is None and sequence.length <= block_tokens:
            if sequence.length not in known:
                whole = np.array([0, sequence.length])
                known[sequence.length] = whole, whole
            bounds.append(known[sequence.length])
            continue
        edges = [_edges(mask) for mask in sequence.masks.values()]
        rows, keys = (np.concatenate([edge[side] for edge in edges], axis=1) for side in (0, 1))
        if sequence.kv_length is None:
            both = _cut(sequence.length, np.concatenate([rows, keys], axis=1), block_tokens)
            bounds.append((both, both))
        else:
            bounds.append((_cut(sequence.length, rows, block_tokens), _cut(sequence.kv_length, keys, block_tokens)))
    return bounds


def _edges(mask: Mask) -> tuple[Ints, Ints]:
    """The edges of a mask between two rows and between two keys: each int64[2, n], its place and its length."""
    slices = mask.slices
    rows = slices[:, Q_STOP] - slices[:, Q_START]
    first = slices[:, HI] - slices[:, LO]
    last = first + (slices[:, HI_STEP] - slices[:, LO_STEP]) * (rows - 1)
    # a row sees as many keys more or fewer than the row above it as the edge between them is long, at least
    place, which = np.unique(np.concatenate([slices[:, Q_START], slices[:, Q_STOP]]), return_inverse=True)
    grown = np.bincount(which, np.concatenate([first, -last]), len(place))
    fixed = [
        (slices[slices[:, step] == 0, at], rows[slices[:, step] == 0]) for at, step in ((LO, LO_STEP), (HI, HI_STEP))
    ]
    keys = np.concatenate([np.stack(edge) for edge in fixed], axis=1)
    return np.stack([place, np.abs(grown).astype("int64")]), keys


def _cut(length: int, edges: Ints, block_tokens: int) -> Ints:
    """int64[n + 1]: the bounds of blocks."""
    blocks = -(-length // block_tokens)
    place, which = np.unique(edges[0], return_inverse=True)
    size = np.bincount(which, edges[1], len(place))
    inside = (place > 0) & (place < length) & (size > 0)
    place, size = place[inside], size[inside]
    heavy = np.argsort(-size, kind="stable")[:blocks]
    heavy = heavy[size[heavy] >= max(block_tokens * LONG, 2)]
    fixed = np.sort(np.concatenate([[0], place[heavy], [length]])).astype("int64")
    even = _snap(np.arange(1, blocks) * length // blocks, place, block_tokens)
    distance = np.minimum(
        even - fixed[np.searchsorted(fixed, even, "right") - 1], fixed[np.searchsorted(fixed, even)] - even
    )
    bounds = np.unique(np.concatenate([fixed, even[distance > block_tokens * NEAR]]))
    return np.sort(np.concatenate([bounds, _between(bounds, block_tokens)]))  # where a block has grown too large


def _between(bounds: Ints, block_tokens: int) -> Ints:
    """int64: further bounds that cut blocks of more than `block_tokens` tokens evenly."""
    parts = -(-np.diff(bounds) // block_tokens)
    large = np.flatnonzero(parts > 1)
    inner = [bounds[i] + np.arange(1, parts[i]) * (bounds[i + 1] - bounds[i]) // parts[i] for i in large]
    return np.concatenate(inner) if inner else np.empty(0, "int64")


def _snap(cuts: Ints, place: Ints, block_tokens: int) -> Ints:
    """Cuts moved to the nearest edge, where one is near."""
    if not len(place) or not len(cuts):
        return cuts
    after = np.minimum(np.searchsorted(place, cuts), len(place) - 1)
    before = np.maximum(after - 1, 0)
    nearest = np.where(place[after] - cuts < cuts - place[before], place[after], place[before])
    return np.where(np.abs(nearest - cuts) <= block_tokens * NEAR, nearest, cuts)
