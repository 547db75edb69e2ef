import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lookahead.loading import LENGTHS, Counting

from dyncp.lookahead.config import Batching
from dyncp.lookahead.lengths import arrow_lengths, measured_lengths, sample_lengths, sample_tokens
from dyncp.lookahead.source import is_stream, make_source


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    """Nothing of the library's is written elsewhere."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)


def rows(lengths=LENGTHS):
    return [list(range(i, i + length)) for i, length in enumerate(lengths)]


def table(lengths=LENGTHS):
    return datasets.Dataset.from_dict({"input_ids": rows(lengths), "title": ["x"] * len(lengths)})


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d,
        lambda d: d.select([3, 0, 3, 11]),
        lambda d: d.select(range(4, 9)),
        lambda d: d.shuffle(seed=4),
        lambda d: d.shuffle(seed=4).select([1, 0]),
        lambda d: d.with_format("torch"),
        lambda d: d.with_format("numpy", columns=["input_ids"]),
        lambda d: d.cast_column("input_ids", datasets.LargeList(datasets.Value("int64"))),
        lambda d: datasets.concatenate_datasets([d, table((4, 6, 2))]),
        lambda d: d.train_test_split(0.4, seed=1)["test"],
        lambda d: d.filter(lambda row: len(row["input_ids"]) > 9, keep_in_memory=True),
    ],
)
def test_lengths_of_a_hugging_face_dataset_are_read_where_they_lie(change, tmp_path, monkeypatch):
    table().save_to_disk(tmp_path / "table", num_shards=3)
    datasets_ = [change(table()), change(datasets.load_from_disk(tmp_path / "table"))]
    expected = [[len(dataset[i]["input_ids"]) for i in range(len(dataset))] for dataset in datasets_]
    read, keys = datasets.Dataset.__getitem__, []
    monkeypatch.setattr(datasets.Dataset, "__getitem__", lambda self, key: keys.append(key) or read(self, key))
    assert [measured_lengths(dataset).tolist() for dataset in datasets_] == expected
    assert keys == [0, 0]  # to see that the library keeps what it returns


def test_lists_of_one_length_have_it_in_their_type():
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"), length=3)})
    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 4}, features=features)
    assert arrow_lengths(dataset.select([2, 1])).tolist() == [3, 3]


def test_what_is_not_the_column_is_read():
    class Longer(datasets.Dataset):
        def __getitem__(self, key):
            return {"input_ids": [0, *super().__getitem__(key)["input_ids"]]}

    longer = Longer(table().data)
    transformed = table().with_transform(lambda rows: {"input_ids": [[0, *ids] for ids in rows["input_ids"]]})
    for dataset in (longer, transformed):
        assert arrow_lengths(dataset) is None
        assert measured_lengths(dataset).tolist() == [length + 1 for length in LENGTHS]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"]}, "sample 0 is a mapping of text; it needs 'input_ids'"),
        ({"input_ids": ["a b"]}, "sample 0 is <U3"),
        ({"input_ids": [[0.5]]}, "sample 0 is float64"),
        ({"input_ids": [[1], None]}, "sample 1 is NoneType"),
        ({"input_ids": [[1], []]}, "sample 1 "),
        ({"input_ids": []}, "the dataset has no samples"),
    ],
)
def test_columns_that_cannot_be_are_refused(columns, message):
    with pytest.raises(ValueError, match=message):
        make_source(datasets.Dataset.from_dict(columns), Batching(20))


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_batches_of_a_hugging_face_dataset(form):
    dataset = table().shuffle(seed=3).with_format(form)
    source = make_source(dataset, Batching(128, 50))
    draws = list(source.draws(1))
    for draw in draws:
        assert len(source.global_batch(draw).sequences) == len(draw.samples)
        for sample, length in zip(draw.samples.tolist(), draw.lengths.tolist(), strict=True):
            expected = dataset.with_format(None)[sample]["input_ids"][:50]
            assert source.tokens(sample).tolist() == expected and len(expected) == length
    assert sum(len(draw.samples) for draw in draws) == len(LENGTHS)


@pytest.mark.parametrize("form", [None, "torch"])
def test_batches_of_a_hugging_face_stream(form):
    def stream():
        return table().to_iterable_dataset(num_shards=3).shuffle(seed=3, buffer_size=4).with_format(form)

    def content(source, epoch, start=0):
        return [
            (draw.digest, [source.tokens(place).tolist() for place in draw.samples.tolist()])
            for draw in source.draws(epoch, start)
        ]

    assert is_stream(stream())
    epochs = []
    for epoch in (0, 1):
        expected = stream()
        expected.set_epoch(epoch)
        tokens = [list(map(int, row["input_ids"]))[:50] for row in expected]
        whole = content(make_source(stream(), Batching(128, 50)), epoch)
        assert [ids for _, batch in whole for ids in batch] == tokens
        for start in range(len(whole) + 1):
            assert content(make_source(stream(), Batching(128, 50)), epoch, start) == whole[start:]
        epochs.append(whole)
    assert epochs[0] != epochs[1]


def test_lengths_may_be_given_in_many_forms():
    column = datasets.Dataset.from_dict({"length": [3, 4]})["length"]
    for lengths in ([3, 4], (3, 4), np.array([3, 4], np.uint16), torch.tensor([3, 4]), column):
        source = make_source([[1] * 3, [1] * 4], Batching(8, lengths=lengths))
        assert source.lengths.tolist() == [3, 4] and source.lengths.dtype == np.int64


@given(lengths=st.lists(st.integers(1, 9), min_size=1))
def test_lengths_are_told_given_or_measured(lengths):
    told = Counting(lengths)
    assert list(sample_lengths(told, Batching(99))) == lengths
    assert list(sample_lengths(told, Batching(99, lengths=lengths[::-1]))) == lengths[::-1]
    assert not told.read
    assert sample_lengths(told.samples, Batching(99)).tolist() == lengths


def test_another_number_of_lengths_than_of_samples_is_refused():
    with pytest.raises(ValueError, match="1 lengths for a dataset of 12 samples"):
        sample_lengths(Counting(), Batching(99, lengths=[1]))


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.uint64])
def test_tokens_become_int64(kind):
    assert sample_tokens(np.arange(3, dtype=kind), 0).dtype == np.int64
