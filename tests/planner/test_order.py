"""The compiled parts of the timeline schedule: the order of fetching, the way into a node, and the steps of blocks."""

from __future__ import annotations

import numpy as np

from dyncp.planner.scheduling.order import enter, fetch_order, fill_steps, last_steps


def ints(*values, dtype="int64"):
    return np.array(values, dtype)


def test_a_rank_fetches_first_what_makes_most_possible_for_its_time():
    # needs 0 and 1 are its own; 2 completes one block with need 0, 3 completes two, 4 is as good as 3 but takes longer
    ends = np.array([[0, 2], [0, 3], [1, 3], [0, 4], [1, 4]], "int32")
    away = np.array([False, False, True, True, True])
    far, fetch_s = np.zeros(5, bool), np.array([1.0, 1.0, 1.0, 1.0, 2.0])
    when = fetch_order(ints(0, 5), ends, away, far, np.ones(5), fetch_s)
    assert when.tolist() == [0.0, 0.0, 1.5, 1.25, 2.0]
    near = np.array([False, False, False, False, True])
    when = fetch_order(ints(0, 5), ends, away, near, np.ones(5), fetch_s)
    assert when.tolist() == [0.0, 0.0, 2.0, 1.5, 1.0]


def test_with_nothing_possible_yet_it_fetches_what_promises_most():
    ends = np.array([[0, 1], [0, 2], [3, 4]], "int32")
    when = fetch_order(ints(0, 3), ends, np.ones(5, bool), np.zeros(5, bool), np.array([1.0, 1.0, 1.5]), np.ones(5))
    order = np.argsort(when).tolist()
    assert order[0] == 0  # two seconds wait for it
    assert set(order[1:3]) == {1, 2}


def test_ranks_do_not_see_each_others_needs():
    ends = np.array([[0, 1], [2, 3]], "int32")
    away = np.array([False, True, False, True])
    assert fetch_order(ints(0, 1, 2), ends, away, ~away, np.ones(2), np.ones(4)).tolist() == [0.0, 2.0, 0.0, 2.0]


def test_a_piece_enters_a_node_once_and_is_passed_on_a_wave_later():
    wave = ints(1, 1, 2)
    way, waves = enter(
        ints(0, 3), ints(0, 1, 2, dtype="int32"), ints(0, 1, 2, dtype="int32"), ints(8, 8, 8), wave, 3, 3
    )
    assert len(way) == 1 and waves[way[0]] == 1
    assert sorted(waves.tolist()) == [1, 2, 2]


def test_what_is_passed_on_can_still_come_in_the_last_wave():
    way, waves = enter(ints(0, 2), ints(0, 1, dtype="int32"), ints(0, 1, dtype="int32"), ints(8, 8), ints(2, 2), 2, 2)
    assert sorted(waves.tolist()) == [1, 2] and waves[way[0]] == 1


def test_the_ranks_of_a_node_share_what_enters_it():
    count = 8  # entries of two needs each, of rank 0 and of rank 1
    by_entry = np.arange(2 * count, dtype="int32")
    rank = np.tile(np.array([0, 1], "int32"), count)
    way, _ = enter(
        np.arange(0, 2 * count + 1, 2), by_entry, rank, np.full(2 * count, 5), np.ones(2 * count, "int64"), 2, 2
    )
    assert np.bincount(rank[way]).tolist() == [count // 2, count // 2]


def steps(ends, away, when, wave, work_s, share, leave=None):
    leave = when if leave is None else leave
    ptr = ints(0, len(ends))
    return fill_steps(ptr, np.array(ends, "int32"), away, when, leave, wave, np.array(work_s), np.array(share)).tolist()


def test_no_block_runs_before_its_data_is_there_and_all_run():
    away = np.array([False, True, True])
    when, wave = np.array([0.0, 0.5, 1.0]), ints(0, 1, 2)
    found = steps([[0, 0], [0, 1], [0, 2], [1, 2]], away, when, wave, [1.0] * 4, [0.25, 0.5, 1.0])
    assert found == [0, 1, 2, 2]


def test_own_blocks_are_kept_for_the_end():
    away, when = np.array([False, True]), np.array([0.0, 1.0])
    ends = [[0, 0]] * 4 + [[0, 1]] * 4
    found = steps(ends, away, when, ints(0, 1), [1.0] * 8, [0.25, 0.75, 1.0])
    assert found == [0, 0, 2, 2, 1, 1, 1, 1]


def test_what_was_fetched_last_is_finished_first():
    away, when = np.array([False, True, True]), np.array([0.0, 0.5, 1.0])
    ends = [[0, 1], [0, 2], [0, 1], [0, 2]]
    found = steps(ends, away, when, ints(0, 1, 1), [1.0] * 4, [0.0, 0.5, 1.0])
    assert found == [2, 1, 2, 1]


def test_the_last_step_takes_what_is_left():
    found = steps([[0, 0]] * 3, np.array([False]), np.zeros(1), ints(0), [1.0] * 3, [0.0, 0.0])
    assert found == [1, 1, 1]


def test_the_last_step_of_each_piece():
    ends = np.array([[0, 1], [0, 2], [1, 2]], "int32")
    assert last_steps(ends, np.array([0, 3, 1], "int32"), 4).tolist() == [3, 1, 3, 0]
