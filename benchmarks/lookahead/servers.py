"""Plan stores that benchmarks start and end: servers are processes of their own on a free port of the loopback
interface."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dyncp.lookahead import PlanStore, open_store

ROOT = Path(__file__).parents[2]
START_S = 30.0  # how long a server may take to listen
PASSWORD = "of a benchmark"
KINDS = ("memory", "file", "tcp", "redis", "rediss")


def environment() -> dict[str, str]:
    """That of this process, in which children find the package and these benchmarks."""
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Server:
    """A process that listens on a port, and can be killed and started again there.

    Args:
        command: its words.
        port: that it listens on.
        log: file for what it prints.
    """

    def __init__(self, command: Sequence[str], port: int, log: Path) -> None:
        self.port = port
        self._command, self._log = command, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment())
        deadline = time.monotonic() + START_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self._command[0]} does not listen on {self.port}: {self._log.read_text()}")
            time.sleep(0.01)

    def kill(self) -> None:
        """End it with SIGKILL, and all that it holds."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def tcp_server(folder: Path) -> Server:
    """`dyncp store`."""
    port = free_port()
    words = f"-m dyncp store --host 127.0.0.1 --port {port}"
    return Server([sys.executable, *words.split()], port, folder / f"tcp-{port}.log")


def redis_server(folder: Path, certificate: Path | None = None) -> Server:
    """`redis-server`, with TLS where it has a certificate (and its key beside it)."""
    port = free_port()
    words = [*f"redis-server --bind 127.0.0.1 --appendonly no --dir {folder} --requirepass".split(), PASSWORD]
    words += ["--save", "", "--port", "0" if certificate else str(port)]
    if certificate:
        words += ["--tls-port", str(port), "--tls-auth-clients", "no", "--tls-cert-file", str(certificate)]
        words += ["--tls-ca-cert-file", str(certificate), "--tls-key-file", str(key_of(certificate))]
    return Server(words, port, folder / f"redis-{port}.log")


def make_certificate(folder: Path) -> Path:
    """A certificate for the loopback address, signed by itself."""
    certificate = folder / "certificate.pem"
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=plans",
    ]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate), "-keyout", str(key_of(certificate))]
    subprocess.run(words, check=True, capture_output=True)
    return certificate


def key_of(certificate: Path) -> Path:
    """Where the key of a certificate lies."""
    return certificate.with_name("key.pem")


def lacking(kind: str) -> str:
    """The program that a kind of store needs and that is not installed, or nothing."""
    programs = {"redis": ("redis-server",), "rediss": ("redis-server", "openssl")}.get(kind, ())
    return next((program for program in programs if shutil.which(program) is None), "")


@contextmanager
def store(kind: str, folder: Path, job: str) -> Iterator[PlanStore]:
    """A store of one of `KINDS`, with its server."""
    match kind:
        case "memory":
            yield open_store("memory:", job)
            return
        case "file":
            yield open_store(f"file:{folder}", job)
            return
        case "tcp":
            server = tcp_server(folder)
            address, password = f"tcp://127.0.0.1:{server.port}", None
        case _:
            certificate = make_certificate(folder) if kind == "rediss" else None
            server = redis_server(folder, certificate)
            options = f"?ssl_ca_certs={certificate}" if certificate else ""
            address, password = f"{kind}://127.0.0.1:{server.port}/0{options}", PASSWORD
    try:
        server.start()
        yield open_store(address, job, password=password)
    finally:
        server.kill()
