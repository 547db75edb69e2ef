"""Checks of the numbers that users give: counts are whole numbers of at least so much, and True is not 1."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from dyncp.ir.mask import MAX_LENGTH


def whole_number(name: str, value: Any, least: int) -> int:
    """`value` as an int.

    Raises:
        ValueError: not a whole number (a bool or a float is none), or out of range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, (bool, np.bool_)) or not least <= number <= MAX_LENGTH:
        raise ValueError(f"{name} is {value!r}; expected a whole number of at least {least} (and at most {MAX_LENGTH})")
    return number


def whole_numbers(name: str, values: Any, least: int) -> list[int]:
    """`values` as a list of ints.

    Raises:
        ValueError: not a list, or one of them is not a whole number of at least `least`.
    """
    if isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
        raise ValueError(f"{name} is {values!r}; expected a list of whole numbers")
    return [whole_number(f"{name}[{index}]", value, least) for index, value in enumerate(values)]
