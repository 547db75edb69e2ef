import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dyncp.demo import DemoConfig, DemoError, run_demo
from dyncp.demo import run as run_module
from dyncp.demo.data import TextFiles
from dyncp.demo.report import result_table
from dyncp.demo.run import first_failure, planning_figures, run_to_end, train_distributed
from dyncp.demo.worker import EXITS_FILE, FAILURE_FILE


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    texts = tmp_path_factory.mktemp("demo")
    for number in range(9):
        (texts / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog. " * (1 + number))
    config = DemoConfig(
        ranks=2, steps=5, tokens=512, max_length=256, data=texts, block_tokens=64, out=texts / "out", masks=MASKS
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
    assert {path.name for path in config.out.iterdir()} == {"result.json", "demo.png"}


def test_what_the_demo_writes_below_the_data_is_no_document(finished):
    """The results lie in the data folder, as with `--data .`."""
    config, result = finished
    assert config.out.parent == config.data
    assert result["documents"] == 9
    assert len(TextFiles.below(config.data, 256, config.out)) == 9


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
        "waits_s": [0.5, 0.0, 0.0, 0.0, 0.0],
    }
    load = {"forward_bytes": 1, "backward_bytes": 1, "pairs": 1, "tokens": 1}
    monkeypatch.setattr(run_module, "train_distributed", lambda *_: [rank | {"loads": [load] * 5}] * 2)
    monkeypatch.setattr(run_module, "train_dense", lambda *_: [5.0, 5.0, 5.002, 5.0, 5.0])
    with pytest.raises(DemoError, match=r"the loss curves differ by 2.00e-03; they must agree to 0.001"):
        run_demo(config)
    assert json.loads((tmp_path / "result.json").read_text())["passed"] is False


def test_a_process_that_fails_ends_the_demo_with_its_error(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("some text")
    config = DemoConfig(ranks=2, steps=2, tokens=64, max_length=64, strategy="ring", data=texts, out=tmp_path)
    dataset = TextFiles.below(texts, 64, tmp_path / "out")
    (texts / "a.txt").unlink()
    details = tmp_path / "failure.txt"
    message = rf"training failed on rank \d: FileNotFoundError: .*a.txt' \(traceback in {details}\)"
    with pytest.raises(DemoError, match=message):
        train_distributed(config, dataset)
    assert details.read_text().startswith("Traceback")


def report_of(folder, rank, time_s):
    report = {"time_s": time_s, "error": f"lost at {time_s}", "details": f"trace of {rank}"}
    (folder / FAILURE_FILE.format(rank=rank)).write_text(json.dumps(report))


@pytest.mark.parametrize(
    ("reporting", "exits", "message"),
    [
        ([1, 0], [[0, 1], [1, 1]], "training failed on rank 1: lost at 0"),
        ([0, 1], [[2, -15], [0, 1], [1, 1]], "training failed on rank 0: lost at 0"),
        ([0, 2], [[0, 1], [1, -9], [2, 1]], "training failed on rank 1: its process was ended by SIGKILL without a"),
        ([0], [[0, 1], [1, 3]], "training failed on rank 1: its process ended with exit code 3 without a report"),
        ([], [[1, -11], [0, -15]], "training failed on rank 1: its process was ended by SIGSEGV"),
        ([], [[1, -15], [0, -15]], ""),
        ([], None, ""),
    ],
)
def test_the_first_process_that_failed_is_named_and_not_those_that_lost_it(tmp_path, reporting, exits, message):
    for time_s, rank in enumerate(reporting):
        report_of(tmp_path, rank, time_s)
    if exits is not None:
        (tmp_path / EXITS_FILE).write_text(json.dumps(exits))
    cause, details = first_failure(tmp_path, 3)
    assert cause.startswith(message) and bool(cause) == bool(message)
    assert details == (f"trace of {reporting[0]}" if "lost" in message else "")


def ran(planning_s, waits_s, plans=2, first_wait_s=0.0):
    loader = {"plans_made": plans, "planning_s": planning_s, "waited_s": sum(waits_s), "first_wait_s": first_wait_s}
    return {"loader": loader, "waits_s": waits_s}


def test_a_step_waits_as_long_as_the_rank_that_waits_longest():
    figures = planning_figures([ran(8.0, [1.0, 0.0, 3.0], 2, 1.0), ran(4.0, [0.5, 2.0, 0.0], 1, 0.5)], workers=1)
    assert (figures["plans"], figures["planning_s"], figures["busiest_s"]) == (3, 12.0, 8.0)
    assert (figures["waited_s"], figures["first_wait_s"]) == (6.0, 1.0)
    assert figures["hidden"] == 0.25
    assert figures["hidden_after_first_step"] == 0.375


@pytest.mark.parametrize("workers", [0, 1, 5])
def test_planning_side_by_side_hides_nothing_where_there_is_nothing_to_hide_behind(workers):
    """Four ranks with ten plans of a second each, and training that takes no time: it waits for the planners."""
    alone_s = 10.0 / max(1, workers)
    waits_s = [alone_s / 10, 0.0, 0.0, 0.0] * 10
    assert planning_figures([ran(10.0, waits_s)] * 4, workers)["hidden"] < 1e-9
    halved = planning_figures([ran(10.0, [wait / 2 for wait in waits_s])] * 4, workers)
    assert abs(halved["hidden"] - 0.5) < 1e-9


def test_no_less_than_nothing_is_hidden():
    assert planning_figures([ran(1.0, [1.0, 5.0])], 1)["hidden"] == 0  # with kappa 0, say, or slow starts


def test_the_table_says_what_hidden_means(finished):
    assert "on the busiest rank; training waited" in result_table(finished[1])
    assert "hidden (1 - waited / busiest)" in result_table(finished[1])


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


def test_a_command_has_a_stdin_that_ends_with_a_demo_that_is_killed(tmp_path):
    mark = tmp_path / "mark"
    code = (
        f"import os, pathlib; mark = pathlib.Path({str(mark)!r}); mark.write_text('started'); "
        "from dyncp.demo.worker import end_with_demo; mark.write_text(str(os.getpid())); end_with_demo()"
    )
    program = f"import sys; from dyncp.demo.run import run_to_end; run_to_end([sys.executable, '-c', {code!r}])"
    owner = subprocess.Popen([sys.executable, "-c", program], cwd=SOURCE)
    wait_until(lambda: mark.exists() and mark.read_text().isdigit())
    owner.kill()
    owner.wait(30)
    wait_until(lambda: not is_running(int(mark.read_text())))


@pytest.fixture
def training(tmp_path):
    """A demo in the middle of its training, as a terminal starts it: the process, and its training processes."""
    if not Path("/proc").exists():
        pytest.skip("looks at processes in /proc")
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 9)
    options = ["--ranks", "2", "--steps", "100000", "--tokens", "512", "--max-length", "256"]
    words = ["demo", *options, "--strategy", "ring", "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    (tmp_path / "tmp").mkdir()
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "dyncp", *words],
            cwd=SOURCE,
            env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
            stderr=stderr,
            start_new_session=True,
        )
    wait_until(lambda: "loss=" in (tmp_path / "stderr").read_text(), 120)
    yield process, training_processes(process.pid), tmp_path / "stderr"
    if process.poll() is None:
        process.kill()
        process.wait()


def test_ctrl_c_ends_a_demo_with_a_word(training):
    process, children, stderr = training
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    wait_until(lambda: not any(is_running(number) for number in children))
    assert not [path for path in (stderr.parent / "tmp").iterdir() if path.name.startswith(("dyncp", "torchelastic"))]
    bar, word = stderr.read_text().splitlines()[-2:]
    assert "loss=" in bar and word == "dyncp: interrupted"
    assert "Traceback" not in stderr.read_text()


def test_the_rank_whose_process_is_killed_is_named(training):
    process, children, stderr = training
    ranks = {rank_of(number): number for number in reversed(children)}  # parents replace their planners
    os.kill(ranks["1"], signal.SIGKILL)
    assert process.wait(120) == 1
    message = "dyncp: the demo failed: training failed on rank 1: its process was ended by SIGKILL without a report"
    assert stderr.read_text().splitlines()[-1] == message
    assert "Traceback" not in stderr.read_text()


def test_no_training_outlives_a_demo_that_is_killed(training):
    process, children, _ = training
    process.kill()
    wait_until(lambda: not any(is_running(number) for number in children), 60)


def planner_processes():
    """Those of all ranks below this process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command, variables = ((folder / name).read_bytes() for name in ("cmdline", "environ"))
            if b"import serve" in command and f"DEMO_OF={os.getpid()}".encode() in variables:
                found.append(int(folder.name))
    return found


def test_the_demo_survives_the_end_of_its_planner_processes_with_the_same_losses(tmp_path, monkeypatch):
    if not Path("/proc").exists():
        pytest.skip("looks at processes in /proc")
    monkeypatch.setenv("DEMO_OF", str(os.getpid()))
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog. " * (3 + number))
    config = DemoConfig(
        ranks=2, steps=40, tokens=512, max_length=256, data=tmp_path, block_tokens=64, out=tmp_path / "out", masks=MASKS
    )
    dataset = TextFiles.below(tmp_path, 256, config.out)
    undisturbed = train_distributed(config, dataset)
    killed, done = [], threading.Event()

    def kill():
        while not done.wait(0.8):
            for number in planner_processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
                    killed.append(number)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        disturbed = train_distributed(config, dataset)
    finally:
        done.set()
        killer.join()
    assert len(killed) >= 4
    assert sum(rank["loader"]["lost"] for rank in disturbed) >= 2
    assert sum(rank["loader"]["lost"] for rank in undisturbed) == 0
    assert [rank["losses"] for rank in disturbed] == [rank["losses"] for rank in undisturbed]
    assert not planner_processes()


SOURCE = Path(run_module.__file__).parents[2]


def wait_until(done, timeout_s=30):
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(number):
    """A process that has ended may stay a zombie, where nobody asks for its exit code."""
    if Path("/proc").exists():
        stat = Path(f"/proc/{number}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def training_processes(number):
    """The processes below one that torchrun gave a rank, and below each its planners, which have it too."""
    children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
    below = [process for child in children for process in training_processes(child)]
    return [*(int(child) for child in children if rank_of(child)), *below]


def rank_of(number):
    variables = Path(f"/proc/{number}/environ").read_text().split("\0")
    return next((text.partition("=")[2] for text in variables if text.startswith("RANK=")), None)


def test_the_exit_code_of_a_command_comes_back():
    assert run_to_end([sys.executable, "-c", "raise SystemExit(3)"]) == 3
