"""A plan store that waits for its server to come back."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from dyncp.lookahead.stores.api import PlanStore, RefusedError, StoreError

T = TypeVar("T")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0  # between two tries
SAME_S = 10.0  # after an outage, in which failures that pass within AT_ONCE_S are still of it
AT_ONCE_S = 0.1
_log = logging.getLogger("dyncp")


class Patient:
    """`PlanStore` around another, which tries again while that one fails.

    An outage begins with the first call that fails, of any thread, and ends with the next one that succeeds. When it
    has lasted for `patience_s`, calls fail. Each later one then tries once, until one succeeds and ends the outage.
    Failures soon afterwards that pass at once belong to it: other threads find out that their connections are broken.

    `add` may say True to a second caller with the same value when the answer to an earlier try of it was lost; values
    that name their caller tell two callers apart.

    Args:
        store: what fails now and then.
        patience_s: how long an outage may take.
        clock: seconds that only grow.
        sleep: waits for so many seconds; by default a wait that `stop` ends.
    """

    def __init__(
        self,
        store: PlanStore,
        patience_s: float = 60.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self.address = store.address
        self.job = store.job
        self.lasting = store.lasting
        self.patience_s = patience_s
        self.outages = 0  # that ended: a server that was started again has forgotten what was put before
        self._store = store
        self._clock = clock
        self._stopped = threading.Event()
        self._sleep = sleep or self._stopped.wait
        self._lock = threading.Lock()
        self._began_s: float | None = None  # when the outage began
        self._tries = 0  # in it
        self._ended_s = -math.inf  # when the last one ended

    @property
    def away(self) -> bool:
        """Whether the last call failed."""
        return self._began_s is not None

    def put(self, key: str, value: bytes) -> None:
        """See `PlanStore.put`."""
        self._keep_trying(lambda: self._store.put(key, value))

    def add(self, key: str, value: bytes) -> bool:
        """See `PlanStore.add`."""
        asked = 0

        def add() -> bool:
            nonlocal asked
            asked += 1
            if self._store.add(key, value):
                return True
            if asked == 1:
                return False
            try:  # an earlier try may have done it, and only its answer been lost
                return self._store.get(key, 0) == value
            except TimeoutError:  # deleted since
                return False

        return self._keep_trying(add)

    def get(self, key: str, timeout_s: float) -> bytes:
        """See `PlanStore.get`. It may take longer by an outage, after which it looks once more."""
        left_s, deadline = timeout_s, self._clock() + timeout_s

        def get() -> bytes:
            nonlocal left_s
            try:
                return self._store.get(key, left_s)
            except StoreError:
                left_s = max(0.0, deadline - self._clock())
                raise

        return self._keep_trying(get)

    def delete(self, key: str) -> None:
        """See `PlanStore.delete`."""
        self._keep_trying(lambda: self._store.delete(key))

    def stop(self) -> None:
        """Try no more: whatever waits for the store to come back, and every later call, raises StoreError at once."""
        self._stopped.set()

    def _keep_trying(self, call: Callable[[], T]) -> T:
        pause_s = FIRST_PAUSE_S
        while True:
            if self._stopped.is_set():
                raise StoreError(f"the plan store {self.address} is no longer used: it was stopped here")
            try:
                result = call()
            except RefusedError:
                raise
            except ConnectionError as error:
                left_s = self._failed(error)
            except TimeoutError:
                self._succeeded()  # it was reached, and has no such key
                raise
            else:
                self._succeeded()
                return result
            # Ranks that lost the same server must not all come back at the same moment.
            self._sleep(min(left_s, pause_s * random.uniform(0.5, 1.0)))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _failed(self, error: ConnectionError) -> float:
        """Count a failure; seconds that are left of the patience.

        Raises:
            StoreError: there are none.
        """
        with self._lock:
            now_s = self._clock()
            first = self._began_s is None and now_s - self._ended_s >= SAME_S
            if self._began_s is None:
                self._began_s, self._tries = now_s, 0
            self._tries += 1
            tries, lasted_s = self._tries, now_s - self._began_s
        if first:
            _log.warning("%s; trying again for up to %g s", error, self.patience_s)
        if lasted_s >= self.patience_s:
            raise StoreError(
                f"the plan store {self.address} was out of reach for {lasted_s:.1f} s and {tries} tries; the last "
                f"one: {error}"
            ) from error
        return self.patience_s - lasted_s

    def _succeeded(self) -> None:
        with self._lock:
            if self._began_s is None:
                return
            now_s, began_s, tries = self._clock(), self._began_s, self._tries
            lasted_s, same = now_s - began_s, began_s - self._ended_s < SAME_S
            self._began_s, self._ended_s = None, now_s
            if same and lasted_s < AT_ONCE_S:
                return
            self.outages += 1
        _log.warning(
            "the plan store %s is back after %.1f s and %d tries; it may have forgotten what was put before",
            self.address,
            lasted_s,
            tries,
        )
