import os
import re
import signal
import socket
import subprocess
import sys

import pytest
from lookahead.stores.servers import SOURCE, free_port

from dyncp import cli
from dyncp.lookahead.stores.open import open_store


@pytest.mark.parametrize("number, host", [(signal.SIGINT, "--host 127.0.0.1"), (signal.SIGTERM, "")])
def test_hosts_plans_until_it_is_told_to_end(number, host):
    command = [sys.executable, *f"-m dyncp store --port 0 {host}".split()]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            (port,) = re.fullmatch(r"tcp://\S+:(\d+)\n", process.stdout.readline()).groups()
            one, two = (open_store(f"tcp://127.0.0.1:{port}", "job") for _ in range(2))
            one.put("a", b"1")
            assert two.get("a", 5) == b"1"
            process.send_signal(number)
            assert process.communicate(timeout=20) == ("", "")
            assert process.returncode == 0
        finally:
            process.kill()


def test_a_port_that_is_taken_is_bad_input(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert cli.main(["store", "--host", "127.0.0.1", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1, port {port}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "--port"),
        ("--port 70000", "--port is 70000; it needs a number from 0 to 65535"),
        (f"--host no-such-host.invalid --port {free_port()}", "cannot listen on no-such-host.invalid"),
    ],
)
def test_bad_options(capsys, words, message):
    assert cli.main(["store", *words.split()]) == 2
    assert message in capsys.readouterr().err
