import numpy as np
import pytest
from lookahead.loading import LENGTHS
from lookahead.sources import Stream

from dyncp import masks
from dyncp.lookahead.config import Batching
from dyncp.lookahead.source import make_source


def test_a_stream_is_read_no_further_than_asked():
    stream = Stream([10] * 30)
    draws = make_source(stream, Batching(25)).draws(0)
    assert stream.read == 0
    next(draws)
    assert stream.read == 3  # two, and the one that did not fit
    next(draws)
    assert stream.read == 5
    stream = Stream([10] * 30)
    draws = make_source(stream, Batching(30, accumulate=2)).draws(0)
    next(draws), next(draws)
    assert stream.read == 6  # two full batches: nothing can be added to them


def test_tokens_of_a_stream_are_kept_until_they_are_released():
    stream = Stream(shuffled=True)
    source = make_source(stream, Batching(128, 50))
    draws = list(source.draws(2))
    order = np.random.default_rng(2).permutation(len(LENGTHS))
    assert np.concatenate([draw.samples for draw in draws]).tolist() == list(range(len(LENGTHS)))
    for draw in draws:
        source.global_batch(draw)
        for place, length in zip(draw.samples.tolist(), draw.lengths.tolist(), strict=True):
            tokens = source.tokens(place)
            assert len(tokens) == length and tokens.dtype == np.int64 and tokens.base is None
            assert tokens.tolist() == stream.samples[order[place]][:50].tolist()
        source.release(draw)
        source.release(draw)  # a second time does nothing
        with pytest.raises(ValueError, match="of the stream is not kept"):
            source.tokens(int(draw.samples[0]))
        with pytest.raises(ValueError, match="was released"):
            source.global_batch(draw)
    assert not source._kept and not source._drawn


def test_what_is_skipped_or_left_out_is_not_kept():
    source = make_source(Stream([10] * 9), Batching(20, accumulate=2, drop_last=True, sample_mask=first_token))
    draws = list(source.draws(0, 3))
    assert [draw.samples.tolist() for draw in draws] == [[6, 7]]
    assert sorted(source._kept) == [6, 7]
    assert source._kept[6].sample["number"] == 6


def first_token(sample, length):
    return masks.sliding_window(length, 1 + int(sample["input_ids"][0]))


def test_a_new_pass_over_a_stream_ends_the_one_before():
    source = make_source(Stream([10] * 9), Batching(20))
    old = source.draws(0)
    drawn = [next(old), next(old)]
    new = source.draws(0)
    assert not source._kept and not source._drawn
    with pytest.raises(ValueError, match="another pass over the stream has begun"):
        next(old)
    fresh = next(new)
    source.release(drawn[0])  # has the same samples, but they are the new pass's now
    assert len(source.tokens(int(fresh.samples[0]))) == 10
    with pytest.raises(ValueError, match="another pass over the stream has begun"):
        source.global_batch(drawn[0])


def test_errors_of_a_stream():
    with pytest.raises(ValueError, match="the stream gave no samples in epoch 3"):
        list(make_source(iter([]), Batching(20)).draws(3))
    with pytest.raises(ValueError, match="sample 1 is empty"):
        list(make_source(iter([[1], []]), Batching(20)).draws(0))
