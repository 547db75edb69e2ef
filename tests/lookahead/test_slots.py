import os
import signal
import time

import pytest
from builders import causal_batch
from lookahead.loading import planning

from dyncp.ir.codec import encode_batch
from dyncp.lookahead import LookAhead, slots
from dyncp.lookahead.exchange import Run
from dyncp.lookahead.health import Health, LoaderReport
from dyncp.lookahead.messages import Answer, Task
from dyncp.lookahead.producer import Job
from dyncp.lookahead.slots import MOST_FAILURES, RETRY_S, Slot
from dyncp.lookahead.workers import WorkerLost

TASK = Task(planning(1), encode_batch(causal_batch(7)), 0)


class Mortal:
    """Stands for a planner process; dies as often as it is told."""

    deaths, made = 0, 0

    def __init__(self, planner):
        type(self).made += 1
        self.alive = True

    def plan(self, task, limit_s):
        if type(self).deaths:
            type(self).deaths -= 1
            raise WorkerLost("it died")
        return Answer([b"plan"])

    def get_ready(self):
        pass

    def close(self):
        return 0


@pytest.fixture
def slot(monkeypatch):
    monkeypatch.setattr(slots, "Worker", Mortal)
    monkeypatch.setattr(slots, "load_planner", lambda planner: lambda task: Answer([b"here"]))
    Mortal.deaths = Mortal.made = 0
    now = [0.0]
    made = Slot(LookAhead(1, 1), Health(), process=True, clock=lambda: now[0])
    made.now = now
    return made


def die(slot, times):
    Mortal.deaths = times
    for _ in range(times):
        with pytest.raises(WorkerLost):
            slot.plan(TASK)


def test_processes_are_started_again_until_too_many_ended_in_a_row_and_then_after_a_while(slot):
    die(slot, MOST_FAILURES)
    made = Mortal.made
    assert made == MOST_FAILURES
    for _ in range(3):
        assert slot.plan(TASK).parts == [b"here"]
    assert Mortal.made == made  # none was even tried
    slot.now[0] += RETRY_S
    assert slot.plan(TASK).parts == [b"plan"]
    assert Mortal.made == made + 1


def test_a_plan_that_was_made_makes_up_for_those_that_ended(slot):
    for _ in range(3):
        die(slot, MOST_FAILURES - 1)
        assert slot.plan(TASK).parts == [b"plan"]
    assert slot._health.counts["in_process"] == 0


def test_a_process_that_is_found_dead_is_replaced_without_a_word_to_the_job(slot):
    slot.plan(TASK)
    slot.worker.alive = False
    assert slot.plan(TASK).parts == [b"plan"]
    assert (Mortal.made, slot._health.counts["lost"]) == (2, 1)


def test_a_slot_that_is_closed_starts_nothing(slot):
    slot.close()
    slot.start()
    assert (slot.worker, Mortal.made) == (None, 0)


def test_the_same_settings_are_not_tried_twice():
    job = Job(Run("run"), 0, "draw", bytes)
    seen = [job.rung]
    while job.rung < 4:
        job.next_rung(planning(2, "zigzag"))
        seen.append(job.rung)
    assert seen == [0, 1, 3, 4]  # what rung 2 would do was asked in the first place


def test_a_report_in_words_has_what_happened_and_nothing_else():
    quiet = LoaderReport(3, 2, 0.5, 0.25, 0.2)
    assert str(quiet) == (
        "batch 3: 0 plans ready, 0.0 s ahead; waited 0.25 s, 0.20 s of it at starts; 2 plans made here in 0.50 s"
    )
    assert str(LoaderReport(3, 2, 0.5, 0.25, 0.2, remote=1, lost=2, outages=4)).endswith("1 remote, 2 lost, 4 outages")


def test_time_goes_on_where_a_process_is_killed():
    """The real thing, once: the next plan is made by another process."""
    real = Slot(LookAhead(1, 1), Health(), process=True)
    try:
        first = real.plan(TASK)
        pid = real.worker.pid
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        assert real.plan(TASK).digest == first.digest
        assert real.worker.pid != pid
    finally:
        real.close()
