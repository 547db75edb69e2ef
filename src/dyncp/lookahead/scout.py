"""Runs ahead of training: learns which batches come, has this rank's share of them planned, and fetches this rank's
parts of all plans before they are due. Each pass has a thread that draws batches, as a data set may take its time, and
one that fetches plans."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from dyncp.ir.codec import encode_batch
from dyncp.ir.errors import DecodeError
from dyncp.ir.plan import RankPlan
from dyncp.lookahead.exchange import Exchange, Run
from dyncp.lookahead.messages import Hello, Pointer, Progress
from dyncp.lookahead.producer import Job, PlanningError, PlanProducer
from dyncp.lookahead.source import Draw, Source

LOOK_UP_S = 0.5  # how long one look for a plan takes at most that training waits for
CHECK_S = 1.0  # how often a rank makes sure that the store still has what it published
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.2  # between looks for a plan that is not due yet
STOP_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Due:
    """A batch, and this rank's part of its plan."""

    draw: Draw
    plan: RankPlan


class Scout:
    """Of one rank, on one pass.

    Args:
        source: the batches.
        draws: those of this pass.
        start: iteration of the first.
        run: the pass.
        producer: plans this rank's share.
        exchange: where plans are.
        rank: of the trainer.
        kappa: how many batches ahead.
        hello: for planners elsewhere, with its place; of one rank.
        prepare: called with each plan that is fetched, see `DynamicLoader`.
    """

    def __init__(
        self,
        source: Source,
        draws: Iterator[Draw],
        start: int,
        run: Run,
        producer: PlanProducer,
        exchange: Exchange,
        rank: int,
        kappa: int,
        hello: tuple[str, int, Hello] | None = None,
        prepare: Callable[[RankPlan], object] | None = None,
    ) -> None:
        self.run = run
        self.first = start  # iteration
        self._source = source
        self._draws = draws
        self._producer = producer
        self._exchange = exchange
        self._rank = rank
        self._kappa = kappa
        self._hello = hello
        self._prepare = prepare
        self._changed = threading.Condition()  # reentrant, see Jobs
        self._drawn: list[Draw] = []  # from iteration `_released` on
        self._released = start
        self._pointers: list[Pointer] = []  # of the first of these
        self._ready: dict[int, RankPlan] = {}
        self._failure: BaseException | None = None  # at the first batch that is not ready
        self._end_of_data: BaseException | None = None  # why there are no more batches, if that is not the end
        self._exhausted = False
        self._looked_after_s = time.monotonic()
        self._told, self._told_s = -1, 0.0  # what planners elsewhere know of `run.reached`, and since when
        run.reached = start
        self._thread = threading.Thread(target=self._work, name="dyncp-scout", daemon=True)
        self._thread.start()
        threading.Thread(target=self._draw, name="dyncp-draw", daemon=True).start()

    def take(self, iteration: int, timeout_s: float) -> Due | None:
        """Wait for a batch and its plan; None when the pass has no more.

        Raises:
            PlanningError: there will be no plan.
            TimeoutError: it did not come in time.
            RuntimeError: the pass was ended meanwhile.
            Exception: whatever the data set raised.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self.run.reached = iteration + 1
            self._changed.notify_all()  # of both threads
            while iteration not in self._ready:
                if self.run.ended:
                    raise RuntimeError("the loader is closed; make a new one")
                if self._failure:
                    raise self._failure
                if self._exhausted and iteration >= self._released + len(self._drawn):
                    if self._end_of_data:
                        raise self._end_of_data
                    return None
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(self._late(iteration, timeout_s))
                self._changed.wait(left_s)
            return Due(self._drawn[iteration - self._released], self._ready[iteration])

    def ready(self) -> int:
        """How many plans of batches to come are here, one after the other."""
        with self._changed:
            count = 0
            while self.run.reached + count in self._ready:
                count += 1
            return count

    def end(self) -> None:
        """The pass is over, at its end or before; the thread tidies up, and ends."""
        self.run.ended = True
        with self._changed:
            self._changed.notify_all()

    def join(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Wait until the thread has tidied up."""
        if self._thread is not threading.current_thread():  # the collector may run on any
            self._thread.join(timeout_s)

    def _late(self, iteration: int, timeout_s: float) -> str:
        if iteration >= self._released + len(self._drawn):
            return f"the data set or its sampler did not come to iteration {iteration} within {timeout_s:g} s"
        if self._exchange.store.away:
            return (
                f"no plan for iteration {iteration} within {timeout_s:g} s, as the plan store "
                f"{self._exchange.store.address} is out of reach: see why, or raise timeout_s above patience_s"
            )
        return (
            f"no plan for iteration {iteration} within {timeout_s:g} s; it was to come from the planner of rank "
            f"{iteration % self._exchange.ranks}: see whether that rank is alive, or raise timeout_s"
        )

    def _work(self) -> None:
        try:
            self._follow()
        except BaseException as error:  # noqa: BLE001 each kind of store has its own, and the trainer has to know
            with self._changed:
                self._failure = self._explained(error)
                self._changed.notify_all()
                while not self.run.ended:
                    self._changed.wait()
        with suppress(ConnectionError, TimeoutError):  # then nobody finds the plans anyway
            self._leave()

    def _follow(self) -> None:
        pause_s = SHORTEST_PAUSE_S
        while not self.run.ended:
            self._tell()
            self._let_go()
            self._repair()
            iteration = self._released + len(self._pointers)
            with self._changed:
                due = iteration < self.run.reached
                beyond = iteration >= self._released + len(self._drawn)
            if not beyond and self._fetch(iteration, LOOK_UP_S if due else 0.0):
                pause_s = SHORTEST_PAUSE_S
                continue
            if self._producer.broken:
                raise self._producer.broken
            if due and not beyond:
                continue
            with self._changed:
                # What changes is what training has reached; other ranks' plans come without a word.
                if not self.run.ended and self._up_to_date():
                    self._changed.wait(CHECK_S if beyond else pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _tell(self) -> None:
        """Tell planners elsewhere how far training is; one rank does. And again now and then: stores forget."""
        now_s = time.monotonic()
        if self._hello and (self._told != self.run.reached or now_s - self._told_s > CHECK_S):
            self._told, self._told_s = self.run.reached, now_s
            self._exchange.put(f"{self.run.prefix}/progress", -1, Progress(self._told))
            self._exchange.put(*self._hello)

    def _up_to_date(self) -> bool:
        """Whether nothing waits but plans that are not due, or batches that are not drawn."""
        fetched = len(self._pointers)
        return (self._released + fetched >= self.run.reached or fetched == len(self._drawn)) and not self._is_over()

    def _is_drawn(self) -> bool:
        """Whether all batches up to kappa ahead of the one that training is in are known."""
        return self._exhausted or self._released + len(self._drawn) >= self.run.reached + self._kappa

    def _is_over(self) -> bool:
        """Whether training has left the first batch that is still held: it has asked for the one after the next."""
        return bool(self._pointers) and self._released + 1 < self.run.reached

    def _draw(self) -> None:
        """Learn of batches, up to kappa ahead of training, and request this rank's share."""
        while True:
            with self._changed:
                while not self.run.ended and self._is_drawn():
                    self._changed.wait()
                if self.run.ended:
                    return
            try:
                draw = next(self._draws, None)
            except BaseException as error:  # noqa: BLE001 of the user's data set or sampler; what came before it is good
                draw, self._end_of_data = None, error
            with self._changed:
                ended = bool(self.run.ended)  # it may have been, in the meantime
                self._exhausted = draw is None
                if draw is not None and not ended:
                    self._drawn.append(draw)
                self._changed.notify_all()
            if draw is None:
                return
            if ended:
                self._source.release(draw)
                return
            if draw.iteration % self._exchange.ranks == self._rank:
                # Nothing of a loader: what planners hold must not keep it from being dropped.
                encode = partial(_encoded, self._source, draw)
                self._producer.submit(Job(self.run, draw.iteration, draw.digest, encode))

    def _fetch(self, iteration: int, timeout_s: float) -> bool:
        """Fetch a plan, if it is there."""
        try:
            pointer = self._exchange.look(self.run, iteration, timeout_s)
            if pointer.failure:
                error = PlanningError(pointer.failure)
                error.add_note(pointer.details)
                raise error
            self._check(iteration, pointer)
        except TimeoutError:
            return False
        try:
            plan = self._exchange.fetch(self.run, iteration, pointer, self._rank, LOOK_UP_S)
        except TimeoutError:
            self._exchange.report_missing(self.run, iteration)
            return False
        self._check_lengths(iteration, plan)
        if self._prepare:
            self._prepare(plan)
        with self._changed:
            self._pointers.append(pointer)
            self._ready[iteration] = plan
            self._changed.notify_all()
        return True

    def _check(self, iteration: int, pointer: Pointer) -> None:
        """Tokens must never be sharded by a plan that was made for others."""
        draw = self._drawn[iteration - self._released]
        for what, got, expected in (
            ("samples or lengths", pointer.draw, draw.digest),
            ("settings", pointer.planned, self._producer.planned),
        ):
            if got != expected:
                raise PlanningError(
                    f"the plan that came for iteration {iteration} was made by {pointer.planner} for other {what} than "
                    f"rank {self._rank} has: give all ranks the same data set, sampler and arguments, and every loader "
                    "a store with a job name of its own"
                )

    def _check_lengths(self, iteration: int, plan: RankPlan) -> None:
        """Whatever a pointer says, the plan itself must be for this batch."""
        tokens, lengths = plan.header.tokens, self._drawn[iteration - self._released].lengths
        planned = np.zeros(max(len(lengths), int(tokens.sequence.max(initial=-1)) + 1), np.int64)
        np.maximum.at(planned, tokens.sequence, tokens.stop)
        if not np.array_equal(planned, lengths):
            raise PlanningError(
                f"the plan that came for iteration {iteration} has {planned.sum()} tokens in {len(planned)} sequences, "
                f"but this batch has {lengths.sum()} in {len(lengths)}: something else writes to the plan store"
            )

    def _let_go(self) -> None:
        """Drop what training has left behind."""
        tidy = False
        while self._is_over():
            self._drop()
            tidy = True
        if tidy:
            self._exchange.tidy()

    def _drop(self) -> None:
        with self._changed:
            draw, pointer, iteration = self._drawn.pop(0), self._pointers.pop(0), self._released
            self._ready.pop(iteration, None)
            self._released += 1
        self._source.release(draw)
        self._exchange.done(self.run, iteration, pointer, self._rank)

    def _repair(self) -> None:
        """Put again what the store forgot, as a server does that was restarted."""
        now_s = time.monotonic()
        if now_s - self._looked_after_s < CHECK_S:
            return
        self._looked_after_s = now_s
        self._exchange.repair(self.run)

    def _leave(self) -> None:
        """Tidy up at the end of the pass."""
        while self._pointers and self._released < self.run.reached:
            self._drop()
        with self._changed:
            left, self._drawn = self._drawn, []
        for draw in left:
            self._source.release(draw)
        self._exchange.tidy()
        if self._hello:
            self._exchange.store.delete(f"{self.run.prefix}/progress")

    def _explained(self, error: BaseException) -> BaseException:
        """What to tell the trainer: where planning is, and what can be done about it."""
        iteration = self._released + len(self._pointers)
        if isinstance(error, ConnectionError):
            text = (
                f"rank {self._rank} lost the plan store at the plan of iteration {iteration}: {error}; see why the "
                "process that holds the store ended (rank 0, or torchrun), and start all ranks again"
            )
        elif error is self._producer.broken:
            text = (
                f"rank {self._rank} has no plan for iteration {iteration}, and its planner can store no more plans: "
                f"{type(error).__name__}: {error}"
            )
        elif isinstance(error, DecodeError):
            text = f"the plan of iteration {iteration} cannot be used: {error}"
        else:
            return error
        explained = PlanningError(text)
        explained.__cause__ = error
        return explained


def _encoded(source: Source, draw: Draw) -> bytes:
    return encode_batch(source.global_batch(draw))
