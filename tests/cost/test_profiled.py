"""Tables of measured times: written and read back, interpolated, refused."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp.cost.model import FORMS, Work
from dyncp.cost.profiled import Profiled, interpolate
from dyncp.ir.plan import BACKWARD, FORWARD, PASSES
from dyncp.ir.shape import AttentionShape

SHAPE = AttentionShape(4, 2, 8)
ROWS, COLUMNS = (128, 512, 1024), (128, 256)
GRID = np.array([[1.0, 2.0], [4.0, 7.0], [9.0, 16.0]]) * 1e-4


def table(**changes):
    seconds = {pass_.name: {form: (GRID * (1 + f)).tolist() for f, form in enumerate(FORMS)} for pass_ in PASSES}
    fields = {"q_tokens": ROWS, "kv_tokens": COLUMNS, "seconds": seconds, "bytes_per_s": 1e9}
    return Profiled(**(fields | changes))


def full(q_tokens, kv_tokens, launch=0):
    return Work(*(np.array([value]) for value in (launch, 0, q_tokens, kv_tokens, q_tokens * kv_tokens)))


@pytest.mark.parametrize("cores", [math.inf, 2.0])
def test_is_read_back_as_written(tmp_path, cores):
    written = table(launch_s=1e-5, instruction_s=2e-6, cores=cores)
    path = tmp_path / "table.json"
    written.write(path)
    assert Profiled.read(path) == written
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"device": "further fields are ignored"}))
    assert Profiled.read(path) == written


def test_is_exact_at_the_points_of_the_grid():
    cost = table(launch_s=1e-3)
    for i, rows in enumerate(ROWS):
        for j, columns in enumerate(COLUMNS):
            for pass_ in (FORWARD, BACKWARD):
                found = cost.attention_s(pass_, SHAPE, full(rows, columns), 1)
                assert found[0] == pytest.approx(GRID[i, j] + 1e-3)


def test_forms_have_tables_of_their_own():
    causal = Work(*(np.array([value]) for value in (0, 0, 128, 128, 128 * 129 // 2)))
    masked = Work(*(np.array([value]) for value in (0, 0, 128, 128, 128 * 128 // 2)))
    assert table().attention_s(FORWARD, SHAPE, causal, 1)[0] == pytest.approx(2 * GRID[0, 0])
    assert table().attention_s(FORWARD, SHAPE, masked, 1)[0] == pytest.approx(3 * GRID[0, 0])


def masked_s(part, tokens, cost=None):
    pairs = np.asarray([round(each * tokens * tokens) for each in part])
    same = np.full(len(part), tokens)
    number = np.arange(len(part))
    return (cost or table()).attention_s(FORWARD, SHAPE, Work(number, number, same, same, pairs), len(part))


def test_masked_blocks_take_time_by_their_pairs():
    seconds = masked_s([1e-4, 0.1, 0.25, 0.5, 0.75], 256)
    least, half = 3 * GRID[0, 0], seconds[3]
    # the mean of a corner, which costs twice its pairs, and of a band, which costs as much as half of all pairs
    assert seconds[:3] == pytest.approx([least + (half - least) * share for share in (0.5001, 0.6, 0.75)], rel=1e-3)
    assert seconds[4] == half  # in this table full blocks take less than masked ones


def test_masked_blocks_come_near_to_full_ones():
    grids = {name: {"full": (GRID * 2).tolist(), "causal": GRID.tolist(), "masked": GRID.tolist()}
             for name in ("forward", "backward")}  # fmt: skip
    seconds = masked_s([0.5, 0.75, 1 - 1e-4], 1024, table(seconds=grids))
    whole = table(seconds=grids).attention_s(FORWARD, SHAPE, full(1024, 1024), 1)[0]
    assert seconds == pytest.approx([whole / 2, whole * 0.75, whole], rel=1e-3)


@given(st.integers(1, 5000), st.lists(st.floats(0.0, 0.999), min_size=2, max_size=9))
def test_more_pairs_never_take_less(tokens, parts):
    parts = [round(part * tokens * tokens) / tokens**2 for part in sorted(parts)]
    parts = [part for part in parts if part < 1 and 2 * round(part * tokens**2) != tokens * (tokens + 1)]
    seconds = masked_s(parts, tokens)
    assert (np.diff(seconds) >= -1e-12 * seconds[1:]).all()
    assert (seconds >= 3 * GRID[0, 0] * (1 - 1e-12)).all()


def test_launches_add_up_their_items():
    items = Work(*(np.array([value, value]) for value in (1, 0, 128, 128, 128 * 128)))
    assert table(launch_s=1.0).attention_s(FORWARD, SHAPE, items, 3).tolist() == pytest.approx([0, 1 + 2e-4, 0])
    assert table().move_s(np.array([2e9])).tolist() == [2.0]


def test_between_points_it_is_the_mean_in_logarithms():
    found = interpolate(ROWS, COLUMNS, GRID, np.array([256]), np.array([128]))  # half way from 128 to 512
    assert found[0] == pytest.approx(math.sqrt(GRID[0, 0] * GRID[1, 0]))


def test_beyond_the_grid():
    found = interpolate(ROWS, COLUMNS, GRID, np.array([4096, 4096, 1]), np.array([256, 512, 1]))
    assert found.tolist() == pytest.approx([4 * GRID[2, 1], 8 * GRID[2, 1], GRID[0, 0]])


def test_a_grid_of_one_point():
    found = interpolate((128,), (128,), np.array([[1.0]]), np.array([64, 128, 256]), np.array([128, 128, 256]))
    assert found.tolist() == pytest.approx([1.0, 1.0, 4.0])


@given(st.lists(st.integers(1, 5000), min_size=2, max_size=2), st.integers(1, 1000))
def test_more_tokens_never_take_less(q_tokens, kv_tokens):
    few, many = sorted(q_tokens)
    sizes = np.array([few, many])
    less, more = interpolate(ROWS, COLUMNS, GRID, sizes, np.full(2, kv_tokens))
    assert less <= more * (1 + 1e-12)
    less, more = interpolate(COLUMNS, ROWS, GRID.T, np.full(2, kv_tokens), sizes)
    assert less <= more * (1 + 1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_tokens": ()}, "ascending sizes"),
        ({"q_tokens": (512, 128, 1024)}, "ascending sizes"),
        ({"kv_tokens": (0, 4)}, r"kv_tokens\[0\] is 0"),
        ({"kv_tokens": (None, 4)}, r"kv_tokens\[0\] is None"),
        ({"kv_tokens": (128, 256, 512)}, "expected positive numbers"),
        ({"bytes_per_s": 0.0}, "bytes_per_s"),
        ({"launch_s": -1.0}, "launch_s"),
        ({"seconds": {"forward": {}}}, "no grid of seconds of the forward pass, form 'full'"),
        ({"seconds": {"forward": {"full": [[1], [1, 2]]}}}, "no grid of seconds"),
        ({"seconds": 4}, "no grid of seconds"),
    ],
)
def test_bad_tables_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        table(**changes)


def test_times_are_positive():
    seconds = table().seconds
    worse = {**seconds, "backward": {**seconds["backward"], "causal": (GRID * 0).tolist()}}
    with pytest.raises(ValueError, match="backward pass, form 'causal'"):
        table(seconds=worse)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("3", "expected an object, got int"),
        ("[]", "got list"),
        ("{}", "it lacks q_tokens, kv_tokens"),
    ],
)
def test_files_that_are_no_tables(tmp_path, text, message):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Profiled.read(path)
