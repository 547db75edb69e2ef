"""All ranks in one process, a thread each: for tests, for `dyncp verify`, and to step through a plan in a debugger."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor

from dyncp.runtime.transports.api import Message, TransportError

T = TypeVar("T")


class LocalWorld:
    """The mailboxes that the ranks of one process share."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"the world size is {world_size}; it must be at least 1")
        self.world_size = world_size
        self.failed: int | None = None  # the first rank that failed
        self.interrupted = False
        self.changed = threading.Condition()
        self.boxes: dict[tuple[int, int, int], Tensor] = {}  # by source, destination and number of the message

    def transport(self, rank: int) -> LocalTransport:
        """The end of one rank."""
        return LocalTransport(self, rank)

    def fail(self, rank: int) -> None:
        """Say that a rank will send nothing more, so that nobody waits for it until the time-out."""
        with self.changed:
            if self.failed is None:
                self.failed = rank
            self.changed.notify_all()

    def interrupt(self) -> None:
        """End all waiting, because nobody asks for the results any more."""
        with self.changed:
            self.interrupted = True
            self.changed.notify_all()


class LocalTransport:
    """One rank's end of a `LocalWorld`. A message is copied when it is sent."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.sent: Counter[int] = Counter()  # messages so far to each peer
        self.received: Counter[int] = Counter()

    @property
    def world_size(self) -> int:
        return self.world.world_size

    def begin(
        self, program: str, last_steps: tuple[int, ...], device: torch.device, timeout_s: float
    ) -> tuple[int, ...]:
        return (0,) * len(last_steps)

    def start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[tuple[int, int, Tensor]]:
        for peer, data in sends:
            message = data.clone()
            with self.world.changed:
                self.world.boxes[self.rank, peer, self.sent[peer]] = message
                self.world.changed.notify_all()
            self.sent[peer] += 1
        handle = []
        for peer, data in recvs:
            handle.append((peer, self.received[peer], data))
            self.received[peer] += 1
        return handle

    def wait(self, handle: list[tuple[int, int, Tensor]], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for peer, number, data in handle:
            message = self._take((peer, self.rank, number), deadline_s, timeout_s)
            if message.shape != data.shape:
                raise TransportError(
                    f"rank {self.rank} expects {len(data)} bytes from rank {peer} but was sent {len(message)}"
                )
            data.copy_(message)

    def _take(self, box: tuple[int, int, int], deadline_s: float, timeout_s: float) -> Tensor:
        world, peer = self.world, box[0]
        with world.changed:
            while box not in world.boxes:
                if world.failed is not None or world.interrupted:
                    why = "the run was interrupted" if world.failed is None else f"rank {world.failed} failed"
                    raise TransportError(f"rank {self.rank} waits for a message from rank {peer}, but {why}")
                if not world.changed.wait(deadline_s - time.monotonic()) and box not in world.boxes:
                    raise TransportError(f"rank {self.rank} received nothing from rank {peer} within {timeout_s:g} s")
            return world.boxes.pop(box)


def run_ranks(world_size: int, fn: Callable[[LocalTransport], T]) -> list[T]:
    """Run `fn(transport)` for every rank at once, each in its own thread, and return the results by rank.

    The threads take over the caller's grad mode. On CPU tensors `fn` may run a backward pass; on CUDA tensors it may
    not, because autograd runs the backward passes of all threads in a single one per device, where ranks would wait for
    each other until the time-out.

    Raises:
        The first error that a rank raised, with a note that names the rank. The other ranks stop waiting at once.
    """
    world = LocalWorld(world_size)
    with_grad = torch.is_grad_enabled()

    def run(rank: int) -> T:
        try:
            with torch.set_grad_enabled(with_grad):
                return fn(world.transport(rank))
        except BaseException as error:
            error.add_note(f"(on rank {rank} of {world_size})")
            world.fail(rank)
            raise

    with ThreadPoolExecutor(world_size, thread_name_prefix="rank") as pool:
        futures = [pool.submit(run, rank) for rank in range(world_size)]
        try:
            wait(futures)
        except KeyboardInterrupt:  # leaving the pool takes until all ranks have ended
            world.interrupt()
            raise
    if world.failed is not None:
        futures[world.failed].result()  # raises
    return [future.result() for future in futures]
