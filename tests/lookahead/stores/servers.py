"""Servers that store tests start, each a process of its own on a free port of the loopback interface."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src"
PASSWORD = "correct horse"
LONG_S = 60  # for what takes a moment on a machine that is not busy


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Server:
    """A process that may be killed and started again on the same port."""

    def __init__(self, folder):
        self.folder = folder
        self.port = free_port()
        self.process = None

    def start(self):
        log = open(self.folder / f"log{self.port}", "ab")  # noqa: SIM115 the process has it
        with log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, env=self.environment())
        deadline = time.monotonic() + LONG_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return self
            assert self.process.poll() is None and time.monotonic() < deadline, Path(log.name).read_text()
            time.sleep(0.01)

    def kill(self):
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    @contextlib.contextmanager
    def frozen(self):
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def environment(self):
        return None


class TcpServer(Server):
    password = None

    @property
    def address(self):
        return f"tcp://127.0.0.1:{self.port}"

    def command(self):
        words = f"-m dyncp store --host 127.0.0.1 --port {self.port}"
        return [sys.executable, *words.split()]

    def environment(self):
        return os.environ | {"PYTHONPATH": str(SOURCE)}


class RedisServer(Server):
    password = PASSWORD

    @property
    def address(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self):
        words = f"redis-server --bind 127.0.0.1 --appendonly no --dir {self.folder} {self.ports()}"
        return [*words.split(), "--save", "", "--requirepass", self.password]

    def ports(self):
        return f"--port {self.port}"


class TlsServer(RedisServer):
    def __init__(self, folder):
        super().__init__(folder)
        self.certificate, self.key = folder / "certificate.pem", folder / "key.pem"
        words = (
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=plans "
            f"-addext subjectAltName=IP:127.0.0.1 -keyout {self.key} -out {self.certificate}"
        )
        subprocess.run(words.split(), check=True, capture_output=True)

    @property
    def address(self):
        return f"rediss://127.0.0.1:{self.port}/0?ssl_ca_certs={self.certificate}"

    def ports(self):
        files = f"--tls-cert-file {self.certificate} --tls-key-file {self.key} --tls-ca-cert-file {self.certificate}"
        return f"--port 0 --tls-port {self.port} {files} --tls-auth-clients no"


KINDS = {"tcp": TcpServer, "redis": RedisServer, "rediss": TlsServer}


def new_server(kind, folder):
    """A server that is not started yet; skips the test where its program is missing and nobody insists on it."""
    program = {"tcp": sys.executable, "redis": "redis-server", "rediss": "redis-server"}[kind]
    if shutil.which(program) is None:
        message = f"{program} is not installed"
        if os.environ.get("DYNCP_REQUIRE_REDIS") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return KINDS[kind](folder)
