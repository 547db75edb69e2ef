import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lookahead.loading import Counting
from lookahead.sources import ByEpoch, Stream, content
from torch.utils.data import IterableDataset

from dyncp import masks
from dyncp.lookahead.config import Batching
from dyncp.lookahead.source import is_stream, make_source

LENGTH_LISTS = st.lists(st.integers(1, 30), min_size=1, max_size=30)


def make(kind, lengths, **settings):
    """A source over samples of these lengths."""
    match kind:
        case "samples":
            return make_source(Counting(lengths), Batching(30, seed=2, **settings))
        case "stream":
            return make_source(Stream(lengths, shuffled=True), Batching(30, **settings))
    return make_source(Counting(lengths), Batching(**settings), ByEpoch(len(lengths)))


KINDS = pytest.mark.parametrize("kind", ["samples", "stream", "batch_sampler"])


@KINDS
@given(lengths=LENGTH_LISTS, accumulate=st.integers(1, 3), drop_last=st.booleans(), epoch=st.integers(0, 2))
def test_a_pass_that_begins_anywhere_has_the_batches_of_an_unbroken_one(kind, lengths, accumulate, drop_last, epoch):
    source = make(kind, lengths, accumulate=accumulate, drop_last=drop_last)
    try:
        whole = content(source.draws(epoch))
    except ValueError as error:
        assert drop_last and "drop_last" in str(error)  # nothing was left
        return
    for start in range(len(whole) + 1):
        assert content(source.draws(epoch, start)) == whole[start:]
    with pytest.raises(ValueError, match=f"iteration {len(whole) + 1} of epoch {epoch} .* it has {len(whole)} batches"):
        list(source.draws(epoch, len(whole) + 1))


@KINDS
@given(lengths=LENGTH_LISTS, accumulate=st.integers(1, 3))
def test_steps_have_so_many_batches_and_all_their_labels(kind, lengths, accumulate):
    source = make(kind, lengths, accumulate=accumulate)
    draws = list(source.draws(0))
    assert [draw.iteration for draw in draws] == list(range(len(draws)))
    assert [draw.step for draw in draws] == [draw.iteration // accumulate for draw in draws]
    assert sorted(np.concatenate([draw.samples for draw in draws]).tolist()) == list(range(len(lengths)))
    assert len({draw.digest for draw in draws}) == len(draws)
    for step in range(draws[-1].step + 1):
        parts = [draw for draw in draws if draw.step == step]
        assert [part.ends_step for part in parts] == [False] * (len(parts) - 1) + [True]
        assert {part.num_label_tokens for part in parts} == {sum(int((part.lengths - 1).sum()) for part in parts)}
    if kind == "samples":
        assert source.batches(0) == len(draws)


@pytest.mark.parametrize("kind", ["samples", "stream"])
@given(lengths=LENGTH_LISTS, drop_last=st.booleans())
def test_the_budget_holds_and_is_filled(kind, lengths, drop_last):
    source = make(kind, [*lengths, 30], drop_last=drop_last)
    lengths = np.array([*lengths, 30])
    draws = list(source.draws(1))
    tokens = [int(draw.lengths.sum()) for draw in draws]
    assert max(tokens) <= 30
    for used, following in zip(tokens, draws[1:], strict=False):
        assert used + following.lengths[0] > 30
    if kind == "samples":
        assert all(draw.lengths.tolist() == lengths[draw.samples].tolist() for draw in draws)
    whole = list(make(kind, lengths.tolist()).draws(1))
    left_out = drop_last and whole[-1].lengths.sum() < 30
    assert content(draws) == content(whole[:-1] if left_out else whole)


@KINDS
def test_epochs_differ_and_so_do_their_digests(kind):
    source = make(kind, list(range(1, 25)))
    first, second, again = (list(source.draws(epoch)) for epoch in (0, 1, 0))
    assert content(first) == content(again)
    assert [draw.lengths.tolist() for draw in first] != [draw.lengths.tolist() for draw in second]
    assert not {draw.digest for draw in first} & {draw.digest for draw in second}


def test_a_last_step_that_is_not_full_is_left_out_on_request():
    assert make("samples", [30] * 7, accumulate=3, drop_last=True).batches(0) == 6
    assert make("samples", [30] * 7, accumulate=3).batches(0) == 7
    last = list(make("stream", [30] * 7, accumulate=3).draws(0))[-1]
    assert (last.step, last.ends_step, last.num_label_tokens) == (2, True, 29)


@KINDS
def test_leaving_out_everything_is_refused(kind):
    source = make(kind, [30] * 2, accumulate=3, drop_last=True)
    with pytest.raises(ValueError, match="epoch 0 has 2 batches for steps of 3, and drop_last leaves out"):
        list(source.draws(0))


def test_leaving_out_the_only_batch_is_refused():
    for kind, message in (
        ("samples", "all 2 samples fit into one batch of 3"),
        ("stream", "epoch 0 has no full batch"),
    ):
        with pytest.raises(ValueError, match=f"{message}.*drop_last"):
            list(make(kind, [1, 2], drop_last=True).draws(0))


def test_masks_may_depend_on_what_is_in_a_sample():
    def window(sample, length):
        return {"near": masks.sliding_window(length, 1 + int(sample["input_ids"][0]) % 3), "all": masks.full(length)}

    stream = Stream()
    for dataset in (stream, [{"input_ids": tokens} for tokens in stream.samples]):
        source = make_source(dataset, Batching(128, 50, shuffle=False, sample_mask=window, weights={"near": 3}))
        for draw in source.draws(0):
            batch = source.global_batch(draw)
            assert batch.weights == {"near": 3, "all": 1}
            for sequence, number in zip(batch.sequences, draw.samples.tolist(), strict=True):
                expected = window({"input_ids": stream.samples[number]}, sequence.length)
                assert sequence.masks == expected


def test_a_mask_function_is_given_index_and_length():
    source = make_source(
        Counting(), Batching(128, 50, mask=lambda index, length: masks.sliding_window(length, index + 1))
    )
    draw = next(source.draws(0))
    for sequence, number in zip(source.global_batch(draw).sequences, draw.samples.tolist(), strict=True):
        assert sequence.masks["default"] == masks.sliding_window(sequence.length, number + 1)


def test_an_iterator_gives_one_pass():
    source = make_source(iter([[1, 2], [3]]), Batching(20))
    assert len(list(source.draws(0))) == 1
    with pytest.raises(ValueError, match=r"the dataset is an iterator .list_iterator.* gives one pass, and epoch 1"):
        source.draws(1)
    source = make_source(Counting(), Batching(), ([index] for index in range(3)))
    assert len(list(source.draws(0))) == 3
    with pytest.raises(ValueError, match=r"the batch_sampler is an iterator .generator"):
        source.draws(1)


@pytest.mark.parametrize("library", ["torch", "generator", "no length", "length that fails"])
def test_streams_are_told_from_map_style_datasets(library):
    class Sized(IterableDataset):
        def __iter__(self):
            yield [1, 2]

        def __len__(self):
            return 1

    class Unsized:
        def __getitem__(self, index):
            return [1, 2]

        def __iter__(self):
            yield [1, 2]

    class Unknown(Unsized):
        def __len__(self):
            raise NotImplementedError

    dataset = {"torch": Sized(), "generator": iter([[1, 2]]), "no length": Unsized(), "length that fails": Unknown()}
    assert is_stream(dataset[library])
    (draw,) = make_source(dataset[library], Batching(8)).draws(0)
    assert draw.lengths.tolist() == [2]
    assert not is_stream([[1, 2]]) and not is_stream({0: [1, 2]})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: make_source(Counting(), Batching()), r"give Batching\(tokens=...\) or a batch_sampler"),
        (lambda: make_source(Stream(), Batching()), "a stream is cut into batches by a token budget"),
        (lambda: make_source(Stream(), Batching(9), [[0]]), "the dataset is a stream, whose samples have none"),
        (lambda: make_source(Stream(), Batching(9, lengths=[1])), "measured as they are read: leave out lengths"),
        (lambda: make_source(Stream(), Batching(9, length_cache="x")), "leave out length_cache"),
        (lambda: make_source(Counting(), Batching(9), 3), "the batch_sampler is 3; it must be an iterable"),
        (lambda: make_source({"train": [1]}, Batching(9)), "is a mapping of train; give one of these"),
        (lambda: make_source(3, Batching(9)), "the dataset is 3; it needs __len__ and __getitem__, or __iter__"),
        (lambda: make_source([], Batching(), [[0]]), "the dataset has no samples"),
        (lambda: make_source(Counting(), Batching(90)).draws(-1), "epoch is -1"),
        (lambda: make_source(Counting(), Batching(90)).draws(0, -1), "start is -1"),
        (lambda: make_source(Stream(), Batching(90)).draws(0, 0.5), "start is 0.5"),
    ],
)
def test_bad_arguments_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
