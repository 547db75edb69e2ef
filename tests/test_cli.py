import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

import dyncp
from dyncp import cli, verify
from dyncp.ir import codec
from dyncp.strategies.api import Options
from dyncp.strategies.warm import warm_up

BATCH = '{"sequences": [{"length": 96, "mask": {"kind": "lambda", "sink": 4, "window": 16}}, {"length": 40}]}'


@pytest.fixture
def batch_file(tmp_path):
    path = tmp_path / "batch.json"
    path.write_text(BATCH)
    return str(path)


@pytest.fixture
def named_file(tmp_path):
    path = tmp_path / "named.json"
    window, whole = {"kind": "sliding_window", "window": 8}, {"kind": "causal"}
    sequences = [{"length": 90, "masks": {"window": window, "global": whole}}, {"length": 30}]
    path.write_text(json.dumps({"sequences": sequences, "weights": {"window": 5}}))
    return str(path)


@pytest.fixture(scope="module")
def compiled():
    """Lets no process say that it compiles the planner."""
    warm_up()


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
    out = plan(capsys, batch_file, "--cluster", "cpu", "--strategy", "ring")
    assert "2 sequences, 136 tokens" in out and "4 (1 node x 4)" in out and "between nodes" in out
    assert "up to 24 tokens (8 blocks)" in out, "the ring's own blocks, whatever --block-tokens says"
    assert "8 query heads and 2 KV heads of 128, bfloat16" in out


def test_says_that_a_check_passed_where_one_was_asked_for(capsys, batch_file, tmp_path):
    words = (batch_file, "--cluster", "cpu", "--strategy", "ring")
    assert plan(capsys, *words, "--check").splitlines()[-1] == "check passed"
    assert "check" not in plan(capsys, *words)
    assert json.loads(plan(capsys, *words, "--json", "--check"))["checked"] is True
    assert "checked" not in json.loads(plan(capsys, *words, "--json"))
    text = plan(capsys, *words, "--text", "--check")
    assert "# check passed" in text and codec.from_text(text) == codec.from_text(plan(capsys, *words, "--text"))


def test_draws_the_mask_that_is_asked_for(capsys, named_file, tmp_path):
    pictures = [tmp_path / f"{name}.png" for name in ("first", "window", "global")]
    words = (named_file, "--cluster", "cpu", "--strategy", "ring", "--picture")
    plan(capsys, *words, str(pictures[0]))
    for path in pictures[1:]:
        plan(capsys, *words, str(path), "--picture-mask", path.stem)
    first, window, every = (path.read_bytes() for path in pictures)
    assert first == window != every
    code, _, err = run(capsys, "plan", *words, str(pictures[0]), "--picture-mask", "local")
    assert code == 2 and "no mask 'local' in this plan; it has window, global" in err


@pytest.mark.parametrize("suffix", ["plan", "txt"])
def test_shows_a_plan_file(capsys, named_file, tmp_path, suffix):
    path = str(tmp_path / f"a.{suffix}")
    made = plan(capsys, named_file, "--cluster", "cpu", "--check", "--out", path).splitlines()
    code, out, err = run(capsys, "show", path)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        line for line in made if not line.startswith(("planning", "  in time", "bound", "note"))
    ]
    code, out, _ = run(capsys, "show", path, "--text")
    assert code == 0 and codec.from_text(out) == codec.read_plan(path)


def test_shows_no_broken_plan(capsys, batch_file, tmp_path):
    path = tmp_path / "a.txt"
    plan(capsys, batch_file, "--cluster", "cpu", "--strategy", "ring", "--out", str(path))
    lines = [line for line in path.read_text().splitlines() if not line.startswith("digest")]
    unwaited, uncomputed = list(lines), list(lines)
    unwaited.remove("wait step 1")
    uncomputed.remove(next(line for line in lines if line.startswith("  comp ") and " reads " in line))
    for text, expected, message in ((unwaited, 2, "step 1 is never waited for"), (uncomputed, 1, "the plan is broken")):
        path.write_text("\n".join(text))
        code, out, err = run(capsys, "show", str(path))
        assert code == expected and out == "" and message in err


def test_batches_and_plans_are_not_taken_for_each_other(capsys, batch_file, tmp_path):
    for path in (tmp_path / "a.plan", tmp_path / "a.txt"):
        plan(capsys, batch_file, "--cluster", "cpu", "--strategy", "ring", "--out", str(path))
        for command in ("plan", "verify"):
            code, _, err = run(capsys, command, str(path))
            assert code == 2 and f"{path.name} is a plan, not a batch" in err and "dyncp show" in err
    code, _, err = run(capsys, "show", batch_file)
    assert code == 2 and "not a dyncp plan file" in err


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
        (("FILE", "--lengths", "4"), "both a batch file and --lengths 4"),
        (("FILE", "FILE"), "give one batch file"),
        (("FILE", "--mask", "full"), "--mask is for --lengths"),
        (("--lengths", "100", "200"), "'200' was taken as FILE"),
        (("--lengths", "100", "200", "300"), "separate lengths by commas"),
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
        (("--lengths", "40", "--keep", "q"), "error: --keep: unknown keep 'q'; choose one of none"),
        (
            ("--lengths", "40", "--block-tokens", "0"),
            "error: --block-tokens: block_tokens is 0; expected a whole number from 1",
        ),
        (("--lengths", "40", "--block-tokens", "many"), "error: --block-tokens: "),
        (("--lengths", "40", "--picture-mask", "default"), "--picture-mask without --picture"),
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


def test_bad_options_are_named_whatever_the_terminal_can_draw(monkeypatch):
    source = Path(dyncp.__file__).parents[1]
    for encoding in ("ascii", "utf-8"):
        monkeypatch.setenv("PYTHONIOENCODING", encoding)
        words = [sys.executable, "-m", "dyncp", "plan", "--lengths", "40", "--keep", "q"]
        result = subprocess.run(words, cwd=source, capture_output=True, text=True)
        assert result.returncode == 2
        assert result.stderr == (
            "dyncp: error: --keep: unknown keep 'q'; choose one of none, kv, all (see dyncp plan --help)\n"
        )


def test_a_bad_option_of_the_demo_is_named(capsys):
    code, _, err = run(capsys, "demo", "--keep", "q")
    assert code == 2 and "error: --keep: unknown keep 'q'" in err
    code, _, err = run(capsys, "demo", "--masks", "square")
    assert code == 2 and "error: unknown mask kind 'square'" in err


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
    assert code == 2 and "unknown command 'paln'; choose one of demo, plan, show, verify" in err
    code, out, err = run(capsys)
    assert code == 2


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help(capsys, name):
    with pytest.raises(SystemExit) as stop:
        cli.main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: dyncp {name}" in capsys.readouterr().out


def test_every_planning_option_has_help_of_its_own(capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    out = capsys.readouterr().out
    words = " ".join(out.replace("│", " ").split())
    for option in fields(Options):
        flag = f"--{'no-' * (option.default is True)}{option.name.replace('_', '-')}"
        _, _, text = words.rpartition(f" {flag} ")
        value = "" if option.default is True else r"(INT|FLOAT|STR|(INT|FLOAT)\|\{auto\}) "
        assert re.match(rf"{value}[A-Z`].*?\(default: ", text), flag
    assert "1 + --epsilon for computation, 1 + --token-epsilon for tokens" in words


def test_is_a_program_that_may_be_cut_short(compiled):
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
    from dyncp.ir.plan import PlanError

    def refuse(plan, blocks, batch):
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
    for words in ("zigzag", "136 tokens", "4 (1 node x 4)", "(16 blocks)", "of 16, float32", "forward, "):
        assert words in out[: out.index("largest relative error")]
    code, out, _ = run(
        capsys, "verify", "--lengths", "50", "--cluster", "cpu", "--strategy", "ring", "--dtype", "bfloat16"
    )
    assert code == 0 and "2e-02" in out


def test_verify_gives_the_errors_of_each_mask(capsys, named_file):
    code, out, _ = run(capsys, "verify", named_file, "--cluster", "cpu", "--strategy", "ring")
    assert code == 0 and re.search(r"largest relative error +window +global\n", out)
    assert re.search(r"  dq +\d\.\de-\d\d +\d\.\de-\d\d\n", out)


def test_verify_fails_past_the_tolerance(capsys, monkeypatch):
    monkeypatch.setitem(verify.TOLERANCE, "float32", 1e-12)
    code, out, _ = run(capsys, "verify", "--lengths", "50", "--cluster", "cpu", "--strategy", "ring")
    assert code == 1 and "0 of 1 batch passed" in out and "mask 'default' fails: out" in out


def test_verify_runs_a_corpus(capsys):
    code, out, err = run(capsys, "verify", "--corpus", "6", "--seed", "3")
    assert code == 0 and "6 of 6 batches passed" in out
    assert out.startswith("largest relative error")
    code, _, err = run(capsys, "verify", "--corpus", "6", "--lengths", "40")
    assert code == 2 and "both a batch and --corpus" in err


@pytest.mark.parametrize("words", [("--json",), ("--text",), ()])
def test_a_full_disk_is_one_line(compiled, words):
    command = [sys.executable, "-m", "dyncp", "plan", "--lengths", "40", "--strategy", "ring", *words]
    with open("/dev/full", "w") as full:
        source = Path(dyncp.__path__[0]).parent
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=source)
    assert process.returncode == 2
    assert process.stderr == "dyncp: error: No space left on device\n"


def test_out_of_memory_is_one_line(capsys, monkeypatch):
    from dyncp.commands import plan as module

    def exhaust(*_):
        raise MemoryError("116 GiB")

    monkeypatch.setattr(module, "build", exhaust)
    code, out, err = run(capsys, "plan", "--lengths", "40")
    assert (code, out) == (2, "") and err.startswith("dyncp: error: out of memory; use larger blocks")


def test_a_long_message_is_cut(capsys, tmp_path):
    path = tmp_path / "batch.json"
    path.write_text(
        json.dumps({"sequences": [{"length": 8, "mask": {"kind": "slices", "slices": list(range(10**5))}}]})
    )
    code, _, err = run(capsys, "plan", str(path))
    assert code == 2 and err.startswith("dyncp: error: ") and len(err) < 1100 and err.count("\n") == 1
