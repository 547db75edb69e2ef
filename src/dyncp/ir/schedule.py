"""When everything happens: computation by steps, and the transfers between them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from dyncp.ir.arrays import Ints, freeze_fields


class Side(IntEnum):
    """What a transfer moves. A forward and a backward pass fill the sides with different data, see `plan.Pass`."""

    Q_IN = 0  # what a computation block reads of its query block
    KV_IN = 1  # what it reads of its KV block
    Q_OUT = 2  # the partial result it adds to its query block
    KV_OUT = 3  # the partial result it adds to its KV block (backward only)


@dataclass(frozen=True, slots=True, eq=False)
class Transfers:
    """Moves of one (block, head group) from rank to rank, one row each.

    A transfer of step s is launched before the computation of step s - 1, overlaps it, and has arrived before the
    computation of step s. So an input needed at step s moves at step s or earlier (never 0); it may be sent on at a
    later step by a rank that received it. A partial result whose last contribution is computed at step s, or received
    at step s + 1, can move at step s + 2; the receiver adds it to its own.
    """

    mask: Ints  # int32[M], index into Blocks.mask_names
    side: Ints  # uint8[M], Side
    block: Ints  # int32[M], token block
    group: Ints  # int32[M], head group
    src: Ints  # int32[M], rank
    dst: Ints  # int32[M], rank
    step: Ints  # int32[M], at least 1

    def __post_init__(self) -> None:
        freeze_fields(
            self, mask="int32", side="uint8", block="int32", group="int32", src="int32", dst="int32", step="int32"
        )

    def __len__(self) -> int:
        return len(self.mask)

    def take(self, index: Ints) -> Transfers:
        """The rows selected by an index or boolean array."""
        return Transfers(*(getattr(self, name)[index] for name in TRANSFER_FIELDS))

    @staticmethod
    def concatenate(parts: list[Transfers]) -> Transfers:
        """All rows of `parts`, in order."""
        return Transfers(
            *(
                np.concatenate([getattr(part, name) for part in parts]) if parts else np.empty(0)
                for name in TRANSFER_FIELDS
            )
        )


TRANSFER_FIELDS = ("mask", "side", "block", "group", "src", "dst", "step")


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Step of each computation block, and all transfers. Masks are independent of each other: each counts its own
    steps from 0.
    """

    comp_step: Ints  # int32[G, N]
    transfers: Transfers

    def __post_init__(self) -> None:
        freeze_fields(self, comp_step="int32")
