import pytest

from dyncp.report.table import columns, format_bytes, format_seconds


def test_first_column_left_others_right():
    text = columns([("", "forward", "backward"), ("moved", "1 B", "20 B"), ("a note, which is longer than any cell",)])
    assert text.splitlines() == [
        "       forward  backward",
        "moved      1 B      20 B",
        "a note, which is longer than any cell",
    ]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1234, "1.23 kB"),
        (45_600, "45.6 kB"),
        (1_484_000_000, "1,484 MB"),
        (2e12, "2,000 GB"),
        (12e9, "12.0 GB"),
    ],
)
def test_bytes_have_decimal_units(size_bytes, text):
    assert format_bytes(size_bytes) == text


def test_seconds():
    assert format_seconds(1.234) == "1.23 s"
    assert format_seconds(0.0456) == "45.6 ms"
