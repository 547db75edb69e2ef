"""What ranks agree on before they exchange plans: who is who, which loader it is, and which start of the job."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from weakref import WeakKeyDictionary

from dyncp.lookahead.stores.api import PlanStore

# How many loaders each rank made on a store, so that each has keys of its own; ranks may be threads of one process.
_loaders: WeakKeyDictionary[PlanStore, Counter[int]] = WeakKeyDictionary()
_agreements: Counter[tuple[str, int, int]] = Counter()  # that each rank came to, on each loader of a job
_counting = threading.Lock()


def agreed_run(store: PlanStore, ranks: int, number: int, rank: int, timeout_s: float) -> str:
    """What tells this start of a job from others: rank 0 draws it, where the ranks have another store, a new one.

    Args:
        store: that may hold plans of other starts.
        ranks: of the loader.
        number: of the loader on the store.
        rank: that asks.
        timeout_s: how long to wait for rank 0.

    Raises:
        ValueError: there is no such store, and plans may outlive a start.
        TimeoutError: rank 0 did not come.
    """
    if ranks == 1:
        return _token()
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        if store.lasting:
            raise ValueError(
                f"the plan store {store.address} may hold plans of an earlier start of job {store.job!r}, and "
                "torch.distributed is not initialized, so that the ranks cannot agree on what is new: call "
                "init_process_group first, or give run=... , the same on all ranks and another at each start"
            )
        return "0"
    from torch.distributed.distributed_c10d import _get_default_store

    with _counting:
        _agreements[store.job, number, rank] += 1
        key = f"dyncp/{store.job}/{number}/{_agreements[store.job, number, rank]}"
    meeting, deadline = _get_default_store(), time.monotonic() + timeout_s
    if rank == 0:
        meeting.set(key, _token())
    while not meeting.check([key]):  # its own wait sees no ctrl-C
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank 0 did not begin to iterate its loader of job {store.job!r} within {timeout_s:g} s: all ranks "
                "must make the same loaders and passes"
            )
        time.sleep(0.01)
    run: bytes = meeting.get(key)
    return run.decode()


def _token() -> str:
    return uuid.uuid4().hex[:8]


def default_rank(ranks: int) -> int:
    """This process's rank, where it is beyond doubt."""
    if ranks == 1:
        return 0
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized() and dist.get_world_size() == ranks:
        return dist.get_rank()
    raise ValueError(f"the cluster has {ranks} ranks, and torch.distributed has not as many: say which one with rank=")


def loader_number(store: PlanStore, rank: int) -> int:
    """How many loaders this rank made on the store before: the same on all ranks that make theirs in the same order."""
    with _counting:
        made = _loaders.setdefault(store, Counter())
        made[rank] += 1
        return made[rank] - 1
