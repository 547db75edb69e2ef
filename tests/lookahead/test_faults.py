"""What happens when things break: each test causes one fault, and would fail without its handling."""

import contextlib
import errno
import gc
import logging
import os
import signal
import threading
import time
import warnings
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
from builders import causal_batch
from lookahead.loading import Counting, in_turns, open_loaders, planning
from lookahead.test_workers import task

from dyncp.ir.codec import decode_rank
from dyncp.lookahead import Batching, DynamicLoader, FileStore, LookAhead, MemoryStore, PlanningError
from dyncp.lookahead.health import Health
from dyncp.lookahead.ladder import RUNGS, on_rung, plan_parts
from dyncp.lookahead.slots import MOST_FAILURES, Slot
from dyncp.lookahead.workers import memory_bytes

pytestmark = pytest.mark.usefixtures("faults")
SMALL = Batching(50, 50)


def ahead(kappa, workers, **more):
    """Without a cache, so that every batch is planned."""
    return LookAhead(kappa, workers, **{"timeout_s": 60, "cache_bytes": 0} | more)


MANY = tuple(range(2, 50)) + (49,) * 4


def expected(ranks=1, lengths=MANY, strategy="zigzag"):
    """Samples and digests of an undisturbed pass."""
    with open_loaders([Counting(lengths) for _ in range(ranks)], SMALL, strategy=strategy) as loaders:
        return [(batch.samples, batch.plan.digest) for batch, *_ in in_turns(loaders)]


def seen(loaders):
    return [(batch.samples, batch.plan.digest) for batch, *_ in in_turns(loaders)]


def test_a_planner_process_that_is_killed_in_the_middle_of_a_plan_is_replaced(monkeypatch, caplog):
    lookahead = ahead(3, 2)
    with open_loaders([Counting(MANY)], SMALL, lookahead, planner="lookahead.planners:dies_once") as (loader,):
        assert seen([loader]) == expected()
        report = loader.report()
    assert (report.lost, report.fallbacks, report.in_process) == (1, 0, 0)
    assert report.plans_made == report.steps
    assert not caplog.records


def test_planner_processes_that_are_killed_while_idle_are_replaced():
    with open_loaders([Counting(MANY)], SMALL, ahead(1, 2)) as (loader,):
        batches = []
        for batch in loader:
            batches.append((batch.samples, batch.plan.digest))
            if batch.iteration in (3, 9):
                while loader._producer.pending:
                    time.sleep(0.01)
                for number in loader._producer.pids:
                    os.kill(number, signal.SIGKILL)
        report = loader.report()
    assert batches == expected()
    assert report.lost >= 2
    assert (report.fallbacks, report.in_process) == (0, 0)


def test_the_trainer_does_not_notice_a_killed_planner_within_the_look_ahead(monkeypatch):
    """One that dies with the plan of the next batch but one; the step that training is in takes long enough."""
    monkeypatch.setenv("DIES_AT", "6")
    with open_loaders([Counting(MANY)], SMALL, ahead(4, 2), planner="lookahead.planners:dies_once") as (loader,):
        batches = iter(loader)
        for _ in range(10):
            next(batches)
            deadline = time.monotonic() + 60
            while loader.report().plans_ready < 4:  # without another word from the trainer
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert loader.report().lost == 1


def test_where_no_planner_process_can_be_had_the_rank_plans_and_says_so(caplog):
    lookahead = ahead(2, 1)
    with open_loaders([Counting(MANY)], SMALL, lookahead, planner="lookahead.planners:dies") as (loader,):
        assert seen([loader])[1:] == expected()[1:]  # the first, in which planners died, was made by simpler means
        report = loader.report()
    assert report.lost == MOST_FAILURES
    assert report.in_process >= report.steps - 1
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING and "had" in record.message]
    assert "no planner process can be had" in record.message and "this process plans itself" in record.message


def test_a_planner_process_that_cannot_even_start_is_no_end(monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise OSError("no more processes")

    monkeypatch.setattr("dyncp.lookahead.workers.subprocess.Popen", refuse)
    with open_loaders([Counting(MANY)], SMALL, ahead(2, 1)) as (loader,):
        assert seen([loader]) == expected()
    assert "OSError: no more processes" in caplog.text


@pytest.mark.parametrize(
    ("workers", "planner", "rung", "field"),
    [
        (0, "raises_as_asked", "tiling", "failed"),
        (0, "raises_but_static", "zigzag", "failed"),
        (1, "raises_as_asked", "tiling", "failed"),
        (1, "raises_but_static", "zigzag", "failed"),
        (1, "hangs_as_asked", "tiling", "slow"),  # a plan of this very process cannot be ended
    ],
)
def test_a_solver_that_fails_gives_way_to_simpler_means(caplog, planner, rung, field, workers):
    lookahead = ahead(1, workers, plan_limit_s=2)
    dataset = Counting((25, 24) * 3)
    with open_loaders([dataset], SMALL, lookahead, "dynamic", planner=f"lookahead.planners:{planner}") as (loader,):
        strategies = [batch.plan.header.strategy for batch in loader]
        report = loader.report()
    assert strategies == ["dynamic" if rung == "tiling" else rung] * 3
    assert report.fallbacks == report.steps == 3
    assert getattr(report, field) >= 3
    assert f"falling back to {rung}" in caplog.text
    assert "iteration 0: planning as asked failed" in caplog.text


def test_the_ladder_ends_with_schemes_that_need_no_solver():
    asked = planning(4, "dynamic")
    rungs = [on_rung(asked, rung) for rung in range(len(RUNGS))]
    assert rungs[0] is asked
    assert [rung.strategy for rung in rungs] == ["dynamic", "dynamic", "zigzag", "data_parallel"]
    assert not rungs[1].options.portfolio and rungs[1].options.schedule == "greedy"


def test_where_every_rung_fails_all_ranks_learn_the_first_cause(faults):
    lookahead = ahead(1, 0)
    batching = Batching(50, 50, sample_mask=lambda sample, length: None)
    with open_loaders([Counting(), Counting()], batching, lookahead) as loaders:
        for loader in loaders:
            with pytest.raises(PlanningError, match="iteration 0 could not be planned by rank 0"):
                next(iter(loader))


class Flaky(MemoryStore):
    """Away while `away` is set; then with nothing in it, if it was told to forget."""

    def __init__(self):
        super().__init__("job")
        self.away = threading.Event()
        self.calls = 0

    def reach(self):
        self.calls += 1
        if self.away.is_set():
            raise ConnectionError("nobody answers at flaky:1")

    def forget(self):
        with self._changed:
            self._values.clear()

    def put(self, *args):
        self.reach()
        super().put(*args)

    def add(self, *args):
        self.reach()
        return super().add(*args)

    def get(self, *args):
        self.reach()
        return super().get(*args)

    def delete(self, *args):
        self.reach()
        super().delete(*args)


@pytest.mark.parametrize("forgets", [False, True])
def test_a_store_that_is_away_for_a_while_is_waited_for(forgets):
    """As with a server that is restarted, with or without what it held."""
    store = Flaky()
    store.away.set()
    threading.Timer(0.5, store.away.clear).start()
    lookahead = ahead(3, 0, patience_s=30)
    batches = []
    with open_loaders([Counting(MANY), Counting(MANY)], SMALL, lookahead, store=store) as loaders:
        for batch, *_ in in_turns(loaders):
            batches.append((batch.samples, batch.plan.digest))
            if batch.iteration in (4, 11):
                store.away.set()
                time.sleep(0.2)
                if forgets:
                    store.forget()
                store.away.clear()
        reports = [loader.report() for loader in loaders]
    assert batches == expected(2)
    assert sum(report.outages for report in reports) >= 1
    assert len(store) == 0


def test_a_store_that_forgets_without_ever_being_away_is_filled_again():
    """A connection that is made anew unseen; only the values are gone."""
    store = Flaky()
    with open_loaders([Counting(MANY), Counting(MANY)], SMALL, ahead(3, 0), store=store) as loaders:
        batches = []
        for batch, *_ in in_turns(loaders):
            batches.append((batch.samples, batch.plan.digest))
            if batch.iteration == 4:
                time.sleep(0.3)  # the next ones are in the store
                store.forget()
    assert batches == expected(2)


def test_a_store_that_stays_away_is_an_error_that_names_it():
    store = Flaky()
    with open_loaders([Counting(MANY), Counting(MANY)], SMALL, ahead(2, 0, patience_s=0.5), store=store) as loaders:
        iterators = [iter(loader) for loader in loaders]
        for iterator in iterators:
            next(iterator)
        time.sleep(0.2)
        store.away.set()
        for rank, iterator in enumerate(iterators):
            with pytest.raises(PlanningError, match=f"rank {rank} .*nobody answers at flaky:1"):
                for _ in range(6):  # some plans are there already
                    next(iterator)


def test_a_store_that_is_away_does_not_hold_up_the_end():
    store = Flaky()
    with open_loaders([Counting(MANY)], SMALL, ahead(2, 0, patience_s=600), store=store) as (loader,):
        next(iter(loader))
        store.away.set()
        started = time.monotonic()
    assert time.monotonic() - started < 10


def test_a_disk_that_is_full_for_a_while_is_waited_for(tmp_path, monkeypatch):
    store = FileStore(tmp_path, "job")
    full = threading.Event()
    replace = Path.replace

    def refuse(*args):
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(*args)

    monkeypatch.setattr(Path, "replace", refuse)
    with open_loaders([Counting(MANY)], SMALL, ahead(2, 0, patience_s=30), store=store) as (loader,):
        batches = []
        for batch in loader:
            batches.append((batch.samples, batch.plan.digest))
            if batch.iteration == 3:
                full.set()
                threading.Timer(0.5, full.clear).start()
        assert loader.report().outages >= 1
    assert batches == expected()


def test_a_plan_that_never_comes_names_iteration_and_planner():
    with open_loaders([Counting(), Counting()], SMALL, ahead(2, 0, timeout_s=0.3)) as (loader, _):
        iterator = iter(loader)
        next(iterator)  # planned here; the next one is rank 1's, which does nothing
        with pytest.raises(TimeoutError, match=r"iteration 1 within 0.3 s.* planner of rank 1"):
            next(iterator)


def test_two_jobs_share_a_store(tmp_path):
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(
                open_loaders([Counting(MANY)] * 2, Batching(50, 50, seed=seed), store=FileStore(tmp_path, f"job{seed}"))
            )
            for seed in (0, 1)
        ]
        both = [[], []]
        for one, two in zip_longest(in_turns(jobs[0]), in_turns(jobs[1])):
            both[0] += [one[0].samples] if one else []
            both[1] += [two[0].samples] if two else []
        assert both[0] != both[1]
        assert sorted(sum(both[0], ())) == sorted(sum(both[1], ())) == list(range(len(MANY)))


def loader_of(rank, store, run="first", **batching):
    lookahead = ahead(2, 0)
    return DynamicLoader(
        Counting(MANY), planning(2), Batching(50, 50, **batching), lookahead, rank=rank, store=store, run=run
    )


def test_a_rank_that_is_restarted_alone_goes_on_where_the_others_are(tmp_path):
    """It comes back with its last state, in the same run; what it had not done with is still in the store."""
    zero, one = (loader_of(rank, FileStore(tmp_path, "job")) for rank in (0, 1))
    iterators = [iter(zero), iter(one)]
    first = [batch for batch, _ in [tuple(map(next, iterators)) for _ in range(5)]]
    state = one.state_dict()
    # killed: it neither closes nor tidies up
    one._producer.stop()
    iterators[1].scout._exchange.store.stop()
    again = loader_of(1, FileStore(tmp_path, "job"))
    again.load_state_dict(state)
    rest = [batches[0] for batches in zip(iterators[0], iter(again), strict=True)]
    assert [(batch.samples, batch.plan.digest) for batch in first + rest] == expected(2)
    for loader in (zero, again):
        loader.close()


def test_what_an_earlier_start_of_the_job_left_is_not_taken(tmp_path):
    """All ranks died and come back with other masks, under the same job name."""
    from dyncp import masks

    before = [loader_of(rank, FileStore(tmp_path, "job")) for rank in (0, 1)]
    for iterator in [iter(loader) for loader in before]:
        next(iterator)
    time.sleep(0.3)  # plans of the next iterations are there
    for loader in before:
        loader._producer.stop()
    full = {"mask": lambda index, length: masks.full(length)}
    after = [loader_of(rank, FileStore(tmp_path, "job"), "second", **full) for rank in (0, 1)]
    for batch, _ in zip(iter(after[0]), iter(after[1]), strict=True):
        pairs = sum(
            program.comps.mask(i, batch.plan.header.tokens).pairs()
            for program in batch.plan.programs
            for i in range(len(program.comps))
        )
        assert pairs > 0
    digests = [batch.plan.digest for batch, _ in zip(iter(after[0]), iter(after[1]), strict=True)]
    assert not set(digests) & {digest for _, digest in expected(2)}
    for loader in (*after, *before):
        loader.close()


def test_ranks_without_a_common_start_on_a_store_that_lasts_are_refused(tmp_path):
    loader = DynamicLoader(Counting(), planning(2), SMALL, ahead(2, 0), rank=0, store=FileStore(tmp_path, "job"))
    with pytest.raises(ValueError, match=r"may hold plans of an earlier start of job 'job'.* give run=\.\.\. "):
        iter(loader)


def test_clocks_that_differ_or_jump_change_nothing(tmp_path, monkeypatch):
    """Every rank and every call has another time of day, years apart."""
    rng = np.random.default_rng(0)
    monkeypatch.setattr(time, "time", lambda: float(rng.integers(0, 1 << 32)))
    monkeypatch.setattr(time, "time_ns", lambda: int(rng.integers(0, 1 << 62)))
    stores = [FileStore(tmp_path, "job") for _ in range(2)]
    loaders = [loader_of(rank, store) for rank, store in enumerate(stores)]
    assert seen(loaders) == expected(2)
    for loader in loaders:
        loader.close()


def test_a_slow_rank_gets_every_plan():
    """The other is done before it begins, and closes: its plans wait."""
    store = MemoryStore()
    loaders = [loader_of(rank, store) for rank in (0, 1)]
    slow = threading.Thread(target=lambda: got.extend(loaders[1]))
    got, iterator = [], iter(loaders[0])
    fast = [next(iterator)]
    time.sleep(0.5)
    slow.start()
    fast += list(iterator)
    slow.join(60)
    assert [(b.samples, b.plan.digest) for b in got] == [(b.samples, b.plan.digest) for b in fast] == expected(2)
    for loader in loaders:
        loader.close()
    assert len(store) == 0


class Growing(Counting):
    def grow(self, length):
        self.samples.append(np.arange(length))
        self.lengths = (*self.lengths, length)


def test_a_dataset_that_grows_between_epochs_is_read_to_its_new_end():
    datasets = [Growing(), Growing()]
    with open_loaders(datasets, SMALL) as loaders:
        for more in range(3):
            batches = [batch for batch, *_ in in_turns(loaders)]
            assert sorted(sum((batch.samples for batch in batches), ())) == list(range(len(Counting()) + more))
            for dataset in datasets:
                dataset.grow(30)


def test_ranks_whose_datasets_differ_are_told_apart():
    datasets = [Growing(), Growing()]
    datasets[1].grow(30)
    with open_loaders(datasets, SMALL) as loaders:
        iterators = [iter(loader) for loader in loaders]
        with pytest.raises(
            PlanningError, match="iteration 0 was made by rank 0 for other samples or lengths than rank 1"
        ):
            for iterator in iterators:
                next(iterator)


def test_a_planner_process_that_leaks_is_replaced(faults, monkeypatch):
    lookahead = ahead(2, 1, worker_bytes=220 << 20)
    with open_loaders([Counting((25, 24) * 60)], SMALL, lookahead, planner="lookahead.planners:leaks") as (loader,):
        assert len(list(loader)) == 60
        report = loader.report()
    assert report.replaced >= 1
    assert (report.lost, report.fallbacks, report.in_process) == (0, 0, 0)
    processes = {path.name.split("-")[1] for path in faults.glob("process-*")}
    assert len(processes) >= 2


def test_ten_thousand_plans_leave_no_memory_behind():
    """The rank's side of it, with a cache so small that it turns over all the time."""
    batching, passes = Batching(8, 8), 20
    dataset = Counting([3, 4, 5] * 340)
    lookahead = ahead(4, 0, cache_bytes=20_000)
    store = MemoryStore()
    with open_loaders([dataset], batching, lookahead, store=store) as (loader,):
        plans, objects, held = 0, [], []
        for epoch in range(passes):
            loader.set_epoch(epoch)
            plans += sum(1 for _ in loader)
            dataset.read.clear()
            gc.collect()
            objects.append(len(gc.get_objects()))
            held.append(memory_bytes())
            if plans >= 10_000:
                break
        threads = sum(thread.name == "dyncp-scout" for thread in threading.enumerate())
    assert plans >= 10_000
    assert threads <= 1
    assert len(store) == 0
    assert objects[-1] < objects[1] + 2000, objects  # less than one for every four plans
    assert held[-1] < held[1] + (20 << 20), held  # a plan with all that belongs to it takes some ten kilobytes


def test_a_worker_that_is_found_dead_leaves_no_pipe_open():
    slot = Slot(ahead(1, 1), Health(), process=True)
    slot.plan(task(7))
    os.kill(slot.worker.pid, signal.SIGKILL)
    time.sleep(0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not slot.plan(task(7)).error
        gc.collect()
    slot.close()


class ForgetsOnce(Flaky):
    """Loses everything at one call, of all that are made."""

    def __init__(self, at, away):
        super().__init__()
        self.at, self.tries = at, 3 * away

    def reach(self):
        super().reach()
        if self.calls >= self.at and self.tries >= 0:
            self.tries -= 1
            if self.tries >= 0:
                raise ConnectionError("nobody answers at flaky:1")
            self.forget()


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("at", range(2, 100, 11))
def test_a_store_may_be_restarted_at_any_moment(at, away):
    """Between the parts of a plan and its pointer, say."""
    store, lengths = ForgetsOnce(at, away), MANY[-14:]
    with open_loaders([Counting(lengths), Counting(lengths)], SMALL, ahead(2, 0), store=store) as loaders:
        assert seen(loaders) == expected(2, lengths)


class Odd(Counting):
    """A stream, or a data set, that does something else at one place."""

    def __init__(self, act):
        super().__init__(MANY)
        self.act = act

    def __getitem__(self, index):
        if len(self.read) == 5:
            self.act()
        return super().__getitem__(index)


def stop_iteration():
    raise StopIteration


def test_a_sample_that_raises_stop_iteration_is_no_end_of_the_batches():
    with (
        open_loaders([Odd(stop_iteration)], SMALL) as (loader,),
        pytest.raises(RuntimeError, match="raised StopIteration where a sample was asked for"),
    ):
        list(loader)


class Stream:
    def __init__(self, act):
        self.act = act

    def __iter__(self):
        for number, sample in enumerate(Counting([49] * 8).samples):
            if number == 4:
                self.act()
            yield sample


@pytest.mark.parametrize("error", [OSError, SystemExit])
def test_what_a_stream_raises_reaches_training_when_it_comes_there(error):
    def act():
        raise error("enough")

    with open_loaders([Stream(act)], SMALL, ahead(3, 0)) as (loader,):
        batches = iter(loader)
        assert [next(batches).iteration for _ in range(3)] == [0, 1, 2]  # the next one is not known to be full
        with pytest.raises(error, match="enough"):
            next(batches)


def test_a_stream_that_is_slow_ahead_does_not_hold_back_what_is_there():
    gate = threading.Event()
    with open_loaders([Stream(lambda: gate.wait(60))], SMALL, ahead(6, 0)) as (loader,):
        batches = iter(loader)
        assert [next(batches).iteration for _ in range(3)] == [0, 1, 2]
        gate.set()
        assert len(list(batches)) == 5


@pytest.mark.parametrize("text", ["x" * 90_000, "\U0001f600" * 25_000, "\udc80"])
def test_an_error_of_any_size_and_letters_reaches_all_ranks(text):
    def mask(index, length):
        raise KeyError(text)

    with open_loaders([Counting(), Counting()], Batching(50, 50, mask=mask), ahead(1, 0)) as loaders:
        for loader in loaders:
            with pytest.raises(PlanningError, match="iteration 0 could not be planned by rank 0: KeyError"):
                next(iter(loader))


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (Batching(50, 50, accumulate=2), "samples or lengths"),
        (Batching(50, 50, seed=1), "samples or lengths"),
        (Batching(50, 50, weights={"default": 2}), "settings"),
    ],
)
def test_ranks_with_different_settings_are_told_apart(other, what):
    store = MemoryStore()
    with (
        open_loaders([Counting(), Counting()], SMALL, ahead(1, 0), store=store) as (zero, _),
        open_loaders([Counting(), Counting()], other, ahead(1, 0), store=MemoryStore()) as (_, one),
    ):
        one._exchange.store = zero._exchange.store
        next(iter(zero))
        with pytest.raises(PlanningError, match=f"iteration 0 was made by rank 0 for other {what} than rank 1"):
            next(iter(one))


def test_a_plan_for_other_lengths_is_refused_whatever_its_pointer_says():
    (part,), _, _ = plan_parts(causal_batch(10), planning(1))
    with open_loaders([Counting([48])], SMALL, ahead(1, 0)) as (loader,):
        loader._exchange.fetch = lambda *args: decode_rank(part)
        with pytest.raises(PlanningError, match="has 10 tokens in 1 sequences, but this batch has 48 in 1"):
            next(iter(loader))


def test_a_plan_by_simpler_means_is_not_kept_for_batches_to_come():
    lookahead = ahead(1, 0, cache_bytes=1 << 20)
    options = {"strategy": "dynamic", "planner": "lookahead.planners:raises_as_asked"}
    with open_loaders([Counting((25, 24) * 4)], SMALL, lookahead, **options) as (loader,):
        assert len(list(loader)) == 4
        assert (loader.report().fallbacks, loader.report().cached) == (4, 0)
