import math
from pathlib import Path

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
        (lambda: LookAhead(timeout_s=math.inf), "timeout_s is inf; it must be positive, and at most"),
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
        (lambda: Batching(max_length=0), "max_length is 0; it must be at least 1"),
        (lambda: Batching("64"), "tokens is '64'"),
        (lambda: Batching(64, shuffle=1), "shuffle is 1; it must be True or False"),
        (lambda: Batching(64, drop_last=None), "drop_last is None; it must be True or False"),
        (lambda: Batching(64, accumulate=0), "accumulate is 0; it must be a whole number of at least 1"),
        (lambda: Batching(64, accumulate=1.5), "accumulate is 1.5"),
        (lambda: Batching(64, sample_mask=causal(64)), "give a function of a sample and its length"),
        (lambda: Batching(64, mask=lambda i, n: causal(n), sample_mask=lambda s, n: causal(n)), "are both given"),
        (lambda: Batching(64, sample_mask=lambda s, n: causal(n), weights={"a": 0}), "the weight of mask 'a' is 0"),
        (lambda: Batching(64, length_cache=3), "length_cache is 3; give the path of a file"),
        (lambda: Batching(64, lengths=[1], length_cache="x"), "length_cache has none to keep"),
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


def test_nothing_is_cut_without_a_budget_unless_asked():
    assert Batching().max_length is None and Batching().longest > 1 << 40
    assert Batching(max_length=30).longest == 30


def test_a_path_may_be_text():
    assert Batching(100, length_cache="lengths").length_cache == Path("lengths")


@pytest.mark.parametrize(
    ("workers", "kappa", "ranks", "here", "cores", "expected"),
    [
        (3, 4, 8, 8, 2, 3),  # as told
        (0, 4, 8, 8, 2, 0),
        ("auto", 10, 1, 1, 64, 11),  # all that can be under way
        ("auto", 10, 1, 1, 8, 7),  # a core is the trainer's
        ("auto", 10, 8, 8, 64, 2),
        ("auto", 4, 64, 8, 128, 1),
        ("auto", 4, 4, 4, 2, 1),  # fewer cores than ranks: one at least
    ],
)
def test_planner_processes_are_as_many_as_can_be_busy_on_the_cores_that_are_left(
    workers, kappa, ranks, here, cores, expected
):
    assert LookAhead(kappa, workers).worker_count(ranks, here, cores) == expected
