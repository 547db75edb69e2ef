"""How the planner's hot loops are compiled: numba, with the machine code kept on disk.

What is kept lies beside the source file or, where that folder cannot be written, in the user's cache folder. It is out
of date when the file of the function changes, and refers to classes by name. So compiled functions that call each other
are in one file, and a function that others than compiled ones call takes a plain tuple in place of a NamedTuple.

Compiling all of it takes some ten seconds, so the first function of a process that is compiled is announced in the log,
and what plans ahead of training calls `strategies.warm.warm_up` before.

One thread, and no reordering of floating-point operations: the same arguments give the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import event
from numba.extending import register_jitable

F = TypeVar("F", bound=Callable[..., Any])
njit: Any = numba.njit  # with `_nrt`, which its annotations leave out


class _Announcer(event.Listener):
    """Says in the log that compiling begins, once."""

    silent = False

    def on_start(self, event: Any) -> None:
        module = event.data["dispatcher"].py_func.__module__
        if not self.silent and module.startswith("dyncp."):
            self.silent = True
            logging.getLogger("dyncp").warning(
                "compiling parts of dyncp, which are kept for later: up to half a minute"
            )

    def on_end(self, event: Any) -> None:
        pass


register: Any = event.register
register("numba:compile", _Announcer())


def jit(function: F) -> F:
    """Compile a function on its first call of a process, or load what an earlier process has compiled."""
    return cast(F, njit(cache=True, error_model="numpy")(function))


def lean_jit(function: F) -> F:
    """As `jit`, for functions that allocate nothing: without reference counts, which else take most of the time where
    many arrays are passed around."""
    return cast(F, njit(cache=True, error_model="numpy", _nrt=False)(function))


def part(function: F) -> F:
    """A function that compiled functions call, kept as a part of these."""
    return register_jitable(error_model="numpy")(function)


def lean_part(function: F) -> F:
    """As `part`, for small functions in the loops of a `lean_jit`: compiled into their callers."""
    return register_jitable(error_model="numpy", forceinline=True, _nrt=False)(function)
