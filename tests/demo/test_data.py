from pathlib import Path

import numpy as np
import pytest

from dyncp.demo.data import DocumentMasks, TextFiles
from dyncp.masks import causal, from_spec, lambda_, parse_spec

FOUR = ("causal", "lambda", "causal_blockwise", "shared_question")


def test_a_folder_gives_the_bytes_of_its_text_files_in_a_fixed_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "late.md").write_text("grüße, later")
    (tmp_path / "a.txt").write_text("0123456789")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "one.txt").write_text("1")
    (tmp_path / "binary").write_bytes(b"ab\0cd")
    (tmp_path / ".hidden").write_text("not this one")
    dataset = TextFiles.below(tmp_path, 8, tmp_path)
    assert [path.name for path in dataset.paths] == ["a.txt", "late.md"]
    assert len(dataset) == 2
    assert dataset.lengths.tolist() == [8, 8]
    assert bytes(dataset[0]) == b"01234567"
    assert bytes(dataset[1]) == "grüße, later".encode()[:8]
    assert TextFiles.below(tmp_path, 100, tmp_path / "out").lengths.tolist() == [10, 14]


@pytest.mark.parametrize("relative", [False, True])
def test_results_below_the_folder_are_no_documents(tmp_path, monkeypatch, relative):
    (tmp_path / "a.txt").write_text("0123456789")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "result.json").write_text("{}")
    (tmp_path / "outside.txt").write_text("0123")
    monkeypatch.chdir(tmp_path)
    folder, out = (Path(), Path("out")) if relative else (tmp_path, tmp_path / "out")
    assert [path.name for path in TextFiles.below(folder, 8, out).paths] == ["a.txt", "outside.txt"]
    # results in the folder itself, or above it, leave it as it is
    for elsewhere in (tmp_path, tmp_path.parent):
        assert len(TextFiles.below(folder, 8, elsewhere)) == 3


def test_the_list_of_files_can_be_handed_over(tmp_path):
    (tmp_path / "a.txt").write_text("0123456789")
    (tmp_path / "b\udcff.txt").write_text("not a name in any encoding")
    dataset = TextFiles.below(tmp_path, 8, tmp_path)
    (tmp_path / "later.txt").write_text("came too late")
    ours = TextFiles.from_json(dataset.to_json())
    assert ours.paths == dataset.paths and ours.lengths.tolist() == [8, 8]
    assert bytes(ours[0]) == b"01234567"


def test_the_standard_library_is_there():
    dataset = TextFiles.below(None, 4096, Path("demo-out"))
    assert len(dataset) > 300
    assert all(path.suffix == ".py" and "site-packages" not in path.parts for path in dataset.paths)
    assert dataset.lengths.min() >= 2
    assert dataset.lengths.max() == 4096
    for index in (0, len(dataset) // 2, len(dataset) - 1):
        assert len(dataset[index]) == dataset.lengths[index]


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no text files"):
        TextFiles.below(tmp_path, 8, tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        TextFiles.below(tmp_path / "missing", 8, tmp_path)


@pytest.mark.parametrize("length", [2, 3, 5, 17, 400, 4096])
def test_every_kind_of_the_demo_fits_every_length(length):
    masks = DocumentMasks(FOUR, seed=0)
    for index in range(20):
        mask = masks(index, length)
        assert (mask.q_length, mask.k_length) == (length, length)
        assert not np.triu(mask.dense(), 1).any()  # nobody sees the token it predicts


def test_documents_keep_their_kind_and_all_kinds_occur():
    masks = DocumentMasks(("causal", "lambda:sink=1,window=4"), seed=5)
    kinds = {causal(30): 0, lambda_(30, 1, 4): 1}
    drawn = [kinds[masks(index, 30)] for index in range(40)]
    assert set(drawn) == {0, 1}
    assert drawn == [kinds[DocumentMasks(("causal", "lambda:sink=1,window=4"), 5)(index, 30)] for index in range(40)]
    assert from_spec(parse_spec("lambda:sink=1,window=4"), 30) in kinds
