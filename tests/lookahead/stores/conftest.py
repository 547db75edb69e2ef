import contextlib

import pytest
from lookahead.stores.servers import new_server


@pytest.fixture(scope="session")
def running(tmp_path_factory):
    """Gives the one server of a kind that tests share; each test takes a job of its own."""
    servers = {}

    def server(kind):
        if kind not in servers:
            started = new_server(kind, tmp_path_factory.mktemp(kind))
            stack.callback(started.kill)
            servers[kind] = started.start()
        return servers[kind]

    with contextlib.ExitStack() as stack:
        yield server


@pytest.fixture
def stopped(tmp_path):
    """Makes servers for one test, which starts and kills them."""
    with contextlib.ExitStack() as stack:

        def server(kind):
            made = new_server(kind, tmp_path)
            stack.callback(made.kill)
            return made

        yield server
