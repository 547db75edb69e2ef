"""The benchmark of one GPU runs without one, at toy sizes, and sees what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu import run
from benchmarks.gpu.cases import KINDS, mask_mod, mask_of
from benchmarks.gpu.clock import Budget, Clock, Deadline, spread
from benchmarks.gpu.pieces import moving, pass_of, piece_of
from dyncp.cost.profiled import Profiled
from dyncp.ir.plan import Kind
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.kernels.api import KERNELS, Choice

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Exit code, output, result and table of a toy run."""
    folder = tmp_path_factory.mktemp("toy")
    out, table = folder / "out.json", folder / "table.json"
    words = ["-m", "benchmarks.gpu.run", "--toy", "--kernels", "reference", "--out", str(out), "--table", str(table)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(out.read_text()), Profiled.read(table)


def test_every_section_finds_something(toy):
    printed, result, _ = toy
    assert list(result["sections"]) == list(run.SECTIONS)
    assert result["sections"].pop("tiles")["left_out"] == ["tiles, which kernels 'reference' do not have"]
    for name, section in result["sections"].items():
        assert section["rows"] and not section["left_out"] and "broken" not in section, name
        assert f"{name}: " in printed
    assert result["failures"] == [] and "FAILED" not in printed


def test_targets_of_numbers_are_judged_and_those_of_speed_are_not(toy):
    printed, result, _ = toy
    verdicts = {each["name"]: each["met"] for each in result["targets"]}
    assert {met for name, met in verdicts.items() if name.startswith(("errors in", "the same bits"))} == {True}
    assert {met for name, met in verdicts.items() if "speed of" in name} == {None}
    assert "not judged (toy)" in printed and "MISSED" not in printed


def test_peers_that_do_not_run_say_why(toy):
    _, result, _ = toy
    rows = [row for row in result["sections"]["dense"]["rows"] if row["peer"]]
    flex, cudnn = (next(row for row in rows if name in row["contender"]) for name in ("Flex", "cuDNN"))
    assert "median_s" in flex["forward"] and "backward on CPU" in flex["backward"]["error"]
    assert all("No viable backend" in cudnn[name]["error"] for name in ("forward", "backward", "both"))


def test_the_table_has_all_sizes(toy):
    _, result, table = toy
    assert list(table.q_tokens) == result["scale"]["table_sizes"]
    assert table.launch_s > 0 and table.instruction_s > 0
    replayed = [row for row in result["sections"]["replay"]["rows"] if "graph" not in row]
    assert all(row["table_s"] > 0 and row["roofline_s"] > 0 for row in replayed)


def test_wrong_kernels_fail_the_check(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(KERNELS, "wrong", Choice("benchmarks_gpu.wrong", "Wrong", ()))
    out = tmp_path / "out.json"
    assert run.main(["--toy", "--kernels", "wrong", "--only", "check", "--out", str(out)]) == 1
    failures = json.loads(out.read_text())["failures"]
    wrong_kinds = {kind for kind in KINDS if any(f"wrong, {kind} 70" in line for line in failures)}
    assert wrong_kinds == set(KINDS)
    printed = capsys.readouterr().out
    assert printed.index("FAILED check") < printed.index("target") and "MISSED" in printed


def test_further_kernels_are_further_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "FURTHER", ("torch_cpu",))
    out, sections = tmp_path / "out.json", ("check", "dense", "masks")
    words = [word for section in sections for word in ("--only", section)]
    assert run.main(["--toy", "--kernels", "reference", *words, "--out", str(out)]) == 0
    found = json.loads(out.read_text())["sections"]
    for section in sections:
        ran = [row["contender"] for row in found[section]["rows"] if not row["peer"]]
        assert set(ran) == {"reference", "torch_cpu"}, section
    cases = [row["case"] for row in found["check"]["rows"] if row["contender"] == "torch_cpu"]
    assert sum("4 ranks" in case for case in cases) == 2 and len(cases) == 2 + len(KINDS)


def test_a_section_that_breaks_does_not_end_the_others(tmp_path, capsys, monkeypatch):
    def broken(session, deadline, found):
        found.rows.append({"move": "pack Q"})
        raise RuntimeError("out of order")

    monkeypatch.setitem(run.SECTIONS, "moves", run.Section(broken, 1, ""))
    monkeypatch.setattr(run.report, "TABLES", run.report.TABLES | {"moves": lambda rows: [["rows"]]})
    out = tmp_path / "out.json"
    words = ["--toy", "--kernels", "reference", "--only", "moves", "--only", "blocks", "--out", str(out)]
    assert run.main(words) == 1
    sections = json.loads(out.read_text())["sections"]
    assert sections["moves"]["rows"] and "out of order" in sections["moves"]["broken"]
    assert sections["blocks"]["rows"]
    assert "FAILED moves broke: RuntimeError: out of order" in capsys.readouterr().out


def test_without_time_everything_is_left_out_and_said(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert run.main(["--toy", "--kernels", "reference", "--minutes", "0", "--out", str(out)]) == 0
    sections = json.loads(out.read_text())["sections"]
    assert all(section["left_out"] and not section["rows"] for section in sections.values())
    assert capsys.readouterr().out.count("left out for lack of time") == len(run.SECTIONS)


def test_what_cannot_run_is_refused(capsys):
    for wrong in (["--toy", "--kernels", "none"], ["--only", "nothing"], ["--kernels", "reference"]):
        if wrong[0] == "--kernels" and torch.cuda.is_available():
            continue
        with pytest.raises(SystemExit):
            run.main(wrong)
    assert "--toy tries the benchmark without one" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [64, 150])
def test_flex_attention_gets_the_same_mask(kind, tokens):
    at = torch.arange(tokens)
    mod = mask_mod(kind, tokens, CPU) or (lambda b, h, q, k: (q >= 0) & (k >= 0))
    seen = mod(at[:0], at[:0], at[:, None], at[None, :])
    np.testing.assert_array_equal(seen.numpy(), mask_of(kind, tokens).dense())


def test_a_section_has_its_share_of_the_time_that_is_left(monkeypatch):
    monkeypatch.setattr("benchmarks.gpu.clock.time.perf_counter", lambda: 100.0)
    budget = Budget(1, {"a": 1, "b": 2, "c": 3}, 100.0)
    assert [budget.deadline(name).at_s for name in "abc"] == [110.0, 124.0, 160.0]
    left_out = []
    assert list(Deadline(99.0).in_time("xy", str.upper, left_out)) == [] and left_out == ["X", "Y"]
    assert list(Deadline(101.0).in_time("xy", str.upper, left_out)) == ["x", "y"]


def test_times_on_a_gpu_are_those_between_events(monkeypatch):
    now, asleep = [0.0], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[0]

        def synchronize(self):
            assert self.at == now[0]

        def elapsed_time(self, other):
            return 1e3 * (other.at - self.at)

    def work(seconds):
        return lambda: now.__setitem__(0, now[0] + seconds)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", asleep.append)
    clock = Clock(torch.device("cuda", 0))
    assert clock.laps([work(0.25), work(0.5)], head_start_s=1e-3).device_s == (0.25, 0.5)
    assert asleep == [2_000_000]
    assert clock.times(work(0.125), 3) == [0.125] * 3


def test_a_spread_is_median_and_quartiles():
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median_s": 3.0, "q1_s": 2.0, "q3_s": 4.0, "runs": 5}


@pytest.mark.parametrize(("kind", "reduce"), [(Kind.KV, False), (Kind.Q, False), (Kind.DQ, True), (Kind.DKV, True)])
def test_moves_move_what_they_say(kind, reduce):
    shape = AttentionShape(4, 2, 16, dtype="float32")
    piece = piece_of(moving(kind, reduce, 3, 5, shape), pass_of(kind), "reference", CPU)
    slots = range(len(piece.buffers.layout.slots) // 2)
    for local in slots:
        for field in piece.buffers.fields(local + len(slots)):
            field.fill_(local + 1)
    before = [[field.clone() for field in piece.buffers.fields(local)] for local in slots]
    piece.run()
    for local in slots:
        fields = zip(before[local], piece.buffers.fields(local), piece.buffers.fields(local + len(slots)), strict=True)
        for old, near, far in fields:
            assert torch.equal(near, old + local + 1 if reduce else old)
            assert torch.equal(far, torch.full_like(far, local + 1) if reduce else old)


def test_tiles_and_moves_of_the_triton_kernels(tmp_path):
    out = tmp_path / "out.json"
    words = ["--toy", "--only", "tiles", "--only", "moves", "--out", str(out), "--table", str(tmp_path / "table.json")]
    assert run.main(words) == 0
    sections = json.loads(out.read_text())["sections"]
    assert [row["tiles"] for row in sections["tiles"]["rows"]] == ["as used"] * 2 + [
        "(32, 32, 4, 1)",
        "(32, 32, 64, 32, 4, 1)",
    ]
    assert all(row["median_s"] > 0 for row in sections["tiles"]["rows"])
    assert {row["move"] for row in sections["moves"]["rows"]} == {"pack KV", "pack Q", "add OUT", "add DQ", "add DKV"}
