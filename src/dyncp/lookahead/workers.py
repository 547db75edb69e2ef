"""Planner processes: what runs in them, and how one is driven.

Not `multiprocessing`: its workers run the caller's main script again, and with it the script's `import torch`; and what
they are told is pickled. A worker here is a fresh interpreter that imports the planner and nothing else, reads typed
messages, is ended by its owner, and ends by itself when its owner is gone, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

import dyncp
from dyncp.lookahead import messages
from dyncp.lookahead.messages import Answer, Task
from dyncp.strategies.warm import warm_up

END_TIMEOUT_S = 5.0
START_TIMEOUT_S = 600.0  # the first on a machine compiles the planner
READY = b"ready"
NICENESS = 5  # training comes first
PLANNER = "dyncp.lookahead.ladder:carry_out"


class WorkerLost(RuntimeError):
    """The planner process ended before it answered; `ready` says whether it had got as far as to plan."""

    ready = False


class WorkerSlow(RuntimeError):
    """The planner process did not answer in time, and was ended."""


def interpreter_command(module: str, function: str, *arguments: str) -> list[str]:
    """The command that calls `module.function(*arguments)` in a fresh interpreter like this one, on this very
    package."""
    # The package's folder goes where -c puts the current directory: this process need not have it from PYTHONPATH.
    boot = f"import sys; sys.path[0] = sys.argv[1]; from {module} import {function}; {function}(*sys.argv[2:])"
    return [sys.executable, "-c", boot, str(Path(dyncp.__path__[0]).parent), *arguments]


class Worker:
    """One planner process, for one thread at a time.

    Args:
        planner: `module:function` that turns a `Task` into an `Answer`, imported in the process.
    """

    def __init__(self, planner: str = PLANNER) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._ready = False
        with theirs:
            descriptor = theirs.fileno()
            command = interpreter_command("dyncp.lookahead.workers", "serve", str(descriptor), planner)
            # Its stdin is never written: it ends when this process does, however that happens.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                pass_fds=[descriptor],
                env=os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
            )

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def plan(self, task: Task, limit_s: float) -> Answer:
        """What the planner makes of a task.

        Raises:
            WorkerLost: the process ended. Ask another.
            WorkerSlow: it took longer than `limit_s`, counted from when it was ready for its first task; it was ended.
        """
        self.get_ready()
        try:
            self._pipe.send_bytes(messages.encode(task))
            if not self._pipe.poll(limit_s):
                self.close()
                raise WorkerSlow(f"planning took longer than {limit_s:g} s")
            return messages.decode(self._pipe.recv_bytes(messages.MAX_BYTES), Answer)
        except (EOFError, OSError) as error:
            raise self._lost() from error

    def get_ready(self) -> None:
        """Wait until the process can plan.

        Raises:
            WorkerLost: it ended, or takes longer than anything explains.
        """
        if self._ready:
            return
        try:
            if not self._pipe.poll(START_TIMEOUT_S):
                self.close()
                raise WorkerLost(f"the planner process did not start within {START_TIMEOUT_S:g} s")
            self._ready = self._pipe.recv_bytes() == READY
        except (EOFError, OSError) as error:
            raise self._lost() from error

    def _lost(self) -> WorkerLost:
        lost = WorkerLost(f"the planner process ended with exit code {self.close()} before it answered")
        lost.ready = self._ready
        return lost

    def close(self) -> int:
        """End the process, whatever it is doing, and return its exit code. May be called from any thread, twice."""
        # Not the pipe: a thread may be reading from it, and sees it end with the process.
        self._process.terminate()
        try:
            code = self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()
        return code


def serve(descriptor: str, planner: str) -> None:
    """The main function of a worker: answer tasks until the owner closes the pipe, of which this is the file number."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches the whole terminal; the owner ends its workers
    threading.Thread(target=_end_with_owner, daemon=True).start()
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    carry_out = load_planner(planner)
    warm_up()
    pipe = Connection(int(descriptor))
    with contextlib.suppress(EOFError, ConnectionError):  # which of them depends on what was left unread
        pipe.send_bytes(READY)
        while True:
            task = messages.decode(pipe.recv_bytes(messages.MAX_BYTES), Task)
            answer = msgspec.structs.replace(carry_out(task), memory_bytes=memory_bytes())
            pipe.send_bytes(messages.encode(answer))


def load_planner(planner: str) -> Callable[[Task], Answer]:
    """The function that `module:function` names."""
    module, _, name = planner.partition(":")
    function: Callable[[Task], Answer] = getattr(importlib.import_module(module), name)
    return function


def memory_bytes() -> int:
    """What this process holds in memory; where the system does not say, the most it ever held."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _end_with_owner() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
