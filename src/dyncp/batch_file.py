"""Batches as JSON: `{"sequences": [{"length": 4096, "mask": {"kind": "lambda", "sink": 64, "window": 1024}}, ...]}`.

A sequence has a `length`, and may have a `kv_length` (cross-attention) and a `mask`, or `masks` by name for a model
whose layers differ; no mask at all means causal. A sequence with a single mask uses it for every name of the batch.
`weights`, how many layers use each name, stand beside `sequences`, or in sequences that then agree. See
`dyncp.masks.from_spec` for what a mask may be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dyncp.ir.arguments import whole_number
from dyncp.ir.batch import DEFAULT_MASK, Batch, Sequence
from dyncp.ir.codec import MAGIC
from dyncp.ir.errors import DecodeError, decoding
from dyncp.ir.mask import Mask
from dyncp.ir.text import TITLE
from dyncp.masks import from_spec, to_spec

BATCH_KEYS = ("sequences", "weights")
SEQUENCE_KEYS = ("length", "kv_length", "mask", "masks", "weights")
PLAN_STARTS = (MAGIC, TITLE.literals[0].encode())  # of a plan as bytes, and as text


def read_batch(path: str | Path) -> Batch:
    """The batch in a JSON file.

    Raises:
        ValueError: a file that cannot be read.
        DecodeError: a file that is a plan, is not JSON, or does not describe a batch; says where and how to fix it.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the batch file {path}: {error.strerror}") from error
    if content.startswith(PLAN_STARTS):
        raise DecodeError(f"{path} is a plan, not a batch: give the batch file, or look at the plan with dyncp show")
    with decoding(f"the batch file {path} is not JSON: "):
        data = json.loads(content.decode("utf-8"), object_pairs_hook=_object)
    return batch_from_dict(data)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; two values under one key are a mistake that json itself passes over."""
    keys = [key for key, _ in pairs]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"an object has the key {twice[0]!r} twice")
    return dict(pairs)


def write_batch(batch: Batch, path: str | Path) -> None:
    """Write a batch as a JSON file that `read_batch` reads back as the same batch."""
    Path(path).write_text(json.dumps(batch_to_dict(batch)) + "\n", encoding="utf-8")


def batch_from_dict(data: Mapping[str, Any]) -> Batch:
    """The batch that a JSON object describes; see the head of this file.

    Raises:
        DecodeError: a missing or unknown key, or a value of another type or out of range; names the sequence.
    """
    with decoding():
        return _batch(data)


def _batch(data: Mapping[str, Any]) -> Batch:
    _check_object("a batch", data, BATCH_KEYS)
    items = data.get("sequences")
    if not isinstance(items, list) or not items:
        raise ValueError(f"sequences is {_shown(items)}; expected a list of at least one sequence")
    for index, item in enumerate(items):
        _check_object(f"sequence {index}", item, SEQUENCE_KEYS)
        if "mask" in item and "masks" in item:
            raise ValueError(f"sequence {index} has both mask and masks; give one of them")
    named = [tuple(_named_masks(index, item)) for index, item in enumerate(items) if "masks" in item]
    names = named[0] if named else (DEFAULT_MASK,)
    weights = _weights(data, items, names)
    sequences = []
    for index, item in enumerate(items):
        try:
            sequences.append(_sequence(item, names))
        except ValueError as error:
            raise ValueError(f"sequence {index}: {error}") from error
    return Batch(tuple(sequences), weights)


def batch_to_dict(batch: Batch) -> dict[str, Any]:
    """The JSON object of a batch, with masks as slices; `batch_from_dict` makes the same batch of it."""
    sequences = []
    for sequence in batch.sequences:
        item: dict[str, Any] = {"length": sequence.length}
        if sequence.kv_length is not None:
            item["kv_length"] = sequence.kv_length
        if batch.mask_names == (DEFAULT_MASK,):
            item["mask"] = to_spec(sequence.masks[DEFAULT_MASK])
        else:
            item["masks"] = {name: to_spec(sequence.masks[name]) for name in batch.mask_names}
        sequences.append(item)
    return {"sequences": sequences, "weights": dict(batch.weights or {})}


def _sequence(item: Mapping[str, Any], names: tuple[str, ...]) -> Sequence:
    if "length" not in item:
        raise ValueError("it has no length; give its number of tokens")
    length = whole_number("length", item["length"], 1)
    kv_length = None if "kv_length" not in item else whole_number("kv_length", item["kv_length"], 1)
    if "masks" not in item:
        mask = from_spec(item.get("mask", {"kind": "causal"}), length, kv_length)
        return Sequence(length, dict.fromkeys(names, mask), kv_length)
    masks: dict[str, Mask] = {}
    for name, spec in item["masks"].items():
        try:
            masks[name] = from_spec(spec, length, kv_length)
        except ValueError as error:
            raise ValueError(f"mask {name!r}: {error}") from error
    return Sequence(length, masks, kv_length)


def _named_masks(index: int, item: Mapping[str, Any]) -> Mapping[str, Any]:
    masks = item["masks"]
    if not isinstance(masks, Mapping) or not masks:
        raise ValueError(f"sequence {index}: masks is {_shown(masks)}; expected an object of at least one named mask")
    return masks


def _weights(
    data: Mapping[str, Any], items: list[Mapping[str, Any]], names: tuple[str, ...]
) -> dict[str, float] | None:
    """The weights of the batch, wherever they are given; a name left out has 1 in each place."""
    given = [("the batch", data)] + [(f"sequence {index}", item) for index, item in enumerate(items)]
    given = [(where, item) for where, item in given if "weights" in item]
    ones = dict.fromkeys(names, 1)
    for where, item in given:
        weights = item["weights"]
        if not isinstance(weights, Mapping) or not all(_is_number(value) for value in weights.values()):
            raise ValueError(f"{where}: weights is {_shown(weights)}; expected an object of numbers by mask name")
        for name in weights:
            if name not in names:
                raise ValueError(f"{where}: weight for unknown mask {name!r}; the batch has {', '.join(names)}")
        if {**ones, **weights} != {**ones, **given[0][1]["weights"]}:
            raise ValueError(
                f"{where} has the weights {_shown(weights)} but {given[0][0]} has {_shown(given[0][1]['weights'])}: a "
                'batch has one set of weights; give it once, beside "sequences"'
            )
    return dict(given[0][1]["weights"]) if given else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _check_object(what: str, value: Any, known: tuple[str, ...]) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is {_shown(value)}; expected an object with the keys {', '.join(known)}")
    for key in value:
        if key not in known:
            raise ValueError(f"{what} has the unknown key {key!r}; the keys are {', '.join(known)}")


def _shown(value: Any) -> str:
    """A value in an error message, cut short."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
