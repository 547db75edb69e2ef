"""Time of attention on one device: against peers, under masks, and by the size of a plan's blocks.

Contenders take turns on the same inputs, of which there are several sets, so that no cache holds them. One run is a
forward and the backward of its result; `both` is the time from the beginning of the one to the end of the other. The
times are the device's alone (see `Clock.laps`); `host_s` is what the host took to launch both, and where it is longer
than the device's time, a model that does nothing else waits for the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from benchmarks.gpu.cases import DENSE, SPARSE, Inputs, mask_mod, mask_of, one_rank, random_inputs, unprepared
from benchmarks.gpu.cases import useful_flops as flops
from benchmarks.gpu.clock import Clock, Deadline, spread
from benchmarks.gpu.compare import reason
from benchmarks.gpu.peers import Contender, Flex, Ours, sdpa
from benchmarks.gpu.session import Findings, Row, Session
from dyncp.ir.mask import Mask
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.prepare import prepared_for

PASSES = ("forward", "backward", "both")
MOST_SETS = 16
BUILDS = 3  # of tables and block masks


@dataclass(slots=True)
class Entry:
    """A contender with its own view of the inputs, and what has been measured of it."""

    contender: Contender
    sets: list[Inputs]
    head_start_s: float = 0.0
    errors: dict[str, str] = field(default_factory=dict)  # by pass that cannot run: why
    times: list[tuple[float, ...]] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)

    def steps(self, inputs: Inputs) -> list:
        """Forward and, where there is one, backward."""
        q, k, v, do = inputs
        outs: list[torch.Tensor] = []
        steps = [lambda: outs.append(self.contender.attend(q, k, v))]
        return steps if self.errors else [*steps, lambda: torch.autograd.grad(outs.pop(), (q, k, v), do)]

    def run(self, clock: Clock, number: int) -> None:
        """Time one run."""
        laps = clock.laps(self.steps(self.sets[number % len(self.sets)]), self.head_start_s)
        self.times.append(laps.device_s)
        self.host_s.append(laps.host_s)

    def warm_up(self, clock: Clock) -> None:
        """Compile, and find out what runs: both passes, the forward alone, or nothing."""
        for failing in ("backward", "forward"):
            try:
                self.head_start_s = clock.warm_up(self.steps(self.sets[0]), runs=3)
                return
            except Exception as error:  # noqa: BLE001 backends and compilers have their own, and the table says which
                self.errors |= {"both": reason(error), failing: reason(error)}
                self.sets = [Inputs(*(tensor.detach() for tensor in inputs)) for inputs in self.sets]

    def row(self, case: Row, mask: Mask, shape: AttentionShape) -> Row:
        """Times and useful FLOP/s, by pass; in the place of those that did not run, why."""
        work = {name: flops(mask, shape, name == "backward") for name in PASSES[:2]}
        work["both"] = sum(work.values())
        row: Row = {**case, "contender": self.contender.name, "peer": self.contender.is_peer}
        timed = dict(zip(PASSES, zip(*self.times, strict=True), strict=False))
        if len(timed) == 2:
            timed["both"] = tuple(sum(run) for run in self.times)
        for name in PASSES:
            if name in timed:
                found = spread(timed[name])
                row[name] = {**found, "flops_per_s": work[name] / found["median_s"]}
            else:
                row[name] = {"error": self.errors.get(name) or self.errors["both"]}
        return {**row, "host_s": median(self.host_s) if self.host_s else None}


def input_sets(session: Session, shape: AttentionShape, tokens: int) -> list[Inputs]:
    """So many that they are larger than any cache, and at least two."""
    sets = [random_inputs(shape, tokens, tokens, session.device, seed=0)]
    count = min(MOST_SETS, max(2, -(-session.scale.set_bytes // sets[0].size_bytes)))
    return sets + [random_inputs(shape, tokens, tokens, session.device, seed) for seed in range(1, count)]


def contest(session: Session, contenders: Sequence[Contender], sets: Sequence[Inputs]) -> list[Entry]:
    """Let contenders take turns."""
    clock, scale = session.clock, session.scale
    entries = []
    for contender in contenders:
        own = [Inputs(*(contender.arrange(tensor) for tensor in inputs)) for inputs in sets]
        own = [Inputs(*(tensor.detach().requires_grad_() for tensor in each[:3]), each.do) for each in own]
        entries.append(Entry(contender, own))
        entries[-1].warm_up(clock)
    running = [entry for entry in entries if "forward" not in entry.errors]
    started = time.perf_counter()
    for number in range(scale.repeats):
        if number >= scale.least and time.perf_counter() - started > scale.case_s:
            break
        for at in range(len(running)):
            running[(at + number) % len(running)].run(clock, number)
    return entries


def ours(session: Session, mask: Mask, block_tokens: int) -> list[Contender]:
    """Every set of kernels, on the same plan."""
    shape = session.scale.shape
    return [Ours(name, one_rank(mask, shape, block_tokens), name) for name in session.kernels]


def median_wall_s(session: Session, call) -> float:
    """Of some calls after a first one."""
    call()
    return median(session.clock.wall_s(call) for _ in range(BUILDS))


def dense(session: Session, deadline: Deadline, found: Findings) -> None:
    """Causal and full attention of one sequence, against all peers."""
    scale = session.scale
    cases = [(kind, tokens) for tokens in scale.dense_tokens for kind in DENSE]
    for kind, tokens in deadline.in_time(cases, lambda case: f"{case[0]} {case[1]:,}", found.left_out):
        mask, sets = mask_of(kind, tokens), input_sets(session, scale.shape, tokens)
        flex = Flex(mask_mod(kind, tokens, session.device), tokens, session.device)
        peers = [flex, *(sdpa(name, kind == "causal", sets[0]) for name in ("SDPA flash", "SDPA cuDNN"))]
        case = {"mask": kind, "tokens": tokens}
        for entry in contest(session, [*ours(session, mask, scale.block_tokens), *peers], sets):
            row = entry.row(case, mask, scale.shape)
            if entry.contender is flex and "forward" not in entry.errors:
                row["build_s"] = median_wall_s(session, flex.build)
            found.rows.append(row)


def masked(session: Session, deadline: Deadline, found: Findings) -> None:
    """Sparse masks, against FlexAttention; with and without what a new batch costs both before attention can begin."""
    scale = session.scale
    cases = [(kind, tokens) for tokens in scale.mask_tokens for kind in SPARSE]
    for kind, tokens in deadline.in_time(cases, lambda case: f"{case[0]} {case[1]:,}", found.left_out):
        mask, sets = mask_of(kind, tokens), input_sets(session, scale.shape, tokens)
        flex = Flex(mask_mod(kind, tokens, session.device), tokens, session.device)
        contenders = [*ours(session, mask, scale.block_tokens), flex]
        case = {"mask": kind, "tokens": tokens, "pairs": mask.pairs()}
        for entry in contest(session, contenders, sets):
            row = entry.row(case, mask, scale.shape)
            found.rows.append(row if "forward" in entry.errors else row | building(session, entry))


def building(session: Session, entry: Entry) -> Row:
    """Seconds of making ready for a new batch, and of that and both passes after it (what runs of them), by the host's
    clock. Ours: the tables of a plan, made and brought to the device. FlexAttention: its block mask."""
    contender = entry.contender

    def build() -> Contender:
        if isinstance(contender, Ours):
            fresh = Ours(contender.name, unprepared(contender.part), contender.kernels)
            prepared_for(fresh.part, fresh.part.header.mask_names[0], fresh.kernels, session.device)
            return fresh
        assert isinstance(contender, Flex)
        contender.build()
        return contender

    def build_and_run() -> None:
        for step in Entry(build(), [], errors=entry.errors).steps(entry.sets[0]):
            step()

    return {"build_s": median_wall_s(session, build), "built_s": median_wall_s(session, build_and_run)}


def blocks(session: Session, deadline: Deadline, found: Findings) -> None:
    """The same attention by plans with blocks of several sizes."""
    scale = session.scale
    tokens, shape = scale.sweep_tokens, scale.shape
    for kind in deadline.in_time(("causal", "lambda"), str, found.left_out):
        mask, sets = mask_of(kind, tokens), input_sets(session, shape, tokens)
        contenders = [
            Ours(f"blocks of {size}", one_rank(mask, shape, size), session.kernels[0]) for size in scale.sweep_blocks
        ]
        for size, entry in zip(scale.sweep_blocks, contest(session, contenders, sets), strict=True):
            part = entry.contender.part
            case = {"mask": kind, "tokens": tokens, "block_tokens": size, "comps": len(part.programs[0].comps)}
            row = entry.row(case, mask, shape)
            found.rows.append(row if "forward" in entry.errors else row | building(session, entry))
