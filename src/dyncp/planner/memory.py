"""Buffer slots: give memory to slots at planning time, and reuse it (the paper's buffer manager, section 5)."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

ALIGN_BYTES = 128  # of every run of slots; inside a run slots lie one behind the other


@dataclass(slots=True)
class Run:
    """Slots that must lie one behind the other (a message, or one slot alone).

    `birth` is the instruction that first writes the run; `deaths[i]` the last one that uses slot i.
    """

    slots: list[int]
    sizes_bytes: list[int]
    birth: int
    deaths: list[int]


class Arena:
    """Free ranges of a growing memory; allocation takes the smallest free range that fits, and the lowest of those."""

    def __init__(self) -> None:
        self.free_ranges: list[tuple[int, int]] = []  # (start, stop), sorted, never touching
        self.size_bytes = 0

    def allocate(self, size: int) -> int:
        """Offset of `size` bytes that are free from now on until `free`."""
        fits = [(stop - start, start) for start, stop in self.free_ranges if stop - start >= size]
        if fits:
            length, start = min(fits)
            self.free_ranges.remove((start, start + length))
            if length > size:
                insort(self.free_ranges, (start + size, start + length))
            return start
        start = self.size_bytes
        if self.free_ranges and self.free_ranges[-1][1] == start:  # grow the last free range instead of skipping it
            start = self.free_ranges.pop()[0]
        self.size_bytes = start + size
        return start

    def free(self, start: int, stop: int) -> None:
        """Give a range back; it may be part of what `allocate` gave."""
        if start == stop:
            return
        at = bisect_left(self.free_ranges, (start, stop))
        if at < len(self.free_ranges) and self.free_ranges[at][0] == stop:
            stop = self.free_ranges.pop(at)[1]
        if at and self.free_ranges[at - 1][1] == start:
            start = self.free_ranges.pop(at - 1)[0]
        insort(self.free_ranges, (start, stop))


def assign_offsets(runs: list[Run]) -> tuple[dict[int, int], int]:
    """Offsets in bytes of the slots of all runs, and the size of the memory. Two slots share bytes only when one has
    died before the instruction at which the other is born.
    """
    arena = Arena()
    offsets: dict[int, int] = {}
    dying: dict[int, list[tuple[int, int]]] = {}  # instruction -> ranges that end there
    pending: list[int] = []  # sorted instructions in `dying`
    for run in sorted(runs, key=lambda run: run.birth):
        while pending and pending[0] < run.birth:
            for start, stop in dying.pop(pending.pop(0)):
                arena.free(start, stop)
        total = -(-sum(run.sizes_bytes) // ALIGN_BYTES) * ALIGN_BYTES
        offset = arena.allocate(total)
        end = offset + total
        for place, (slot, size, death) in enumerate(zip(run.slots, run.sizes_bytes, run.deaths, strict=True)):
            assert death >= run.birth
            offsets[slot] = offset
            stop = end if place == len(run.slots) - 1 else offset + size
            if death not in dying:
                insort(pending, death)
            dying.setdefault(death, []).append((offset, stop))
            offset = stop
    return offsets, arena.size_bytes
