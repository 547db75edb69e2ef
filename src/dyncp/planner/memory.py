"""Buffer slots: give memory to slots at planning time, and reuse it (the paper's buffer manager, section 5).

Slots that must lie one behind the other, because they are one message, are a *run*; a slot alone is a run of one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.jit import jit, part

ALIGN_BYTES = 128  # of every run of slots; inside a run slots lie one behind the other
COUNT, TOTAL_BYTES = range(2)  # what Arena.used holds


class Arena(NamedTuple):
    """Free ranges of a growing memory: `used[COUNT]` of them in ascending order, never touching."""

    start: Ints  # int64, bytes
    stop: Ints  # int64, bytes
    used: Ints  # int64[2]


@part
def aligned(size_bytes: int) -> int:
    """The size of a run, rounded up."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


@jit
def assign_offsets(slots: Ints, place: int) -> int:
    """Fill in the offsets of all slots of a place, and return the size of its memory. Two slots share bytes only when
    one has died before the instruction at which the other is born.

    Args:
        slots: records with `place`; `run`, the first slot of the run that a slot belongs to (-1 for those that have an
            offset already); `size_bytes`; `birth`, the instruction that writes the slot first (the same in all of a
            run, and never descending); `death`, the last instruction that uses it; `offset`, the result in bytes.
        place: as in the slots.
    """
    count, last = len(slots), slots[-1].birth if len(slots) else 0
    arena = Arena(np.empty(count, np.int64), np.empty(count, np.int64), np.zeros(2, np.int64))
    # the ranges that end with an instruction, as a chain of their first slots
    first_dying, next_dying, range_stop = np.empty(last, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    first_dying[:] = -1
    now = at = 0
    while at < count:
        if slots[at].run < 0 or slots[at].place != place:
            at += 1
            continue
        while now < slots[at].birth:
            dying = first_dying[now]
            while dying >= 0:
                free(arena, slots[dying].offset, range_stop[dying])
                dying = next_dying[dying]
            now += 1
        stop, total = at, 0
        while stop < count and slots[stop].run == at:
            total += slots[stop].size_bytes
            stop += 1
        offset = allocate(arena, aligned(total))
        end = offset + aligned(total)
        while at < stop:  # neighbours that die together are one range; the last of a run has the padding
            first, death = at, slots[at].death
            while at < stop and slots[at].death == death:
                slots[at].offset = offset
                offset += slots[at].size_bytes
                at += 1
            range_stop[first] = offset if at < stop else end
            if death < last:  # nothing is born after the last birth
                next_dying[first], first_dying[death] = first_dying[death], first
    return arena.used[TOTAL_BYTES]


@part
def allocate(arena: Arena, size: int) -> int:
    """Offset of `size` bytes that are free from now on until `free`: in the smallest free range that fits, and the
    lowest of those."""
    best = -1
    for i in range(arena.used[COUNT]):
        length = arena.stop[i] - arena.start[i]
        if length >= size and (best < 0 or length < arena.stop[best] - arena.start[best]):
            best = i
    if best >= 0:
        at = arena.start[best]
        arena.start[best] += size
        if arena.start[best] == arena.stop[best]:
            remove(arena, best)
        return at
    at, last = arena.used[TOTAL_BYTES], arena.used[COUNT] - 1
    if last >= 0 and arena.stop[last] == at:  # grow the last free range instead of skipping it
        at = arena.start[last]
        arena.used[COUNT] = last
    arena.used[TOTAL_BYTES] = at + size
    return at


@part
def free(arena: Arena, start: int, stop: int) -> None:
    """Give a range back; it may be part of what `allocate` gave."""
    if start == stop:
        return
    at = first_from(arena, start)
    joins_next = at < arena.used[COUNT] and arena.start[at] == stop
    joins_last = at > 0 and arena.stop[at - 1] == start
    if joins_next and joins_last:
        arena.stop[at - 1] = arena.stop[at]
        remove(arena, at)
    elif joins_next:
        arena.start[at] = start
    elif joins_last:
        arena.stop[at - 1] = stop
    else:
        for i in range(arena.used[COUNT], at, -1):
            arena.start[i], arena.stop[i] = arena.start[i - 1], arena.stop[i - 1]
        arena.start[at], arena.stop[at] = start, stop
        arena.used[COUNT] += 1


@part
def first_from(arena: Arena, start: int) -> int:
    """Index of the first free range that begins at `start` or later."""
    low, high = 0, arena.used[COUNT]
    while low < high:
        middle = (low + high) // 2
        if arena.start[middle] < start:
            low = middle + 1
        else:
            high = middle
    return low


@part
def remove(arena: Arena, at: int) -> None:
    """Forget a free range."""
    arena.used[COUNT] -= 1
    for i in range(at, arena.used[COUNT]):
        arena.start[i], arena.stop[i] = arena.start[i + 1], arena.stop[i + 1]
