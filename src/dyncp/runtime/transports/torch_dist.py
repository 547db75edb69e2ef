"""Messages over torch.distributed: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from dyncp.runtime.transports.api import Message, TransportError

PendingOps = list[tuple[dist.Work, str, bool]]  # what is waited for, in words, and whether on a GPU


class TorchDistTransport:
    """The ranks of a process group. Each `start` is one `batch_isend_irecv`, hence one NCCL group.

    With NCCL, `wait` orders the current stream after the messages and does not block the host; a lost peer is then
    reported by the process group's own time-out, so give `init_process_group` one.

    Args:
        group: the process group; the default group when left out.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        world = group or dist.group.WORLD
        assert world is not None, "torch.distributed is not initialized"
        self.group = world
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)

    def start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> PendingOps:
        messages = [(peer, True, data) for peer, data in sends] + [(peer, False, data) for peer, data in recvs]
        if not messages:
            return []
        # Of each pair, the message from the lower rank comes first on both sides.
        messages.sort(key=lambda message: (message[0], message[1] == (self.rank > message[0])))
        ops, labels = [], []
        for peer, is_send, data in messages:
            op, verb = (dist.isend, "send to") if is_send else (dist.irecv, "receive from")
            ops.append(dist.P2POp(op, data, dist.get_global_rank(self.group, peer), self.group))
            labels.append((f"{verb} rank {peer} ({len(data)} bytes)", data.is_cuda))
        try:
            works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            peers = ", ".join(str(peer) for peer in dict.fromkeys(message[0] for message in messages))
            raise TransportError(f"rank {self.rank} could not start messages with rank {peers}: {error}") from error
        if len(works) != len(ops):  # NCCL: one for the whole batch
            labels = [("; ".join(label for label, _ in labels), labels[0][1])] * len(works)
        return [(work, *label) for work, label in zip(works, labels, strict=True)]

    def wait(self, handle: PendingOps, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for work, label, on_gpu in handle:
            left = timedelta(seconds=max(deadline_s - time.monotonic(), 1e-3))
            try:
                done = work.wait() if on_gpu else work.wait(left)
            except RuntimeError as error:
                raise TransportError(f"rank {self.rank}: {label} failed (time-out {timeout_s:g} s): {error}") from error
            if not done:
                raise TransportError(f"rank {self.rank}: {label} did not end within {timeout_s:g} s")
