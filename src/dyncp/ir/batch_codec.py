"""Batches as bytes, and the digest that tells batches apart: the frame and the columns of plans, around other columns.

A mask that several sequences or names share is there once. The order of a batch's mask names is kept, as plans follow
it; so batches have the same bytes where they are equal and name their masks in the same order.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.columns import MAX_BYTES, Array, Schema, decode_body, encode_body
from dyncp.ir.frame import Format
from dyncp.ir.mask import Mask, check_slices
from dyncp.ir.slices import HI_STEP, LO, LO_STEP, Q_START, Q_STOP

BATCH_VERSION = 1
BATCH_MAGIC = b"DYNCPBAT"
FORMAT = Format(BATCH_MAGIC, BATCH_VERSION, "batch", "write it again with this dyncp", ("a batch",))

# Names and weights of masks; of each sequence its length, its kv_length (0: none) and its masks, by name, as indices
# into the masks; of each mask how many slices it has; and the slices. Masks are counted as sequences come upon them.
SCHEMA = Schema(
    {
        "names": tuple[str, ...],
        "weights": tuple[float, ...],
        "length": Array("int32", use_bytes=320),
        "kv_length": Array("int32"),
        "masks": Array("int32", use_bytes=64),
        "slice_counts": Array("int32", use_bytes=240),
        "slices": Array("int32", ndim=2, use_bytes=32),
    },
    "batch",
    "give it in parts",
)


def encode_batch(batch: Batch) -> bytes:
    """A batch as bytes.

    Raises:
        ValueError: a batch of more than 1 GiB.
    """
    body = _body(batch)
    return FORMAT.seal(0, FORMAT.digest(body), body)


def batch_digest(batch: Batch) -> str:
    """What tells batches apart: 64 hexadecimal digits, the same for one batch in every process and on every machine.

    Raises:
        ValueError: a batch of more than 1 GiB.
    """
    return FORMAT.digest(_body(batch))


def decode_batch(data: bytes, max_bytes: int = MAX_BYTES) -> Batch:
    """The batch of `encode_batch`. As when masks are made, nothing looks whether slices of a mask overlap.

    Args:
        data: the bytes.
        max_bytes: the most that its body may unpack to, and the most that may be made of it; reading takes a small
            multiple of that.

    Raises:
        DecodeError: anything that is not such a batch, or a larger one.
    """
    digest, body = FORMAT.open(0, data, max_bytes)
    with FORMAT.damage():
        if FORMAT.digest(body) != digest:
            raise ValueError(f"its digest is {digest}, but its content has {FORMAT.digest(body)}")
        return _batch(*decode_body(SCHEMA, body, max_bytes))


def _body(batch: Batch) -> bytes:
    names, weights = batch.mask_names, batch.weights
    assert weights is not None, "a batch's weights have every name"
    numbers: dict[Mask, int] = {}
    used = [numbers.setdefault(item.masks[name], len(numbers)) for item in batch.sequences for name in names]
    values = (
        names,
        [float(weights[name]) for name in names],
        np.array([item.length for item in batch.sequences], np.int32),
        np.array([item.kv_length or 0 for item in batch.sequences], np.int32),
        np.array(used, np.int32),
        np.array([len(mask.slices) for mask in numbers], np.int32),
        np.concatenate([mask.slices for mask in numbers]).astype(np.int32),
    )
    return encode_body(SCHEMA, values)


def _batch(
    names: tuple[str, ...],
    weights: tuple[float, ...],
    length: Ints,
    kv_length: Ints,
    used: Ints,
    counts: Ints,
    slices: Ints,
) -> Batch:
    """The batch of these columns."""
    if len(set(names)) != len(names) or len(weights) != len(names):
        raise ValueError(f"{len(set(names))} different mask names of {len(names)}, and {len(weights)} weights")
    if len(kv_length) != len(length) or len(used) != len(length) * len(names):
        raise ValueError(f"{len(length)} lengths, {len(kv_length)} kv lengths and {len(used)} masks")
    if not len(used):
        raise ValueError("the batch has no sequences")
    masks = _masks(length, np.where(kv_length == 0, length, kv_length), len(names), used, counts, slices)
    numbers, width = used.tolist(), len(names)
    sequences = [
        Sequence(
            tokens,
            dict(zip(names, [masks[number] for number in numbers[at * width : (at + 1) * width]], strict=True)),
            keys or None,
        )
        for at, (tokens, keys) in enumerate(zip(length.tolist(), kv_length.tolist(), strict=True))
    ]
    return Batch(sequences, dict(zip(names, weights, strict=True)))


def _masks(length: Ints, keys: Ints, width: int, used: Ints, counts: Ints, slices: Ints) -> list[Mask]:
    """The masks, each as large as the first sequence that uses it."""
    number, first = np.unique(used, return_index=True)
    if not np.array_equal(number, np.arange(len(counts))) or (np.diff(first) < 0).any():
        raise ValueError(f"its {len(counts)} masks are not numbered as its sequences use them")
    if slices.shape[1] != 6 or counts.min() < 0 or counts.sum(dtype=np.int64) != len(slices):
        raise ValueError(f"its masks have {counts.sum(dtype=np.int64)} slices, expected {list(slices.shape)}")
    q_length, k_length = length[first // width].astype(np.int64), keys[first // width].astype(np.int64)
    stops = np.cumsum(counts, dtype=np.int64)
    bounds = [0, *stops.tolist()]
    slices = slices.astype(np.int64)
    slices.flags.writeable = False
    sizes = list(zip(q_length.tolist(), k_length.tolist(), pairwise(bounds), strict=True))
    q_limit: Any = np.repeat(q_length, counts)  # of each slice, where a mask has one for all
    k_limit: Any = np.repeat(k_length, counts)
    try:  # all at once: one after the other they would take most of the time
        check_slices(q_limit, k_limit, slices)
    except ValueError:
        for q, k, (start, stop) in sizes:
            Mask(q, k, slices[start:stop])  # says which slice of which size is wrong
        raise
    _check_spelling(slices, stops)
    return [_checked_mask(q, k, slices[start:stop]) for q, k, (start, stop) in sizes]


def _check_spelling(slices: Ints, stops: Ints) -> None:
    """Slices must stand as a mask keeps them, so that equal batches have equal bytes."""
    single = slices[:, Q_STOP] - slices[:, Q_START] == 1
    stepped = single & ((slices[:, LO_STEP] | slices[:, HI_STEP]) != 0)
    q_start, lo = slices[:, Q_START], slices[:, LO]
    descends = (q_start[1:] < q_start[:-1]) | ((q_start[1:] == q_start[:-1]) & (lo[1:] < lo[:-1]))
    inside = stops[(stops > 0) & (stops < len(slices))]
    descends[inside - 1] = False  # from one mask to the next they may
    if stepped.any() or descends.any():
        raise ValueError("its slices are not sorted, or a single row has a step")


def _checked_mask(q_length: int, k_length: int, slices: Ints) -> Mask:
    """A `Mask` of slices that have been checked, int64 and read-only."""
    mask: Any = object.__new__(Mask)
    for name, value in (("q_length", q_length), ("k_length", k_length), ("slices", slices)):
        object.__setattr__(mask, name, value)
    return mask
