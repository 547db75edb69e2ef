"""The error of everything that reads bytes or text from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class DecodeError(ValueError):
    """Bytes or text that are not what they should be."""


@contextmanager
def decoding(where: str = "") -> Iterator[None]:
    """What foreign bytes can make go wrong inside ends in a `DecodeError`: `where`, then the error's own words.

    Readers refuse what they can see with a ValueError. The others are the interpreter's own answers to input: numbers
    too large for a C type, nesting deeper than its stack, and sizes beyond the memory of a machine that has less than
    the reader's limit.
    """
    try:
        yield
    except (ValueError, OverflowError, RecursionError, MemoryError) as error:
        if isinstance(error, DecodeError) and not where:
            raise
        words = "it takes more memory than there is" if isinstance(error, MemoryError) else str(error)
        raise DecodeError(where + words) from None
