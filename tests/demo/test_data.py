import numpy as np
import pytest

from dyncp.demo.data import DocumentMasks, TextFolder
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
    dataset = TextFolder(tmp_path, 8)
    assert [path.name for path in dataset.paths] == ["a.txt", "late.md"]
    assert len(dataset) == 2
    assert dataset.lengths.tolist() == [8, 8]
    assert bytes(dataset[0]) == b"01234567"
    assert bytes(dataset[1]) == "grüße, later".encode()[:8]
    assert TextFolder(tmp_path, 100).lengths.tolist() == [10, 14]


def test_the_standard_library_is_there():
    dataset = TextFolder(None, 4096)
    assert len(dataset) > 300
    assert all(path.suffix == ".py" and "site-packages" not in path.parts for path in dataset.paths)
    assert dataset.lengths.min() >= 2
    assert dataset.lengths.max() == 4096
    for index in (0, len(dataset) // 2, len(dataset) - 1):
        assert len(dataset[index]) == dataset.lengths[index]


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no text files"):
        TextFolder(tmp_path, 8)
    with pytest.raises(ValueError, match="is not a folder"):
        TextFolder(tmp_path / "missing", 8)


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
