"""How long a plan takes through a store: alone, and with all that happens to it on the way."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lookahead import servers
from benchmarks.lookahead.data import RANKS, TOKENS, batch_of, long_tailed, planning
from dyncp.ir.codec import decode_rank, encode_rank
from dyncp.ir.plan import RankPlan
from dyncp.lookahead import PlanStore
from dyncp.lookahead.seal import Seal
from dyncp.strategies import make_plan
from dyncp.strategies.api import Options

TARGET_MS = 5.0  # for the whole way of one rank's part by tcp
SIZES = (5_000, 30_000, 100_000)
KEY = bytes(range(32))
Row = dict[str, Any]


def measure(quick: bool) -> dict[str, list[Row]]:
    """Over stores, and over sizes and plans."""
    times = 5 if quick else 1000
    plans = largest_parts(quick)
    rows: list[Row] = []
    for kind in ("memory", "file") if quick else servers.KINDS:
        if program := servers.lacking(kind):
            rows.append({"store": kind, "skipped": f"{program} is not installed"})
            continue
        with (
            tempfile.TemporaryDirectory(prefix="dyncp-bench-") as name,
            servers.store(kind, Path(name), "stores") as store,
        ):
            rows += [put_get_row(kind, store, size_bytes, times) for size_bytes in SIZES]
            rows += [whole_way_row(kind, store, plan, what, times) for what, plan in plans.items()]
    return {"stores": rows}


def largest_parts(quick: bool) -> dict[str, RankPlan]:
    """The largest part of a usual plan, and of one with small blocks."""
    tokens, ranks = (4096, 4) if quick else (TOKENS, RANKS)
    found = {}
    for what, lengths, options in (
        ("long-tailed", long_tailed(tokens, 0), Options()),
        ("one sequence, blocks of 512", (tokens,), Options(block_tokens=512)),
    ):
        wanted = planning(ranks, options)
        plan = make_plan(batch_of(lengths), wanted.shape, wanted.cluster, wanted.strategy, options)
        found[what] = max((plan.rank(rank) for rank in range(ranks)), key=lambda part: len(encode_rank(part)))
    return found


def put_get_row(kind: str, store: PlanStore, size_bytes: int, times: int) -> Row:
    """Random bytes under a key of their own, put and fetched by the same thread."""
    value = os.urandom(size_bytes)

    def way(key: str) -> None:
        store.put(key, value)
        assert len(store.get(key, 5)) == size_bytes

    row = {"store": kind, "what": "put + get", "size_bytes": size_bytes, "target_ms": None}
    return row | spread(timed(store, way, times))


def whole_way_row(kind: str, store: PlanStore, plan: RankPlan, what: str, times: int) -> Row:
    """Encode, seal, store, fetch, unseal, decode, with an HMAC."""
    seal = Seal("stores", KEY)

    def way(key: str) -> None:
        store.put(key, seal.wrap(key, 0, encode_rank(plan)))
        decoded = decode_rank(seal.unwrap(key, 0, store.get(key, 5)))
        assert decoded.digest == plan.digest

    target_ms = TARGET_MS if kind == "tcp" else None
    row = {"store": kind, "what": f"whole way, {what}", "size_bytes": len(encode_rank(plan)), "target_ms": target_ms}
    return row | spread(timed(store, way, times))


def timed(store: PlanStore, way: Callable[[str], None], times: int) -> list[float]:
    """Seconds of each of many calls, after a few that do not count."""
    taken_s = []
    for number in range(-3, times):
        key = f"{number % times}/0/plan"
        began_s = time.perf_counter()
        way(key)
        if number >= 0:
            taken_s.append(time.perf_counter() - began_s)
        store.delete(key)
    return taken_s


def spread(taken_s: Sequence[float]) -> Row:
    """Median and 99th percentile, in ms."""
    median_s, high_s = np.percentile(taken_s, (50, 99))
    return {"times": len(taken_s), "median_ms": 1e3 * median_s, "p99_ms": 1e3 * high_s}
