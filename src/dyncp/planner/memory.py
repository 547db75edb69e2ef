"""Buffer slots: give memory to slots at planning time, and reuse it (the paper's buffer manager, section 5)."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

ALIGN_BYTES = 128  # of every run of slots; inside a run slots lie one behind the other


class Run(NamedTuple):
    """Slots that must lie one behind the other (a message, or one slot alone).

    `birth` is the instruction that first writes the run; `deaths[i]` the last one that uses its slot i.
    """

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


def assign_offsets(runs: list[Run]) -> tuple[list[int], int]:
    """Offset in bytes of each run, and the size of the memory. Two slots share bytes only when one has died before the
    instruction at which the other is born.
    """
    arena = Arena()
    offsets = [0] * len(runs)
    dying: dict[int, list[tuple[int, int]]] = {}  # instruction -> ranges that end there
    pending: list[int] = []  # sorted instructions in `dying`
    for number in sorted(range(len(runs)), key=lambda number: runs[number].birth):
        run = runs[number]
        while pending and pending[0] < run.birth:
            for start, stop in dying.pop(pending.pop(0)):
                arena.free(start, stop)
        total = -(-sum(run.sizes_bytes) // ALIGN_BYTES) * ALIGN_BYTES
        offsets[number] = arena.allocate(total)
        for death, start, stop in _ranges(run, offsets[number], total):
            assert death >= run.birth
            if death not in dying:
                insort(pending, death)
                dying[death] = []
            dying[death].append((start, stop))
    return offsets, arena.size_bytes


def _ranges(run: Run, start: int, total: int) -> list[tuple[int, int, int]]:
    """(death, start, stop) of the neighbouring slots of a run that die together; the last has the rest of `total`."""
    current, end, stop = run.deaths[0], start + total, start
    ranges: list[tuple[int, int, int]] = []
    for death, size in zip(run.deaths, run.sizes_bytes, strict=True):
        if death != current:
            ranges.append((current, start, stop))
            start, current = stop, death
        stop += size
    ranges.append((current, start, end))
    return ranges
