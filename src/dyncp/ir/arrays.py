"""Read-only numpy arrays: what the large types of the intermediate representation are made of."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[Any]  # an integer array; its exact dtype and shape stand in a comment beside each field


def frozen(values: Any, dtype: str) -> Ints:
    """A read-only, contiguous array of `values`; shares memory when it already is one."""
    array = np.ascontiguousarray(values, dtype)
    if array.flags.writeable:
        if array is values:
            array = array.copy()
        array.flags.writeable = False
    return array


def freeze_fields(record: object, **dtypes: str) -> None:
    """Replace the named fields of a frozen dataclass by read-only arrays (call it in `__post_init__`)."""
    for name, dtype in dtypes.items():
        object.__setattr__(record, name, frozen(getattr(record, name), dtype))


def ragged_ranges(lengths: Ints) -> Ints:
    """`[0..lengths[0]) ++ [0..lengths[1]) ++ ...` as one array."""
    total = int(lengths.sum())
    firsts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    ranges: Ints = np.arange(total) - firsts
    return ranges
