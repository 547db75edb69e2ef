"""Tuning: which batches, which settings, how long."""

from dataclasses import replace

import pytest

from dyncp.cost.layer import Model
from dyncp.ir.cluster import Cluster
from dyncp.lookahead.sampler import TokenBudgetSampler
from dyncp.simulator.iteration import Training
from dyncp.strategies.api import Options
from dyncp.tune import run as module
from dyncp.tune.compare import Setting
from dyncp.tune.run import Expectation, Search, batches_of, look_ahead, steps, tune

MODEL = Model(layers=3, hidden=8, q_heads=4, kv_heads=2, head_dim=8, ffn=16, vocabulary=10)
TRAINING = Training(1e9, tp=2)
SETTING = Setting(MODEL.shape(2), Cluster(2, 4), Options(block_tokens=32), None, MODEL, TRAINING)
LENGTHS = (90, 13, 40, 200, 7, 64, 64, 120, 33, 150)
SEARCH = Search(tokens=256, batches=2)


@pytest.fixture(autouse=True)
def few_choices(monkeypatch):
    monkeypatch.setattr(module, "CHOICES", {"block_tokens": (16, 32), "keep": ("all",)})


def steady(found):
    """Without what planning took."""
    figures = found.figures()
    for one in (
        *figures["strategies"],
        figures["recommended"]["expected"],
        *(t["expected"] for t in figures["trials"]),
    ):
        one["planning_s"] = 0.0
    return figures


def test_says_what_to_expect_and_what_to_use():
    calls = []
    found = tune(LENGTHS, ["ring", "zigzag"], SETTING, SEARCH, lambda: calls.append(1))
    assert {one.strategy for one in found.expected} == {"dynamic", "ring", "zigzag"}
    times = [one.iteration_s for one in found.expected]
    assert times == sorted(times) and all(one.batches == 2 for one in found.expected)
    assert [(trial.name, trial.value) for trial in found.trials] == [("block_tokens", 16), ("keep", "all")]
    assert found.best.iteration_s <= min(times) * (1 + module.MARGIN)
    assert len(calls) <= steps(["ring", "zigzag"], SEARCH) and not found.cut_short
    assert found.samples == 10 and found.sample_tokens == sum(LENGTHS)
    assert found.kappa >= 2 and found.workers >= 1


def test_is_the_same_again():
    first, again = (steady(tune(LENGTHS, ["zigzag"], SETTING, SEARCH)) for _ in range(2))
    assert first == again


def test_batches_are_the_loaders():
    sampler = TokenBudgetSampler(LENGTHS, 256, 256, 0)
    batches = list(batches_of(sampler, SEARCH))
    chosen = sampler.batches(0)[:2]
    assert [[one.length for one in batch.sequences] for batch in batches] == [
        sampler.lengths[indices].tolist() for indices in chosen
    ]
    alone = list(batches_of(TokenBudgetSampler([5, 6], 256, 256, 0), SEARCH))
    assert len(alone) == 1 and alone[0].tokens == 11


def test_time_runs_out():
    now = iter(range(0, 10**6, 100))
    found = tune(LENGTHS, ["zigzag"], SETTING, replace(SEARCH, seconds=50.0), clock=lambda: next(now))
    assert found.used == 1 and found.trials == () and found.cut_short
    assert found.skipped_batches == 1 and found.skipped == (("block_tokens", 16), ("keep", "all"))


def test_time_that_runs_out_at_the_end_is_no_cut():
    now = iter([0.0, *[0.0] * 3, *[99.0] * 9])  # the start, a batch, two settings
    found = tune(LENGTHS, [], SETTING, replace(SEARCH, seconds=50.0), clock=lambda: next(now))
    assert len(found.trials) == 2 and not found.cut_short


@pytest.mark.parametrize(("gain", "words"), [(0.996, "less than 0.5% faster"), (1.0, "no faster"), (1.1, "no faster")])
def test_settings_that_gain_little_say_so(monkeypatch, gain, words):
    batches = list(batches_of(TokenBudgetSampler(LENGTHS, 256, 256, 0), SEARCH))
    same = Expectation.of([module.run_strategy(one, "dynamic", SETTING) for one in batches])
    best = replace(same, iteration_s=same.iteration_s / gain)
    trial = module._trial(batches, SETTING, SEARCH, best, ("divisions", 4))
    assert not trial.taken and trial.why_not == words


def test_samples_that_are_cut_are_counted():
    assert tune(LENGTHS, [], SETTING, replace(SEARCH, max_length=100)).shortened == 3


def test_memory_is_kept_only_where_there_is_some():
    found = tune(LENGTHS, ["ring"], SETTING, replace(SEARCH, kept_bytes=1.0))
    (keep,) = (trial for trial in found.trials if trial.name == "keep")
    assert not keep.taken and (keep.expected.kept_bytes == 0 or keep.why_not == "keeps too much memory")


def test_a_strategy_that_fails_is_named(monkeypatch):
    real = module.run_strategy

    def run_strategy(batch, name, setting):
        if name == "ring" or setting.options.block_tokens == 16:
            raise ValueError("cannot")
        return real(batch, name, setting)

    monkeypatch.setattr(module, "run_strategy", run_strategy)
    found = tune(LENGTHS, ["ring"], SETTING, SEARCH)
    assert [one.strategy for one in found.failures] == ["ring"] and len(found.expected) == 1
    assert found.trials[0].expected is None and found.trials[0].why_not == "cannot"
    assert {"strategy": "ring", "error": "cannot"} in found.figures()["strategies"]


def test_how_far_ahead():
    def expectation(iteration_s, planning_s):
        return Expectation("dynamic", 1, iteration_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, planning_s, 0.0)

    assert look_ahead(expectation(2.0, 0.1), 16) == (2, 1)
    assert look_ahead(expectation(0.5, 10.0), 16) == (21, 2), "10 s are 20 steps; 16 ranks plan 1.6 in a step of 2"
    assert look_ahead(expectation(0.1, 1.0), 2) == (11, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"tokens": 0}, "tokens is 0"), ({"batches": 0}, "batches is 0"), ({"max_length": 300}, "max_length is 300")],
)
def test_bad_searches_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SEARCH, **changes)


def test_a_model_is_needed():
    with pytest.raises(ValueError, match="give a model"):
        tune(LENGTHS, ["ring"], replace(SETTING, model=None, training=None), SEARCH)
