"""Checks of the numbers and names that users give: counts are whole, True is not 1, and nothing is NaN."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

MAX_COUNT = 2**31 - 1


def whole_number(name: str, value: Any, least: int, most: int = MAX_COUNT) -> int:
    """`value` as an int.

    Raises:
        ValueError: not a whole number (a bool or a float is none), or out of range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, (bool, np.bool_)) or not least <= number <= most:
        raise ValueError(f"{name} is {value!r}; expected a whole number from {least} to {most}")
    return number


def whole_numbers(name: str, values: Any, least: int) -> list[int]:
    """`values` as a list of ints.

    Raises:
        ValueError: not a list, or one of them is not a whole number of at least `least`.
    """
    if isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
        raise ValueError(f"{name} is {values!r}; expected a list of whole numbers")
    return [whole_number(f"{name}[{index}]", value, least) for index, value in enumerate(values)]


def positive_number(name: str, value: Any, finite: bool = True) -> float:
    """`value` as a float.

    Raises:
        ValueError: not a number, or one that is not positive (and, when asked for, finite).
    """
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_number or not (value > 0 and (math.isfinite(value) or not finite)):
        raise ValueError(f"{name} is {value!r}; expected a positive{', finite' if finite else ''} number")
    return float(value)


def plain_name(what: str, value: Any) -> str:
    """`value` as it is.

    Raises:
        ValueError: not a string, an empty one, or one with characters that do not print.
    """
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError(f"{what} is {value!r}; expected a string of printable characters")
    return value
