"""`dyncp planner`: planning for a training job, on hosts of its own."""

from __future__ import annotations

import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from dyncp.lookahead.config import LookAhead
from dyncp.lookahead.producer import cores
from dyncp.lookahead.remote import PlannerServer
from dyncp.lookahead.seal import Seal
from dyncp.lookahead.stores.open import open_store

KEY_VARIABLE, PASSWORD_VARIABLE = "DYNCP_KEY", "DYNCP_STORE_PASSWORD"
DEFAULTS = LookAhead()


@dataclass(frozen=True)
class Command:
    """Plan the batches of a training job whose ranks have `LookAhead(remote=True)`, until ctrl-C or SIGTERM.

    Start as many as you like, on any host that reaches the store, before or after the job: each takes what none has
    taken yet. They need neither torch nor a GPU, unless the store is a tcp one, which is torch's. See docs/stores.md.
    """

    store: Annotated[str, arg(metavar="ADDRESS")]
    """Where plans go: `tcp://host:port`, `redis://host:port`, `file:/shared/folder`; as the ranks have it."""
    job: str
    """Name of the job, as the ranks have it."""
    workers: Annotated[int | None, arg(metavar="INT")] = None
    """Planner processes; one for each core when left out."""
    key_file: Annotated[Path | None, arg(metavar="FILE")] = None
    """File with the key of the job in hexadecimal, where its loaders have one; or put it into DYNCP_KEY."""
    password_file: Annotated[Path | None, arg(metavar="FILE")] = None
    """File with the password of the store; or put it into DYNCP_STORE_PASSWORD."""
    patience_s: float = DEFAULTS.patience_s
    """How long the store may be away, in seconds, before this gives up."""
    plan_limit_s: float = DEFAULTS.plan_limit_s
    """How long one plan may take, in seconds, before simpler means are used."""


def run(command: Command) -> int:
    """Do what `Command` says."""
    lookahead = LookAhead(patience_s=command.patience_s, plan_limit_s=command.plan_limit_s)
    workers = cores() if command.workers is None else command.workers
    if workers < 1:
        raise ValueError(f"--workers is {workers}; it must be at least 1")
    store = open_store(command.store, command.job, password=read_password(command.password_file))
    server = PlannerServer(store, Seal(command.job, read_key(command.key_file)), workers, lookahead)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s dyncp planner: %(message)s")
    # It raises: to set an event could wait for ever for the main thread that it interrupts.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"planner {server.name}: {workers} processes, job {command.job!r} on {store.address}", flush=True)
    try:
        server.serve()
    except KeyboardInterrupt:
        pass
    except ConnectionError as error:
        print(f"dyncp: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)
    made, cached = server.health.made, server.health.counts["cached"]
    print(f"planner {server.name}: {made} plans made, {cached} taken from the cache", flush=True)
    return 0


def read_key(file: Path | None) -> bytes | None:
    """The key of a job: hexadecimal, in a file or in the environment.

    Raises:
        ValueError: a file that cannot be read, or no hexadecimal.
    """
    text = os.environ.get(KEY_VARIABLE) if file is None else _read(file).decode(errors="replace")
    if text is None:
        return None
    try:
        return bytes.fromhex(text)
    except ValueError:
        where = KEY_VARIABLE if file is None else f"the key in {file}"
        raise ValueError(f"{where} is not hexadecimal; make one with: openssl rand -hex 32") from None


def read_password(file: Path | None) -> str | None:
    """The password of a store: a file's first line, or the environment's.

    Raises:
        ValueError: a file that cannot be read.
    """
    if file is not None:
        return _read(file).decode().partition("\n")[0]
    return os.environ.get(PASSWORD_VARIABLE)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}") from None
