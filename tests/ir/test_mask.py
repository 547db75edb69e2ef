import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from masks.dense_masks import Dense, dense_masks, spans

from dyncp import masks
from dyncp.ir.mask import Mask


def row_lists(dense: Dense) -> np.ndarray:
    """Every pair as an interval of one key: int[q_length, k_length, 2], most of them empty."""
    keys = np.arange(dense.shape[1])
    return np.stack([np.broadcast_to(keys, dense.shape), keys + dense], axis=2)


def mask_of(dense: Dense) -> Mask:
    return Mask.from_intervals(*dense.shape, row_lists(dense))


def pairs_grid(mask: Mask, q_bounds: np.ndarray, k_bounds: np.ndarray) -> np.ndarray:
    """int64[nq, nk]: `pairs_blocks` written out."""
    rows, columns, pairs = mask.pairs_blocks(q_bounds, k_bounds)
    grid = np.zeros((len(q_bounds) - 1, len(k_bounds) - 1), np.int64)
    grid[rows, columns] = pairs
    return grid


@settings(max_examples=300)
@given(dense_masks())
def test_from_intervals_has_just_the_pairs(dense: Dense):
    mask = mask_of(dense)
    mask.check()
    np.testing.assert_array_equal(mask.dense(), dense)
    assert mask.pairs() == dense.sum()


@settings(max_examples=100)
@given(dense_masks(), st.randoms(use_true_random=False))
def test_from_intervals_does_not_depend_on_how_rows_are_written(dense: Dense, random):
    rows = row_lists(dense)
    order = list(range(rows.shape[1]))
    random.shuffle(order)
    overlapping = np.concatenate([rows[:, order], mask_of(dense).rows(0, len(dense))], axis=1)
    assert Mask.from_intervals(*dense.shape, overlapping) == mask_of(dense)


@pytest.mark.parametrize(
    ("rows", "slices"),
    [
        ([[0, 1], [0, 2], [0, 3]], [[0, 3, 0, 0, 1, 1]]),
        ([[0, 4], [0, 4], [0, 4]], [[0, 3, 0, 0, 4, 0]]),
        ([[0, 4], [1, 4], [2, 4]], [[0, 3, 0, 1, 4, 0]]),
        ([[0, 2], [1, 3], [2, 4]], [[0, 3, 0, 1, 2, 1]]),
        ([[0, 2], [2, 4], [2, 4]], [[0, 1, 0, 0, 2, 0], [1, 3, 2, 0, 4, 0]]),
        # the move changes in every row: a slice has two rows
        ([[0, 1], [0, 2], [0, 2], [0, 3], [0, 3]], [[0, 2, 0, 0, 1, 1], [2, 4, 0, 0, 2, 1], [4, 5, 0, 0, 3, 0]]),
        # a hole ends a slice
        ([[0, 1], [0, 0], [0, 1]], [[0, 1, 0, 0, 1, 0], [2, 3, 0, 0, 1, 0]]),
    ],
)
def test_from_intervals_makes_few_slices(rows: list, slices: list):
    mask = Mask.from_intervals(len(rows), 4, np.array(rows)[:, None, :])
    assert mask.slices.tolist() == slices


def test_from_intervals_joins_intervals_that_touch():
    mask = Mask.from_intervals(2, 6, np.array([[[2, 4], [0, 2], [5, 6]], [[0, 4], [1, 2], [5, 6]]]))
    assert mask.slices.tolist() == [[0, 2, 0, 0, 4, 0], [0, 2, 5, 0, 6, 0]]


@settings(max_examples=100)
@given(dense_masks(), st.data())
def test_rows_are_sorted_intervals_of_the_asked_rows(dense: Dense, data):
    start, stop = data.draw(spans(len(dense)))
    rows = mask_of(dense).rows(start, stop)
    assert rows.dtype == np.int32
    written = np.zeros((stop - start, dense.shape[1]), bool)
    for row, intervals in enumerate(rows.tolist()):
        used = [interval for interval in intervals if interval != [0, 0]]
        assert intervals == used + [[0, 0]] * (len(intervals) - len(used)), "unused intervals come last"
        assert used == sorted(used)
        for lo, hi in used:
            assert lo < hi
            assert not written[row, lo:hi].any(), "intervals do not overlap"
            written[row, lo:hi] = True
    np.testing.assert_array_equal(written, dense[start:stop])
    most = max(sum(interval != [0, 0] for interval in row) for row in rows.tolist())
    assert rows.shape[1] == max(1, most)


@settings(max_examples=300)
@given(dense_masks(), st.data())
def test_crop_is_the_crop_of_the_dense_mask(dense: Dense, data):
    (q_start, q_stop), (k_start, k_stop) = data.draw(spans(dense.shape[0])), data.draw(spans(dense.shape[1]))
    crop = mask_of(dense).crop(q_start, q_stop, k_start, k_stop)
    crop.check()
    np.testing.assert_array_equal(crop.dense(), dense[q_start:q_stop, k_start:k_stop])


@given(dense_masks())
def test_cropping_nothing_away_changes_nothing(dense: Dense):
    assert mask_of(dense).crop(0, dense.shape[0], 0, dense.shape[1]) == mask_of(dense)


@settings(max_examples=200)
@given(dense_masks(), st.data())
def test_pairs_grid_counts_every_rectangle(dense: Dense, data):
    q_bounds, k_bounds = (
        sorted(data.draw(st.lists(st.integers(0, length), min_size=1, max_size=6))) for length in dense.shape
    )
    grid = pairs_grid(mask_of(dense), np.array(q_bounds), np.array(k_bounds))
    assert grid.shape == (len(q_bounds) - 1, len(k_bounds) - 1)
    for i, j in np.ndindex(grid.shape):
        assert grid[i, j] == dense[q_bounds[i] : q_bounds[i + 1], k_bounds[j] : k_bounds[j + 1]].sum()


@settings(max_examples=200)
@given(dense_masks(), st.data())
def test_pairs_blocks_are_the_cells_with_pairs(dense: Dense, data):
    """Also bounds that leave rows out or repeat; and several slices in one cell make one block."""
    q_bounds, k_bounds = (
        sorted(data.draw(st.lists(st.integers(0, length), min_size=1, max_size=6))) for length in dense.shape
    )
    mask = mask_of(dense)
    i, j, pairs = mask.pairs_blocks(np.array(q_bounds), np.array(k_bounds))
    grid = pairs_grid(mask, np.array(q_bounds), np.array(k_bounds))
    assert [column.tolist() for column in np.nonzero(grid)] == [i.tolist(), j.tolist()]
    assert pairs.tolist() == grid[i, j].tolist()


def test_pairs_blocks_of_a_grid_too_large_to_write_out():
    length = 2**31 - 1
    bounds = np.append(np.arange(0, length, 2**14), length)  # 131,072 x 131,072 cells
    mask = Mask(length, length, [[0, length, 0, 0, 1, 0], [5, 6, 9, 0, length, 0]])
    i, j, pairs = mask.pairs_blocks(bounds, bounds)
    assert len(i) == 2 * (len(bounds) - 1) - 1
    assert int(pairs.sum()) == mask.pairs() == length + length - 9
    assert (i[0], j[0], int(pairs[0])) == (0, 0, 2**14 + 2**14 - 9)


def test_pairs_grid_counts_in_parts(monkeypatch):
    rng = np.random.default_rng(0)
    dense = rng.random((40, 30)) < 0.5
    mask, bounds = mask_of(dense), np.arange(0, 31, 3)
    whole = pairs_grid(mask, bounds, bounds)
    monkeypatch.setattr("dyncp.ir.slices.CHUNK_CELLS", 7)
    np.testing.assert_array_equal(pairs_grid(mask, bounds, bounds), whole)


def test_large_masks_are_counted_exactly():
    length = 2**31 - 1
    mask = Mask(length, length, [[0, length, 0, 0, 1, 1]])
    assert mask.pairs() == length * (length + 1) // 2
    bounds = np.linspace(0, length, 5).astype(np.int64)
    assert int(pairs_grid(mask, bounds, bounds).sum()) == mask.pairs()
    assert mask.rows(length - 1, length).tolist() == [[[0, length]]]


def test_many_slices_over_many_blocks():
    length, count = 131_072, 2_000
    edges = np.linspace(0, length, count + 1).astype(np.int64)
    zero, one = np.zeros(count, np.int64), np.ones(count, np.int64)
    mask = Mask(length, length, np.stack([edges[:-1], edges[1:], zero, zero, edges[:-1] + 1, one], axis=1))
    bounds = np.arange(0, length + 1, 1024)
    causal = Mask(length, length, [[0, length, 0, 0, 1, 1]])
    np.testing.assert_array_equal(pairs_grid(mask, bounds, bounds), pairs_grid(causal, bounds, bounds))


def test_equality_is_by_content():
    mask = Mask(4, 4, [[2, 4, 0, 0, 1, 1], [0, 1, 2, 1, 3, 1]])
    same = Mask(4, 4, np.array([[0, 1, 2, 0, 3, 0], [2, 4, 0, 0, 1, 1]], np.int32))
    assert mask == same, "order and the steps of single rows do not matter"
    assert hash(mask) == hash(same)
    assert mask != Mask(4, 5, mask.slices)
    assert mask != Mask(4, 4, mask.slices[:1])
    assert mask != "mask"


def test_a_mask_cannot_be_changed():
    given_slices = np.array([[0, 4, 0, 0, 1, 1]])
    mask = Mask(4, 4, given_slices)
    given_slices[0, 1] = 2
    assert mask.pairs() == 10
    with pytest.raises(ValueError, match="read-only"):
        mask.slices[0, 1] = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        mask.q_length = 5


def test_a_mask_without_slices_sees_nothing():
    mask = Mask(3, 2, [])
    assert mask.pairs() == 0
    assert mask.rows(0, 3).tolist() == [[[0, 0]]] * 3
    assert not mask.dense().any()
    assert mask.crop(1, 3, 0, 1) == Mask(2, 1, [])
    assert pairs_grid(mask, np.array([0, 3]), np.array([0, 2])).tolist() == [[0]]
    assert Mask.from_intervals(3, 2, mask.rows(0, 3)) == mask
    mask.check()


@pytest.mark.parametrize(
    ("q_length", "k_length", "slices", "message"),
    [
        (0, 4, [], "q_length is 0"),
        (4, -1, [], "k_length is -1"),
        (2**31, 4, [], "q_length is 2147483648"),
        (4, 4, [[0, 4, 0, 0, 1]], r"expected integers \[N, 6\]"),
        (4, 4, [[0.0, 4, 0, 0, 1, 1]], r"float64.*expected integers"),
        (4, 4, [[-1, 4, 0, 0, 1, 0]], r"rows must lie in \[0, 4\)"),
        (4, 4, [[0, 5, 0, 0, 1, 0]], r"rows must lie in \[0, 4\)"),
        (4, 4, [[2, 2, 0, 0, 1, 0]], "q_start must be below q_stop"),
        (4, 4, [[0, 4, 0, 2, 1, 1]], "steps must be 0 or 1"),
        (4, 4, [[0, 4, 0, 0, 1, -1]], "steps must be 0 or 1"),
        (4, 4, [[0, 4, 2, 0, 2, 1]], "every row must see a key"),
        (4, 4, [[0, 4, 0, 1, 3, 0]], "every row must see a key"),
        (4, 4, [[0, 4, -1, 0, 3, 0]], r"keys must lie in \[0, 4\)"),
        (4, 4, [[0, 4, 0, 0, 2, 1]], r"keys must lie in \[0, 4\)"),
        (4, 4, [[0, 4, 0, 0, 4, 0], [0, 5, 0, 0, 1, 0]], r"slice 1 of the mask.*\[0, 5, 0, 0, 1, 0\]"),
    ],
)
def test_bad_slices_are_refused(q_length: int, k_length: int, slices: list, message: str):
    with pytest.raises(ValueError, match=message):
        Mask(q_length, k_length, slices)


def test_check_finds_overlapping_slices():
    with pytest.raises(ValueError, match=r"row 2 sees keys \[0, 3\) and \[2, 4\), which overlap"):
        Mask(4, 4, [[0, 4, 0, 0, 1, 1], [2, 3, 2, 0, 4, 0]]).check()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mask: mask.rows(0, 5), r"rows \[0, 5\): expected 0 <= start < stop <= 4"),
        (lambda mask: mask.rows(2, 2), r"rows \[2, 2\)"),
        (lambda mask: mask.crop(0, 5, 0, 1), r"queries \[0, 5\)"),
        (lambda mask: mask.crop(0, 4, 3, 7), r"keys \[3, 7\): expected 0 <= start < stop <= 6"),
        (lambda mask: mask.pairs_blocks([0, 2, 1], [0, 6]), "q_bounds .* ascending"),
        (lambda mask: mask.pairs_blocks([0, 4], [[0, 6]]), "k_bounds .* flat"),
        (lambda mask: Mask.from_intervals(4, 6, np.zeros((3, 1, 2), int)), r"expected integers \[4, R, 2\]"),
        (lambda mask: Mask.from_intervals(1, 6, np.array([[[0, 7]]])), r"row 0 sees keys \[0, 7\)"),
        (lambda mask: Mask.from_intervals(1, 6, np.array([[[-1, 2]]])), r"row 0 sees keys \[-1, 2\)"),
        (lambda mask: Mask.from_row_intervals(2, 6, *np.array([[2], [0], [1]])), "row 2"),
        (lambda mask: Mask.from_row_intervals(2, 6, *np.array([[1], [3], [3]])), "is empty"),
    ],
)
def test_bad_arguments_are_refused(call, message: str):
    with pytest.raises(ValueError, match=message):
        call(Mask(4, 6, [[0, 4, 0, 0, 3, 1]]))


def test_the_diagonal_of_a_causal_mask_is_one_slice():
    """So kernels see it as causal, and plans stay small."""
    assert masks.causal(64).crop(16, 32, 16, 32).slices.tolist() == [[0, 16, 0, 0, 1, 1]]
    assert masks.sliding_window(64, 8).crop(16, 32, 16, 32).slices.tolist() == [[0, 7, 0, 0, 1, 1], [7, 16, 0, 1, 8, 1]]


@pytest.mark.parametrize(
    "row",
    [
        [2**63 - 1, -(2**63), 0, 0, 1, 0],  # one row, by the difference
        [0, 3, 2**63 - 2, 1, 2**63 - 1, 1],  # the last row's keys wrap around, and lie below the limit
        [0, 4, 0, 0, 2**63 - 1, 1],
    ],
)
def test_numbers_that_wrap_around_are_refused(row):
    with pytest.raises(ValueError, match="slice 0 of the mask"):
        Mask(4, 4, [row])
