import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders import causal_batch
from lookahead.loading import planning

import dyncp
from dyncp.ir.codec import decode_rank, encode_batch
from dyncp.lookahead.ladder import plan_parts
from dyncp.lookahead.messages import Task
from dyncp.lookahead.workers import Worker, WorkerLost, WorkerSlow, interpreter_command

SOURCE = Path(dyncp.__file__).parents[1]
LIMIT_S = 60.0


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.close()


def task(*lengths, ranks=2, rung=0):
    return Task(planning(ranks), encode_batch(causal_batch(*lengths)), rung)


def process_is_there(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def gone(number, timeout_s=10):
    deadline = time.monotonic() + timeout_s
    while process_is_there(number) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not process_is_there(number)


def test_a_worker_plans_as_this_process_does(worker):
    answer = worker.plan(task(40, 9), LIMIT_S)
    parts, digest, _ = plan_parts(causal_batch(40, 9), planning(2))
    assert (answer.parts, answer.digest) == (parts, digest)
    assert [decode_rank(part).rank for part in answer.parts] == [0, 1]
    assert answer.seconds > 0
    assert 10 << 20 < answer.memory_bytes < 1 << 30


def test_a_worker_never_imports_torch(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    worker = Worker("lookahead.test_workers:torch_is_there")
    try:
        assert worker.plan(task(4), LIMIT_S).digest == "torch False, planner True"
    finally:
        worker.close()


def torch_is_there(task):
    from dyncp.lookahead import ladder, messages

    answer = ladder.carry_out(task)
    there = "torch" in sys.modules, "dyncp.strategies" in sys.modules
    return messages.Answer(digest=f"torch {there[0]}, planner {there[1]}", error=answer.error)


def test_an_error_comes_back_in_words_and_the_worker_goes_on(worker):
    bad = Task(planning(2), b"no batch", 0)
    answer = worker.plan(bad, LIMIT_S)
    assert answer.error.startswith("DecodeError: ") and "Traceback" in answer.details
    assert not answer.parts
    assert not worker.plan(task(7), LIMIT_S).error


def test_a_worker_that_dies_is_reported_with_its_exit_code(worker):
    worker.plan(task(7), LIMIT_S)
    assert worker.alive
    os.kill(worker.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(WorkerLost, match="exit code -9"):
            worker.plan(task(7), LIMIT_S)
    assert not worker.alive


def test_a_worker_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("SLOW_S", "600")
    worker = Worker("lookahead.planners:slow")
    with pytest.raises(WorkerSlow, match=r"longer than 0\.2 s"):
        worker.plan(task(7), 0.2)
    assert not process_is_there(worker.pid)


def test_a_worker_ignores_ctrl_c_and_ends_when_closed(worker):
    worker.plan(task(7), LIMIT_S)
    os.kill(worker.pid, signal.SIGINT)
    assert not worker.plan(task(7), LIMIT_S).error
    worker.close()
    assert not process_is_there(worker.pid)


OWNER = (
    "import os, time; from dyncp.lookahead.workers import Worker; worker = Worker({planner!r}); "
    "worker._pipe.poll(60); print(worker.pid, flush=True); {then}"
)


@pytest.mark.parametrize("then", ["os._exit(0)", "os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 15)"])
def test_an_idle_worker_ends_with_its_owner_without_a_word(then):
    code = OWNER.format(planner="dyncp.lookahead.ladder:carry_out", then=then)
    # Both share stderr: the pipe ends when the last of them has.
    owner = subprocess.run([sys.executable, "-c", code], cwd=SOURCE, check=False, capture_output=True, timeout=60)
    assert gone(int(owner.stdout))
    assert owner.stderr == b""


@pytest.mark.parametrize("then", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_a_worker_in_the_middle_of_a_plan_ends_with_its_owner(then):
    """It does not read its pipe then, and would go on for as long as the plan takes."""
    send = "worker._pipe.recv_bytes(); from lookahead.test_workers import task; from dyncp.lookahead import messages; "
    send += "worker._pipe.send_bytes(messages.encode(task(7))); time.sleep(0.3); "
    code = OWNER.format(planner="lookahead.planners:slow", then=send + then)
    environment = os.environ | {"SLOW_S": "600", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1])])}
    owner = subprocess.run(
        [sys.executable, "-c", code], cwd=SOURCE, check=False, capture_output=True, timeout=60, env=environment
    )
    assert owner.stderr == b""
    assert gone(int(owner.stdout))


def test_an_interpreter_that_exits_ends_the_workers_of_a_loader_that_nobody_closed():
    code = (
        "import numpy as np; from dyncp.ir.cluster import Cluster; from dyncp.ir.shape import AttentionShape; "
        "from dyncp.lookahead import Batching, DynamicLoader, LookAhead, Planning; "
        "planning = Planning(AttentionShape(2, 1, 8), Cluster(1, 1), 'zigzag'); "
        "loader = DynamicLoader([np.arange(40)] * 90, planning, Batching(64), LookAhead(9, 2)); "
        "batches = iter(loader); next(batches); "
        "print(*loader._producer.pids, flush=True)"
    )
    owner = subprocess.run([sys.executable, "-c", code], cwd=SOURCE, check=True, capture_output=True, timeout=60)
    numbers = [int(number) for number in owner.stdout.split()]
    assert len(numbers) == 2
    assert all(gone(number) for number in numbers)
    assert owner.stderr == b""


def test_a_fresh_interpreter_finds_this_package_from_anywhere(tmp_path):
    command = interpreter_command("dyncp.masks", "parse_spec", "no_such_mask")
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert "unknown mask kind 'no_such_mask'" in done.stderr
