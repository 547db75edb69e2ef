import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders import causal_batch
from lookahead.loading import planning

import dyncp
from dyncp.ir.codec import decode_rank
from dyncp.lookahead.workers import Worker, WorkerError, interpreter_command, plan_parts

SOURCE = Path(dyncp.__file__).parents[1]


@pytest.fixture
def worker():
    worker = Worker()
    yield worker
    worker.close()


def process_is_there(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_plans_as_this_process_does_and_never_imports_torch(worker):
    parts, planning_s = worker.call(plan_parts, causal_batch(40, 9), planning(2))
    assert parts == plan_parts(causal_batch(40, 9), planning(2))[0]
    assert [decode_rank(part).rank for part in parts] == [0, 1]
    assert planning_s > 0
    assert worker.call(eval, "'torch' in __import__('sys').modules") is False
    assert worker.call(eval, "'dyncp.strategies' in __import__('sys').modules") is True


def test_an_error_comes_back_in_words_and_the_worker_goes_on(worker):
    with pytest.raises(WorkerError, match=r"ZeroDivisionError: .* by zero") as caught:
        worker.call(divmod, 1, 0)
    assert "Traceback" in caught.value.details
    with pytest.raises(WorkerError, match="ModuleNotFoundError"):
        worker.call(MissingThere())
    assert worker.call(divmod, 7, 2) == (3, 1)


class MissingThere:
    """Unpickles only where this module can be imported."""

    def __reduce__(self):
        return (__import__, ("no_such_module",))


def test_what_cannot_be_pickled_fails_here(worker):
    with pytest.raises((pickle.PicklingError, AttributeError)):
        worker.call(lambda: 1)
    assert worker.call(divmod, 7, 2) == (3, 1)


def test_a_worker_that_dies_is_reported_with_its_exit_code(worker):
    with pytest.raises(WorkerError, match="exit code 5"):
        worker.call(os._exit, 5)
    with pytest.raises(WorkerError, match="exit code 5"):
        worker.call(divmod, 7, 2)


def test_a_worker_ignores_ctrl_c_and_ends_when_closed(worker):
    number = worker.call(os.getpid)
    os.kill(number, signal.SIGINT)
    assert worker.call(divmod, 7, 2) == (3, 1)
    worker.close()
    assert not process_is_there(number)


def test_a_worker_ends_with_its_owner():
    code = (
        "import os; from dyncp.lookahead.workers import Worker; "
        "print(Worker().call(os.getpid), flush=True); os._exit(0)"
    )
    owner = subprocess.run([sys.executable, "-c", code], cwd=SOURCE, check=True, capture_output=True)
    number = int(owner.stdout)
    deadline = time.monotonic() + 10
    while process_is_there(number) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process_is_there(number)


@pytest.mark.parametrize("how", ["os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_a_worker_whose_owner_dies_in_the_middle_of_a_call_ends_without_a_word(how):
    """An unread answer turns the end of the pipe into a reset."""
    code = (
        "import os, time; from dyncp.lookahead.workers import Worker; worker = Worker(); "
        "print(worker.call(os.getpid), flush=True); worker._pipe.send((divmod, (7, 2))); "
        f"worker._pipe.poll(20); {how}"
    )
    # Both share stderr: the pipe ends when the last of them has.
    owner = subprocess.run([sys.executable, "-c", code], cwd=SOURCE, check=False, capture_output=True, timeout=60)
    assert owner.stdout
    assert owner.stderr == b""


def test_an_interpreter_that_exits_ends_the_workers_of_a_loader_that_nobody_closed():
    code = (
        "import numpy as np; from dyncp.ir.cluster import Cluster; from dyncp.ir.shape import AttentionShape; "
        "from dyncp.lookahead import Batching, DynamicLoader, LookAhead, Planning; "
        "planning = Planning(AttentionShape(2, 1, 8), Cluster(1, 1), 'zigzag'); "
        "loader = DynamicLoader([np.arange(40)] * 90, planning, Batching(64), LookAhead(9, 2)); "
        "batches = iter(loader); next(batches); "
        "print(*(worker._process.pid for worker in loader._producer._workers), flush=True)"
    )
    owner = subprocess.run([sys.executable, "-c", code], cwd=SOURCE, check=True, capture_output=True, timeout=60)
    numbers = [int(number) for number in owner.stdout.split()]
    assert len(numbers) == 2
    assert not any(process_is_there(number) for number in numbers)
    assert owner.stderr == b""


def test_a_fresh_interpreter_finds_this_package_from_anywhere(tmp_path):
    command = interpreter_command("dyncp.masks", "parse_spec", "no_such_mask")
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert "unknown mask kind 'no_such_mask'" in done.stderr
