from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dyncp.ir.plan import Place
from dyncp.planner.lowering.draft import SLOT
from dyncp.planner.memory import assign_offsets

sizes = st.lists(st.integers(0, 300), min_size=1, max_size=4)


class Run(NamedTuple):
    """Slots that lie one behind the other: their sizes, the instruction that writes them, and the last to use each."""

    sizes_bytes: list[int]
    birth: int
    deaths: list[int]


def assign(runs: list[Run], place: Place = Place.ARENA) -> tuple[list[int], int]:
    """The offset of each run, in the order of their births, and the size of the memory."""
    slots = np.zeros(sum(len(run.deaths) for run in runs), SLOT)
    firsts = []
    at = 0
    for run in runs:
        firsts.append(at)
        stop = at + len(run.deaths)
        slots["run"][at:stop], slots["birth"][at:stop], slots["death"][at:stop] = at, run.birth, run.deaths
        slots["size_bytes"][at:stop] = run.sizes_bytes
        at = stop
    slots["place"] = place
    size_bytes = assign_offsets(slots, int(place))
    for run, first in zip(runs, firsts, strict=True):
        steps = np.diff(slots["offset"][first : first + len(run.deaths)])
        assert steps.tolist() == run.sizes_bytes[:-1]
    return slots["offset"][firsts].tolist(), size_bytes


@st.composite
def run_lists(draw):
    runs = []
    for _ in range(draw(st.integers(0, 25))):
        birth, chosen = draw(st.integers(0, 20)), draw(sizes)
        deaths = [birth + draw(st.integers(0, 8)) for _ in chosen]
        runs.append(Run(chosen, birth, deaths))
    return sorted(runs, key=lambda run: run.birth)


@given(run_lists())
def test_live_slots_never_share_bytes(runs):
    offsets, size = assign(runs)
    lives = []
    for run, at in zip(runs, offsets, strict=True):  # a message is one piece of memory
        for n, death in zip(run.sizes_bytes, run.deaths, strict=True):
            lives.append((at, at + n, run.birth, death))
            at += n
    for i, (start, stop, birth, death) in enumerate(lives):
        assert start >= 0 and stop <= size
        for other_start, other_stop, other_birth, other_death in lives[:i]:
            if birth <= other_death and other_birth <= death and start < stop and other_start < other_stop:
                assert stop <= other_start or other_stop <= start


def test_memory_is_reused():
    runs = [Run([1000], birth=i, deaths=[i]) for i in range(50)]
    _, size = assign(runs)
    assert size == 1024


def test_the_last_free_range_grows():
    runs = [Run([128], 0, [0]), Run([256], 1, [1])]
    assert assign(runs) == ([0, 0], 256)


def test_the_smallest_range_that_fits_is_taken_and_the_lowest_of_those():
    holes = [Run([size], 0, [death]) for size, death in ((512, 1), (128, 9), (256, 1), (128, 9), (256, 1), (128, 9))]
    offsets, size = assign([*holes, Run([200], 2, [9]), Run([256], 2, [9]), Run([512], 2, [9])])
    assert offsets[6:] == [640, 1024, 0]
    assert size == 1408


def test_neighbours_that_die_together_or_apart_are_free_afterwards():
    """The first slot goes first, the other two (with the run's padding) later."""
    long = Run([100, 100, 56], 0, [1, 5, 5])
    assert assign([long, Run([100], 2, [2])]) == ([0, 256], 384)  # 100 bytes do not hold an aligned run
    assert assign([long, Run([250], 6, [6])]) == ([0, 0], 256)
    assert assign([Run([128, 100, 100], 0, [1, 5, 5]), Run([100], 2, [2]), Run([256], 6, [6])])[0] == [0, 0, 0]


def test_other_places_and_slots_that_have_one_are_left_alone():
    slots = np.zeros(3, SLOT)
    slots["run"], slots["place"] = [0, 1, -1], [Place.KEPT, Place.ARENA, Place.ARENA]
    slots["size_bytes"], slots["offset"] = 100, 7
    assert assign_offsets(slots, int(Place.ARENA)) == 128
    assert slots["offset"].tolist() == [7, 0, 7]
