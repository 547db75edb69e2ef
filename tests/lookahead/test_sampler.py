import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp.lookahead.sampler import TokenBudgetSampler


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    max_length=st.integers(1, 50),
    spare=st.integers(0, 60),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 3),
)
def test_every_sample_is_in_one_batch_and_no_batch_is_over_the_budget(lengths, max_length, spare, seed, epoch):
    sampler = TokenBudgetSampler(lengths, max_length + spare, max_length, seed)
    batches = sampler.batches(epoch)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert sampler.lengths.tolist() == [min(length, max_length) for length in lengths]
    used = [sampler.lengths[batch].sum() for batch in batches]
    assert all(0 < tokens <= max_length + spare for tokens in used)
    # a batch ends only where the next sample would not have fitted
    for tokens, following in zip(used, batches[1:], strict=False):
        assert tokens + sampler.lengths[following[0]] > max_length + spare


def test_the_shuffle_depends_on_seed_and_epoch_alone():
    def order(seed, epoch):
        return np.concatenate(TokenBudgetSampler([5] * 200, 50, 20, seed).batches(epoch)).tolist()

    assert order(1, 2) == order(1, 2)
    assert len({tuple(order(*key)) for key in ((1, 2), (1, 3), (2, 2), (0, 0))}) == 4
    assert order(1, 2) != sorted(order(1, 2))


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40), epoch=st.integers(0, 3))
def test_without_a_shuffle_samples_stay_in_their_order(lengths, epoch):
    sampler = TokenBudgetSampler(lengths, 60, 50, 1, shuffle=False)
    assert np.concatenate(sampler.batches(epoch)).tolist() == list(range(len(lengths)))


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_a_last_batch_is_left_out_on_request_unless_it_is_full(lengths):
    lengths = [60, *lengths]
    every = TokenBudgetSampler(lengths, 60, 60, 1).batches(0)
    some = TokenBudgetSampler(lengths, 60, 60, 1, drop_last=True).batches(0)
    full = sum(lengths[sample] for sample in every[-1]) == 60
    assert [batch.tolist() for batch in some] == [batch.tolist() for batch in (every if full else every[:-1])]


def test_a_batch_that_is_the_only_one_is_not_left_out():
    assert len(TokenBudgetSampler([3, 5], 8, 8, 0, drop_last=True).batches(0)) == 1
    with pytest.raises(ValueError, match="all 2 samples fit into one batch of 7 tokens, below the budget of 8"):
        TokenBudgetSampler([3, 4], 8, 8, 0, drop_last=True).batches(0)


@pytest.mark.parametrize("lengths", [[[1, 2]], [1.5, 2.0]])
def test_lengths_must_be_a_flat_list_of_integers(lengths):
    with pytest.raises(ValueError, match="expected integers, one per sample"):
        TokenBudgetSampler(lengths, 8, 8, 0)


def test_an_empty_dataset_is_refused():
    with pytest.raises(ValueError, match="the dataset has no samples"):
        TokenBudgetSampler([], 8, 8, 0)


def test_an_empty_sample_is_named():
    with pytest.raises(ValueError, match="sample 2 has length 0"):
        TokenBudgetSampler([4, 3, 0], 8, 8, 0)
