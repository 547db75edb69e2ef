"""What lies where in a plan store, and how a plan gets there whole, once, and away again.

    RUN/L0/2/17/plan       the `Pointer` of iteration 17 of the third pass of a job's first loader: its plan is there
    RUN/L0/2/17/ATTEMPT/3  rank 3's part of it
    RUN/L0/2/17/missing    put by a rank that found the pointer, and not its part
    RUN/L0/2/17/ask        what planners elsewhere are to plan, and `claim`, who of them does

All parts are put before the pointer, and the first pointer stays: where two planners plan the same batch, because the
first was thought lost, all ranks take the plan of one of them. A rank deletes its own part when it has done with it,
whoever published the plan the rest.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec

from dyncp.ir.codec import decode_rank
from dyncp.ir.errors import DecodeError
from dyncp.ir.plan import RankPlan
from dyncp.lookahead import messages
from dyncp.lookahead.messages import Kind, Message, Pointer
from dyncp.lookahead.seal import Seal
from dyncp.lookahead.stores.patient import Patient

LEAST_DRIFT = 16
MAX_PART_BYTES = 256 << 20  # of one rank's part, unpacked


@dataclass(slots=True, eq=False)
class Run:
    """One pass over the batches: how far training is, what was published, and whether anybody still wants more.

    `prefix` begins its keys: no other pass of any loader on the store has it, and all ranks have the same.
    """

    prefix: str
    reached: int = 0  # iterations that training has begun
    published: dict[int, Published] = field(default_factory=dict)  # by iteration; those whose keys are still there
    ended: bool = False
    # Held while a plan is published. Reentrant: garbage collection may end a run in the middle of that.
    lock: threading.RLock = field(default_factory=threading.RLock)

    def place(self, iteration: int, what: str | int) -> str:
        """A key."""
        return f"{self.prefix}/{iteration}/{what}"


@dataclass(frozen=True, slots=True)
class Published:
    """A plan that was published here: the parts are kept until all ranks must have theirs, should the store forget.
    `again`: they were put a second time, and some ranks may not come for theirs."""

    pointer: Pointer
    parts: tuple[bytes, ...]
    again: bool = False


class Exchange:
    """The plans of one job in a store.

    Args:
        store: where they are.
        seal: wraps them.
        ranks: that share each plan.
        drift: iterations that ranks may be apart. They meet in attention and in the sums of gradients, but hosts run
            ahead of devices.
    """

    def __init__(self, store: Patient, seal: Seal, ranks: int, drift: int = LEAST_DRIFT) -> None:
        self.store = store
        self.seal = seal
        self.ranks = ranks
        self._drift = drift
        self._runs: list[Run] = []
        self._lock = threading.Lock()

    def begin(self, prefix: str) -> Run:
        """Begin a pass."""
        run = Run(prefix)
        with self._lock:
            self._runs.append(run)
        return run

    def put(self, place: str, iteration: int, message: Message) -> None:
        """Put a message where it belongs."""
        self.store.put(place, self.seal.wrap(place, iteration, messages.encode(message)))

    def add(self, place: str, iteration: int, message: Message) -> bool:
        """Put a message unless one is there; whether it was put."""
        return self.store.add(place, self.seal.wrap(place, iteration, messages.encode(message)))

    def get(self, place: str, iteration: int, kind: type[Kind], timeout_s: float) -> Kind:
        """A message.

        Raises:
            TimeoutError: it did not come.
            DecodeError: something else is there.
        """
        data = self.store.get(place, timeout_s)
        return messages.decode(self.seal.unwrap(place, iteration, data), kind)

    def publish(self, run: Run, iteration: int, pointer: Pointer, parts: Sequence[bytes]) -> bool:
        """Put a plan where all ranks find it; whether it is the one that they find. `pointer` needs no attempt."""
        pointer = msgspec.structs.replace(pointer, attempt=uuid.uuid4().hex[:12])
        self._put_parts(run, iteration, pointer, parts)
        with run.lock:
            if not run.ended:
                if self.add(run.place(iteration, "plan"), iteration, pointer):
                    run.published[iteration] = Published(pointer, tuple(parts))
                    return True
                self._adopt(run, iteration, pointer, parts)
        self._delete_parts(run, iteration, pointer)
        return False

    def _adopt(self, run: Run, iteration: int, pointer: Pointer, parts: Sequence[bytes]) -> None:
        """Look after the plan that somebody else published first. The same plan has the same parts."""
        with suppress(TimeoutError):
            first = self.look(run, iteration, 0.0)
            run.published[iteration] = Published(first, tuple(parts) if first.digest == pointer.digest else ())

    def watch(self, run: Run, iteration: int, pointer: Pointer) -> None:
        """Look after a plan that a planner elsewhere published, with a copy of it, should the store forget."""
        parts = []
        for rank in range(0 if pointer.failure else self.ranks):
            place = self._part(run, iteration, pointer, rank)
            try:
                parts.append(self.seal.unwrap(place, iteration, self.store.get(place, 0.0)))
            except TimeoutError:  # the rank has done with it already
                parts.append(b"")
        with run.lock:
            run.published[iteration] = Published(pointer, tuple(parts))

    def report_missing(self, run: Run, iteration: int) -> None:
        """Say that a plan's pointer is there, and a part of it is not; who published it puts it again."""
        place = run.place(iteration, "missing")
        self.store.put(place, self.seal.wrap(place, iteration, b""))

    def repair(self, run: Run) -> None:
        """Publish once more what the store has forgotten, as a server does that was restarted."""
        with run.lock:
            for iteration, plan in list(run.published.items()):
                held = plan.parts or plan.pointer.failure
                if (
                    not held
                    or iteration + self._drift < run.reached
                    or run.ended
                    or self._is_whole(run, iteration, plan)
                ):
                    continue
                self._put_parts(run, iteration, plan.pointer, plan.parts)
                self.put(run.place(iteration, "plan"), iteration, plan.pointer)
                self.store.delete(run.place(iteration, "missing"))
                run.published[iteration] = replace(plan, again=True)

    def _is_whole(self, run: Run, iteration: int, plan: Published) -> bool:
        """Whether the store has our pointer, not one of a late planner in its place, and no rank misses a part."""
        try:
            if self.look(run, iteration, 0.0).attempt != plan.pointer.attempt:
                return False
        except TimeoutError:
            return False
        try:
            self.store.get(run.place(iteration, "missing"), 0.0)
        except TimeoutError:
            return True
        return False

    def look(self, run: Run, iteration: int, timeout_s: float) -> Pointer:
        """The pointer of an iteration.

        Raises:
            TimeoutError: it is not there yet.
        """
        return self.get(run.place(iteration, "plan"), iteration, Pointer, timeout_s)

    def fetch(self, run: Run, iteration: int, pointer: Pointer, rank: int, timeout_s: float) -> RankPlan:
        """A rank's part of a plan.

        Raises:
            TimeoutError: it is not there, because the store forgot it.
            DecodeError: something else is there.
        """
        place = self._part(run, iteration, pointer, rank)
        data = self.seal.unwrap(place, iteration, self.store.get(place, timeout_s))
        plan = decode_rank(data, MAX_PART_BYTES)
        if (plan.rank, plan.digest) != (rank, pointer.digest):
            raise DecodeError(
                f"{place} holds the part of rank {plan.rank} of the plan {plan.digest[:12]}, expected that of rank "
                f"{rank} of {pointer.digest[:12]}"
            )
        return plan

    def done(self, run: Run, iteration: int, pointer: Pointer, rank: int) -> None:
        """Delete a rank's part: it needs it no more."""
        self.store.delete(self._part(run, iteration, pointer, rank))

    def tidy(self) -> bool:
        """Drop what was published here and is over: the keys that all ranks have done with; and, of a pass that has
        ended, what nobody will ask for. Whether nothing is left of passes that have ended."""
        with self._lock:
            runs = list(self._runs)
        for run in runs:
            self._tidy(run)
        with self._lock:
            self._runs = [run for run in self._runs if run.published or not run.ended]
            # Failures stay: nobody knows who has seen them.
            waiting = [plan for run in self._runs if run.ended for plan in run.published.values()]
            return all(plan.pointer.failure for plan in waiting)

    def _tidy(self, run: Run) -> None:
        with run.lock:
            for iteration, plan in list(run.published.items()):
                over = iteration + self._drift < run.reached
                unwanted = (run.ended and iteration >= run.reached) or (over and (plan.again or plan.pointer.failure))
                if unwanted:
                    self._delete_parts(run, iteration, plan.pointer)
                    self.store.delete(run.place(iteration, "missing"))
                if unwanted or ((over or run.ended) and self._is_done(run, iteration, plan.pointer)):
                    self.store.delete(run.place(iteration, "plan"))
                    del run.published[iteration]
                elif over:
                    run.published[iteration] = replace(plan, parts=())

    def _is_done(self, run: Run, iteration: int, pointer: Pointer) -> bool:
        """Whether all ranks have deleted their parts."""
        for rank in range(0 if pointer.failure else self.ranks):
            try:
                self.store.get(self._part(run, iteration, pointer, rank), 0.0)
            except TimeoutError:
                continue
            return False
        return not pointer.failure

    def _put_parts(self, run: Run, iteration: int, pointer: Pointer, parts: Sequence[bytes]) -> None:
        for rank, part in enumerate(parts):
            if not part:
                continue
            place = self._part(run, iteration, pointer, rank)
            self.store.put(place, self.seal.wrap(place, iteration, part))

    def _delete_parts(self, run: Run, iteration: int, pointer: Pointer) -> None:
        if not pointer.failure:
            for rank in range(self.ranks):
                self.store.delete(self._part(run, iteration, pointer, rank))

    def _part(self, run: Run, iteration: int, pointer: Pointer, rank: int) -> str:
        return run.place(iteration, f"{pointer.attempt}/{rank}")
