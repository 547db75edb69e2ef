import json
import os
import signal
import subprocess
import sys
import time

import pytest

from dyncp.demo import DemoConfig, DemoError, run_demo
from dyncp.demo import run as run_module
from dyncp.demo.report import result_table
from dyncp.demo.run import planning_figures, run_to_end, train_distributed


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    texts = folder / "texts"
    texts.mkdir()
    for number in range(9):
        (texts / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog. " * (1 + number))
    config = DemoConfig(
        ranks=2, steps=5, tokens=512, max_length=256, data=texts, block_tokens=64, out=folder / "out", masks=MASKS
    )
    return config, run_demo(config)


MASKS = (
    "causal",
    "lambda:sink=4,window=40",
    "causal_blockwise:block=16,sink_blocks=1,window_blocks=2",
    "shared_question",
)


def test_two_processes_learn_what_one_with_dense_attention_learns(finished):
    _, result = finished
    ours, dense = result["loss"]["distributed"], result["loss"]["dense"]
    assert len(ours) == len(dense) == 5
    assert result["loss"]["largest_difference"] == max(abs(a - b) for a, b in zip(ours, dense, strict=True)) <= 1e-3
    assert ours[-1] < ours[0] - 0.3
    assert result["passed"]


def test_the_result_is_written_and_drawn(finished):
    config, result = finished
    assert json.loads((config.out / "result.json").read_text()) == result
    assert (config.out / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_does_not_offer_the_dense_run_as_a_baseline_of_speed(finished):
    assert "(a reference for correctness, not a speed comparison)" in result_table(finished[1])


def test_the_result_says_what_moved_and_what_planning_cost(finished):
    config, result = finished
    assert list(result["strategies"]) == ["dynamic", "ring", "zigzag"]
    for figures in result["strategies"].values():
        assert len(figures["bytes_per_step"]) == config.steps
        assert figures["compute_imbalance"] >= 1
        assert figures["token_imbalance"] >= 1
    assert result["strategies"]["dynamic"]["total_bytes"] < result["strategies"]["ring"]["total_bytes"]
    planning = result["planning"]
    assert planning["plans"] >= config.steps
    assert planning["planning_s"] > 0
    assert 0 <= planning["hidden"] <= planning["hidden_after_first_step"] <= 1
    assert set(result["seconds"]) == {"distributed", "dense", "comparison", "total", "training_steps"}


def test_a_curve_that_differs_fails_the_demo(finished, monkeypatch, tmp_path):
    config, _ = finished
    config = DemoConfig.from_json(config.to_json().replace(str(config.out), str(tmp_path)))
    rank = {
        "losses": [5.0] * 5,
        "training_s": 1.0,
        "loader": {"plans_made": 5, "planning_s": 1.0, "waited_s": 0.5, "first_wait_s": 0.5},
    }
    load = {"forward_bytes": 1, "backward_bytes": 1, "pairs": 1, "tokens": 1}
    monkeypatch.setattr(run_module, "train_distributed", lambda _: [rank | {"loads": [load] * 5}] * 2)
    monkeypatch.setattr(run_module, "train_dense", lambda _: [5.0, 5.0, 5.002, 5.0, 5.0])
    with pytest.raises(DemoError, match=r"the loss curves differ by 2.00e-03; they must agree to 0.001"):
        run_demo(config)
    assert json.loads((tmp_path / "result.json").read_text())["passed"] is False


def test_a_process_that_fails_ends_the_demo_with_its_error(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("some text")
    config = DemoConfig(ranks=2, steps=2, tokens=64, max_length=64, strategy="ring", data=texts, out=tmp_path)
    (texts / "a.txt").unlink()
    with pytest.raises(DemoError, match=r"training failed on rank \d: ValueError: no text files"):
        train_distributed(config)


def test_hidden_is_what_the_slowest_rank_did_not_wait_for():
    reports = [
        {"plans_made": 2, "planning_s": 3.0, "waited_s": 1.0, "first_wait_s": 0.9},
        {"plans_made": 1, "planning_s": 1.0, "waited_s": 2.0, "first_wait_s": 1.0},
    ]
    figures = planning_figures(reports)
    assert figures["plans"] == 3
    assert figures["planning_s"] == 4.0
    assert figures["hidden"] == 0.5
    assert figures["hidden_after_first_step"] == 0.75


def test_a_command_does_not_outlive_an_interrupted_demo(tmp_path):
    mark = tmp_path / "pid"
    code = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    program = f"import sys; from dyncp.demo.run import run_to_end; run_to_end([sys.executable, '-c', {code!r}])"
    source = str(run_module.__file__).split("/dyncp/")[0]
    owner = subprocess.Popen([sys.executable, "-c", program], cwd=source, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (mark.exists() and mark.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    owner.send_signal(signal.SIGTERM)
    owner.wait(30)
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_the_exit_code_of_a_command_comes_back():
    assert run_to_end([sys.executable, "-c", "raise SystemExit(3)"]) == 3
