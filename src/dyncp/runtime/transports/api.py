"""What the executor needs of a transport: point-to-point messages between the ranks of one group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

Message = tuple[int, Tensor]  # (peer rank, uint8[bytes], contiguous)
Handle = Any  # what `start` gives to `wait`; only the transport looks inside


class TransportError(RuntimeError):
    """A message did not arrive or could not leave: a peer was lost, failed, or took longer than the time-out."""


@runtime_checkable
class Transport(Protocol):
    """Messages between ranks `0 .. world_size - 1`.

    Messages from one rank to another arrive in the order they were started, so both sides must start them in the same
    order and agree on their sizes; the plan sees to that. There are no tags, and a transport need not check sizes.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def begin(
        self, program: str, last_steps: tuple[int, ...], device: torch.device, timeout_s: float
    ) -> tuple[int, ...]:
        """Make ready for the messages of one pass; all ranks call this before them, in the same order.

        Args:
            program: what is run; the same text on all ranks, and another one for another plan or mask.
            last_steps: of each pass of it, the last step in which this rank has messages; 0 for none.
            device: of the messages.
            timeout_s: the longest to wait for other ranks, where that is needed: at the first use of a group, or of a
                program.

        Returns:
            Of each pass, the last step in which all ranks must call `start`: step by step from step 1 on, with nothing
            to send or to receive where they have no messages. 0: they call it only where they have some.

        Raises:
            ValueError: messages cannot be sent from this device.
            TransportError: another rank was lost or too slow.
        """
        ...

    def start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Handle:
        """Start sending and receiving; returns at once. The tensors must stay untouched until `wait`.

        Raises:
            TransportError: a peer is already known to be lost.
        """
        ...

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Return once every message of one `start` has been sent and received.

        Raises:
            TransportError: a peer was lost or `timeout_s` seconds passed; the message names this rank and the peer.
        """
        ...
