import pytest

from dyncp.reproduce import published
from dyncp.reproduce.compare import BEST, BEST_BASELINE, BEST_STATIC
from dyncp.reproduce.fit import error_text, errors, median_error, order_kept
from dyncp.reproduce.page import cell, put, table
from dyncp.reproduce.points import Point
from dyncp.reproduce.summary import in_short

AT = {"data": "LongAlign", "mask": "causal", "scale": "4", "pass": "forward"}


def test_a_cell_says_ours_the_papers_and_the_ratio():
    assert cell(Point(AT, "TE", (10.0, 14.0), 10.0)) == "12.0 ± 2.00 / 10.0 = 1.20"
    assert cell(Point(AT, "TE", (0.5,), None, "s")) == "0.50"
    assert cell(Point(AT, "TE", (1.0, 4.0), 4.0, "x")) == "2.00 / 4.00 = 0.50"  # the geometric mean


def test_points_go_to_json_and_back():
    point = Point(AT, "TE", (10.0, 14.0), 10.0)
    figures = point.figures()
    assert (figures["mean"], figures["spread"], figures["ratio"]) == (12.0, 2.0, 1.2)
    assert Point.of(figures) == point


def test_a_table_has_a_row_for_each_place():
    points = [Point(AT, "TE", (1.0,)), Point(AT, "dyncp", (2.0,)), Point(AT | {"scale": "2"}, "dyncp", (3.0,))]
    lines = table(points).splitlines()
    assert lines[0] == "| data | mask | scale | pass | TE (ms) | dyncp (ms) |"
    assert lines[2:] == [
        "| LongAlign | causal | 4 | forward | 1.00 | 2.00 |",
        "| LongAlign | causal | 2 | forward |  | 3.00 |",
    ]


def test_a_part_of_a_page_is_replaced_where_it_is(tmp_path):
    page = tmp_path / "page.md"
    put(page, "a", "one")
    put(page, "b", "two")
    page.write_text(page.read_text() + "\nby hand\n")
    put(page, "a", "three")
    text = page.read_text()
    assert "one" not in text
    assert text.index("three") < text.index("two") < text.index("by hand")


def test_the_papers_values():
    assert published.micro_ms("RFA_ring", "longdatacollections", 0.5, "causal", "forward") == 28.293
    assert published.micro_ms("TE", "longalign", 4, "lambda", "backward") == 22.862
    assert published.iteration_s("MLM", "longalign", 131_072, "causal") == 2.79
    assert published.speedup("longdatacollections", 0.5, "causal") == pytest.approx(2.43, abs=0.01)
    assert published.speedup("longalign", 4, "lambda") == pytest.approx((17.488 + 22.862) / (4.065 + 7.033))


def bars(te, ring):
    return [
        Point(AT, "TE", (te,), 12.0),
        Point(AT, "RFA ring", (ring,), 24.0),
        Point(AT, "DCP as published", (6.0,), 12.0),
    ]


def test_errors_of_a_fit():
    points = bars(12.0, 30.0)
    assert errors(points)[1:] == [
        ["TE", "causal", "forward", "1", "0%", "0%", "+0%"],
        ["RFA ring", "causal", "forward", "1", "25%", "25%", "+25%"],
        ["DCP as published", "causal", "forward", "1", "50%", "50%", "-50%"],
    ]
    assert median_error(points, ["TE", "RFA ring"]) == 0.125
    assert order_kept(points, ["TE", "RFA ring"]) == (1, 1)
    assert order_kept(bars(31.0, 30.0), ["TE", "RFA ring"]) == (0, 1)
    assert "DCP as published (never fitted): 50% median" in error_text(points)


def test_bars_that_do_not_go_with_their_neighbours_do_not_count():
    at = AT | {"data": "LongDataCollections", "scale": "1"}
    assert order_kept([*bars(12.0, 30.0), Point(at, "RFA ring", (27.0,), 52.478)], ["TE", "RFA ring"]) == (1, 1)
    assert median_error([*bars(12.0, 30.0), Point(at, "RFA ring", (27.0,), 52.478)], ["RFA ring"]) == 0.25


def test_nothing_in_short_without_rivals():
    assert in_short({}) == ""


def test_all_in_a_few_lines():
    here = AT | {"constants": "hardware"}
    points = [
        Point(here, BEST_BASELINE, (2.0,), 1.5, "x"),
        Point(here, BEST_STATIC, (1.5,), None, "x"),
        Point(here, BEST, (0.9,), None, "x"),
        Point(here, "hidden forward", (0.75,), None, "share"),
    ]
    text = in_short({"rivals": points})
    assert "against the best baseline dyncp is 2.00 to 2.00 times as fast" in text
    assert "slower in 1 of 1 settings (LongAlign causal 4 forward)" in text
    assert "in 1 of 1 settings" in text
    assert "75% does" in text
