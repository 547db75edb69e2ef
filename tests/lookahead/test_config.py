import pytest

from dyncp.lookahead import Batching, LookAhead


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Batching(0), "tokens is 0"),
        (lambda: Batching(100, 0), r"max_length is 0; it must lie in \[1, 100\]"),
        (lambda: Batching(100, 101), "lower max_length or raise tokens"),
        (lambda: LookAhead(kappa=-1), "kappa is -1"),
        (lambda: LookAhead(workers=-1), "workers is -1"),
        (lambda: LookAhead(timeout_s=0), "timeout_s is 0"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_samples_may_fill_the_budget_unless_told_otherwise():
    assert Batching(100).longest == 100
    assert Batching(100, 30).longest == 30
