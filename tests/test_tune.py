"""`dyncp tune`."""

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dyncp import cli
from dyncp.commands.tune import preferred
from dyncp.lookahead import LookAhead, Planning
from dyncp.strategies.api import Options
from dyncp.tune.run import Expectation, Tuning

ROOT = Path(__file__).parents[1]
WORDS = ("--ranks-per-node", "4", "--tp", "2", "--layers", "2", "--tokens", "512", "--strategies", "ring,zigzag")
WORDS += ("--batches", "2")


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([300, 40, 7, 500, 120, 64, 90, 210, 33, 400]))
    return str(path)


def run(capsys, *words):
    code = cli.main(["tune", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_says_what_to_use(capsys, lengths):
    code, out, _ = run(capsys, lengths, *WORDS)
    assert code == 0
    for words in (
        "10 samples of 7 to 500 tokens",
        "batches     2 of ",
        "2 (1 node x 2)",
        "as given",
        "keep = kv",
        "use ",
    ):
        assert words in out
    for name in ("dynamic", "ring", "zigzag"):
        assert any(line.startswith(name) for line in out.splitlines())


def test_every_line_is_explained(capsys, lengths):
    page = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
    explained = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL)))
    _, out, _ = run(capsys, lengths, *WORDS)
    (head,) = (line for line in out.splitlines() if "x best" in line)
    assert set(re.split(r"\s{2,}", head.strip())) <= explained
    assert "settings of dynamic" in explained


@pytest.mark.parametrize("mask", ["causal", "lambda:sink=4,window=16"])
def test_the_snippet_runs(capsys, lengths, mask):
    _, out, _ = run(capsys, lengths, *WORDS, "--mask", mask, "--max-length", "256")
    start = out.index("from dyncp import")
    names = {}
    exec(out[start : out.index("of the first batch:")], names)
    assert isinstance(names["planning"], Planning) and isinstance(names["look_ahead"], LookAhead)
    assert names["planning"].cluster.ranks == 2 and names["batching"].longest == 256
    assert names["batching"].mask(0, 20).pairs() > 0


def test_the_command_runs(capsys, lengths):
    mask = "lambda:sink=4,window=16"
    _, out, _ = run(capsys, lengths, *WORDS, "--mask", mask)
    (line,) = (line for line in out.splitlines() if line.startswith("dyncp simulate"))
    words = shlex.split(line)[1:]
    assert words[words.index("--mask") + 1] == mask
    assert cli.main(words) == 0
    assert "iteration" in capsys.readouterr().out


def test_a_batch_of_many_sequences_has_no_command(capsys, tmp_path):
    path = tmp_path / "lengths"
    path.write_text("4 " * 60)
    code, out, _ = run(capsys, str(path), *WORDS, "--batches", "1")
    assert code == 0 and "dyncp simulate" not in out and "of the first batch" not in out


def test_says_what_was_cut_and_what_there_was_no_time_for(capsys, lengths):
    _, out, _ = run(capsys, lengths, *WORDS)
    assert "cut to" not in out and "--time-limit" not in out and "* pads" not in out
    _, out, _ = run(capsys, lengths, *WORDS, "--max-length", "256", "--time-limit", "1e-6", "--tp", "1")
    assert "; 3 cut to --max-length" in out and "4 (1 node x 4), 1 device each" in out
    assert "not simulated: 1 of 2 batches; not tried: block_tokens = 512, 1024, 2048, 4096; schedule = greedy;" in out
    _, out, _ = run(capsys, lengths, *WORDS, "--strategies", "double_ring", "--tokens", "450")
    assert "; 1 cut to --tokens" in out and "* pads to the longest sequence" in out


def test_says_why_dynamic_is_preferred():
    def expectation(strategy, iteration_s):
        return Expectation(strategy, 1, iteration_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0, 0.0)

    ring, ours = expectation("ring", 1.0), expectation("dynamic", 1.004)
    tuning = Tuning(1, 1, 0, 1, 1, (ring, ours), (), (), "dynamic", Options(), ours, 2, 1, (1,), 0, ())
    (line,) = preferred(tuning)
    assert "ring is faster by 0.40%" in line
    assert preferred(replace(tuning, expected=(ours, ring))) == []
    assert preferred(replace(tuning, strategy="ring", best=ring)) == []


def test_prints_one_json_object_the_same_again(capsys, lengths):
    def figures():
        code, out, _ = run(capsys, lengths, *WORDS, "--json")
        assert code == 0 and out.count("\n") == 1
        data = json.loads(out)
        for one in (
            *data["strategies"],
            data["recommended"]["expected"],
            *(trial["expected"] for trial in data["trials"]),
        ):
            assert one.pop("planning_s") > 0
        return data

    data = figures()
    assert {one["strategy"] for one in data["strategies"]} == {"dynamic", "ring", "zigzag"}
    assert data["recommended"]["strategy"] in ("dynamic", "ring", "zigzag")
    assert data["batches"]["simulated"] == 2 and data["model"]["layers"] == 2
    assert data == figures()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("no/such/file",), "neither a file nor a folder"),
        (("LENGTHS", "--strategies", "best"), "unknown strategy 'best'"),
        (("LENGTHS", "--tokens", "0"), "tokens is 0"),
        (("LENGTHS", "--max-length", "200000"), "max_length is 200000"),
        (("LENGTHS", "--batches", "0"), "batches is 0"),
        (("LENGTHS", "--mask", "square"), "unknown mask kind 'square'"),
        (("LENGTHS", "--kept-gb", "0"), "--kept-gb is 0"),
        (("LENGTHS", "--time-limit=-1"), "--time-limit is -1"),
        (("LENGTHS", "--model", "9b"), "unknown model '9b'"),
        (("LENGTHS", "--bytes-per-token", "0"), "bytes_per_token is 0"),
        ((), "DATA"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, monkeypatch, lengths, words, message):
    monkeypatch.setitem(sys.modules, "datasets", None)
    code, out, err = run(capsys, *(lengths if word == "LENGTHS" else word for word in words))
    assert (code, out) == (2, "")
    assert err.startswith("dyncp: error: ") and err.count("\n") == 1
    assert message in err
