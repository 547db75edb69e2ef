import json
import subprocess
import sys
from pathlib import Path

import pytest

import dyncp
from dyncp import cli, verify
from dyncp.ir import codec

BATCH = '{"sequences": [{"length": 96, "mask": {"kind": "lambda", "sink": 4, "window": 16}}, {"length": 40}]}'


@pytest.fixture
def batch_file(tmp_path):
    path = tmp_path / "batch.json"
    path.write_text(BATCH)
    return str(path)


def run(capsys, *words):
    code = cli.main(words)
    out, err = capsys.readouterr()
    return code, out, err


def plan(capsys, *words):
    code, out, err = run(capsys, "plan", "--block-tokens", "16", *words)
    assert (code, err) == (0, "")
    return out


def test_prints_one_json_object(capsys, batch_file):
    out = plan(capsys, batch_file, "--nodes", "2", "--ranks-per-node", "2", "--strategy", "zigzag", "--json")
    assert out.count("\n") == 1
    figures = json.loads(out)
    assert (figures["strategy"], figures["ranks"], figures["nodes"], figures["tokens"]) == ("zigzag", 4, 2, 136)
    assert figures["total_bytes"] > 0


def test_lengths_and_a_mask_are_a_batch(capsys, batch_file):
    words = ("--lengths", "96,40", "--mask", "lambda:sink=4,window=16", "--strategy", "ring", "--json")
    figures = json.loads(plan(capsys, *words))
    assert (figures["sequences"], figures["ranks"]) == (2, 8), "p4de has 8 ranks in a node"


def test_prints_a_table(capsys, batch_file):
    out = plan(capsys, batch_file, "--cluster", "cpu", "--strategy", "ring", "--check")
    assert "2 sequences, 136 tokens" in out and "4 (1 node x 4)" in out and "between nodes" in out


def test_writes_plan_text_and_picture(capsys, batch_file, tmp_path):
    out, picture = tmp_path / "a.plan", tmp_path / "a.png"
    words = (
        batch_file,
        "--cluster",
        "cpu",
        "--strategy",
        "ring",
        "--out",
        str(out),
        "--picture",
        str(picture),
        "--text",
    )
    text = plan(capsys, *words)
    assert text.rstrip("\n") == codec.to_text(codec.read_plan(out)).rstrip("\n")
    assert picture.exists()


def test_the_same_plan_every_time(capsys, batch_file, tmp_path):
    files = [tmp_path / "a.plan", tmp_path / "b.plan"]
    for path in files:
        plan(capsys, batch_file, "--cluster", "cpu", "--out", str(path))
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "neither a batch file nor --lengths"),
        (("FILE", "--lengths", "4"), "both a batch file and --lengths"),
        (("missing.json",), "missing.json: No such file"),
        (("--lengths", "4096,x"), "'x' in --lengths is not a number"),
        (("--lengths", "0"), "length is 0"),
        (("--lengths=-4"), "length is -4"),
        (("--lengths", "40", "--mask", "lambda:sink=3"), "it takes sink, window"),
        (("--lengths", "40", "--mask", "square"), "unknown mask kind 'square'; choose one of full"),
        (("--lengths", "40", "--mask", "document:lengths=40+2"), "add up to 42 tokens"),
        (("--lengths", "40", "--strategy", "best"), "unknown strategy 'best'; choose one of dynamic"),
        (("--lengths", "40", "--cluster", "tpu"), "unknown cluster preset 'tpu'; choose one of p4de"),
        (("--lengths", "40", "--q-heads", "3"), "3 query heads cannot be shared by 2 KV heads"),
        (("--lengths", "40", "--dtype", "int8"), "unknown dtype 'int8'; choose one of float32"),
        (("--lengths", "40", "--keep", "q"), "unknown keep 'q'; choose one of none"),
        (("--lengths", "40", "--block-tokens", "0"), "block_tokens is 0; it must be at least 1"),
        (("--lengths", "40", "--block-tokens", "many"), "--block-tokens"),
        (("--lengths", "40", "--nodes", "0"), "nodes is 0"),
        (("--lengths", "40", "--blocks", "4"), "Unrecognized options: --blocks"),
        (("--lengths", "40", "--json", "--text"), "both --json and --text"),
        (("--lengths", "40", "--strategy", "ring", "--out", "no/such/folder/a.plan"), "no/such/folder/a.plan"),
        (("--lengths", "40", "--strategy", "ring", "--picture", "no/such/folder/a.png"), "no/such/folder/a.png"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, batch_file, words, message):
    words = [words] if isinstance(words, str) else words
    code, out, err = run(capsys, "plan", *(batch_file if word == "FILE" else word for word in words))
    assert code == 2 and out == ""
    assert err.startswith("dyncp: error: ") and err.count("\n") == 1
    assert message in err


def test_a_wrong_batch_file_is_bad_input(capsys, tmp_path):
    path = tmp_path / "batch.json"
    for text, message in (("{", "is not JSON"), ('{"sequences": [{"len": 4}]}', "'len'"), ("[]", "expected an object")):
        path.write_text(text)
        code, _, err = run(capsys, "plan", str(path))
        assert code == 2 and message in err and err.count("\n") == 1


def test_commands(capsys):
    assert run(capsys, "--version") == (0, f"dyncp {dyncp.__version__}\n", "")
    code, out, _ = run(capsys, "--help")
    assert code == 0 and all(f"  {name} " in out for name in cli.COMMANDS)
    code, _, err = run(capsys, "paln")
    assert code == 2 and "unknown command 'paln'; choose one of demo, plan, verify" in err
    code, out, err = run(capsys)
    assert code == 2


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(capsys, name):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: dyncp {name}" in capsys.readouterr().out


def test_is_a_program_that_may_be_cut_short():
    words = "-m dyncp plan --lengths 2000 --strategy data_parallel --block-tokens 8 --text --cluster cpu"
    source = Path(dyncp.__file__).parents[1]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, *words.split()], cwd=source, **pipes) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_a_broken_plan_fails_its_check(capsys, monkeypatch):
    from dyncp.commands import plan as module
    from dyncp.ir.check import PlanError

    def refuse(plan, blocks):
        raise PlanError("rank 1 reads nothing\n  step 0\n  step 1")

    monkeypatch.setattr(module, "check_plan", refuse)
    code, out, err = run(capsys, "plan", "--lengths", "40", "--strategy", "ring", "--check")
    assert code == 1 and out == "" and "rank 1 reads nothing\n  step 0" in err


def test_verify_says_how_exact_a_plan_is(capsys, batch_file):
    code, out, err = run(
        capsys, "verify", batch_file, "--cluster", "cpu", "--block-tokens", "16", "--strategy", "zigzag"
    )
    assert (code, err) == (0, "")
    for name in ("out", "dq", "dk", "dv", "tolerance", "1 of 1 batch passed"):
        assert name in out
    code, out, _ = run(
        capsys, "verify", "--lengths", "50", "--cluster", "cpu", "--strategy", "ring", "--dtype", "bfloat16"
    )
    assert code == 0 and "2e-02" in out


def test_verify_fails_past_the_tolerance(capsys, monkeypatch):
    monkeypatch.setitem(verify.TOLERANCE, "float32", 1e-12)
    code, out, _ = run(capsys, "verify", "--lengths", "50", "--cluster", "cpu", "--strategy", "ring")
    assert code == 1 and "0 of 1 batch passed" in out and "batch 0 fails: out" in out


def test_verify_runs_a_corpus(capsys):
    code, out, err = run(capsys, "verify", "--corpus", "6", "--seed", "3")
    assert code == 0 and "6 of 6 batches passed" in out
    code, _, err = run(capsys, "verify", "--corpus", "6", "--lengths", "40")
    assert code == 2 and "both a batch and --corpus" in err
