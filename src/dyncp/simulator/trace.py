"""A simulation as a file in Chrome's trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A process for each node. In it every rank has a track of what it does, and tracks of the messages that it sends and
receives: as many as there are messages at the same time, so that events of one track never overlap. Passes follow one
another on the time axis, forward before backward, and in each the masks, once each whatever their weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, assert_never

import numpy as np

from dyncp.cost.fluid import LAUNCH, Played
from dyncp.ir.arrays import Ints
from dyncp.ir.plan import PASSES, Attention, CommLaunch, CommWait, Copy, Instruction, Plan, Program, Reduction
from dyncp.simulator.program import LABELS, Track
from dyncp.simulator.run import Simulation

LANES = 1000  # numbers that a rank has for its tracks: 0 computes, then sends, from the middle on receives
US = 1e6  # trace times are in microseconds

Event = dict[str, Any]


class Part(NamedTuple):
    """One pass under one mask, and when it begins."""

    name: str
    begin_s: float
    programs: tuple[Program, ...]  # per rank
    track: Track
    played: Played


def write_trace(simulation: Simulation, plan: Plan, path: str | Path) -> None:
    """Write the events of a simulation of a plan.

    Args:
        simulation: of the plan.
        plan: the plan.
        path: of the file to write, JSON.
    """
    events = trace_events(simulation, plan)
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n", encoding="utf-8")


def trace_events(simulation: Simulation, plan: Plan) -> list[Event]:
    """The events: names of tracks first, then what happens, a complete event (`"ph": "X"`) each."""
    per_node = plan.header.ranks_per_node
    events = [event for part in parts_of(simulation, plan) for event in part_events(part, per_node)]
    used = sorted({(event["pid"], event["tid"]) for event in events})
    return [*_names(plan, used), *events]


def parts_of(simulation: Simulation, plan: Plan) -> Iterator[Part]:
    """Passes and masks in the order in which they are drawn."""
    begin_s = 0.0
    for pass_, result in zip(PASSES, (simulation.forward, simulation.backward), strict=True):
        for mask, (track, played) in enumerate(zip(result.tracks, result.played, strict=True)):
            programs = tuple(getattr(rank[mask], pass_.name) for rank in plan.programs)
            name = pass_.name
            if len(result.tracks) > 1:
                name = f"{pass_.name}, {plan.header.mask_names[mask]}"
            yield Part(name, begin_s, programs, track, played)
            begin_s += played.makespan_s


def part_events(part: Part, per_node: int) -> Iterator[Event]:
    """What happens in one pass under one mask."""
    instructions = [instruction for program in part.programs for instruction in program.instructions]
    yield from _operation_events(part, per_node, instructions)
    operations, messages = part.track.operations, part.track.messages
    step_of = {
        group: instruction.step
        for kind, group, instruction in zip(
            operations.kind.tolist(), operations.group.tolist(), instructions, strict=True
        )
        if kind == LAUNCH and isinstance(instruction, CommLaunch)
    }
    for mine, other, word, first in (
        (messages.src, messages.dst, "to", 1),
        (messages.dst, messages.src, "from", LANES // 2),
    ):
        lanes = lanes_of(mine, part.played.sent, part.played.arrived)
        for i, (rank, peer, lane) in enumerate(zip(mine.tolist(), other.tolist(), lanes.tolist(), strict=True)):
            args = {
                "pass": part.name,
                "step": step_of[int(messages.src_group[i])],
                "bytes": int(messages.size_bytes[i]),
                "link": "intra" if rank // per_node == peer // per_node else "inter",
            }
            track = rank * LANES + first + min(lane, LANES // 2 - 2)
            times = part.played.sent[i], part.played.arrived[i]
            yield _event(part, rank // per_node, track, f"{word} rank {peer}", times, "message", args)


def _operation_events(part: Part, per_node: int, instructions: list[Instruction]) -> Iterator[Event]:
    operations, played = part.track.operations, part.played
    ranks = np.repeat(np.arange(len(part.programs)), np.diff(operations.ptr)).tolist()
    for i, (rank, instruction) in enumerate(zip(ranks, instructions, strict=True)):
        times = played.start[i], played.stop[i]
        if isinstance(instruction, CommWait) and times[0] == times[1]:
            continue
        name, args = _described(instruction)
        category = LABELS[int(part.track.label[i])]
        yield _event(part, rank // per_node, rank * LANES, name, times, category, {"pass": part.name, **args})


def _described(instruction: Instruction) -> tuple[str, dict[str, int]]:
    match instruction:
        case Attention():
            return "attention", {"blocks": len(instruction.comp)}
        case Copy():
            return "copy", {"slots": len(instruction.src)}
        case Reduction():
            return "reduce", {"slots": len(instruction.src)}
        case CommLaunch():
            return f"launch step {instruction.step}", {"step": instruction.step, "messages": len(instruction.peer)}
        case CommWait():
            return f"wait step {instruction.step}", {"step": instruction.step}
        case _:
            assert_never(instruction)


def lanes_of(rank: Ints, start: Ints, stop: Ints) -> Ints:
    """int64[m]: a lane for each message, so that those of one rank and lane do not overlap."""
    lanes = np.zeros(len(rank), "int64")
    free: dict[int, list[float]] = {}  # rank -> when each of its lanes is free
    for i in np.lexsort((stop, start)).tolist():
        mine = free.setdefault(int(rank[i]), [])
        lane = next((lane for lane, until in enumerate(mine) if until <= start[i]), len(mine))
        if lane == len(mine):
            mine.append(0.0)
        mine[lane] = float(stop[i])
        lanes[i] = lane
    return lanes


def _event(
    part: Part, node: int, track: int, name: str, times: tuple[float, float], category: str, args: dict[str, Any]
) -> Event:
    start_us, stop_us = ((part.begin_s + time) * US for time in times)
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": node,
        "tid": track,
        "ts": start_us,
        "dur": stop_us - start_us,
        "args": args,
    }


def _names(plan: Plan, used: list[tuple[int, int]]) -> Iterator[Event]:
    for node in range(plan.header.nodes):
        yield _metadata("process_name", node, 0, name=f"node {node}")
        yield _metadata("process_sort_index", node, 0, sort_index=node)
    for node, track in used:
        rank, lane = divmod(track, LANES)
        word = "" if lane == 0 else " sends" if lane < LANES // 2 else " receives"
        yield _metadata("thread_name", node, track, name=f"rank {rank}{word}")
        yield _metadata("thread_sort_index", node, track, sort_index=track)


def _metadata(what: str, node: int, track: int, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": node, "tid": track, "args": args}
