from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dyncp.planner.memory import Run, assign_offsets

sizes = st.lists(st.integers(0, 300), min_size=1, max_size=4)


@st.composite
def run_lists(draw):
    runs = []
    for _ in range(draw(st.integers(0, 25))):
        birth, chosen = draw(st.integers(0, 20)), draw(sizes)
        deaths = [birth + draw(st.integers(0, 8)) for _ in chosen]
        runs.append(Run(chosen, birth, deaths))
    return runs


@given(run_lists())
def test_live_slots_never_share_bytes(runs):
    offsets, size = assign_offsets(runs)
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
    _, size = assign_offsets(runs)
    assert size == 1024


def test_the_last_free_range_grows():
    runs = [Run([128], 0, [0]), Run([256], 1, [1])]
    assert assign_offsets(runs) == ([0, 0], 256)


def test_neighbours_that_die_together_or_apart_are_free_afterwards():
    """The first slot goes first, the other two (with the run's padding) later."""
    long = Run([100, 100, 56], 0, [1, 5, 5])
    assert assign_offsets([long, Run([100], 2, [2])]) == ([0, 256], 384)  # 100 bytes do not hold an aligned run
    assert assign_offsets([long, Run([250], 6, [6])]) == ([0, 0], 256)
    assert assign_offsets([Run([128, 100, 100], 0, [1, 5, 5]), Run([100], 2, [2]), Run([256], 6, [6])])[0] == [0, 0, 0]
