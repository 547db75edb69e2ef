"""Carries out a program: one loop over five instructions. What overlaps is in the plan, not decided here."""

from __future__ import annotations

import hashlib
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
from dyncp.runtime.buffers import Buffers, Run
from dyncp.runtime.kernels.api import Score
from dyncp.runtime.prepare import Prepared
from dyncp.runtime.transports.api import Handle, Message, Transport, TransportError

COMPARED_BYTES = 256  # of a message of `compare_ranks`, whatever the plan


@dataclass(frozen=True, slots=True)
class Executor:
    """Runs one rank's programs for one mask of a plan.

    Args:
        plan, mask: what to run.
        prepared: what was made ready for them.
        transport: to the other ranks.
        score: how scores are made.
        timeout_s: the longest that one step's messages may take.
        compared: before each pass, make sure that all ranks run the same: this plan, pass and mask, and what these
            words say. None: rely on it.
    """

    plan: RankPlan
    mask: str
    prepared: Prepared
    transport: Transport
    score: Score
    timeout_s: float
    compared: str | None = None

    def program(self, pass_: Pass) -> Program:
        """The program of a pass."""
        programs = self.plan.program(self.mask)
        return programs.forward if pass_ is FORWARD else programs.backward

    def run(self, pass_: Pass, buffers: Buffers) -> None:
        """Run a pass on buffers made for its program.

        Raises:
            ValueError: another rank runs something else; nothing was sent then.
            TransportError: a peer was lost or too slow; names rank, pass, instruction and peers.
        """
        if self.compared is not None:
            self._compare(pass_, buffers.device, self.compared)
        instructions = self.program(pass_).instructions
        kernels, messages = self.prepared.kernels, self.prepared.layout(pass_).messages
        attend = kernels.attend_backward if pass_ is BACKWARD else kernels.attend
        in_flight: dict[int, tuple[Handle, CommLaunch]] = {}
        for number, instruction in enumerate(instructions):
            match instruction:
                case Attention():
                    attend(buffers, instruction, self.score)
                case Reduction():
                    kernels.reduce(buffers, instruction)
                case Copy():
                    kernels.copy(buffers, instruction)
                case CommLaunch():
                    try:
                        handle = self.transport.start(*_messages(buffers, messages[instruction]))
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

    def _compare(self, pass_: Pass, device: torch.device, settings: str) -> None:
        plan = self.plan
        words = f"the {pass_.name} pass of plan {plan.digest[:12]}, mask {self.mask!r}, {settings}"
        try:
            compare_ranks(words, plan.digest, self.transport, device, self.timeout_s)
        except TransportError as error:
            raise TransportError(
                f"rank {plan.rank}, {pass_.name} pass, mask {self.mask!r}, before instruction 0 of "
                f"{len(self.program(pass_).instructions)} (comparing plans with all ranks): {error}"
            ) from error

    def _fail(self, error: TransportError, pass_: Pass, number: int, launch: CommLaunch) -> NoReturn:
        instructions = self.program(pass_).instructions
        peers = ", ".join(str(peer) for peer in sorted(set(launch.peer.tolist())))
        raise TransportError(
            f"rank {self.plan.rank}, {pass_.name} pass, mask {self.mask!r}, instruction {number} of "
            f"{len(instructions)} ({type(instructions[number]).__name__} of step {launch.step}, peers {peers}): {error}"
        ) from error


def _messages(buffers: Buffers, runs: list[Run]) -> tuple[list[Message], list[Message]]:
    """What a launch sends and what it receives."""
    sends: list[Message] = []
    receives: list[Message] = []
    for run in runs:
        (sends if run.is_send else receives).append((run.peer, buffers.message(run)))
    return sends, receives


def compare_ranks(words: str, digest: str, transport: Transport, device: torch.device, timeout_s: float) -> None:
    """Make sure that all ranks are about to run the same; all of them must call this at the same point.

    Every rank sends a message of `COMPARED_BYTES` to every other one. The size is the same whatever they run, so ranks
    that have come apart find out here, and not by messages of other sizes than they expect.

    Args:
        words: what is to be run, in words for the error message.
        digest: of the plan.
        transport: to the ranks.
        device: where messages are made: a GPU for NCCL.
        timeout_s: the longest that the messages may take.

    Raises:
        ValueError: another rank runs something else.
        TransportError: a peer was lost or too slow.
    """
    whole = hashlib.sha256(f"{digest} {words}".encode()).digest()
    data = (whole + words.encode()).ljust(COMPARED_BYTES, b"\0")[:COMPARED_BYTES]  # long words: the hash has it all
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    theirs = {peer: torch.empty_like(own) for peer in range(transport.world_size) if peer != transport.rank}
    handle = transport.start([(peer, own) for peer in theirs], list(theirs.items()))
    transport.wait(handle, timeout_s)
    for peer, other in theirs.items():
        if not torch.equal(own, other):
            their_words = bytes(other.tolist())[len(whole) :].rstrip(b"\0").decode(errors="replace")
            raise ValueError(
                f"rank {transport.rank} runs {words}; but rank {peer} runs {their_words}: make the same calls in the "
                "same order on all ranks, each with its part of one plan"
            )
