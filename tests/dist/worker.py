"""One process of a gloo group: `worker.py FOLDER RANK RANKS SCENARIO`. Writes what it saw to `FOLDER/RANK.json`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from builders import SHAPE, causal_batch, planned, random_layout
from runtime.compare import TOLERANCE, dense, distributed, random_tensors, rank_attention, relative_error

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import CommLaunch, Plan
from dyncp.runtime.attention import attention
from dyncp.runtime.transports import torch_dist
from dyncp.runtime.transports.api import TransportError
from dyncp.runtime.transports.torch_dist import TorchDistTransport
from dyncp.strategies import lower_layout
from dyncp.strategies.api import Options

BATCH = causal_batch(61, 20, 7)
IDLE, SILENT = causal_batch(20), causal_batch(16)


def random_plan(batch: Batch, ranks: int) -> Plan:
    """A plan with blocks placed at random."""
    cluster, options = Cluster(1, ranks), Options(block_tokens=8)
    layout = random_layout(np.random.default_rng(6), batch, cluster, options)
    return lower_layout(layout, batch, SHAPE, cluster, "random", options)


def both_passes(rank: int, ranks: int, group: Any = None) -> dict:
    """The largest relative error to dense attention, and whether the bits are those of the local transport."""
    result = {"errors": {}, "same_bits": {}}
    strategies = (("ring", "none"), ("zigzag", "all"), ("data_parallel", "kv"))
    cases = [(name, BATCH, planned(BATCH, ranks, name, keep=keep).plan) for name, keep in strategies]
    # Rank 0 has no messages in some of the steps, and none at all.
    cases += [(name, batch, random_plan(batch, ranks)) for name, batch in (("idle", IDLE), ("silent", SILENT))]
    for case, batch, plan in cases:
        tensors = random_tensors(batch, SHAPE)
        want, got, whole = dense(tensors), rank_attention(tensors, plan, group, rank), distributed(tensors, plan)
        for name, value in got.items():
            own = tensors.rows(plan, rank, 1 if name in ("out", "dq") else 2)
            result["errors"][f"{case} {name}"] = relative_error(value, want[name][own]) / TOLERANCE["float32"]
            result["same_bits"][f"{case} {name}"] = torch.equal(value, whole[name][own])
    result["steps"] = {case: launches(plan, rank) for case, _, plan in cases}
    return result


def launches(plan: Plan, rank: int) -> list[int]:
    """The steps in which a rank has messages in the forward."""
    program = plan.rank(rank).program("default").forward
    return [each.step for each in program.instructions if isinstance(each, CommLaunch)]


def all_to_all(rank: int, ranks: int) -> dict:
    """The same, with one collective per step."""
    return both_passes(rank, ranks, TorchDistTransport(exchange="all_to_all"))


def as_on_gpus(rank: int, ranks: int) -> dict:
    """The same, as messages go between GPUs: a collective at first use, a batch per step, no time-out at its wait."""
    results = {}
    with patch.object(torch_dist, "is_gpu", lambda device: True):
        for exchange in torch_dist.EXCHANGES:
            results[exchange] = both_passes(rank, ranks, TorchDistTransport(exchange=exchange))
    return results


def subgroup(rank: int, ranks: int) -> dict:
    """Ranks 1 and 2 of the world as ranks 0 and 1 of a group."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return {"message": refusal(BATCH, planned(BATCH, 2).plan, 0, group)}
    transport = TorchDistTransport(group)
    tensors, plan = random_tensors(BATCH, SHAPE), planned(BATCH, 2).plan
    got = rank_attention(tensors, plan, group, transport.rank)
    own = tensors.rows(plan, transport.rank, 1)
    return {"group_rank": transport.rank, "error": relative_error(got["out"], dense(tensors)["out"][own])}


def refusal(batch: Batch, plan: Plan, rank: int, group: Any = None, **settings: Any) -> str | None:
    """The message with which a call is refused."""
    try:
        rank_attention(random_tensors(batch, SHAPE), plan, group, rank, **settings)
    except ValueError as error:
        return str(error)
    return None


def different_plans(rank: int, ranks: int, group: Any = None) -> dict:
    """The message when the last rank holds another plan: shorter, longer, of other messages, or with another mask."""
    sizes = {"shorter": (40,), "longer": (300, 90), "same": (60,)}
    batches = {name: causal_batch(*(size if rank == 2 else (60,))) for name, size in sizes.items()}
    result = {name: refusal(batch, planned(batch, ranks).plan, rank, group) for name, batch in batches.items()}
    zigzag = planned(batches["same"], ranks, "zigzag" if rank == 2 else "ring").plan
    result["strategy"] = refusal(batches["same"], zigzag, rank, group)
    two = Batch([Sequence(60, {"a": masks.causal(60), "b": masks.full(60)})])
    result["mask"] = refusal(two, planned(two, ranks).plan, rank, group, mask="ab"[rank // 2])
    return result


def different_plans_all_to_all(rank: int, ranks: int) -> dict:
    return different_plans(rank, ranks, TorchDistTransport(exchange="all_to_all"))


def wrong_world(rank: int, ranks: int) -> dict:
    """The message for a plan of another world size."""
    return {"message": refusal(BATCH, planned(BATCH, ranks + 1).plan, rank)}


def healthy(rank: int, ranks: int) -> dict:
    """All that leaves the processes alive, in one start of them; what is refused comes first and breaks nothing."""
    checks = (
        different_plans,
        different_plans_all_to_all,
        wrong_world,
        subgroup,
        both_passes,
        all_to_all,
        as_on_gpus,
    )
    return {check.__name__: check(rank, ranks) for check in checks}


def lose_peer(
    rank: int, ranks: int, how: signal.Signals, timeout_s: float, compare: bool = False, exchange: str = "p2p"
) -> dict:
    """One layer that works; then rank 2 is gone, and the others say so."""
    tensors, plan = random_tensors(BATCH, SHAPE), planned(BATCH, ranks).plan
    transport = TorchDistTransport(exchange=exchange)
    rank_attention(tensors, plan, transport)
    own = tensors.rows(plan, rank, 1)
    dist.barrier()
    if rank == 2:
        time.sleep(0.5)  # the others are past the barrier, and wait for this rank
        os.kill(os.getpid(), how)
    started = time.monotonic()
    try:
        qkv = (tensor[own] for tensor in (tensors.q, tensors.k, tensors.v))
        attention(*qkv, plan, transport, timeout_s=timeout_s, compare_digests=compare)
    except TransportError as error:
        return {"message": str(error), "seconds": time.monotonic() - started}
    return {}


def killed_peer(rank: int, ranks: int) -> dict:
    return lose_peer(rank, ranks, signal.SIGKILL, 30.0)


def stopped_peer(rank: int, ranks: int) -> dict:
    return lose_peer(rank, ranks, signal.SIGSTOP, 1.5)


def killed_before_comparing(rank: int, ranks: int) -> dict:
    return lose_peer(rank, ranks, signal.SIGKILL, 30.0, compare=True)


def killed_peer_all_to_all(rank: int, ranks: int) -> dict:
    return lose_peer(rank, ranks, signal.SIGKILL, 30.0, exchange="all_to_all")


def main(folder: str, rank: int, ranks: int, scenario: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    scenarios = (healthy, killed_peer, stopped_peer, killed_before_comparing, killed_peer_all_to_all)
    result = {each.__name__: each for each in scenarios}[scenario](rank, ranks)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    if scenario == "healthy":
        dist.destroy_process_group()
    else:  # the group is broken, so leave without goodbye
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
