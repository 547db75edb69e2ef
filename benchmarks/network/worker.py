"""One host: `python -m benchmarks.network.worker RANK HOSTS STORE_ADDRESS`. Does what its standard input asks for.

A request is one line of JSON with the name of a handler under `do`; its answer is one line of JSON. Requests with `at`
begin at that time of the clock that all processes of a machine share (`time.monotonic`), so all hosts begin at once.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.network.pieces import Piece, form_masks
from benchmarks.network.process import die_with_parent, go_first, messages_go_first
from dyncp.ir.blocks import HAS_Q
from dyncp.ir.codec import decode_rank
from dyncp.ir.plan import FORWARD, RankPlan
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.attention import attention
from dyncp.runtime.buffers import DTYPES
from dyncp.runtime.transports.torch_dist import TorchDistTransport

STORE_PORT = 29500
TIMEOUT_S = 120.0


class Host:
    """What one host holds between requests: its connections, plans and tensors."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.transport = TorchDistTransport()
        self.plan: RankPlan | None = None
        self.out: torch.Tensor | None = None
        self.tensors: dict[str, torch.Tensor] = {}

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take this rank's part of a plan, and make its rows of the batch's tensors."""
        self.plan = decode_rank(Path(request["plan"]).read_bytes())
        self.tensors = own_rows(self.plan, request["lengths"])
        gc.collect()  # not between runs, where it would take longer than a small batch
        return {}

    def forward(self, request: dict[str, Any]) -> dict[str, Any]:
        """One forward pass: when it ended, and the processor time it took."""
        assert self.plan is not None
        for name in ("q", "k", "v"):
            self.tensors[name] = self.tensors[name].detach().requires_grad_()
        q, k, v = (self.tensors[name] for name in ("q", "k", "v"))
        compare = request.get("compare", False)
        sleep_until(request["at"])
        busy = time.process_time()
        self.out = attention(q, k, v, self.plan, self.transport, timeout_s=TIMEOUT_S, compare_digests=compare)
        return {"end": time.monotonic(), "busy_s": time.process_time() - busy}

    def backward(self, request: dict[str, Any]) -> dict[str, Any]:
        """The backward pass of the last forward: when it ended, and the processor time it took."""
        assert self.out is not None
        sleep_until(request["at"])
        busy = time.process_time()
        self.out.backward(self.tensors["do"])
        answer = {"end": time.monotonic(), "busy_s": time.process_time() - busy}
        if "save" in request:
            done = {name: self.tensors[name].grad for name in ("q", "k", "v")} | {"out": self.out.detach()}
            torch.save(done, request["save"])
        self.out = None
        return answer

    def exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        """Messages as the executor sends them: `sends` and `recvs` are lists of [peer, bytes]."""
        sends, recvs = (
            [(peer, torch.zeros(size, dtype=torch.uint8)) for peer, size in request[side]]
            for side in ("sends", "recvs")
        )
        sleep_until(request["at"])
        self.transport.wait(self.transport.start(sends, recvs), TIMEOUT_S)
        return {"end": time.monotonic()}

    def compute(self, request: dict[str, Any]) -> dict[str, Any]:
        """Compute one block `times` times: when it ended."""
        tokens = request["tokens"]
        call = Piece(form_masks("full", tokens, tokens)[0], AttentionShape(**request["shape"])).attention(FORWARD)
        call()
        sleep_until(request["at"])
        for _ in range(request["times"]):
            call()
        return {"end": time.monotonic()}


def own_rows(plan: RankPlan, lengths: list[int]) -> dict[str, torch.Tensor]:
    """This rank's rows of tensors that are random over the whole batch, the same whatever the plan; rows that the plan
    has beyond a sequence's length (padding) are zero."""
    shape = plan.header.shape
    g = torch.Generator().manual_seed(0)
    starts = np.cumsum([0, *lengths])
    made = {}
    for name, heads, dim in (
        ("q", shape.q_heads, shape.head_dim),
        ("k", shape.kv_heads, shape.head_dim),
        ("v", shape.kv_heads, shape.value_dim),
        ("do", shape.q_heads, shape.value_dim),
    ):
        whole = torch.randn(int(starts[-1]) + 1, heads, dim, generator=g).to(DTYPES[shape.dtype])
        whole[-1] = 0
        sequence, position = plan.header.local_tokens(plan.rank, HAS_Q)
        real = position < np.asarray(lengths)[sequence]
        made[name] = whole[torch.from_numpy(np.where(real, starts[sequence] + position, starts[-1]))]
    return made


def sleep_until(at: float) -> None:
    """Sleep until a time of the shared clock."""
    time.sleep(max(0.0, at - time.monotonic()))


def serve(rank: int, hosts: int, store: str) -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries may print
    torch.set_num_threads(1)
    address = f"tcp://{store}:{STORE_PORT}"
    patience = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=hosts, timeout=patience)
    dist.barrier()
    messages_go_first()
    host = Host(rank)
    handlers = {"load": host.load, "forward": host.forward, "backward": host.backward}
    handlers |= {"exchange": host.exchange, "compute": host.compute}
    gc.freeze()
    gc.disable()
    own = {"process": os.getpid(), "thread": threading.get_native_id()}  # the one that computes
    answers.write(json.dumps(own) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(handlers[request["do"]](request)) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    die_with_parent()
    go_first()
    serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
