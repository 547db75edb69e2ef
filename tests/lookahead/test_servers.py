"""Loaders over real servers, which are killed and come back empty."""

import contextlib
import threading
import time

import pytest
from lookahead.loading import Counting, in_turns, open_loaders
from lookahead.stores.servers import new_server
from lookahead.test_faults import MANY, SMALL, ahead, expected

from dyncp.lookahead import PlanningError, open_store

KINDS = ["tcp", "redis", "rediss"]


@pytest.fixture
def server(request, tmp_path):
    server = new_server(request.param, tmp_path)
    yield server
    server.kill()


def loaders(server, patience_s=60):
    store = open_store(server.address, "job", password=server.password)
    return open_loaders([Counting(MANY), Counting(MANY)], SMALL, ahead(3, 0, patience_s=patience_s), store=store)


@pytest.mark.parametrize("server", KINDS, indirect=True)
def test_a_server_that_starts_late_and_is_killed_twice_loses_nothing(server):
    starter = threading.Timer(0.5, server.start)
    starter.start()
    batches = []
    with loaders(server) as pair:
        for batch, *_ in in_turns(pair):
            batches.append((batch.samples, batch.plan.digest))
            if batch.iteration in (4, 11):
                time.sleep(0.2)
                server.kill()
                time.sleep(0.2)
                server.start()
        outages = [loader.report().outages for loader in pair]
    starter.join()
    assert batches == expected(2)
    assert all(count >= 1 for count in outages)


@pytest.mark.parametrize("server", KINDS, indirect=True)
def test_a_server_that_is_gone_for_good_is_named(server):
    server.start()
    with loaders(server, patience_s=1) as pair:
        iterators = [iter(loader) for loader in pair]
        for iterator in iterators:
            next(iterator)
        time.sleep(0.2)
        server.kill()
        for rank, iterator in enumerate(iterators):
            message = f"rank {rank} .*plan store {server.address.partition('?')[0]} was out of reach"
            with pytest.raises(PlanningError, match=message), contextlib.suppress(StopIteration):
                for _ in range(9):  # some plans are there already
                    next(iterator)
