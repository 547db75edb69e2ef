"""Whether the executor can carry out a rank's programs: what `validate.py` finds in range must also go together.

With the checks there this is what makes a part of a plan safe to run: kernels find the kinds and the sizes of data that
they expect, messages are pieces of memory, and waits are for something. The checker asks for all of this too, over all
ranks, and explains it better; one rank's part from elsewhere has only this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, assert_never

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.plan import (
    PASSES,
    Attention,
    CommLaunch,
    CommWait,
    Comps,
    Copy,
    Kind,
    Pass,
    Place,
    PlanHeader,
    Program,
    RankProgram,
    Reduction,
    Slots,
    token_bytes,
)

OF_KEYS = np.array([kind.of_keys for kind in Kind])
PARTIAL = np.array([kind.is_partial for kind in Kind])


def validate_runnable(header: PlanHeader, rank: int, programs: tuple[RankProgram, ...]) -> None:
    """Check that the instructions of validated programs fit the slots they name.

    Raises:
        ValueError: naming the instruction, and what is wrong with it.
    """
    wires = ("float32", header.wire)
    sizes = np.array([[token_bytes(header.shape, kind, wire) for wire in wires] for kind in Kind], np.int64)
    for name, programs_of_mask in zip(header.mask_names, programs, strict=True):
        for pass_, program in zip(PASSES, (programs_of_mask.forward, programs_of_mask.backward), strict=True):
            slots = program.slots
            stop = slots.offset + sizes[slots.kind, slots.wire] * header.tokens.tokens[slots.block]
            try:
                _validate_program(pass_, program, programs_of_mask.comps, stop)
            except ValueError as error:
                raise ValueError(f"rank {rank}, mask {name!r}, {pass_.name}, {error}") from None


def _validate_program(pass_: Pass, program: Program, comps: Comps, stop: Ints) -> None:
    in_flight: set[int] = set()
    arrays: dict[type, list[tuple[int, tuple[Ints, ...]]]] = {Attention: [], Reduction: [], Copy: []}
    for at, instruction in enumerate(program.instructions):
        where = f"instruction {at}"
        match instruction:
            case Attention(comp, reads, writes, fresh):
                arrays[Attention].append((at, (comp, reads, writes, fresh)))
            case Reduction(src, dst, fresh):
                arrays[Reduction].append((at, (src, dst, fresh)))
            case Copy(src, dst):
                arrays[Copy].append((at, (src, dst)))
            case CommLaunch():
                _expect(where, instruction.step not in in_flight, f"step {instruction.step} is in flight already")
                in_flight.add(instruction.step)
                _validate_messages(where, program.slots, stop, instruction)
            case CommWait(step):
                _expect(where, step in in_flight, f"it waits for step {step}, which has not been launched")
                in_flight.remove(step)
            case _:
                assert_never(instruction)
    _expect("its end", not in_flight, f"step {min(in_flight, default=0)} is never waited for")
    _validate_all(arrays[Attention], partial(_validate_attention, pass_, program.slots, comps))
    _validate_all(arrays[Reduction], partial(_validate_reduction, program.slots))
    _validate_all(arrays[Copy], partial(_validate_copy, program.slots))


def _validate_all(instructions: list[tuple[int, tuple[Ints, ...]]], check: Callable[..., None]) -> None:
    """Check the arrays of all instructions of a type at once, and only where something is wrong one by one."""
    if not instructions:
        return
    try:
        check("together", *map(np.concatenate, zip(*(arrays for _, arrays in instructions), strict=True)))
    except ValueError:
        for at, arrays in instructions:
            check(f"instruction {at}", *arrays)
        raise


def _validate_attention(
    pass_: Pass, slots: Slots, comps: Comps, where: str, comp: Ints, reads: Ints, writes: Ints, fresh: Ints
) -> None:
    """Every computation block reads and writes the kinds that the pass says, of its own two token blocks."""
    named = np.concatenate([reads, writes], axis=1)  # [n, reads + writes]
    kinds = np.array(pass_.reads + pass_.writes)
    _expect(where, slots.kind[named] == kinds, f"it must use {', '.join(Kind(kind).name for kind in kinds.tolist())}")
    ends = np.stack([comps.q_block[comp], comps.kv_block[comp]], axis=1)
    _expect(where, slots.block[named] == ends[:, OF_KEYS[kinds].astype(np.intp)], "slots must be of comp's blocks")
    group = slots.group[named]
    _expect(where, group == group[:, :1], "slots of a computation block must be of one head group")
    _expect(where, PARTIAL[slots.kind[fresh]], "fresh slots must be partial results")


def _validate_reduction(slots: Slots, where: str, src: Ints, dst: Ints, fresh: Ints) -> None:
    _validate_copy(slots, where, src, dst)
    _expect(where, PARTIAL[slots.kind[np.concatenate([dst, fresh])]], "it must add to partial results")


def _validate_copy(slots: Slots, where: str, src: Ints, dst: Ints) -> None:
    same = (slots.kind[src] == slots.kind[dst]) & (slots.block[src] == slots.block[dst])
    _expect(where, same & (slots.group[src] == slots.group[dst]), "src and dst must be of the same data")


def _validate_messages(where: str, slots: Slots, stop: Ints, launch: CommLaunch) -> None:
    """A message is at least one slot, outside the caller's tensors, and its slots lie one behind the other."""
    _expect(where, launch.ptr[1:] > launch.ptr[:-1], "a message has no slots")
    _expect(where, slots.place[launch.slots] != Place.LOCAL, "a message has local slots")
    before, after = launch.slots[:-1], launch.slots[1:]
    behind = (slots.place[before] == slots.place[after]) & (stop[before] == slots.offset[after])
    behind[launch.ptr[1:-1] - 1] = True  # from one message to the next
    _expect(where, behind, "the slots of a message do not lie one behind the other")


def _expect(where: str, holds: Any, rule: str) -> None:
    if not (holds if isinstance(holds, bool) else holds.all()):
        raise ValueError(f"{where}: {rule}")
