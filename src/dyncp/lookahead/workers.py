"""Planner processes: what runs in them, and how one is driven.

Not `multiprocessing`: its workers run the caller's main script again, and with it the script's `import torch`. A worker
here is a fresh interpreter that imports the planner and nothing else, is ended by its owner, and ends by itself when
its owner is gone, as its pipe then closes.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dyncp
from dyncp.ir.batch import Batch
from dyncp.ir.codec import encode_rank
from dyncp.lookahead.config import Planning
from dyncp.strategies import make_plan
from dyncp.strategies.warm import warm_up

END_TIMEOUT_S = 5.0


class WorkerError(RuntimeError):
    """A call failed in a worker. `details` is the worker's traceback."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def plan_parts(batch: Batch, planning: Planning) -> tuple[list[bytes], float]:
    """Plan a batch: the encoded part of every rank, and the seconds it took."""
    started = time.perf_counter()
    plan = make_plan(batch, planning.shape, planning.cluster, planning.strategy, planning.options)
    parts = [encode_rank(plan.rank(rank)) for rank in range(planning.cluster.ranks)]
    return parts, time.perf_counter() - started


def interpreter_command(module: str, function: str, argument: str) -> list[str]:
    """The command that calls `module.function(argument)` in a fresh interpreter like this one, on this very package."""
    # The package's folder goes where -c puts the current directory: this process need not have it from PYTHONPATH.
    boot = f"import sys; sys.path[0] = sys.argv[1]; from {module} import {function}; {function}(sys.argv[2])"
    return [sys.executable, "-c", boot, str(Path(dyncp.__path__[0]).parent), argument]


class Worker:
    """One planner process, for one thread at a time."""

    def __init__(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            descriptor = theirs.fileno()
            command = interpreter_command("dyncp.lookahead.workers", "serve", str(descriptor))
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[descriptor])

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, run in the worker. Function, arguments and result are pickled, the function by name.

        Raises:
            WorkerError: the call failed, or the worker ended.
        """
        try:
            self._pipe.send((function, args))
            done, value, details = self._pipe.recv()
        except (EOFError, OSError) as error:
            code = self.close()
            raise WorkerError(f"the planner process ended with exit code {code} before it answered") from error
        if not done:
            raise WorkerError(value, details)
        return value

    def close(self) -> int:
        """End the process, whatever it is doing, and return its exit code. May be called from any thread, twice."""
        # Not the pipe: a thread may be reading from it, and sees it end with the process.
        self._process.terminate()
        try:
            return self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def serve(descriptor: str) -> None:
    """The main function of a worker: answer calls until the owner closes the pipe, of which this is the file number."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole terminal; the owner ends its workers
    warm_up()
    pipe = Connection(int(descriptor))
    while True:
        try:
            request = pipe.recv_bytes()
        except (EOFError, ConnectionError):  # which of them depends on whether an answer was left unread
            return
        try:
            function, args = pickle.loads(request)  # from the process that started this one
            answer = (True, function(*args), "")
        except Exception as error:  # noqa: BLE001 whatever it is, the owner has to know
            answer = (False, f"{type(error).__name__}: {error}", traceback.format_exc())
        try:
            pipe.send(answer)
        except ConnectionError:
            return
