"""Planners that misbehave, for planner processes: named in `DynamicLoader(planner=...)`. A folder in FAULTS_FOLDER says
how often what has happened, whatever process it happened in."""

import hashlib
import os
import signal
import time
from pathlib import Path

from msgspec.structs import replace

from dyncp.lookahead.ladder import carry_out
from dyncp.lookahead.messages import Answer

TRUNK = []


def happened(what):
    """How often this was called before; every call counts."""
    folder = Path(os.environ["FAULTS_FOLDER"])
    for number in range(100_000):
        try:
            (folder / f"{what}-{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return number
    raise AssertionError


def dies_once(task):
    if happened("call") == int(os.environ.get("DIES_AT", "1")):
        os.kill(os.getpid(), signal.SIGKILL)
    return carry_out(task)


def dies(task):
    """In a planner process, always."""
    happened("call")
    if os.environ["FAULTS_OWNER"] != str(os.getpid()):
        os.kill(os.getpid(), signal.SIGKILL)
    return carry_out(task)


def raises_as_asked(task):
    happened("call")
    if task.rung == 0:
        return Answer(error="ArithmeticError: the solver gave up", details="where it did")
    return carry_out(task)


def raises_but_static(task):
    happened("call")
    return carry_out(task) if task.rung >= 2 else Answer(error=f"ArithmeticError: no luck with {task.rung}")


def hangs_as_asked(task):
    happened("call")
    if task.rung == 0:
        time.sleep(600)
    return carry_out(task)


def slow(task):
    """As long as SLOW_S says, without the processor."""
    answer = carry_out(task)
    time.sleep(float(os.environ["SLOW_S"]))
    return replace(answer, seconds=float(os.environ["SLOW_S"]))


def leaks(task):
    """Four megabytes with every plan."""
    TRUNK.append(bytearray(os.urandom(1 << 10)) * (4 << 10))
    happened(f"process-{os.getpid()}")
    return carry_out(task)


def slow_later(task):
    """The first six batches at once; batches are told apart by their bytes."""
    name = hashlib.sha256(task.batch).hexdigest()[:12]
    folder = Path(os.environ["FAULTS_FOLDER"])
    (folder / f"batch-{name}").touch()
    return carry_out(task) if len(list(folder.glob("batch-*"))) <= 6 else slow(task)
