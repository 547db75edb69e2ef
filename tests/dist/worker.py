"""One process of a gloo group: `worker.py FOLDER RANK RANKS SCENARIO`. Writes what it saw to `FOLDER/RANK.json`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from builders import SHAPE, causal_batch, planned
from runtime.compare import TOLERANCE, dense, distributed, random_tensors, rank_attention, relative_error

from dyncp.runtime.attention import attention
from dyncp.runtime.transports.api import TransportError
from dyncp.runtime.transports.torch_dist import TorchDistTransport

BATCH = causal_batch(61, 20, 7)


def both_passes(rank: int, ranks: int) -> dict:
    """The largest relative error to dense attention, and whether the bits are those of the local transport."""
    tensors, result = random_tensors(BATCH, SHAPE), {"errors": {}, "same_bits": {}}
    want = dense(tensors)
    for strategy, keep in (("ring", "none"), ("zigzag", "all"), ("data_parallel", "kv")):
        plan = planned(BATCH, ranks, strategy, keep=keep).plan
        got = rank_attention(tensors, plan, None, rank, compare_digests=True)
        whole = distributed(tensors, plan)
        for name, value in got.items():
            own = tensors.rows(plan, rank, 1 if name in ("out", "dq") else 2)
            result["errors"][f"{strategy} {name}"] = relative_error(value, want[name][own]) / TOLERANCE["float32"]
            result["same_bits"][f"{strategy} {name}"] = torch.equal(value, whole[name][own])
    return result


def subgroup(rank: int, ranks: int) -> dict:
    """Ranks 1 and 2 of the world as ranks 0 and 1 of a group."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return {}
    transport = TorchDistTransport(group)
    tensors, plan = random_tensors(BATCH, SHAPE), planned(BATCH, 2).plan
    got = rank_attention(tensors, plan, group, transport.rank)
    own = tensors.rows(plan, transport.rank, 1)
    return {"group_rank": transport.rank, "error": relative_error(got["out"], dense(tensors)["out"][own])}


def different_plans(rank: int, ranks: int) -> dict:
    """The message when one rank holds another plan."""
    plan = planned(causal_batch(60 + rank // 2), ranks).plan
    tensors = random_tensors(causal_batch(60 + rank // 2), SHAPE)
    try:
        rank_attention(tensors, plan, None, rank, compare_digests=True)
    except ValueError as error:
        return {"message": str(error)}
    return {}


def wrong_world(rank: int, ranks: int) -> dict:
    """The message for a plan of another world size."""
    try:
        rank_attention(random_tensors(BATCH, SHAPE), planned(BATCH, ranks + 1).plan, None, rank)
    except ValueError as error:
        return {"message": str(error)}
    return {}


def healthy(rank: int, ranks: int) -> dict:
    """All that goes well, in one start of the processes."""
    checks = (both_passes, subgroup, different_plans, wrong_world)
    return {check.__name__: check(rank, ranks) for check in checks}


def lose_peer(rank: int, ranks: int, how: signal.Signals, timeout_s: float) -> dict:
    """One layer that works; then rank 2 is gone, and the others say so."""
    tensors, plan = random_tensors(BATCH, SHAPE), planned(BATCH, ranks).plan
    rank_attention(tensors, plan, None, rank)
    own = tensors.rows(plan, rank, 1)
    dist.barrier()
    if rank == 2:
        time.sleep(0.5)  # the others are past the barrier, and wait for this rank
        os.kill(os.getpid(), how)
    started = time.monotonic()
    try:
        attention(tensors.q[own], tensors.k[own], tensors.v[own], plan, timeout_s=timeout_s)
    except TransportError as error:
        return {"message": str(error), "seconds": time.monotonic() - started}
    return {}


def killed_peer(rank: int, ranks: int) -> dict:
    return lose_peer(rank, ranks, signal.SIGKILL, 30.0)


def stopped_peer(rank: int, ranks: int) -> dict:
    return lose_peer(rank, ranks, signal.SIGSTOP, 1.5)


def main(folder: str, rank: int, ranks: int, scenario: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    result = {"healthy": healthy, "killed_peer": killed_peer, "stopped_peer": stopped_peer}[scenario](rank, ranks)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(result))
    if scenario == "healthy":
        dist.destroy_process_group()
    else:  # the group is broken, so leave without goodbye
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
