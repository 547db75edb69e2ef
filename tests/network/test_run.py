import argparse

import pytest

from benchmarks.network import quiet, run, topology
from benchmarks.network.batches import SHAPE
from benchmarks.network.measure import Timed, needs_more, quietest
from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.strategies import STRATEGIES, build
from dyncp.strategies.padding import as_run


def test_rates_have_units():
    assert run.bits_per_s("200M") == 200e6
    assert run.bits_per_s("1.5g") == 1.5e9
    for wrong in ("fast", "0", "-3M", "5T"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected bits/s"):
            run.bits_per_s(wrong)


def test_the_command_line():
    options = run.parse(["--strategies", "ring,dynamic", "--hosts", "2"])
    assert (options.strategies, options.hosts, options.rate) == (["ring", "dynamic"], 2, None)
    assert run.parse([]).strategies == list(STRATEGIES)
    assert run.parse(["--quick"]).runs == 2
    for wrong in (["--strategies", "rings"], ["--hosts", "1"], ["--runs", "0"]):
        with pytest.raises(SystemExit):
            run.parse(wrong)


def test_variants_follow_their_strategies():
    assert run.with_variants(["ring", "dynamic"]) == ["ring", "dynamic", "dynamic, any tokens"]
    assert all(strategy in STRATEGIES for strategy, _ in run.VARIANTS.values())


def test_tokens_that_are_padded_count():
    batch = Batch([Sequence(30, masks.causal(30)), Sequence(10, masks.causal(10))])
    plan = build(batch, SHAPE, Cluster(2, 1), "data_parallel").plan
    assert run.token_imbalance(plan, (30, 10)) == 1.5
    padded = build(as_run(batch, "double_ring"), SHAPE, Cluster(2, 1), "double_ring").plan
    assert run.token_imbalance(padded, (30, 10)) >= 1.5  # two sequences of 30 or more, halved


def test_what_is_missing_is_said_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(topology.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(topology.shutil, "which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr(topology.sys, "platform", "linux")
    assert run.main([]) == 1
    assert capsys.readouterr().err == "bench-network needs root, to make network namespaces: run it with sudo\n"
    monkeypatch.setattr(topology.os, "geteuid", lambda: 0)
    monkeypatch.setattr(topology, "_output", refused)
    assert topology.missing() == "bench-network cannot make hosts here: ip netns list failed: not permitted"
    monkeypatch.setattr(topology.shutil, "which", lambda tool: None)
    assert topology.missing() == "bench-network needs ip and tc: install iproute2"
    monkeypatch.setattr(topology.sys, "platform", "darwin")
    assert topology.missing().startswith("bench-network needs Linux")


def refused(*command):
    raise RuntimeError(f"{' '.join(command)} failed: not permitted")


def test_the_quietest_runs_are_used():
    runs = [Timed(1.0, 2.0, share) for share in (0.5, 0.0, 0.3, 0.01)]
    assert [each.others_share for each in quietest(runs, 2)] == [0.0, 0.01]
    assert not needs_more(runs, 2)
    assert needs_more(runs, 3)
    assert not needs_more([Timed(1.0, 2.0, 0.5)] * 6, 3)


def test_patience_ends(monkeypatch):
    monkeypatch.setattr(quiet, "busy_share", lambda sample_s: 1.0)
    patience = quiet.Patience(0.0)
    assert not patience.wait()
    monkeypatch.setattr(quiet, "busy_share", lambda sample_s: 0.0)
    assert patience.wait()
