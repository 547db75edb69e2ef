"""Masks as data: `{"kind": "lambda", "sink": 64, "window": 1024}` in a batch file, `lambda:sink=64,window=1024` on a
command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dyncp.ir.arguments import whole_number
from dyncp.ir.mask import Mask
from dyncp.masks.build import from_slices, to_slices
from dyncp.masks.patterns import (
    causal,
    causal_blockwise,
    document,
    full,
    lambda_,
    prefix_lm,
    shared_question,
    shared_question_split,
    sliding_window,
    tree,
)


@dataclass(frozen=True, slots=True)
class Form:
    """One set of keys that a kind takes."""

    keys: dict[str, str]  # name -> what its text on a command line is: int, ints, float or slices
    build: Callable[..., Mask]  # (q_length, k_length, **keys)
    cross: bool = False  # whether the number of keys may differ from the number of queries


# Patterns whose own lengths add up to the sequence's are built without it, and checked against it afterwards.
FORMS: dict[str, tuple[Form, ...]] = {
    "full": (Form({}, full, cross=True),),
    "causal": (Form({}, causal, cross=True),),
    "sliding_window": (Form({"window": "int"}, lambda q, k, **keys: sliding_window(q, **keys)),),
    "lambda": (Form({"sink": "int", "window": "int"}, lambda q, k, **keys: lambda_(q, **keys)),),
    "causal_blockwise": (
        Form(
            {"block": "int", "sink_blocks": "int", "window_blocks": "int"},
            lambda q, k, **keys: causal_blockwise(q, **keys),
        ),
    ),
    "shared_question": (
        Form({"question": "int", "answers": "ints"}, lambda q, k, **keys: shared_question(**keys)),
        Form(
            {"fraction": "float", "answers": "int"},
            lambda q, k, **keys: shared_question(*shared_question_split(q, **keys)),
        ),
    ),
    "document": (Form({"lengths": "ints"}, lambda q, k, **keys: document(**keys)),),
    "prefix_lm": (Form({"prefix": "int"}, lambda q, k, **keys: prefix_lm(q, **keys)),),
    "tree": (Form({"parents": "ints", "lengths": "ints"}, lambda q, k, **keys: tree(**keys)),),
    "slices": (Form({"slices": "slices"}, from_slices, cross=True),),
}


def from_spec(spec: Mapping[str, Any], length: int, kv_length: int | None = None) -> Mask:
    """The mask that a spec describes, for a sequence of `length` tokens.

    Args:
        spec: the kind, and the arguments of the constructor of that name. `shared_question` takes `question` and
            `answers` (a list), or `fraction` and `answers` (a number), see `shared_question_split`.
        length: query tokens of the sequence.
        kv_length: key tokens, if they are not the queries' (only kinds `full`, `causal` and `slices`).

    Raises:
        ValueError: an unknown kind, an unknown or missing key, a value out of range, or lengths inside the spec that do
            not add up to the sequence's.
    """
    length = whole_number("length", length, 1)
    k_length = length if kv_length is None else whole_number("kv_length", kv_length, 1)
    kind, form = _form(spec)
    if k_length != length and not form.cross:
        able = ", ".join(name for name, forms in FORMS.items() if forms[0].cross)
        raise ValueError(
            f"kind {kind!r} with {length} queries and {k_length} keys: only {able} take different lengths; "
            "write the mask as slices"
        )
    mask = form.build(length, k_length, **{key: spec[key] for key in form.keys})
    if mask.q_length != length:
        raise ValueError(
            f"the lengths in the {kind!r} mask add up to {mask.q_length} tokens but its sequence has {length}: "
            "make them equal"
        )
    return mask


def to_spec(mask: Mask) -> dict[str, Any]:
    """A spec that `from_spec` makes the same mask of, whatever the mask was made by: `{"kind": "slices", "slices":
    [...]}`."""
    return {"kind": "slices", "slices": to_slices(mask)}


def parse_spec(text: str) -> dict[str, Any]:
    """The spec in a text `kind:key=value,key=value`; items of a list are joined by `+`.

    Examples: `causal`, `lambda:sink=64,window=1024`, `shared_question:question=100,answers=200+300`.

    Raises:
        ValueError: an unknown kind or key, a missing key, or a value that is not a number.
    """
    kind, _, rest = text.partition(":")
    spec: dict[str, Any] = {"kind": kind.strip()}
    for part in rest.split(",") if rest.strip() else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value or key in spec:
            raise ValueError(f"mask {text!r} has the part {part!r}; expected each key once, as key=value")
        spec[key] = value
    _, form = _form(spec)
    return spec | {key: _parse_value(key, type_, spec[key]) for key, type_ in form.keys.items()}


def _form(spec: Mapping[str, Any]) -> tuple[str, Form]:
    """The kind of a spec, and the form that has just its keys."""
    if not isinstance(spec, Mapping) or "kind" not in spec:
        raise ValueError(f"a mask is {spec!r}; expected an object with a kind, one of {', '.join(FORMS)}")
    kind = spec["kind"]
    if not isinstance(kind, str) or kind not in FORMS:
        raise ValueError(f"unknown mask kind {kind!r}; choose one of {', '.join(FORMS)}")
    given = [key for key in spec if key != "kind"]
    for form in FORMS[kind]:
        if set(form.keys) == set(given):
            return kind, form
    expected = " or ".join(", ".join(form.keys) or "no more keys" for form in FORMS[kind])
    raise ValueError(f"mask kind {kind!r} with the keys {', '.join(map(str, given)) or 'none'}: it takes {expected}")


def _parse_value(key: str, type_: str, text: str) -> Any:
    try:
        match type_:
            case "int":
                return int(text)
            case "ints":
                return [int(item) for item in text.split("+")]
            case "float":
                return float(text)
    except ValueError:
        wanted = {"int": "a whole number", "ints": "whole numbers joined by +", "float": "a number"}[type_]
        raise ValueError(f"{key} is {text!r}; expected {wanted}") from None
    raise ValueError(f"{key} cannot be given in a text; write the mask in a batch file")
