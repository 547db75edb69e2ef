"""Strategies side by side."""

import pytest
from builders import SHAPE, causal_batch

from dyncp.ir.cluster import Cluster
from dyncp.strategies import STRATEGIES
from dyncp.strategies.api import Options
from dyncp.tune import compare as module
from dyncp.tune.compare import Failure, Outcome, Setting, compare, run_strategy, strategy_names

SETTING = Setting(SHAPE, Cluster(2, 2), Options(block_tokens=16))


def test_names_of_strategies():
    assert strategy_names("all") == list(STRATEGIES)
    assert strategy_names("ring, zigzag,ring") == ["ring", "zigzag"]
    with pytest.raises(ValueError, match="unknown strategy 'rong'; choose all, or some of dynamic"):
        strategy_names("ring,rong")


def test_the_fastest_comes_first():
    found = compare(causal_batch(90, 40, 7), ["ring", "zigzag", "data_parallel"], SETTING)
    times = [one.time_s for one in found]
    assert times == sorted(times) and {one.strategy for one in found} == {"ring", "zigzag", "data_parallel"}


def test_what_fails_comes_last_and_says_why(monkeypatch):
    real = module.build

    def build(batch, shape, cluster, strategy, options):
        if strategy == "ring":
            raise ValueError("no ring\n today")
        return real(batch, shape, cluster, strategy, options)

    monkeypatch.setattr(module, "build", build)
    found = compare(causal_batch(90), ["ring", "zigzag"], SETTING)
    assert isinstance(found[0], Outcome) and found[1] == Failure("ring", "no ring today")
    assert found[1].figures() == {"strategy": "ring", "error": "no ring today"}
    with pytest.raises(ValueError, match="ring: no ring today"):
        compare(causal_batch(90), ["ring"], SETTING)


def test_a_strategy_that_pads_runs_the_padded_batch():
    outcome = run_strategy(causal_batch(90, 40), "double_ring", SETTING)
    assert outcome.padding == 50
    assert run_strategy(causal_batch(90, 40), "ring", SETTING).padding == 0
