"""Planners on other hosts, which meet the ranks in the plan store alone: how a rank asks them, and what they do.

A rank puts the batch (`ask`); the first planner with a core to spare that claims it (`claim`) publishes the plan as the
rank itself would. Planners show that they are alive by counting (`planners/NAME`): a rank that sees no change for some
seconds of its own takes the batch back, so no clock is ever compared with another.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from dyncp.ir.codec import decode_batch
from dyncp.ir.errors import DecodeError
from dyncp.lookahead.config import LookAhead
from dyncp.lookahead.exchange import Exchange, Run
from dyncp.lookahead.health import Health
from dyncp.lookahead.messages import Ask, Beat, Claim, Hello, Progress
from dyncp.lookahead.producer import Job, PlanProducer
from dyncp.lookahead.seal import Seal
from dyncp.lookahead.stores.api import PlanStore
from dyncp.lookahead.stores.patient import Patient
from dyncp.lookahead.workers import PLANNER

LOOK_UP_S = 0.2  # between a rank's looks at what became of a batch
CLAIM_S = 3.0  # that a batch may lie about, when it is due, or nobody is there
LOST_S = 5.0  # without a sign of life
BEAT_S = 1.0  # between signs of life
ABSENT_S = 15.0  # that nobody is asked after nobody was there
GONE_S = 10.0  # that a pass is not heard of, before it counts as over; a store may have to be told again
MOST_PASSES = 8  # of a loader that are looked for, when a planner comes late
RETAKE_S = 2.0  # after which a planner looks again for what was claimed
POLL_S = 0.05  # between a planner's looks for batches
MAX_BATCH_BYTES = 256 << 20  # that a rank may ask for, unpacked
SOMEBODY = "planners/any"
log = logging.getLogger("dyncp")
Clock = Callable[[], float]


class Forgotten(Exception):
    """The store has lost what was asked of planners elsewhere, and with it perhaps what they made of it."""


class Pulse:
    """Whether a value that somebody keeps changing still changes, by the reader's clock.

    Args:
        exchange: where the value is.
        place: its key.
    """

    def __init__(self, exchange: Exchange, place: str, clock: Clock) -> None:
        self._exchange, self._place, self._clock = exchange, place, clock
        self._seen: Beat | None = None
        self._changed_s = clock()

    def alive(self) -> bool:
        """Whether it changed within the last `LOST_S`, or has not been watched for that long."""
        with suppress(TimeoutError, DecodeError):  # what cannot be read, for want of the key, say, is no sign of life
            beat = self._exchange.get(self._place, -1, Beat, 0.0)
            if beat != self._seen:
                self._seen, self._changed_s = beat, self._clock()
        return self._clock() - self._changed_s < LOST_S


class RemotePlanners:
    """What one rank knows of planners elsewhere; an `Elsewhere`.

    Args:
        exchange: where they and the rank meet.
        health: counts those that were lost.
        clock: seconds that only go up.
    """

    def __init__(self, exchange: Exchange, health: Health, clock: Clock = time.monotonic) -> None:
        self._exchange, self._health, self._clock = exchange, health, clock
        self._absent_until_s = 0.0

    def plan(self, job: Job) -> bool:
        """See `Elsewhere.plan`."""
        if self._clock() < self._absent_until_s:
            return False
        run, iteration, ask = job.run, job.iteration, Ask(job.draw, job.batch)
        self._exchange.put(run.place(iteration, "ask"), iteration, ask)
        try:
            while not run.ended:
                with suppress(Forgotten):
                    return self._wait(run, iteration)
                self._exchange.put(run.place(iteration, "ask"), iteration, ask)
            return False
        finally:
            for what in ("ask", "claim"):
                self._exchange.store.delete(run.place(iteration, what))

    def _go_without(self, why: str) -> bool:
        if self._clock() >= self._absent_until_s:
            log.warning("%s; planning here, and asking again in %g s", why, ABSENT_S)
        self._absent_until_s = self._clock() + ABSENT_S
        return False

    def _is_there(self, place: str) -> bool:
        try:
            self._exchange.store.get(place, 0.0)
        except TimeoutError:
            return False
        return True

    def _wait(self, run: Run, iteration: int) -> bool:
        began_s = self._clock()
        somebody = Pulse(self._exchange, SOMEBODY, self._clock)
        owner: Pulse | None = None
        while not run.ended:
            with suppress(TimeoutError):
                pointer = self._exchange.look(run, iteration, LOOK_UP_S)
                self._exchange.watch(run, iteration, pointer)
                return True
            if not self._is_there(run.place(iteration, "ask")):
                raise Forgotten
            if owner is None:
                with suppress(TimeoutError, DecodeError):  # whoever wrote something else there plans nothing
                    claim = self._exchange.get(run.place(iteration, "claim"), iteration, Claim, 0.0)
                    owner = Pulse(self._exchange, f"planners/{claim.planner}", self._clock)
            if owner is not None and not owner.alive():
                self._health.count("lost")
                log.warning("iteration %d: the planner that took it shows no sign of life; planning it here", iteration)
                return False
            unclaimed_s = self._clock() - began_s if owner is None else 0.0
            if owner is None and not somebody.alive():
                return self._go_without("no planner on the store takes batches (if there is one, see its log)")
            if unclaimed_s > CLAIM_S and iteration < run.reached:
                return self._go_without(f"no planner takes iteration {iteration}, which training waits for")
        return False


@dataclass(slots=True, eq=False)
class Following:
    """A loader that a planner works for."""

    hello: Hello
    producer: PlanProducer
    exchange: Exchange
    latest: int  # number of the pass that began last
    runs: dict[int, Run] = field(default_factory=dict)  # passes that have begun and not ended
    # Iterations of each that somebody claimed, and when this planner last looked for what was asked there.
    taken: dict[int, dict[int, float]] = field(default_factory=dict)
    seen_s: dict[int, float] = field(default_factory=dict)  # when each was last heard of
    next_pass: int = 0


class PlannerServer:
    """Plans for all loaders of a job, whatever host they are on: what `dyncp planner` runs.

    Args:
        store: that the ranks use, with the same job.
        seal: with the same key.
        workers: planner processes.
        lookahead: limits of one plan, and of the cache.
        name: of this planner; made up when left out.
        planner: see `Worker`.
    """

    def __init__(
        self,
        store: PlanStore,
        seal: Seal,
        workers: int,
        lookahead: LookAhead,
        name: str = "",
        planner: str = PLANNER,
    ) -> None:
        self.name = name or f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.health = Health()
        self._store, self._seal = Patient(store, lookahead.patience_s), seal
        self._workers, self._lookahead, self._planner = workers, lookahead, planner
        self._loaders: dict[int, Following] = {}
        self._refused: set[str] = set()  # reasons that were given
        self._stopped = threading.Event()

    def serve(self) -> None:
        """Plan until `stop` is called from another thread or a signal handler.

        Raises:
            ConnectionError: the store is away for good.
        """
        beating = threading.Thread(target=self._beat, name="dyncp-beat", daemon=True)
        beating.start()
        looked_s = -BEAT_S
        try:
            while not self._stopped.is_set():
                if time.monotonic() - looked_s >= BEAT_S:
                    looked_s = time.monotonic()
                    self._look_for_loaders()
                claimed = [self._serve_loader(number, loader) for number, loader in self._loaders.items()]
                if not any(claimed):
                    self._stopped.wait(POLL_S)
        finally:
            self._stopped.set()
            for loader in self._loaders.values():
                loader.producer.stop()
            beating.join(BEAT_S)

    def stop(self) -> None:
        """End `serve`; batches that were claimed go back to their ranks when these miss the signs of life."""
        self._stopped.set()

    def _beat(self) -> None:
        exchange, count = Exchange(self._store, self._seal, 0), 0
        while not self._stopped.is_set():
            count += 1
            with suppress(ConnectionError):  # the main thread finds out, too
                for place in (f"planners/{self.name}", SOMEBODY) if self._loaders else ():
                    exchange.put(place, -1, Beat(self.name, count))
            self._stopped.wait(BEAT_S)
        with suppress(ConnectionError):
            for place in (f"planners/{self.name}", SOMEBODY):  # others put theirs again
                self._store.delete(place)

    def _look_for_loaders(self) -> None:
        """Loaders of a job are numbered without gaps, but may have been closed."""
        number = 0
        while number <= max(self._loaders, default=-1) + 1:
            hello = self._hello(number)
            known = self._loaders.get(number)
            if known and (hello is None or hello.run != known.hello.run):
                known.producer.stop()
                del self._loaders[number]
                known = None
            if hello and known:
                known.latest = hello.latest
            if hello and not known:
                exchange = Exchange(self._store, self._seal, hello.planning.cluster.ranks)
                producer = PlanProducer(
                    hello.planning,
                    self._lookahead,
                    exchange,
                    f"planner {self.name}",
                    self._workers,
                    self.health,
                    planner=self._planner,
                    planned=hello.planned,
                )
                self._loaders[number] = Following(hello, producer, exchange, hello.latest)
                log.info("planning for loader %d of the job, run %s", number, hello.run)
            number += 1

    def _hello(self, number: int) -> Hello | None:
        try:
            return Exchange(self._store, self._seal, 0).get(f"L{number}/hello", -1, Hello, 0.0)
        except TimeoutError:
            return None
        except DecodeError as error:
            if str(error) not in self._refused:
                self._refused.add(str(error))
                log.warning("loader %d of the job is left to its ranks: %s", number, error)
            return None

    def _serve_loader(self, number: int, loader: Following) -> bool:
        """Claim what one loader asks for, if there is a planner to spare; whether anything was."""
        if loader.producer.broken:
            raise loader.producer.broken
        claimed = False
        for pass_ in range(max(loader.next_pass, loader.latest - MOST_PASSES + 1), loader.latest + 1):
            run = Run(f"{loader.hello.run}/L{number}/{pass_}")
            if self._progress(loader, run.prefix):
                loader.runs[pass_], loader.taken[pass_], loader.seen_s[pass_] = run, {}, time.monotonic()
        loader.next_pass = loader.latest + 1
        for pass_, run in list(loader.runs.items()):
            progress = self._progress(loader, run.prefix)
            if progress is None:
                if time.monotonic() - loader.seen_s[pass_] > GONE_S:
                    run.ended = True
                    del loader.runs[pass_], loader.taken[pass_]
                continue
            run.reached, loader.seen_s[pass_] = progress.reached, time.monotonic()
            with run.lock:
                run.published.clear()  # looking after them is the rank's business
            taken = loader.taken[pass_]
            loader.taken[pass_] = {at: looked_s for at, looked_s in taken.items() if at >= run.reached - 1}
            claimed |= self._claim(loader, run, loader.taken[pass_])
        return claimed

    def _progress(self, loader: Following, prefix: str) -> Progress | None:
        try:
            return loader.exchange.get(f"{prefix}/progress", -1, Progress, 0.0)
        except (TimeoutError, DecodeError):
            return None

    def _claim(self, loader: Following, run: Run, taken: dict[int, float]) -> bool:
        claimed = False
        first = max(0, run.reached - 1)
        for iteration in range(first, run.reached + loader.hello.kappa + 1):
            if loader.producer.pending >= self._workers:
                break
            # It may be asked for again, as when the store forgot the claim and what came of it.
            if time.monotonic() - taken.get(iteration, -RETAKE_S) < RETAKE_S:
                continue
            try:
                ask = loader.exchange.get(run.place(iteration, "ask"), iteration, Ask, 0.0)
                taken[iteration] = time.monotonic()
                decode_batch(ask.batch, MAX_BATCH_BYTES)
            except TimeoutError:
                continue
            except DecodeError as error:
                taken[iteration] = time.monotonic()
                log.warning("iteration %d is left to its rank: %s", iteration, error)
                continue
            if self._take(loader.exchange, run, iteration):
                claimed = True
                loader.producer.submit(Job(run, iteration, ask.draw, partial(bytes, ask.batch)))
        return claimed

    def _take(self, exchange: Exchange, run: Run, iteration: int) -> bool:
        """Claim a batch that its rank still wants."""
        place = run.place(iteration, "claim")
        if not exchange.add(place, iteration, Claim(self.name)):
            return False
        try:
            exchange.get(run.place(iteration, "ask"), iteration, Ask, 0.0)
        except (TimeoutError, DecodeError):  # taken back in the meantime, and the claim with it if it was there by then
            self._store.delete(place)
            return False
        return True
