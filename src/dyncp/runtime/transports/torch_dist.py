"""Messages over torch.distributed: gloo between CPU processes, NCCL between GPUs.

What follows is about GPUs. What it says of torch was read in its source (`distributed_c10d.py` of torch 2.13, and
`ProcessGroupNCCL.cpp` of about 2.9), not tried.

Streams: there are two. Kernels run on the stream that is the caller's current one, messages on the one that the process
group keeps for NCCL. `start` lets NCCL's stream wait for an event behind all that is queued on the current stream;
`wait` lets the current stream wait for an event behind the messages. What is queued between the two runs beside the
messages. A program waits, unpacks, merges, packs, launches the next step, and only then attends: all that a message
needs is queued before its launch, and the attention that hides it after it. A further stream could only pack earlier,
and what is packed is what has just been merged or computed.

The host: it queues work and does not wait for the GPU, but at the first use of a group and, with all_to_all, of a
program. `Work.wait()` makes a stream wait and returns; given a time-out it would block the host, so it is given none.
With `TORCH_NCCL_BLOCKING_WAIT=1` it blocks all the same; `TORCH_NCCL_ASYNC_ERROR_HANDLING` does not change it.

Memory: NCCL's stream uses memory that was given to the current stream. That is safe, because a program waits for all
that it launches: who uses the memory next is queued on the current stream, behind that wait. So passes hand scratch
memory on to each other (`Arenas` in `buffers.py`). For p2p torch also notes that NCCL's stream uses it
(`record_stream`), so memory that a forward keeps for its backward is free again when the GPU has come to the end of the
backward, not when the host has. In a pass that fails, torch keeps the memory until the messages have ended.

Errors: what torch raises at `start` or `wait` becomes a `TransportError` with rank and peers. But a lost peer mostly
shows later, to the watchdog of the process group, after the time-out given to `init_process_group`. The watchdog then
ends the process. With `TORCH_NCCL_BLOCKING_WAIT=1` there is none, and `wait` raises instead, so peers are named; but
the host waits for each step. After an error the group cannot be used any more.

CUDA graphs: a pass asks nothing of the data and allocates by torch's allocator only, so `torch.cuda.graph` can capture
forward and backward together. All ranks must

- make the same calls once before, both passes, with the same plan and masks (on a side stream, as torch wants it): that
  connects the group, agrees on steps and makes tables of blocks;
- keep the plan as long as the graph, which reads the plan's tables;
- leave `compare_digests` off, and copy new data into the tensors that were captured; another plan is another graph;
- capture, and replay, the same graphs in the same order.

The watchdog does not see replays. Memory that p2p has used is not reused within a capture, so each pass in a graph has
scratch memory of its own, unless `PYTORCH_CUDA_ALLOC_CONF=graph_capture_record_stream_reuse:True`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from dyncp.runtime.transports.api import Message, TransportError

EXCHANGES = ("p2p", "all_to_all")
REMEMBERED_PROGRAMS = 4096  # per group; the same number on all ranks, so that all forget the same

Ordered = list[tuple[int, bool, Tensor]]  # peer, whether it is a send, and its data


class Pending(NamedTuple):
    """What is waited for."""

    work: dist.Work
    messages: Ordered  # none: something that all ranks take part in
    on_gpu: bool
    landing: Tensor | None = None  # uint8[bytes], where all that is received lies until it is put in its place


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a process group, whatever number of transports are made for it. Holds no reference to it."""

    rank: int
    global_ranks: list[int]
    connected: set[torch.device] = field(default_factory=set)  # GPUs for which all ranks have joined in a collective
    last_steps: dict[str, tuple[int, ...]] = field(default_factory=dict)  # over all ranks, by program


# By the group itself and not by its name or number, which a later group may have again.
_known: WeakKeyDictionary[dist.ProcessGroup, Known] = WeakKeyDictionary()


class TorchDistTransport:
    """The ranks of a process group.

    How messages of one `start` travel:

    - `p2p` on a GPU: as one `batch_isend_irecv`, hence one group of NCCL. Before the first one, all ranks join in a
      tiny all-reduce, because NCCL connects a group when all take part, and only some may have messages in a step.
    - `p2p` on a CPU: one by one, so that one which fails can be named, and receives before sends.
    - `all_to_all`: as one `all_to_all_single`, for libraries and networks that do better with it. Messages are copied
      into one piece of memory, by peer, and out of one on arrival (a single message is not copied). All ranks join in
      each step, also with nothing to send; NCCL then sends nothing. At the first use of a program all ranks agree on
      its number of steps by a tiny all-reduce, for which the host waits, on a GPU for all that is queued there too.

    On a CPU, sizes are not checked: a message that is shorter than expected leaves the rest of the memory as it was, a
    longer one ends the process. So whoever sends makes sure first that both sides run the same plan (see
    `compare_ranks`). There `wait` blocks inside of gloo, where Ctrl-C is noticed only when it returns, at the time-out
    at the latest. Waiting in short slices is no way out, because gloo closes its connections when a wait times out.

    On a GPU, `wait` does not block the host and has no time-out of its own; see the top of this file. A transport is
    cheap to make: what is to be done once per group is.

    Args:
        group: the process group; the default group when left out.
        exchange: one of `EXCHANGES`, the same on all ranks.

    Raises:
        ValueError: torch.distributed is not initialized, this process is not in the group, or an unknown exchange.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, exchange: str = "p2p") -> None:
        if exchange not in EXCHANGES:
            raise ValueError(f"unknown exchange {exchange!r}; choose one of {', '.join(EXCHANGES)}")
        world = dist.group.WORLD if group is None else group
        if world is None:
            raise ValueError("torch.distributed is not initialized: call torch.distributed.init_process_group")
        if not isinstance(world, dist.ProcessGroup) or dist.get_rank(world) < 0:
            raise ValueError(
                f"group is {world!r}; expected a process group that this process is in: new_group gives a number to "
                "the ranks outside of the new group, and these make no calls with it"
            )
        if world not in _known:
            _known[world] = Known(dist.get_rank(world), dist.get_process_group_ranks(world))
        self.group = world
        self.exchange = exchange
        self.known = _known[world]
        self.rank = self.known.rank
        self.world_size = len(self.known.global_ranks)
        self._nothing = torch.empty(0, dtype=torch.uint8)  # on the device of the messages

    def begin(
        self, program: str, last_steps: tuple[int, ...], device: torch.device, timeout_s: float
    ) -> tuple[int, ...]:
        known = self.known
        if self.world_size == 1:
            return (0,) * len(last_steps)
        if is_gpu(device) and device not in known.connected:
            self._greatest(torch.zeros(1, device=device), timeout_s)
            known.connected.add(device)
        if self.exchange == "p2p":
            return (0,) * len(last_steps)
        if self._nothing.device != device:
            self._nothing = torch.empty(0, dtype=torch.uint8, device=device)
        if program not in known.last_steps:
            greatest = self._greatest(torch.tensor(last_steps, device=device), timeout_s)
            if len(known.last_steps) == REMEMBERED_PROGRAMS:
                del known.last_steps[next(iter(known.last_steps))]
            known.last_steps[program] = tuple(greatest.tolist())
        return known.last_steps[program]

    def _greatest(self, numbers: Tensor, timeout_s: float) -> Tensor:
        """The greatest of each number over all ranks, in place."""
        try:
            work = dist.all_reduce(numbers, dist.ReduceOp.MAX, self.group, async_op=True)
        except RuntimeError as error:
            raise TransportError(f"rank {self.rank}: {describe([])} could not start: {error}") from error
        self.wait([Pending(work, [], is_gpu(numbers.device))], timeout_s)
        return numbers

    def start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[Pending]:
        messages: Ordered = []  # that are being started
        begun: list[Pending] = []
        try:
            if self.exchange == "all_to_all":
                messages = by_peer(sends, recvs)
                begun.append(self._start_all_to_all(messages))
            elif not sends and not recvs:
                pass
            elif is_gpu((sends or recvs)[0][1].device):
                messages = matched_order(sends, recvs, self.rank, self.world_size)
                ops = [dist.P2POp(*self._op(message), self.group) for message in messages]
                begun += [Pending(work, messages, True) for work in dist.batch_isend_irecv(ops)]
            else:
                for message in receives_first(sends, recvs, self.rank, self.world_size):
                    messages = [message]
                    op, data, peer = self._op(message)
                    begun.append(Pending(op(data, peer, self.group), messages, False))
        except RuntimeError as error:
            raise TransportError(f"rank {self.rank}: {describe(messages)} could not start: {error}") from error
        return begun

    def _op(self, message: tuple[int, bool, Tensor]) -> tuple[Callable[..., Any], Tensor, int]:
        peer, is_send, data = message
        return dist.isend if is_send else dist.irecv, data, self.known.global_ranks[peer]

    def _start_all_to_all(self, messages: Ordered) -> Pending:
        nothing = messages[0][2][:0] if messages else self._nothing
        on_gpu = is_gpu(nothing.device)
        leaving = [data for _, is_send, data in messages if is_send]
        coming = [data for _, is_send, data in messages if not is_send]
        sizes = [[0] * self.world_size, [0] * self.world_size]  # received, sent
        for peer, is_send, data in messages:
            sizes[is_send][peer] += len(data)
        packed = leaving[0] if len(leaving) == 1 else torch.cat([nothing, *leaving])
        landing = coming[0] if len(coming) == 1 else nothing.new_empty(sum(sizes[False]))
        work = dist.all_to_all_single(landing, packed, sizes[False], sizes[True], self.group, async_op=True)
        return Pending(work, messages, on_gpu, landing if len(coming) > 1 else None)

    def wait(self, handle: list[Pending], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for work, messages, on_gpu, landing in handle:
            left = timedelta(seconds=max(deadline_s - time.monotonic(), 1e-3))
            try:
                done = work.wait() if on_gpu else work.wait(left)
            except RuntimeError as error:
                raise TransportError(
                    f"rank {self.rank}: {describe(messages)} failed (time-out {timeout_s:g} s): {error}"
                ) from error
            if not done:
                raise TransportError(f"rank {self.rank}: {describe(messages)} did not end within {timeout_s:g} s")
            if landing is not None:
                coming = [data for _, is_send, data in messages if not is_send]
                torch._foreach_copy_(coming, landing.split_with_sizes([len(data) for data in coming]))


def is_gpu(device: torch.device) -> bool:
    """Whether work for a device is queued on streams.

    Raises:
        ValueError: a GPU that is not the current one: NCCL might hang.
    """
    if device.type != "cuda":
        return False
    current = torch.cuda.current_device()
    if device.index != current:
        raise ValueError(
            f"tensors are on {device}, but the current device of this process is cuda:{current}: call "
            f"torch.cuda.set_device({device.index}) first, before init_process_group if possible"
        )
    return True


def describe(messages: Ordered) -> str:
    """Messages in words, for errors."""
    words = (
        f"{'send to' if is_send else 'receive from'} rank {peer} ({len(data)} bytes)"
        for peer, is_send, data in messages
    )
    return "; ".join(words) or "an exchange that all ranks take part in"


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


def by_peer(sends: Sequence[Message], recvs: Sequence[Message]) -> Ordered:
    """Messages as `all_to_all_single` wants them in memory: by peer, those of one peer in the order given."""
    messages = [(peer, True, data) for peer, data in sends] + [(peer, False, data) for peer, data in recvs]
    return sorted(messages, key=lambda message: message[0])
