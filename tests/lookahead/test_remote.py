"""Planners on other hosts: in these tests, threads and processes that share nothing with the ranks but the store."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from lookahead.loading import Counting, in_turns, open_loaders
from lookahead.test_faults import MANY, SMALL, Flaky, ahead, expected

import dyncp
from dyncp.commands.planner import read_key
from dyncp.lookahead import FileStore, LookAhead, MemoryStore, remote
from dyncp.lookahead.remote import PlannerServer
from dyncp.lookahead.seal import Seal

REMOTE = ahead(3, 0, remote=True)
KEY = bytes(range(32))
PAIR = [Counting(MANY), Counting(MANY)]
pytestmark = pytest.mark.usefixtures("faults")


@contextlib.contextmanager
def planners(store, number=1, key=None, workers=0, planner="dyncp.lookahead.ladder:carry_out"):
    """Planners in threads; with 0 workers each plans in its thread."""
    servers = [
        PlannerServer(
            store,
            Seal(store.job, key),
            max(1, workers),
            LookAhead(workers=workers, cache_bytes=0),
            f"p{index}",
            planner,
        )
        for index in range(number)
    ]
    threads = [threading.Thread(target=server.serve) for server in servers]
    for thread in threads:
        thread.start()
    try:
        yield servers
    finally:
        for server in servers:
            server.stop()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads)


def batches_of(loaders):
    return [(batch.samples, batch.plan.digest) for batch, *_ in in_turns(loaders)]


@pytest.mark.parametrize("key", [None, KEY])
def test_planners_elsewhere_make_all_plans(key):
    store = MemoryStore()
    with (
        planners(store, 2, key) as servers,
        open_loaders([Counting(MANY), Counting(MANY)], SMALL, REMOTE, store=store, key=key) as loaders,
    ):
        for _ in range(2):  # passes
            assert batches_of(loaders) == expected(2)
        reports = [loader.report() for loader in loaders]
        assert sum(report.remote for report in reports) == 2 * len(expected(2))
        assert sum(report.plans_made for report in reports) == 0
        assert sum(server.health.made + server.health.counts["cached"] for server in servers) >= len(MANY)
    left = [place for place in store._values if not place.startswith("planners/")]
    assert not left


def test_iterations_are_dealt_to_all_planners(monkeypatch):
    monkeypatch.setenv("SLOW_S", "0.1")
    store = MemoryStore()
    with (
        planners(store, 3, planner="lookahead.planners:slow") as servers,
        open_loaders([Counting(MANY)], SMALL, ahead(6, 0, remote=True), store=store) as (loader,),
    ):
        assert batches_of([loader]) == expected()
        made = [server.health.made for server in servers]
    assert sum(made) == len(expected()) and min(made) >= 3


def test_without_planners_the_rank_plans_and_says_so(caplog, monkeypatch):
    monkeypatch.setattr(remote, "LOST_S", 0.5)
    with open_loaders([Counting(MANY)], SMALL, REMOTE) as (loader,):
        assert batches_of([loader]) == expected()
        report = loader.report()
    assert report.plans_made == report.steps
    assert "no planner on the store takes batches (if there is one, see its log); planning here" in caplog.text


def test_what_a_planner_that_dies_had_claimed_is_planned_here(monkeypatch, caplog):
    """It claims, and is never heard of again."""
    monkeypatch.setattr(remote, "LOST_S", 4.0)
    monkeypatch.setenv("SLOW_S", "3600")
    store = MemoryStore()
    with open_loaders([Counting(MANY)], SMALL, REMOTE, store=store) as (loader,):
        with planners(store, planner="lookahead.planners:slow", workers=1):
            iterator = iter(loader)
            deadline = time.monotonic() + 30
            while not any(place.endswith("claim") for place in list(store._values)):
                assert time.monotonic() < deadline
                time.sleep(0.02)
        first = next(iterator)
        assert (first.samples, first.plan.digest) == expected()[0]
        assert loader.report().lost >= 1
    assert "shows no sign of life; planning it here" in caplog.text


@pytest.mark.parametrize("theirs", [None, bytes(32)])
def test_a_planner_with_another_key_plans_nothing_and_harms_nobody(theirs, caplog, monkeypatch):
    monkeypatch.setattr(remote, "LOST_S", 2.0)
    store = MemoryStore()
    with planners(store, key=theirs) as (server,):
        for run in ("1", "2"):
            with open_loaders([Counting(MANY)], SMALL, ahead(3, 0, remote=True), store=store, key=KEY, run=run) as pair:
                time.sleep(1.2)
                assert batches_of(pair) == expected()
        assert server.health.made == 0
    assert "is left to its ranks: what lies at L0/hello in the plan store is refused" in caplog.text


@pytest.mark.parametrize("place", ["planners/any", "L0/hello", "0/L0/0/progress", "0/L0/0/3/ask", "0/L0/0/3/claim"])
def test_garbage_among_the_messages_costs_remote_planning_and_no_more(place, monkeypatch):
    monkeypatch.setattr(remote, "LOST_S", 2.0)
    monkeypatch.setattr(remote, "CLAIM_S", 1.0)

    class Dirty(MemoryStore):
        def put(self, key, value):
            super().put(key, b"garbage" if key == place else value)

        def add(self, key, value):
            return super().add(key, b"garbage" if key == place else value)

    store = Dirty()
    with planners(store), open_loaders([Counting(MANY)], SMALL, REMOTE, store=store) as pair:
        assert batches_of(pair) == expected()


@pytest.mark.parametrize("kind", ["forgets", "away"])
def test_a_store_that_is_restarted_while_others_plan_loses_nothing(kind):
    store = Flaky()
    with planners(store), open_loaders([Counting(MANY), Counting(MANY)], SMALL, REMOTE, store=store) as loaders:
        batches = []
        for batch, *_ in in_turns(loaders):
            batches.append((batch.samples, batch.plan.digest))
            if batch.iteration in (3, 9, 15):
                if kind == "away":
                    store.away.set()
                    time.sleep(0.3)
                store.forget()
                store.away.clear()
        assert sum(loader.report().remote for loader in loaders) > 12
    assert batches == expected(2)


def test_a_plan_that_others_made_by_simpler_means_is_not_replaced_when_the_store_forgets_it(monkeypatch):
    """Some ranks may have it already. The planner elsewhere fails as asked; this host's would not."""
    store = Flaky()
    options = {"store": store, "planner": "lookahead.planners:raises_but_static"}
    with planners(**options) as (server,), open_loaders(PAIR, SMALL, REMOTE, "dynamic", store=store) as loaders:
        zero, one = map(iter, loaders)
        first = next(zero)
        deadline = time.monotonic() + 30
        while server.health.counts["fallbacks"] < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.5)
        server.stop()
        store.forget()
        assert next(one).plan.digest == first.plan.digest
        assert first.plan.header.strategy == "zigzag"


COMMAND = [sys.executable, "-m", "dyncp", "planner"]


def test_the_command_plans_until_it_is_ended(tmp_path):
    words = ["--store", f"file:{tmp_path}", "--job", "train", "--workers", "2"]
    environment = os.environ | {"DYNCP_KEY": KEY.hex()}
    source = str(Path(dyncp.__file__).parents[1])
    process = subprocess.Popen(
        [*COMMAND, *words], cwd=source, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        store = FileStore(tmp_path, "train")
        with open_loaders([Counting(MANY)], SMALL, REMOTE, store=store, key=KEY) as (loader,):
            assert batches_of([loader]) == expected()
            assert loader.report().remote >= loader.report().steps - 4  # it may have been late
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert re.search(r"2 processes, job 'train' on file:", out)
    assert re.search(r"\d+ plans made", out)
    assert "planning for loader 0" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--store", "ftp://x", "--job", "a"], "ftp"),
        (["--store", "file:/tmp/x", "--job", "a", "--workers", "0"], "--workers is 0"),
        (["--store", "file:/tmp/x", "--job", "a", "--key-file", "/no/such"], "cannot read /no/such"),
    ],
)
def test_bad_options_are_refused(words, message, capsys):
    from dyncp import cli

    assert cli.main(["planner", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", [KEY.hex(), f"{KEY.hex()}\n"])
def test_the_key_is_hexadecimal_in_a_file_and_in_the_environment(tmp_path, monkeypatch, text):
    (tmp_path / "key").write_text(text)
    assert read_key(tmp_path / "key") == KEY
    monkeypatch.setenv("DYNCP_KEY", text)
    assert read_key(None) == KEY
    (tmp_path / "key").write_text("secret")
    with pytest.raises(ValueError, match="is not hexadecimal; make one with: openssl rand -hex 32"):
        read_key(tmp_path / "key")


def test_a_planner_follows_a_job_from_start_to_start():
    """The first start ended without a word: its hello is still there."""
    store = MemoryStore()
    with planners(store) as (server,):
        for run in ("first", "second"):
            fresh = MemoryStore()  # loaders are numbered anew, as in another process
            fresh._values, fresh._changed = store._values, store._changed
            with open_loaders(PAIR, SMALL, REMOTE, store=fresh, run=run) as loaders:
                assert batches_of(loaders) == expected(2)
                assert sum(loader.report().remote for loader in loaders) == len(expected(2))
                hello = store._values["L0/hello"]
            store._values["L0/hello"] = hello
            earlier = [loader.producer for loader in server._loaders.values()]
        assert len(earlier) == 1
