import pytest

from benchmarks.network.batches import CASES, LONG_TAIL, QUICK_CASES, scaled


@pytest.mark.parametrize("case", [*CASES, *QUICK_CASES], ids=lambda case: case.name)
def test_batches_have_their_tokens_and_are_the_same_each_time(case):
    batch = case.batch()
    assert batch.tokens == case.tokens
    assert batch == case.batch()


def test_masks_share_lengths():
    lengths = {case.mask: [s.length for s in case.batch().sequences] for case in CASES if case.lengths == "longtail"}
    assert len(lengths) == 4
    assert len({tuple(each) for each in lengths.values()}) == 1


def test_the_long_tail_is_one():
    lengths = sorted(s.length for s in LONG_TAIL.batch().sequences)
    assert lengths[-1] > 5 * lengths[len(lengths) // 2]


def test_scaled_lengths_keep_proportions():
    assert scaled((600, 300, 100), 100) == [60, 30, 10]
    assert scaled((1000, 1, 1), 10) == [10]
