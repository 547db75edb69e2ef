import pytest
from builders import causal_batch
from lookahead.loading import planning

from dyncp.ir.errors import DecodeError
from dyncp.lookahead import MemoryStore
from dyncp.lookahead.exchange import Exchange
from dyncp.lookahead.ladder import plan_parts
from dyncp.lookahead.messages import Pointer
from dyncp.lookahead.seal import Seal
from dyncp.lookahead.stores.patient import Patient

RANKS, DRIFT = 3, 16
PARTS, DIGEST, _ = plan_parts(causal_batch(40, 9), planning(RANKS))
POINTER = Pointer("", "rank 0", "draw", "planned", DIGEST, "asked")


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def exchange(store):
    return Exchange(Patient(store), Seal("job"), RANKS, DRIFT)


def fetched(exchange, run, iteration):
    """What all ranks get."""
    pointer = exchange.look(run, iteration, 0.0)
    return [exchange.fetch(run, iteration, pointer, rank, 0.0) for rank in range(RANKS)]


def take(exchange, run, iteration, ranks=range(RANKS)):
    pointer = exchange.look(run, iteration, 0.0)
    for rank in ranks:
        exchange.done(run, iteration, pointer, rank)


def test_of_two_plans_all_ranks_find_the_first(exchange, store):
    """As where a planner that was thought lost comes back late."""
    run, late = exchange.begin("run/L0/0"), Exchange(Patient(store), Seal("job"), RANKS)
    assert exchange.publish(run, 4, POINTER, PARTS)
    assert not late.publish(late.begin("run/L0/0"), 4, POINTER, PARTS)
    assert [part.rank for part in fetched(exchange, run, 4)] == [0, 1, 2]
    assert len(store) == 1 + RANKS


def test_nothing_is_published_of_a_pass_that_has_ended(exchange, store):
    run = exchange.begin("run/L0/0")
    run.ended = True
    assert not exchange.publish(run, 4, POINTER, PARTS)
    assert len(store) == 0


def test_keys_go_when_all_ranks_have_done_with_them(exchange, store):
    run = exchange.begin("run/L0/0")
    exchange.publish(run, 4, POINTER, PARTS)
    run.reached = 5
    take(exchange, run, 4, (0, 2))
    run.ended = True
    assert not exchange.tidy()
    assert len(store) == 2  # rank 1's part, and the pointer to it
    take(exchange, run, 4, (1,))
    assert exchange.tidy()
    assert len(store) == 0


def test_what_nobody_will_ask_for_goes_at_the_end(exchange, store):
    run = exchange.begin("run/L0/0")
    for iteration in (4, 5, 6):
        exchange.publish(run, iteration, POINTER, PARTS)
    run.reached, run.ended = 5, True
    exchange.tidy()
    assert {key.split("/")[3] for key in store._values} == {"4"}


@pytest.mark.parametrize("ahead", [0, 1, 2, DRIFT])
def test_what_a_store_forgot_is_put_again_for_ranks_that_are_behind(exchange, store, ahead):
    run = exchange.begin("run/L0/0")
    exchange.publish(run, 4, POINTER, PARTS)
    run.reached = 4 + ahead
    exchange.tidy()
    store._values.clear()
    exchange.repair(run)
    assert [part.digest for part in fetched(exchange, run, 4)] == [DIGEST] * RANKS
    take(exchange, run, 4, (1,))  # the others may have had theirs before
    run.reached = 4 + DRIFT + 1
    exchange.tidy()
    assert len(store) == 0


def test_what_all_ranks_must_have_is_not_put_again(exchange, store):
    run = exchange.begin("run/L0/0")
    exchange.publish(run, 4, POINTER, PARTS)
    run.reached = 4 + DRIFT + 1
    exchange.tidy()
    assert run.published[4].parts == ()  # nor held in memory
    store._values.clear()
    exchange.repair(run)
    assert len(store) == 0


def test_a_failure_stays_until_all_ranks_must_have_seen_it(exchange, store):
    run = exchange.begin("run/L0/0")
    failure = Pointer("", "rank 0", "draw", "planned", failure="no")
    exchange.publish(run, 4, failure, [])
    run.reached = 4 + DRIFT
    exchange.tidy()
    assert exchange.look(run, 4, 0.0).failure == "no"
    run.reached += 1
    exchange.tidy()
    assert len(store) == 0


def test_a_part_of_another_rank_or_plan_is_refused(exchange, store):
    run = exchange.begin("run/L0/0")
    exchange.publish(run, 4, POINTER, [PARTS[1], PARTS[0], PARTS[2]])
    pointer = exchange.look(run, 4, 0.0)
    with pytest.raises(DecodeError, match=r"holds the part of rank 1 .* expected that of rank 0"):
        exchange.fetch(run, 4, pointer, 0, 0.0)
    other, digest, _ = plan_parts(causal_batch(40, 10), planning(RANKS))
    exchange.publish(run, 5, POINTER, other)
    with pytest.raises(DecodeError, match=f"of the plan {digest[:12]}, expected that of rank 2 of {DIGEST[:12]}"):
        exchange.fetch(run, 5, exchange.look(run, 5, 0.0), 2, 0.0)


def test_a_part_that_is_missing_is_put_again(exchange, store):
    """The store forgot it between the parts and the pointer."""
    run = exchange.begin("run/L0/0")
    exchange.publish(run, 4, POINTER, PARTS)
    pointer = exchange.look(run, 4, 0.0)
    store.delete(f"run/L0/0/4/{pointer.attempt}/1")
    exchange.repair(run)
    with pytest.raises(TimeoutError):  # it may be a rank that has done with it
        exchange.fetch(run, 4, pointer, 1, 0.0)
    exchange.report_missing(run, 4)
    exchange.repair(run)
    assert exchange.fetch(run, 4, pointer, 1, 0.0).rank == 1
    run.reached = 4 + DRIFT + 1
    exchange.tidy()
    assert len(store) == 0


def test_a_late_planner_does_not_replace_a_plan_that_the_store_forgot(exchange, store):
    run, late = exchange.begin("run/L0/0"), Exchange(Patient(store), Seal("job"), RANKS)
    exchange.publish(run, 4, POINTER, PARTS)
    ours = exchange.look(run, 4, 0.0)
    store._values.clear()
    other, digest, _ = plan_parts(causal_batch(40, 9), planning(RANKS, "ring"))
    assert digest != DIGEST
    assert late.publish(late.begin("run/L0/0"), 4, Pointer("", "p", "draw", "planned", digest), other)
    exchange.repair(run)
    assert exchange.look(run, 4, 0.0) == ours
    assert [part.digest for part in fetched(exchange, run, 4)] == [DIGEST] * RANKS


def test_a_plan_that_somebody_else_published_first_is_looked_after(exchange, store):
    run, late = exchange.begin("run/L0/0"), Exchange(Patient(store), Seal("job"), RANKS)
    late.publish(late.begin("run/L0/0"), 4, POINTER, PARTS)
    assert not exchange.publish(run, 4, POINTER, PARTS)
    store._values.clear()
    exchange.repair(run)
    assert [part.digest for part in fetched(exchange, run, 4)] == [DIGEST] * RANKS


def test_a_plan_made_elsewhere_is_copied_in_case_the_store_forgets(exchange, store):
    run, theirs = exchange.begin("run/L0/0"), Exchange(Patient(store), Seal("job"), RANKS)
    theirs.publish(theirs.begin("run/L0/0"), 4, POINTER, PARTS)
    exchange.watch(run, 4, exchange.look(run, 4, 0.0))
    store._values.clear()
    exchange.repair(run)
    assert [part.digest for part in fetched(exchange, run, 4)] == [DIGEST] * RANKS
