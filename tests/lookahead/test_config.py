import math

import numpy as np
import pytest
from lookahead.loading import SHAPE

from dyncp.ir.cluster import Cluster
from dyncp.lookahead import Batching, LookAhead, Planning
from dyncp.masks import causal


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Batching(0), "tokens is 0"),
        (lambda: Batching(100, 0), r"max_length is 0; it must lie in \[1, 100\]"),
        (lambda: Batching(100, 101), "lower max_length or raise tokens"),
        (lambda: LookAhead(kappa=-1), "kappa is -1"),
        (lambda: LookAhead(workers=-1), "workers is -1"),
        (lambda: LookAhead(timeout_s=0), "timeout_s is 0"),
        (lambda: LookAhead(timeout_s=math.inf), "timeout_s is inf; it must be positive and finite"),
        (lambda: LookAhead(timeout_s=math.nan), "timeout_s is nan"),
        (lambda: LookAhead(timeout_s="9"), "timeout_s is '9'"),
        (lambda: LookAhead(kappa=2.5), "kappa is 2.5; it must be a whole number of at least 0"),
        (lambda: LookAhead(kappa=None), "kappa is None"),
        (lambda: LookAhead(workers="1"), "workers is '1'"),
        (lambda: Batching(64.5), "tokens is 64.5; it must be a whole number"),
        (lambda: Batching(64, 32.5), "max_length is 32.5"),
        (lambda: Batching(64, seed=-1), "seed is -1; it must be a whole number of at least 0"),
        (lambda: Batching(64, seed=None), "seed is None"),
        (lambda: Batching(64, mask=causal(64)), "give a function of a sample's index and length"),
        (lambda: Batching(64, weights={"window": 1}), "weight for mask 'window', but the only one .* is 'default'"),
        (lambda: Batching(64, weights={"default": 0}), "the weight of mask 'default' is 0; it must be a positive"),
        (lambda: Batching(64, mask=lambda i, n: causal(n), weights={"a": "1"}), "the weight of mask 'a' is '1'"),
        (lambda: Planning(SHAPE, Cluster(1, 1), "best"), "unknown strategy 'best'; choose one of dynamic, ring"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_numbers_may_be_those_of_numpy():
    assert LookAhead(np.int64(2), np.int32(0), np.float32(3)).kappa == 2
    assert Batching(np.int64(64), weights={"default": np.float64(2)}).longest == 64


def test_samples_may_fill_the_budget_unless_told_otherwise():
    assert Batching(100).longest == 100
    assert Batching(100, 30).longest == 30
