"""Carries out a program: one loop over five instructions. What overlaps is in the plan, not decided here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import pairwise
from typing import assert_never
from weakref import WeakKeyDictionary

import torch

from dyncp.ir.plan import (
    BACKWARD,
    FORWARD,
    PASSES,
    Attention,
    CommLaunch,
    CommWait,
    Copy,
    Instruction,
    Pass,
    Program,
    RankPlan,
    Reduction,
)
from dyncp.runtime.buffers import Buffers, Layout, Run
from dyncp.runtime.kernels.api import Score
from dyncp.runtime.prepare import Prepared
from dyncp.runtime.transports.api import Handle, Transport, TransportError

COMPARED_BYTES = 256  # of a message of `compare_ranks`, whatever the plan

Parcels = list[tuple[int, int]]  # peer, and the number of the piece of memory that is sent or received


class Traffic:
    """The messages of a program, sorted for the loop.

    A run makes a view of each piece of memory once, which costs the host more than all else of a message here. A ring
    sends and receives in a handful of pieces again and again.

    Args:
        layout: of the program.
    """

    def __init__(self, layout: Layout) -> None:
        numbers: dict[tuple[int, int, int], int] = {}
        self.pieces: list[Run] = []
        self.launches: dict[int, tuple[Parcels, Parcels]] = {}  # by step: sends, receives
        for launch, runs in layout.messages.items():
            sends, recvs = self.launches[launch.step] = [], []
            for run in runs:
                number = numbers.setdefault((run.place, run.start, run.stop), len(numbers))
                if number == len(self.pieces):
                    self.pieces.append(run)
                (sends if run.is_send else recvs).append((run.peer, number))
        self.last_step = max(self.launches, default=0)

    def idle_steps(self, last_step: int) -> dict[int, int]:
        """Where all ranks take part in each step up to `last_step`: the number of steps without messages here that
        follow one with messages, or 0 for the start.
        """
        if not last_step:
            return {}
        return {step: after - step - 1 for step, after in pairwise((0, *self.launches, last_step + 1))}


# Of the programs in use, with which layouts go.
_traffic: WeakKeyDictionary[Layout, Traffic] = WeakKeyDictionary()


def traffic_of(layout: Layout) -> Traffic:
    """The messages of a program, made at first use."""
    traffic = _traffic.get(layout)
    if traffic is None:
        traffic = _traffic[layout] = Traffic(layout)
    return traffic


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
        """Run a pass on buffers made for its program. On a GPU, queue it.

        Raises:
            ValueError: another rank runs something else, and nothing was sent then; or messages cannot be sent from
                the device of the buffers.
            TransportError: a peer was lost or too slow; names rank, pass, instruction and peers.
        """
        instructions, traffic = self.program(pass_).instructions, traffic_of(self.prepared.layout(pass_))
        kernels, transport = self.prepared.kernels, self.transport
        attend = kernels.attend_backward if pass_ is BACKWARD else kernels.attend
        idle_steps = traffic.idle_steps(self._begin(pass_, buffers.device))
        pieces = [buffers.message(run) for run in traffic.pieces]
        in_flight: dict[int, list[Handle]] = {}
        instruction: Instruction | None = None  # that is carried out
        try:
            idle = self._start_idle(idle_steps, 0)
            for instruction in instructions:
                match instruction:
                    case Attention():
                        attend(buffers, instruction, self.score)
                    case Reduction():
                        kernels.reduce(buffers, instruction)
                    case Copy():
                        kernels.copy(buffers, instruction)
                    case CommLaunch(step=step):
                        sends, recvs = (
                            [(peer, pieces[n]) for peer, n in parcels] for parcels in traffic.launches[step]
                        )
                        in_flight[step] = [*idle, transport.start(sends, recvs)]
                        idle = self._start_idle(idle_steps, step)
                    case CommWait(step=step):
                        for handle in in_flight.pop(step):
                            transport.wait(handle, self.timeout_s)
                    case _:
                        assert_never(instruction)
            for handle in idle:
                transport.wait(handle, self.timeout_s)
        except TransportError as error:
            raise TransportError(f"{self._where(pass_, instruction)}: {error}") from error
        assert not in_flight, "a program waits for all that it launches"

    def _begin(self, pass_: Pass, device: torch.device) -> int:
        """What all ranks do before the first instruction. Returns the last step in which all of them take part."""
        plan, doing = self.plan, "comparing plans with all ranks"
        try:
            if self.compared is not None:
                words = f"the {pass_.name} pass of plan {plan.digest[:12]}, mask {self.mask!r}, {self.compared}"
                compare_ranks(words, plan.digest, self.transport, device, self.timeout_s)
            doing = "making ready for messages"
            last_steps = tuple(traffic_of(layout).last_step for layout in self.prepared.layouts)
            program = f"{plan.digest} {self.mask}"
            return self.transport.begin(program, last_steps, device, self.timeout_s)[PASSES.index(pass_)]
        except TransportError as error:
            raise TransportError(
                f"rank {plan.rank}, {pass_.name} pass, mask {self.mask!r}, before instruction 0 of "
                f"{len(self.program(pass_).instructions)} ({doing}): {error}"
            ) from error

    def _start_idle(self, idle_steps: dict[int, int], step: int) -> list[Handle]:
        """Take part in the steps without messages that follow a step. At once, so that other ranks need not wait until
        this one has computed."""
        return [self.transport.start((), ()) for _ in range(idle_steps.get(step, 0))]

    def _where(self, pass_: Pass, instruction: Instruction | None) -> str:
        """The place of an instruction, in words for an error message; None for what comes before the first."""
        instructions = self.program(pass_).instructions
        doing = "steps without messages"
        if isinstance(instruction, CommLaunch | CommWait):
            step = instruction.step
            launch = next(other for other in instructions if isinstance(other, CommLaunch) and other.step == step)
            peers = ", ".join(str(peer) for peer in sorted(set(launch.peer.tolist())))
            doing = f"{type(instruction).__name__} of step {step}, peers {peers}"
        number = 0 if instruction is None else instructions.index(instruction)
        return (
            f"rank {self.plan.rank}, {pass_.name} pass, mask {self.mask!r}, instruction {number} of "
            f"{len(instructions)} ({doing})"
        )


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
