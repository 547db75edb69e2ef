"""The processes of all hosts, seen from the one that runs the benchmark: requests by pipe, answers by pipe.

The pipes are not part of the network that is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.network.process import environment
from benchmarks.network.shares import Shares, join
from benchmarks.network.topology import INTERFACE, Host

ANSWER_TIMEOUT_S = 180.0
LEAD_S = 0.1  # from a request to the time at which all hosts begin
TAIL_CHARACTERS = 2000


class TeamError(RuntimeError):
    """A host's process ended or did not answer."""


class Team:
    """One process for each host."""

    def __init__(self, hosts: Sequence[Host], shares: Shares, folder: Path) -> None:
        self.shares = shares
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pending = [b""] * len(hosts)
        for host in hosts:
            words = [str(host.number), str(len(hosts)), hosts[0].address]
            command = host.command([sys.executable, "-m", "benchmarks.network.worker", *words])
            with self._log(host.number).open("wb") as log:
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        env=environment(GLOO_SOCKET_IFNAME=INTERFACE),
                        start_new_session=True,  # ctrl-C is for the parent alone
                    )
                )

    def __len__(self) -> int:
        return len(self._processes)

    def ready(self) -> None:
        """Return when all hosts are connected, and the threads that compute are held to their shares."""
        for group, own in zip(self.shares.folders, self._answers(range(len(self))), strict=True):
            if group is not None:
                join(group, own["process"], own["thread"])

    def ask(self, requests: Sequence[dict[str, Any] | None], *, timed: bool = False) -> tuple[float, list[Any]]:
        """One request for each host (None: nothing for this one); when it began, and the answers.

        Args:
            requests: by host.
            timed: all begin at one time, which is added as `at`.

        Raises:
            TeamError: a process ended, or took too long.
        """
        at = time.monotonic() + LEAD_S
        for process, request in zip(self._processes, requests, strict=True):
            if request is not None:
                line = json.dumps(request | {"at": at} if timed else request) + "\n"
                assert process.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # an ended process is noticed while waiting for its answer
                    process.stdin.write(line.encode())
                    process.stdin.flush()
        asked = [rank for rank, request in enumerate(requests) if request is not None]
        return at, self._answers(asked)

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate()

    def _answers(self, ranks: Sequence[int]) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        with selectors.DefaultSelector() as selector:
            for rank in ranks:
                selector.register(self._processes[rank].stdout, selectors.EVENT_READ, rank)
            while len(answers) < len(ranks):
                events = selector.select(max(0.0, deadline_s - time.monotonic()))
                if not events:
                    late = [rank for rank in ranks if rank not in answers]
                    raise TeamError(f"no answer of hosts {late} within {ANSWER_TIMEOUT_S:g} s")
                for key, _ in events:
                    line = self._line(key.data)
                    if line is not None:
                        answers[key.data] = json.loads(line)
                        selector.unregister(key.fileobj)
        return [answers.get(rank) for rank in range(len(self))]

    def _line(self, rank: int) -> bytes | None:
        """A whole line of a host's answers, once it is there."""
        stdout = self._processes[rank].stdout
        assert stdout is not None
        data = os.read(stdout.fileno(), 1 << 16)
        if not data:
            code = self._processes[rank].wait()
            tail = self._log(rank).read_text(errors="replace")[-TAIL_CHARACTERS:]
            raise TeamError(f"the process of host {rank} ended with exit code {code}:\n{tail}")
        self._pending[rank] += data
        line, newline, rest = self._pending[rank].partition(b"\n")
        if not newline:
            return None
        self._pending[rank] = rest
        return line

    def _log(self, rank: int) -> Path:
        return self.folder / f"host{rank}.log"


@contextlib.contextmanager
def team(hosts: Sequence[Host], shares: Shares, folder: Path) -> Iterator[Team]:
    """The processes of all hosts, connected and held to their shares, for the time of a `with` block."""
    made = Team(hosts, shares, folder)
    try:
        made.ready()
        yield made
    finally:
        made.close()
