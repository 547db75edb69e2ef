from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dyncp.planner.memory import Run, assign_offsets

sizes = st.lists(st.integers(0, 300), min_size=1, max_size=4)


@st.composite
def run_lists(draw):
    runs, slot = [], 0
    for _ in range(draw(st.integers(0, 25))):
        birth, chosen = draw(st.integers(0, 20)), draw(sizes)
        deaths = [birth + draw(st.integers(0, 8)) for _ in chosen]
        runs.append(Run(list(range(slot, slot + len(chosen))), chosen, birth, deaths))
        slot += len(chosen)
    return runs


@given(run_lists())
def test_live_slots_never_share_bytes(runs):
    offsets, size = assign_offsets(runs)
    lives = [
        (offsets[slot], offsets[slot] + n, run.birth, death)
        for run in runs
        for slot, n, death in zip(run.slots, run.sizes_bytes, run.deaths, strict=True)
    ]
    for i, (start, stop, birth, death) in enumerate(lives):
        assert start >= 0 and stop <= size
        for other_start, other_stop, other_birth, other_death in lives[:i]:
            if birth <= other_death and other_birth <= death and start < stop and other_start < other_stop:
                assert stop <= other_start or other_stop <= start
    for run in runs:  # a message is one piece of memory
        at = offsets[run.slots[0]]
        for slot, n in zip(run.slots, run.sizes_bytes, strict=True):
            assert offsets[slot] == at
            at += n


def test_memory_is_reused():
    runs = [Run([i], [1000], birth=i, deaths=[i]) for i in range(50)]
    _, size = assign_offsets(runs)
    assert size == 1024


def test_the_last_free_range_grows():
    runs = [Run([0], [128], 0, [0]), Run([1], [256], 1, [1])]
    assert assign_offsets(runs) == ({0: 0, 1: 0}, 256)
