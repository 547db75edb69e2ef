"""Messages over torch.distributed: gloo between CPU processes, NCCL between GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from dyncp.runtime.transports.api import Message, TransportError

PendingOps = list[tuple[dist.Work, str, bool]]  # what is waited for, in words, and whether on a GPU
Ordered = list[tuple[int, bool, Tensor]]  # peer, whether it is a send, and its data


class TorchDistTransport:
    """The ranks of a process group. With NCCL, each `start` is one `batch_isend_irecv`, hence one group of it; with
    gloo, messages are started one by one, so that one which fails can be named, and receives before sends.

    gloo checks no sizes: a message that is shorter than expected leaves the rest of the memory as it was, a longer one
    ends the process. So whoever sends makes sure first that both sides run the same plan (see `compare_ranks`).

    `wait` blocks inside of gloo, where Ctrl-C is noticed only when it returns, at the time-out at the latest. Waiting
    in short slices is no way out, because gloo closes its connections when a wait times out.

    With NCCL, `wait` orders the current stream after the messages and does not block the host; a lost peer is then
    reported by the process group's own time-out, so give `init_process_group` one.

    Args:
        group: the process group; the default group when left out.

    Raises:
        ValueError: torch.distributed is not initialized, or this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        world = dist.group.WORLD if group is None else group
        if world is None:
            raise ValueError("torch.distributed is not initialized: call torch.distributed.init_process_group")
        if not isinstance(world, dist.ProcessGroup) or dist.get_rank(world) < 0:
            raise ValueError(
                f"group is {world!r}; expected a process group that this process is in: new_group gives a number to "
                "the ranks outside of the new group, and these make no calls with it"
            )
        self.group = world
        self.rank = dist.get_rank(self.group)
        self.world_size = dist.get_world_size(self.group)

    def start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> PendingOps:
        if not sends and not recvs:
            return []
        on_gpu = (sends or recvs)[0][1].is_cuda
        ordered = matched_order if on_gpu else receives_first
        ops, labels = [], []
        for peer, is_send, data in ordered(sends, recvs, self.rank, self.world_size):
            op, verb = (dist.isend, "send to") if is_send else (dist.irecv, "receive from")
            ops.append(dist.P2POp(op, data, dist.get_global_rank(self.group, peer), self.group))
            labels.append(f"{verb} rank {peer} ({len(data)} bytes)")
        if not on_gpu:
            return [self._start_one(op, label) for op, label in zip(ops, labels, strict=True)]
        label = "; ".join(labels)
        try:
            return [(work, label, True) for work in dist.batch_isend_irecv(ops)]
        except RuntimeError as error:
            raise TransportError(f"rank {self.rank}: {label} could not start: {error}") from error

    def _start_one(self, op: dist.P2POp, label: str) -> tuple[dist.Work, str, bool]:
        try:
            work = op.op(op.tensor, op.peer, self.group)
        except RuntimeError as error:
            raise TransportError(f"rank {self.rank}: {label} could not start: {error}") from error
        return work, label, False

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


def matched_order(sends: Sequence[Message], recvs: Sequence[Message], rank: int, world_size: int) -> Ordered:
    """Messages by peer; of each pair, the message from the lower rank comes first on both sides."""
    messages = [(peer, True, data) for peer, data in sends] + [(peer, False, data) for peer, data in recvs]
    return sorted(messages, key=lambda message: (message[0], message[1] == (rank > message[0])))


def receives_first(sends: Sequence[Message], recvs: Sequence[Message], rank: int, world_size: int) -> Ordered:
    """All receives before all sends, each from the next rank on.

    gloo has one connection for both directions, and a sender waits for word that the receiver's memory is ready. That
    word would queue behind data that the receiver is itself sending, and two messages that cross would go one after
    the other. Beginning with the next rank, the ranks do not all send to one at once.
    """

    def after(message: Message) -> int:
        return (message[0] - rank) % world_size

    into = [(peer, False, data) for peer, data in sorted(recvs, key=after)]
    return into + [(peer, True, data) for peer, data in sorted(sends, key=after)]
