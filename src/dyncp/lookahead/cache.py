"""Plans that were made before, for batches of the same lengths and masks."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict

from dyncp.lookahead.config import Planning
from dyncp.lookahead.messages import Answer, planning_bytes


class PlanCache:
    """Encoded plans by what they were made of; the least recently used go first.

    Args:
        most_bytes: of all plans in it; with 0 nothing is kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._plans: OrderedDict[str, Answer] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Answer | None:
        """The plan of that key, if it is there."""
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)
            return self._plans.get(key)

    def put(self, key: str, plan: Answer) -> None:
        """Keep a plan, if it is not larger than all that may be kept."""
        size = _size(plan)
        with self._lock:
            if size > self._most_bytes or key in self._plans:
                return
            self._plans[key] = plan
            self._bytes += size
            while self._bytes > self._most_bytes:
                _, dropped = self._plans.popitem(last=False)
                self._bytes -= _size(dropped)


def cache_key(planning: Planning, batch: bytes) -> str:
    """Of an encoded batch under settings: the same for all that have the same plan."""
    return hashlib.sha256(planning_bytes(planning) + batch).hexdigest()


def _size(plan: Answer) -> int:
    return sum(map(len, plan.parts))
