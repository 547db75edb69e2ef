"""What the loader takes of the trainer's own thread when plans are there, and what fetching a plan takes meanwhile.

All ranks are loaders in this process. The dataset has as many batches as may be planned ahead, so that by the time of
the measurement all plans are made and fetched, and nothing else is at work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.lookahead.data import LongTail, planning
from benchmarks.lookahead.latency import KEY
from dyncp.lookahead import DynamicLoader, LookAhead, MemoryStore
from dyncp.lookahead.scout import Scout

RANKS = 8
REST_S = 0.02  # between iterations, so that what goes on in the background is over
READY_S = 300.0
Row = dict[str, Any]


def measure(quick: bool) -> dict[str, list[Row]]:
    """Over tokens of a rank, without and with a key."""
    sizes, batches = ((512,), 4) if quick else ((4096, 131_072), 25)
    return {"loader": [row(tokens, key, batches) for tokens in sizes for key in ((KEY,) if quick else (None, KEY))]}


def row(tokens_per_rank: int, key: bytes | None, batches: int) -> Row:
    """The first rank's iterations, all of them after all plans are there."""
    dataset = LongTail(tokens_per_rank * RANKS, batches)
    store, lookahead = MemoryStore("loader"), LookAhead(kappa=batches, workers=0)
    with ExitStack() as stack:
        loaders = [
            stack.enter_context(
                DynamicLoader(
                    dataset,
                    planning(RANKS),
                    dataset.batching,
                    lookahead,
                    rank=rank,
                    store=store,
                    batch_sampler=dataset.sampler,
                    key=key,
                    run="0",
                )
            )
            for rank in range(RANKS)
        ]
        times = Times(loaders[0])
        passes = [iter(loader) for loader in loaders]
        deadline = time.monotonic() + READY_S
        while any(one.scout.ready() < batches for one in passes):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{batches} plans took longer than {READY_S:g} s")
            time.sleep(REST_S)
        time.sleep(10 * REST_S)
        times.fetch(passes[0].scout)
        for _ in range(batches):
            began_s = time.perf_counter()
            next(passes[0])
            times.taken["next"].append(time.perf_counter() - began_s)
            time.sleep(REST_S)
    return {"tokens_per_rank": tokens_per_rank, "key": key is not None, "iterations": batches} | times.medians_ms()


class Times:
    """Seconds of the parts of a loader's work.

    Args:
        loader: whose methods are timed from now on.
    """

    def __init__(self, loader: DynamicLoader) -> None:
        self.taken: dict[str, list[float]] = {name: [] for name in ("next", "plan", "fetch")}
        own: Any = loader
        own._take = self._timed("plan", own._take)

    def fetch(self, scout: Scout) -> None:
        """Fetch all plans once more, as the background thread did while others were still made."""
        fetch = self._timed("fetch", scout._exchange.fetch)
        for iteration, pointer in enumerate(scout._pointers):
            fetch(scout.run, iteration, pointer, 0, READY_S)

    def medians_ms(self) -> Row:
        """Of each part; what is not waiting for the plan in `next` is putting tokens together."""
        taken = dict(self.taken)
        # the end of the pass is asked for, too
        taken["tokens"] = [whole - plan for whole, plan in zip(taken["next"], taken["plan"], strict=False)]
        return {f"{name}_ms": 1e3 * median(taken_s) for name, taken_s in taken.items()}

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began_s = time.perf_counter()
            result = method(*arguments)
            self.taken[name].append(time.perf_counter() - began_s)
            return result

        return timed
