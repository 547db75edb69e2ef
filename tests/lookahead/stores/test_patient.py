import logging
import threading

import pytest

from dyncp.lookahead.stores.api import StoreError
from dyncp.lookahead.stores.memory import MemoryStore
from dyncp.lookahead.stores.patient import LONGEST_PAUSE_S, Patient


class Failing(MemoryStore):
    """Out of reach until it is called for the `failures`-th time; an add may be done and its answer be lost."""

    def __init__(self, failures=0):
        super().__init__()
        self.failures = failures
        self.add_is_done = False
        self.lost = 0

    def _reach(self):
        if self.failures:
            self.failures -= 1
            raise StoreError("the plan store memory cannot be reached: cable")

    def put(self, key, value):
        self._reach()
        super().put(key, value)

    def add(self, key, value):
        if self.add_is_done and self.failures:
            super().add(key, value)
        self._reach()
        return super().add(key, value)

    def get(self, key, timeout_s):
        self._reach()
        return super().get(key, timeout_s)

    def delete(self, key):
        self._reach()
        super().delete(key)


class Time:
    def __init__(self):
        self.now_s, self.slept = 0.0, []

    def sleep(self, pause_s):
        self.slept.append(pause_s)
        self.now_s += pause_s


def patient(store, patience_s=60.0):
    time = Time()
    return Patient(store, patience_s, clock=lambda: time.now_s, sleep=time.sleep), time


CALLS = [
    lambda store: store.put("b", b"2"),
    lambda store: store.add("b", b"2"),
    lambda store: store.get("a", 5),
    lambda store: store.delete("a"),
]


@pytest.mark.parametrize("call", CALLS)
def test_an_outage_is_sat_out(call, caplog):
    inner = Failing()
    inner.put("a", b"1")
    inner.failures = 9
    store, time = patient(inner)
    call(store)
    assert store.outages == 1
    lower, upper = [], []
    pause_s = 0.05
    for _ in range(9):
        lower.append(pause_s / 2)
        upper.append(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    assert all(low <= slept <= high for low, slept, high in zip(lower, time.slept, upper, strict=True))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert warnings[0] == "the plan store memory cannot be reached: cable; trying again for up to 60 s"
    assert "the plan store memory is back after" in warnings[1] and "9 tries" in warnings[1]


@pytest.mark.parametrize("call", CALLS)
def test_patience_ends(call):
    store, time = patient(Failing(10**9), 7.5)
    with pytest.raises(StoreError, match=r"memory was out of reach for 7\.5 s and \d+ tries; the last one: .*cable"):
        call(store)
    assert sum(time.slept) == pytest.approx(7.5)
    assert store.outages == 0
    tries = len(time.slept)
    with pytest.raises(StoreError):  # whoever tidies up after that does not wait again
        call(store)
    assert len(time.slept) == tries


def test_after_it_gave_up_it_can_come_back():
    inner = Failing(10**9)
    store, _ = patient(inner, 1.0)
    with pytest.raises(StoreError):
        store.put("a", b"1")
    inner.failures = 0
    store.put("a", b"1")
    assert (store.get("a", 0), store.outages) == (b"1", 1)
    inner.failures = 3
    store.put("a", b"2")
    assert store.outages == 2


def test_a_healthy_store_keeps_its_time_outs():
    store = Patient(MemoryStore())
    with pytest.raises(TimeoutError, match=r"did not come within 0\.05 s"):
        store.get("a", 0.05)
    assert store.outages == 0


def test_a_time_out_ends_an_outage():
    store, _ = patient(Failing(3))
    with pytest.raises(TimeoutError):
        store.get("a", 0)
    assert store.outages == 1


def test_an_add_whose_answer_was_lost_is_known_by_its_value():
    for value, won in ((b"mine", True), (b"another's", False)):
        inner = Failing()
        if value != b"mine":
            inner.put("a", value)
        inner.failures, inner.add_is_done = 1, True
        store, _ = patient(inner)
        assert store.add("a", b"mine") is won
        assert not store.add("a", b"mine")


def test_stop_ends_a_retry_and_all_later_calls():
    store = Patient(Failing(10**9), 600)
    errors = []

    def put():
        try:
            store.put("a", b"1")
        except StoreError as error:
            errors.append(str(error))

    thread = threading.Thread(target=put)
    thread.start()
    while store._began_s is None:
        threading.Event().wait(0.01)
    store.stop()
    thread.join(20)
    assert not thread.is_alive() and errors == ["the plan store memory is no longer used: it was stopped here"]
    with pytest.raises(StoreError, match="stopped"):
        store.get("a", 5)


def test_other_errors_are_not_retried():
    store = Patient(MemoryStore())
    with pytest.raises(ValueError, match="at most"):
        store.add("a", b"x" * 100_000)


def test_threads_share_an_outage(caplog):
    inner = Failing(6)
    store = Patient(inner, 60)
    threads = [threading.Thread(target=store.put, args=(str(number), b"")) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(inner) == 4 and 1 <= store.outages <= 2
    assert len(caplog.records) == 2 * store.outages


def test_connections_that_break_after_an_outage_are_no_outages_of_their_own(caplog):
    """One server is started again, and each thread has a connection of its own that finds out about it."""
    inner = Failing(9)
    store, time = patient(inner)
    store.put("a", b"1")
    for _ in range(5):
        inner.failures = 1
        store.put("a", b"1")
    assert store.outages == 1 and len(caplog.records) == 2
    inner.failures = 9  # a long one soon after
    store.put("a", b"1")
    assert store.outages == 2
    time.now_s += 100
    inner.failures = 1  # a short one, long after
    store.put("a", b"1")
    assert store.outages == 3
