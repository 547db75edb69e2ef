"""The blocks of an attention instruction, each named once: for kernels that pack blocks into a few long tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dyncp.ir.arrays import Ints
from dyncp.ir.plan import Attention, Pass
from dyncp.runtime.buffers import Buffers


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """Items of an instruction as pairs of a query block and a key block. Blocks are numbered in the order in which the
    items name them. Two query blocks are one if they read and write the same slots, and so are two key blocks.
    """

    comp: Ints  # int64[n], row of the rank's Comps
    query: Ints  # int64[n], query block
    key: Ints  # int64[n], key block
    query_slots: Ints  # int64[NQ, columns], slots of each query block: what is read, then what is written
    key_slots: Ints  # int64[NK, columns], likewise


def divide(instruction: Attention, pass_: Pass, items: Ints) -> Division:
    """Name the blocks of an instruction.

    Args:
        instruction: of a program of `pass_`.
        pass_: forward or backward.
        items: int64[n], which of its items, in which order.
    """
    slots = np.concatenate([instruction.reads, instruction.writes], axis=1)[items]
    of_keys = np.array([kind.of_keys for kind in pass_.reads + pass_.writes])
    query_slots, query = number(slots[:, ~of_keys])
    key_slots, key = number(slots[:, of_keys])
    return Division(instruction.comp[items], query, key, query_slots, key_slots)


def number(rows: Ints) -> tuple[Ints, Ints]:
    """The different rows of int[n, columns] in the order in which they appear, and int64[n], which of them each is."""
    _, first, of_sorted = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    return rows[first[order]], np.argsort(order)[of_sorted.reshape(-1)]


def join(buffers: Buffers, slots: Iterable[int], field: int) -> Tensor:
    """`[all rows, heads, dim]`: a field of several slots, one behind the other."""
    return torch.cat([buffers.fields(slot)[field] for slot in slots])
