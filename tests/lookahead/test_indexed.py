import threading
from collections import Counter

import numpy as np
import pytest
import torch
from lookahead.loading import LENGTHS, Counting
from lookahead.sources import ByEpoch, content
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from dyncp.lookahead.config import Batching
from dyncp.lookahead.source import make_source


def test_no_sample_is_read_until_its_tokens_are_asked_for():
    dataset = Counting()
    source = make_source(dataset, Batching(128, 50))
    draws = list(source.draws(0, 2))
    source.global_batch(draws[0])
    assert dataset.read == []
    for draw in draws:
        for sample, length in zip(draw.samples.tolist(), draw.lengths.tolist(), strict=True):
            tokens = source.tokens(sample)
            assert tokens.dtype == np.int64 and len(tokens) == length
            assert tokens.tolist() == dataset.samples[sample][:50].tolist()
        source.release(draw)


def test_evaluation_takes_samples_in_their_order():
    draws = list(make_source(Counting(), Batching(128, 50, shuffle=False)).draws(3))
    assert np.concatenate([draw.samples for draw in draws]).tolist() == list(range(len(LENGTHS)))


def growing(told):
    class Growing:
        def __init__(self):
            self.samples = [np.arange(4)] * 5
            self.read = []

        def __len__(self):
            return len(self.samples)

        def __getitem__(self, index):
            self.read.append(index)
            return self.samples[index]

        if told:

            def lengths(self):
                return [len(sample) for sample in self.samples]

    return Growing()


@pytest.mark.parametrize("told", [False, True])
def test_a_dataset_may_grow_and_shrink_between_epochs(told):
    dataset = growing(told)
    source = make_source(dataset, Batching(8))
    assert source.batches(0) == 3
    running = source.draws(0)
    first = next(running)
    dataset.samples = [np.arange(7)] * 3 + [np.arange(4)] * 5
    count = source.batches(1)
    assert [draw.lengths.tolist() for draw in (first, *running)] == [[4, 4], [4, 4], [4]]  # as it was when it began
    after = list(source.draws(1))
    assert count == source.batches(1) == len(after)
    assert sorted(np.concatenate([draw.samples for draw in after]).tolist()) == list(range(8))
    assert sorted(np.concatenate([draw.lengths for draw in after]).tolist()) == [4] * 5 + [7] * 3
    assert content(source.draws(1, 2)) == content(after[2:])
    dataset.samples = [np.arange(3)] * 2
    assert [draw.lengths.tolist() for draw in source.draws(2)] == [[3, 3]]
    assert bool(dataset.read) is not told


def test_threads_that_find_a_dataset_grown_measure_it_once():
    class Slow(list):
        told = 0

        def lengths(self):
            self.told += 1
            threading.Event().wait(0.02)
            return [len(sample) for sample in self]

    dataset = Slow([np.arange(4)] * 5)
    source = make_source(dataset, Batching(8))
    dataset.extend([np.arange(4)] * 4)
    counts = []
    threads = [threading.Thread(target=lambda: counts.append(source.batches(0))) for _ in range(3)]
    for thread in threads:
        thread.start()
    counts.append(len(list(source.draws(0))))
    for thread in threads:
        thread.join()
    assert counts == [5] * 4 and dataset.told == 2


def test_given_lengths_do_not_fit_a_dataset_that_grew():
    dataset = growing(told=False)
    source = make_source(dataset, Batching(8, lengths=[4] * 5))
    dataset.samples.append(np.arange(2))
    with pytest.raises(ValueError, match=r"the dataset has 6 samples now, but Batching\.lengths has 5: make a loader"):
        source.draws(1)


def test_a_sample_of_another_length_is_refused():
    source = make_source(Counting((4, 6)), Batching(20, lengths=[4, 5]))
    with pytest.raises(ValueError, match="sample 1 has 6 tokens, but its length was given as 5"):
        source.tokens(1)


def test_samples_are_read_by_one_thread_at_a_time():
    class OneAtATime(Counting):
        inside = 0

        def __getitem__(self, index):
            self.inside += 1
            assert self.inside == 1
            threading.Event().wait(0.002)
            self.inside -= 1
            return super().__getitem__(index)

    dataset = OneAtATime()
    source = make_source(dataset, Batching(128))
    failed = []

    def read():
        try:
            for index in range(len(LENGTHS)):
                source.tokens(index)
        except AssertionError as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert set(Counter(dataset.read).values()) == {4}


def test_batches_may_come_from_torch():
    dataset = Counting()
    source = make_source(dataset, Batching(max_length=50), BatchSampler(SequentialSampler(dataset), 5, drop_last=False))
    draws = list(source.draws(0))
    assert source.batches(0) == len(draws) == 3
    assert [draw.samples.tolist() for draw in draws] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert draws[0].lengths.tolist() == [40, 7, 1, 23, 50]
    assert not dataset.read


def test_nothing_is_cut_when_neither_budget_nor_cut_is_given():
    (draw,) = make_source(Counting(), Batching(), [range(12)]).draws(0)
    assert draw.lengths.tolist() == list(LENGTHS)


def test_random_samplers_with_a_seed_of_their_own_and_tensors_as_batches():
    generator = torch.Generator()
    sampler = RandomSampler(range(12), generator=generator)
    batches = BatchSampler(sampler, 4, drop_last=True)
    generator.manual_seed(5)
    expected = list(batches)
    generator.manual_seed(5)
    source = make_source(Counting(), Batching(), batches)
    assert [draw.samples.tolist() for draw in source.draws(0)] == expected
    source = make_source(Counting(), Batching(), [torch.tensor([3, 1]), np.array([2], np.uint8)])
    assert [draw.samples.tolist() for draw in source.draws(0)] == [[3, 1], [2]]


def test_the_epoch_reaches_a_batch_sampler_and_its_sampler():
    inner = ByEpoch(12)
    outer = BatchSampler((index for (index,) in inner), 1, drop_last=False)
    outer.sampler = inner
    make_source(Counting(), Batching(), outer).draws(7)
    assert inner.epoch == 7
    lazily = ByEpoch(12)
    source = make_source(Counting(), Batching(), lazily)
    early, late = source.draws(1), source.draws(2)  # each keeps the epoch that it began with
    assert content(early) == content(source.draws(1)) != content(late)
    assert source.batches(0) is None


def test_batch_samplers_are_iterated_as_batches_are_asked_for():
    asked = []

    class Endless:
        def __iter__(self):
            for number in range(1 << 60):
                asked.append(number)
                yield [number % 12]

    draws = make_source(Counting(), Batching(accumulate=2), Endless()).draws(0)
    next(draws), next(draws)
    assert asked == [0, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "gave no batches in epoch 0"),
        ([[0], []], "batch 1 of the batch_sampler is empty"),
        ([[0], [12]], r"batch 1 of the batch_sampler has sample 12; they lie in \[0, 12\)"),
        ([[-1]], r"batch 0 of the batch_sampler has sample -1; they lie in \[0, 12\)"),
        ([[0.0, 1.0]], r"batch 0 of the batch_sampler is \[0.0, 1.0\]; expected a list of sample indices"),
        ([[True]], r"batch 0 of the batch_sampler is \[True\]; expected"),
        ([[[1], [2, 3]]], "expected a list of sample indices"),
        ([3, 4], "batch 0 of the batch_sampler is 3; expected .* inside torch.utils.data.BatchSampler"),
        ([[9], [0, 4]], "batch 1 of the batch_sampler has 90 tokens, but the budget is 80: put fewer"),
    ],
)
def test_batches_that_cannot_be_are_refused(given, message):
    source = make_source(Counting((40, 7, 1, 23, 50, 12, 33, 2, 9, 80, 5, 17)), Batching(80), given)
    with pytest.raises(ValueError, match=message):
        list(source.draws(0))
