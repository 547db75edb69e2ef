"""Lengths of data sets."""

import sys
from types import SimpleNamespace

import pytest

from dyncp.tune.lengths import read_lengths


@pytest.mark.parametrize("text", ["[5, 700, 31]", "5\n700\n\n31\n", "5 700 31"])
def test_numbers_in_a_file(tmp_path, text):
    path = tmp_path / "lengths"
    path.write_text(text)
    found = read_lengths(str(path))
    assert found.tokens == (5, 700, 31) and str(path) in found.source


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no lengths"),
        ("[]", "has no lengths"),
        ("[5, 0]", r"\[1\] is 0; expected a whole number from 1"),
        ("5\nx", "has no lengths: .*'x'"),
        ("[5, 2.5]", "2.5"),
        ("[5", "begins like a JSON list, but is no JSON: .*; expected a JSON list of lengths"),
        ('{"lengths": [1, 2]}', "has JSON objects in it; expected a JSON list of lengths"),
    ],
)
def test_files_without_lengths(tmp_path, text, message):
    path = tmp_path / "lengths"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_lengths(str(path))


def test_bytes_that_are_no_text(tmp_path):
    path = tmp_path / "lengths"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not text"):
        read_lengths(str(path))


def test_a_folder_of_text_files(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 400)
    (tmp_path / "b.md").write_text("y" * 10)
    (tmp_path / "c.bin").write_bytes(b"\0" * 400)
    assert sorted(read_lengths(str(tmp_path)).tokens) == [2, 100]
    found = read_lengths(str(tmp_path), bytes_per_token=1)
    assert sorted(found.tokens) == [10, 400] and "1 bytes a token" in found.source
    with pytest.raises(ValueError, match="bytes_per_token"):
        read_lengths(str(tmp_path), bytes_per_token=0)


def test_a_data_set_needs_what_reads_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"some/data is neither a file nor a folder; .* pip install datasets"):
        read_lengths("some/data")


def test_a_data_set(monkeypatch):
    rows = [{"text": "x" * 40}, {"text": "é" * 2}]
    asked = []

    def load_dataset(name, split, streaming):
        asked.append((name, split, streaming))
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_lengths("some/data").tokens == (10, 1)
    assert asked == [("some/data", "train", True)]
    with pytest.raises(ValueError, match="cannot read column 'body' of the data set some/data"):
        read_lengths("some/data", column="body")
    rows.clear()
    with pytest.raises(ValueError, match="the data set some/data is empty"):
        read_lengths("some/data")
