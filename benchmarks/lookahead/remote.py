"""How many plans `dyncp planner` processes make together through a tcp store.

What asks them is no loader but a driver that puts the same requests into the store, all of them at once, and waits for
the plans: on few cores, ranks that fetch their parts would take turns with the planners, and `hidden` measures them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.lookahead import servers
from benchmarks.lookahead.data import batch_of, long_tailed, planning
from benchmarks.lookahead.hidden import planner_process
from dyncp.ir.codec import encode_batch
from dyncp.lookahead.exchange import Exchange, Run
from dyncp.lookahead.messages import Ask, Hello, Progress
from dyncp.lookahead.seal import Seal

JOB = "remote"
LIMIT_S = 120.0
WARM = 4  # plans for each planner, before the others are asked for
Row = dict[str, Any]


def measure(quick: bool) -> dict[str, list[Row]]:
    """Over planners, and over sizes."""
    sizes = ((4, 2048, 4),) if quick else ((8, 32_768, 60), (32, 131_072, 30))
    kind = "file" if quick else "tcp"  # whose planners need not import torch
    rows = []
    for ranks, tokens, plans in sizes:
        batches = [encode_batch(batch_of(long_tailed(tokens, number))) for number in range(plans)]
        rows += [row(kind, ranks, tokens, batches, planners) for planners in ((1,) if quick else (1, 2))]
    return {"remote": rows}


def row(kind: str, ranks: int, tokens: int, batches: Sequence[bytes], planners: int) -> Row:
    """Planners of one planner process each."""
    with tempfile.TemporaryDirectory(prefix="dyncp-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        store = stack.enter_context(servers.store(kind, folder, JOB))
        exchange = Exchange(store, Seal(JOB), ranks)
        run = exchange.begin("0/L0/0")
        exchange.put("L0/hello", -1, Hello("0", 0, len(batches) + WARM * planners, "", planning(ranks)))
        exchange.put(f"{run.prefix}/progress", -1, Progress(0))
        for _ in range(planners):
            stack.enter_context(planner_process(store.address, JOB, 1, folder))
        warm = [encode_batch(batch_of((64 + number,))) for number in range(WARM * planners)]
        ask(exchange, run, 0, warm)
        wait(exchange, run, 0, len(warm))
        if planners > 1:
            time.sleep(2.0)  # the last planner may have come when nothing was left to claim
        began_s = time.monotonic()
        ask(exchange, run, len(warm), batches)
        names = wait(exchange, run, len(warm), len(batches))
        took_s = time.monotonic() - began_s
    made = [names.count(name) for name in sorted(set(names))]
    figures = {"plans": len(batches), "plans_per_s": len(batches) / took_s, "made_by_each": made}
    return {"ranks": ranks, "tokens": tokens, "planners": planners} | figures


def ask(exchange: Exchange, run: Run, first: int, batches: Sequence[bytes]) -> None:
    """Ask for batches, as ranks do."""
    for iteration, batch in enumerate(batches, first):
        exchange.put(run.place(iteration, "ask"), iteration, Ask(f"draw {iteration}", batch))


def wait(exchange: Exchange, run: Run, first: int, count: int) -> list[str]:
    """Wait for their plans, each in turn; returns who made them."""
    return [exchange.look(run, iteration, LIMIT_S).planner for iteration in range(first, first + count)]
