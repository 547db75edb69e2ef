import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from dyncp import Batch, Sequence, cli, masks
from dyncp.bench import measure as measuring
from dyncp.bench.corpus import MASKS, Case, K, corpus, lengths_of
from dyncp.bench.machine import machine
from dyncp.bench.measure import balance, measure, sent
from dyncp.bench.results import FIGURES, STAGES, Figures, Result, Run, Setting, Solved
from dyncp.bench.rings import ring_figures
from dyncp.bench.summary import against_solver, spread, summarize_results, target_rows
from dyncp.bench.table import bytes_table, summary_table, target_table, time_table
from dyncp.bench.targets import LONGTAIL, targets
from dyncp.commands import bench
from dyncp.ir.blocks import Blocks, TokenBlocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.shape import AttentionShape
from dyncp.strategies import build
from dyncp.strategies.api import Options

ROOT = Path(__file__).parents[1]
TINY = Case("tiny/causal", (300, 90, 40), "causal", 1, (2, 2), "total", 0.1, limits={"planning_s": 60.0})


# The corpus


def test_the_corpus_is_the_same_every_time():
    assert corpus() == corpus() and targets() == targets()
    names = [case.name for case in (*corpus(), *targets())]
    assert len(set(names)) == len(names)
    for case in corpus():
        if case.mask in ("document", "tree", "prefix_lm") and sum(case.lengths) == 128 * K:
            first, again = case.batch(), case.batch()
            for one, two in zip(first.sequences, again.sequences, strict=True):
                assert np.array_equal(one.masks["default"].slices, two.masks["default"].slices)


def test_the_corpus_is_the_same_everywhere():
    assert lengths_of("longtail", 128 * K, Random("a"))[:4] == (1066, 4120, 260, 125_626)


def test_the_corpus_has_what_its_names_say():
    for case in (*corpus(), *targets()):
        kind, size = case.name.removeprefix("target/").split("/")[0].rpartition("-")[::2]
        tokens = (int(size[:-1]) * K * (K if size[-1] == "M" else 1)) if kind else 128 * K
        assert sum(case.lengths) == tokens and min(case.lengths) > 0
        assert case.options().objective == case.name.split("/")[-1]
        assert f"/{case.nodes}x8/{case.heads[0]}-{case.heads[1]}/" in case.name
    assert {case.mask for case in corpus()} == set(MASKS)
    assert {case.heads for case in corpus()} == {(8, 2), (32, 8), (32, 32)}
    assert {case.cluster.ranks for case in corpus()} >= {8, 16, 32, 64, 128, 256, 1024}
    assert {sum(case.lengths) // K for case in corpus()} == {128, 256, 512, 1024, 2048}
    assert {case.objective for case in corpus()} == {"total", "time"}


@pytest.mark.parametrize("kind", MASKS)
def test_every_mask_fits_every_length(kind):
    for length in (1, 2, 17, 300, 5000):
        for maker in MASKS[kind].values():
            assert maker(length, Random(length)).q_length == length


def test_the_cases_with_targets_are_those_of_the_published_figures():
    file = json.loads((ROOT / "docs" / "longtail-batch.json").read_text(encoding="utf-8"))
    assert tuple(sequence["length"] for sequence in file["sequences"]) == LONGTAIL
    published = {
        ("longtail", "causal"): 488185982,
        ("longtail", "causal_blockwise"): 98755198,
        ("longtail", "lambda"): 319419581,
        ("longtail", "shared_question"): 253855316,
        ("single", "causal"): 8590000128,
        ("single", "causal_blockwise"): 133824000,
        ("single", "lambda"): 536608800,
        ("single", "shared_question"): 4466800068,
    }
    for (batch, mask), pairs in published.items():
        for case in targets():
            if f"/{batch}/{mask}/" in case.name:
                assert sum(sequence.masks["default"].pairs() for sequence in case.batch().sequences) == pairs
    assert all(case.limits.keys() <= set(FIGURES) for case in targets())


# Rings and balance


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 3), (1, 4), (4, 1), (1, 1)])
@pytest.mark.parametrize("keep", ["none", "kv"])
def test_the_rings_move_what_their_plans_say(nodes, per_node, keep):
    sequences = (Sequence(n, {"a": masks.causal(n), "b": masks.sliding_window(n, 5)}) for n in (200, 37, 3, 1))
    batch, shape, cluster = Batch(sequences, {"b": 5}), AttentionShape(4, 2, 16), Cluster(nodes, per_node)
    for backward_weight in (0.0, 1.0):
        options = Options(keep=keep, backward_weight=backward_weight)
        for name in ("ring", "zigzag"):
            planned = build(batch, shape, cluster, name, options)
            assert ring_figures(batch, shape, cluster, options, zigzag=name == "zigzag") == sent(planned, cluster)


def test_balance_is_that_of_the_mask_where_it_is_worst():
    tokens = TokenBlocks([0, 0, 0], [0, 10, 20], [10, 20, 40], [3, 3, 3])
    blocks = Blocks(tokens, 1, ("a", "b"), (1.0, 1.0), [0, 1, 2, 2], [0, 1, 2, 2], [0, 0, 0, 1], [50, 50, 100, 10])
    placement = Placement(np.array([0, 0, 1]), np.array([[0, 0, 1, 1]]))
    assert balance(blocks, placement, 2) == (2.0, 1.0)


# Summaries of made-up results


def made(name="case", objective="total", own=(100.0, 10.0, 1.0, 1.0), theirs=(200.0, 20.0, 1.0, 1.0), limits=None):
    setting = Setting(
        1, 1000, 500.0, "causal", 2, 4, 8, 2, objective, {}, 3.0 if objective == "time" else 0.0, 1.1, 1.02
    )
    seconds = dict.fromkeys((*STAGES, "encode"), 0.01)
    more = Figures(own[0] * 1.5, *own[1:])
    runs = tuple(
        Run(seed, seconds, 0.04, 5_000_000 + seed, 9, figures, figures)
        for seed, figures in enumerate((Figures(*own), Figures(*own), more))
    )
    solvers = {"default": Solved("", 0.1, 64, Figures(*theirs)), "highest_quality": Solved("too large")}
    ring = Figures(400.0, 40.0, 1.5, 1.0)
    return Result(name, setting, 128, 8, 40, runs, 50.0, 0.0, ring, ring, solvers, limits or {})


def test_a_result_in_medians_and_the_worst():
    result = made()
    assert result.total_bytes == 100 and result.bound_ratio == 2 and result.peak_bytes == 5_000_002
    assert result.planning_s == pytest.approx(0.04)
    assert replace(result, bound_bytes=0.0).bound_ratio is None
    assert result.setting.broken(Figures(1, 1, 1.1, 1.03)) == ("tokens",)


def test_ratios():
    assert spread([]) is None and spread([None]) is None
    found = spread([0.5, 2.0, None, 0.0])
    assert found == {"cases": 3, "mean": pytest.approx(1.0), "median": 0.5, "largest": 2.0, "at_most_1": 2 / 3}


def test_solvers_are_compared_by_objective_and_limits():
    results = [
        made("bytes"),
        made("time", "time", own=(300.0, 10.0, 1.2, 1.0)),
        made("lost", own=(100.0, 1.0, 1.0, 1.0), theirs=(50.0, 1.0, 1.2, 1.0)),
    ]
    found = against_solver(results, "default")
    assert found["cases"] == 3 and found["skipped"] == {}
    assert found["broken"] == ["lost"] and found["broken_only_here"] == ["time"]
    ratios = found["ratios"]
    assert ratios["bytes"]["largest"] == 2 and ratios["bytes, for fewest bytes"]["mean"] == pytest.approx(1.0)
    assert ratios["time of bytes, for least time"]["mean"] == pytest.approx(330 / 260)
    assert ratios["bytes between nodes, for least time"]["mean"] == pytest.approx(0.5)
    assert found["seconds"]["mean"] == pytest.approx(0.1)
    assert against_solver(results, "highest_quality")["skipped"] == dict.fromkeys(
        ("bytes", "time", "lost"), "too large"
    )


def test_targets_are_met_or_missed():
    limits = {"bound_ratio": 1.9, "total_bytes": 100.0, "compute": 1.0}
    rows = target_rows(made(limits=limits))
    assert [(row["figure"], row["met"]) for row in rows] == [
        ("total_bytes", True),
        ("compute", True),
        ("bound_ratio", False),
    ]
    unknown = replace(made(limits={"peak_bytes": 1.0}), runs=(replace(made().runs[0], peak_bytes=None),))
    assert target_rows(unknown)[0]["met"] is None
    lines = target_table([*rows, *target_rows(unknown)]).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["met", "met", "MISSED", "known"]


def test_tables_show_every_case():
    results = [made("one"), made("two", "time", theirs=(50.0, 5.0, 1.5, 1.0))]
    moved, times = bytes_table(results).splitlines(), time_table(results).splitlines()
    assert moved[1].split()[:6] == ["one", "100", "B", "+50.0%", "2.00x", "0.25x"]
    assert "0.50x" in moved[1] and "!2.00x" in moved[2]
    assert "40.0 ms" in times[1] and "1.10" in times[1] and len(times) == 3
    summary = summarize_results(results)
    text = summary_table(summary)
    assert "Mt-KaHyPar default: bytes " in text and "limits broken in 0 of 2 cases" in text
    assert "by Mt-KaHyPar default in 1 of 2 cases: two" in text
    assert "Mt-KaHyPar highest was not tried in 2 of 2 cases: too large" in text
    json.dumps([asdict(result) for result in results] + [summary])


# All of it


def test_measures_a_case():
    result = measure(TINY, 2, solvers=False)
    first, second = result.runs
    assert (first.seed, second.seed) == (0, 1) and first.placement is None and result.solvers == {}
    assert result.setting.tokens == 430 and result.setting.ranks == 8
    assert 0 < result.bound_bytes <= result.total_bytes < result.ring.total_bytes
    assert first.plan.inter_node_bytes == 0 and first.encoded_bytes > 0
    assert len(measure(replace(TINY, most_runs=1), 2, solvers=False).runs) == 1


def test_a_solver_gets_the_same_case():
    pytest.importorskip("mtkahypar")
    result = measure(TINY, 1, solvers=True)
    for solved in result.solvers.values():
        assert solved.figures.total_bytes >= result.bound_bytes and solved.seconds > 0
    assert result.placement.total_bytes == result.runs[0].placement.total_bytes


def test_a_solver_is_not_asked_where_it_is_missing_or_slow(monkeypatch):
    pytest.importorskip("mtkahypar")
    monkeypatch.setattr(measuring, "MOST_BLOCKS", 1)
    assert "more than 1 computation blocks" in measure(TINY, 1, solvers=True).solvers["default"].skipped
    monkeypatch.setattr(measuring.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in measure(TINY, 1, solvers=True).solvers["default"].skipped


def test_the_command_prints_tables_and_writes_json(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "corpus", lambda: [TINY])
    path = tmp_path / "results.json"
    words = ("bench", "planner", "--only", "tiny", "--seeds", "1", "--out", str(path))
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "medians over 1 seed," in out and "tiny/causal" in out and "planning_s  60.00 s" in out
    found = json.loads(path.read_text(encoding="utf-8"))
    assert found["machine"] == machine() and found["asked"] == {
        "seeds": 1,
        "quick": False,
        "only": "tiny",
        "effort": 1.0,
    }
    (case,) = found["cases"]
    assert case["name"] == "tiny/causal" and case["setting"]["options"]["epsilon"] == 0.1
    assert case["runs"][0]["seconds"].keys() == {*STAGES, "encode"}
    assert found["summary"]["targets"][0]["met"] is True


def test_lists_cases(capsys):
    assert cli.main(("bench", "planner", "--list", "--quick", "--only", "single*time")) == 0
    names = capsys.readouterr().out.splitlines()
    assert names and all("single" in name and name.endswith("time") for name in names)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "what"),
        (("kernels",), "unknown benchmark 'kernels'; choose one of planner"),
        (("planner", "--seeds", "0"), "--seeds is 0"),
        (("planner", "--only", "nothing"), "no case has 'nothing' in its name"),
    ],
)
def test_bad_input(capsys, words, message):
    assert cli.main(("bench", *words)) == 2
    assert message in capsys.readouterr().err.lower()


def test_does_not_import_torch():
    code = "import sys, dyncp.commands.bench; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src", check=False).returncode == 0
