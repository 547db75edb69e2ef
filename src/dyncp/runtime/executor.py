"""Carries out a program: one loop over five instructions. What overlaps is in the plan, not decided here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, assert_never

import torch

from dyncp.ir.plan import (
    BACKWARD,
    FORWARD,
    Attention,
    CommLaunch,
    CommWait,
    Copy,
    Pass,
    Program,
    RankPlan,
    Reduction,
)
from dyncp.runtime.buffers import Buffers
from dyncp.runtime.kernels.api import Kernels, Score
from dyncp.runtime.transports.api import Handle, Message, Transport, TransportError


@dataclass(frozen=True, slots=True)
class Executor:
    """Runs one rank's programs for one mask of a plan.

    Args:
        plan, mask: what to run.
        kernels, transport: with what.
        score: how scores are made.
        timeout_s: the longest that one step's messages may take.
    """

    plan: RankPlan
    mask: str
    kernels: Kernels
    transport: Transport
    score: Score
    timeout_s: float

    def program(self, pass_: Pass) -> Program:
        """The program of a pass."""
        programs = self.plan.program(self.mask)
        return programs.forward if pass_ is FORWARD else programs.backward

    def run(self, pass_: Pass, buffers: Buffers) -> None:
        """Run a pass on buffers made for its program.

        Raises:
            TransportError: a peer was lost or too slow; names rank, pass, instruction and peers.
        """
        instructions = self.program(pass_).instructions
        in_flight: dict[int, tuple[Handle, CommLaunch]] = {}
        for number, instruction in enumerate(instructions):
            match instruction:
                case Attention():
                    attend = self.kernels.attend_backward if pass_ is BACKWARD else self.kernels.attend
                    attend(buffers, instruction, self.score)
                case Reduction():
                    self.kernels.reduce(buffers, instruction)
                case Copy():
                    self.kernels.copy(buffers, instruction)
                case CommLaunch():
                    try:
                        handle = self.transport.start(*_messages(buffers, instruction))
                    except TransportError as error:
                        self._fail(error, pass_, number, instruction)
                    in_flight[instruction.step] = handle, instruction
                case CommWait():
                    handle, launch = in_flight.pop(instruction.step)
                    try:
                        self.transport.wait(handle, self.timeout_s)
                    except TransportError as error:
                        self._fail(error, pass_, number, launch)
                case _:
                    assert_never(instruction)
        assert not in_flight, "a program waits for all that it launches"

    def _fail(self, error: TransportError, pass_: Pass, number: int, launch: CommLaunch) -> NoReturn:
        instructions = self.program(pass_).instructions
        peers = ", ".join(str(peer) for peer in sorted(set(launch.peer.tolist())))
        raise TransportError(
            f"rank {self.plan.rank}, {pass_.name} pass, mask {self.mask!r}, instruction {number} of "
            f"{len(instructions)} ({type(instructions[number]).__name__} of step {launch.step}, peers {peers}): {error}"
        ) from error


def _messages(buffers: Buffers, launch: CommLaunch) -> tuple[list[Message], list[Message]]:
    """What a launch sends and what it receives."""
    slots, ptr = launch.slots.tolist(), launch.ptr.tolist()
    sends: list[Message] = []
    receives: list[Message] = []
    for i, (peer, send) in enumerate(zip(launch.peer.tolist(), launch.send.tolist(), strict=True)):
        (sends if send else receives).append((peer, buffers.message(slots[ptr[i] : ptr[i + 1]])))
    return sends, receives


def compare_plans(plan: RankPlan, transport: Transport, device: torch.device, timeout_s: float) -> None:
    """Make sure that all ranks hold parts of the same plan; all of them must call this.

    Raises:
        ValueError: another rank holds another plan.
        TransportError: a peer was lost or too slow.
    """
    own = torch.frombuffer(bytearray(plan.digest.encode()), dtype=torch.uint8).to(device)
    theirs = {peer: torch.empty_like(own) for peer in range(transport.world_size) if peer != transport.rank}
    handle = transport.start([(peer, own) for peer in theirs], list(theirs.items()))
    transport.wait(handle, timeout_s)
    for peer, digest in theirs.items():
        if not torch.equal(own, digest):
            other = bytes(digest.tolist()).decode(errors="replace")
            raise ValueError(
                f"rank {transport.rank} holds plan {plan.digest[:12]} but rank {peer} holds {other[:12]}: "
                "give every rank its part of one plan, in the same order of calls"
            )
