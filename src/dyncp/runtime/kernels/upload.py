"""Tables on their way to a GPU: collected on the host, sent in one copy, beside what the GPU computes."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from dyncp.ir.arrays import Ints

ALIGN = 4  # int32s at which every table begins, so that compiled kernels find the same alignment in all of them


class Upload:
    """Tables in the order they were added, and where each will be."""

    def __init__(self) -> None:
        self._tables: list[tuple[slice, Ints]] = []
        self._size = 0

    def add(self, table: Ints) -> slice:
        """Add a table of whole numbers below 2^31; returns where it will be."""
        place = slice(self._size, self._size + table.size)
        self._tables.append((place, table))
        self._size += -(-table.size // ALIGN) * ALIGN
        return place

    def send(self, device: torch.device) -> DeviceTables:
        """Send all tables."""
        host = torch.empty(self._size, dtype=torch.int32, pin_memory=device.type == "cuda")
        numbers = host.numpy()
        for place, table in self._tables:
            numbers[place] = table.ravel()
        return DeviceTables(host, device)


class DeviceTables:
    """int32 tables in the memory of a device.

    A GPU gets them on a stream of their own, so they may be sent while another plan runs, from any thread, and nobody
    waits but the streams that use them, until they are there.

    Args:
        host: int32[n]; pinned for a GPU.
        device: where they go.
    """

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self._streams: set[torch.cuda.Stream] = set()  # that have waited
        if device.type != "cuda":
            self.memory = host.to(device)
            return
        with torch.cuda.stream(upload_stream(device)):
            self.memory = host.to(device, non_blocking=True)
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record()

    def use(self) -> None:
        """Say that the current stream will use the tables.

        Raises:
            RuntimeError: in the capture of a CUDA graph, before anything else has used them.
        """
        if not self.memory.is_cuda:
            return
        stream = torch.cuda.current_stream(self.memory.device)
        if torch.cuda.is_current_stream_capturing():
            if not self._streams:  # a graph cannot wait for what it has not captured
                raise RuntimeError(
                    "a CUDA graph is captured of a plan that has not run yet: call attention, forward and backward, "
                    "with it once before"
                )
        elif stream not in self._streams:
            stream.wait_event(self._sent)
            self.memory.record_stream(stream)
            self._streams.add(stream)


@cache
def upload_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which tables are sent: one for each GPU, since torch's allocator keeps memory by stream."""
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
