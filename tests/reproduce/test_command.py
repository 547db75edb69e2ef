import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dyncp import cli
from dyncp.ir.cluster import Cluster
from dyncp.reproduce import compare, micro
from dyncp.reproduce.cases import Bench, Case, source_digest
from dyncp.reproduce.constants import HARDWARE, PUBLISHED
from dyncp.reproduce.figures import FIGURES, Figure
from dyncp.reproduce.methods import BASELINES, DYNCP, TE, rivals
from dyncp.reproduce.points import Point, Scope
from dyncp.strategies import STRATEGIES

LENGTHS = (3000, 1500, 700)
SMALL = Cluster.preset("p4de", 2, 4)


def complaint(capsys, *words):
    assert cli.main(["reproduce", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_bad_input_is_one_line(capsys, tmp_path):
    out = ("--out", str(tmp_path))
    assert "unknown figure '12'; choose among 13, 14" in complaint(capsys, "12", *out)
    assert "batches" in complaint(capsys, "13", "--batches", "0", *out)
    assert "unknown data set 'x'" in complaint(capsys, "13", "--dataset", "x", *out)
    file = tmp_path / "lengths"
    file.write_text("nothing")
    assert "without --dataset" in complaint(capsys, "13", "--lengths-file", str(file), *out)
    assert "neither" in complaint(capsys, "13", "--lengths-file", str(file), "--dataset", "longalign", *out)
    gone = str(tmp_path / "gone")
    assert "gone" in complaint(capsys, "13", "--lengths-file", gone, "--dataset", "longalign", *out)


def test_published_constants_are_dearer_and_not_the_default():
    assert HARDWARE.cluster(SMALL, "blockwise") == SMALL
    assert PUBLISHED.cluster(SMALL, "blockwise").launch_s > SMALL.launch_s
    assert PUBLISHED.cluster(SMALL, "library", 4).block_s == PUBLISHED.cluster(SMALL, "library").block_s / 4
    assert PUBLISHED.cluster(SMALL, "library", 0).block_s == 0
    assert replace(PUBLISHED.cluster(SMALL, "extended"), launch_s=SMALL.launch_s, block_s=SMALL.block_s) == SMALL


def test_every_strategy_is_a_rival():
    assert {method.strategy for method in rivals()} == set(STRATEGIES) - {"dynamic"}


def test_a_case_is_computed_once(tmp_path, monkeypatch):
    bench = Bench(tmp_path / "cache")
    case = Case(LENGTHS, "lambda", SMALL)
    first = bench.measure(case, TE)
    assert set(first) == {"hardware", "published"}
    assert first["hardware"]["total_s"] < first["published"]["total_s"]
    passes = [first["hardware"][name] for name in ("forward", "backward")]
    assert first["hardware"]["total_s"] == pytest.approx(sum(one["makespan_s"] for one in passes))
    monkeypatch.setattr("dyncp.reproduce.cases.compute", lambda *_: pytest.fail("computed again"))
    assert bench.measure(case, TE) == json.loads(json.dumps(first))
    assert len(source_digest()) == 64


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A scope of one small batch."""
    monkeypatch.setattr(Scope, "lengths", lambda self, dataset, scale=1.0, tokens=0: [LENGTHS] * self.batches)
    return Scope.in_folder(tmp_path, batches=1, quick=True, datasets=("longalign",), cluster=SMALL)


def test_bars_of_a_small_cluster(small):
    points = micro.bars(small, (*BASELINES, DYNCP), ("causal",))
    assert len(points) == 2 * 2 * 5  # scales, passes, methods
    assert all(point.paper and point.mean > 0 for point in points)


def test_speedups_of_a_small_cluster(small):
    points = compare.speedups(small, {"scale": "1"}, [Case(LENGTHS, "causal", SMALL)], rivals(), 2.0)
    found = {point.method: point for point in points if point.at["constants"] == "hardware"}
    assert found[compare.BEST].mean <= found[compare.BEST_STATIC].mean <= found[compare.BEST_BASELINE].mean
    assert found[compare.BEST_BASELINE].mean == min(found[name].mean for name in compare.BASELINES)
    assert found[compare.BEST_BASELINE].paper == 2.0
    assert 0 <= found["hidden forward"].mean <= 1


def test_the_parts_of_a_speedup_multiply_to_it(small, monkeypatch):
    monkeypatch.setattr(compare, "BATCH_TOKENS", 5200)
    points = compare.parts(small, {}, [LENGTHS], "lambda", "hardware")
    found = {point.method: point.mean for point in points}
    assert found["masks"] * found["lengths"] * found["the rest"] == pytest.approx(found["all"])


def test_the_command_writes_numbers_a_page_and_a_picture(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    point = Point({"data": "LongAlign", "mask": "causal", "scale": "1", "pass": "forward"}, "TE", (12.0,), 10.0)
    monkeypatch.setitem(FIGURES, "13", Figure("A title", "A text.", lambda scope: [point], "scale", ("data", "pass")))
    monkeypatch.setattr("dyncp.commands.reproduce.warm_up", lambda: 0.0)
    page = tmp_path / "docs" / "page.md"
    assert cli.main(["reproduce", "13", "--out", str(tmp_path / "out"), "--page", str(page)]) == 0
    assert Point.of(json.loads((tmp_path / "out" / "13.json").read_text())[0]) == point
    assert f"wrote {page}" in capsys.readouterr().out
    text = page.read_text()
    assert "## A title" in text and "In short" not in text
    assert "12.0 / 10.0 = 1.20" in text
    assert "![A title](page/13.png)" in text
    assert (tmp_path / "docs" / "page" / "13.png").read_bytes().startswith(b"\x89PNG")


def test_reproducing_does_not_import_torch():
    code = "import sys, dyncp.commands.reproduce; sys.exit('torch' in sys.modules)"
    source = Path(__file__).parents[2] / "src"
    assert subprocess.run([sys.executable, "-c", code], cwd=source, check=False).returncode == 0
