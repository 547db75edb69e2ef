"""A plan made by hand for one rank: a query block against several KV blocks, through all instructions but messages."""

from __future__ import annotations

import itertools

import numpy as np

from dyncp.ir.blocks import HAS_KV, HAS_Q, TokenBlocks
from dyncp.ir.mask import Mask
from dyncp.ir.plan import (
    BACKWARD,
    FORWARD,
    Attention,
    Comps,
    Copy,
    Kind,
    Pass,
    Place,
    Plan,
    PlanHeader,
    Program,
    RankProgram,
    Reduction,
    Slots,
)
from dyncp.ir.shape import AttentionShape

_numbers = itertools.count()


def block_plan(mask: Mask, cuts: list[int], shape: AttentionShape, wire: str = "float32") -> Plan:
    """Keys are cut at `cuts`. What odd KV blocks contribute goes through scratch memory, a copy in the wire dtype and a
    reduction; the rest is accumulated straight into the caller's tensors."""
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < mask.k_length}), mask.k_length]
    count = len(bounds) - 1
    tokens = TokenBlocks(
        np.zeros(count + 1), [0, *bounds[:-1]], [mask.q_length, *bounds[1:]], [HAS_Q] + [HAS_KV] * count
    )
    header = PlanHeader("by hand", shape, 1, 1, "none", wire, ("default",), (1.0,), tokens, np.zeros(count + 1))
    crops = [mask.crop(0, mask.q_length, start, stop).slices for start, stop in itertools.pairwise(bounds)]
    ptr = np.cumsum([0] + [len(slices) for slices in crops])
    comps = Comps(np.arange(count), np.zeros(count), np.arange(1, count + 1), ptr, np.concatenate(crops))
    program = RankProgram(comps, _program(header, FORWARD, bounds), _program(header, BACKWARD, bounds))
    return Plan(header, ((program,),), f"by hand {next(_numbers)}")


def _program(header: PlanHeader, pass_: Pass, bounds: list[int]) -> Program:
    slots: list[tuple[int, ...]] = []
    used_bytes = 0

    def slot(kind: Kind, block: int, group: int, place: Place, wire: bool = False) -> int:
        nonlocal used_bytes
        offset = bounds[block - 1] if kind.of_keys else 0
        if place is Place.ARENA:
            offset, used_bytes = used_bytes, used_bytes + int(header.piece_bytes(kind, wire)[block])
        slots.append((kind, block, group, place, wire, offset))
        return len(slots) - 1

    instructions = []
    for group in range(header.shape.groups):
        of_query = {kind: slot(kind, 0, group, Place.LOCAL) for kind in pass_.reads + pass_.writes if not kind.of_keys}
        total = of_query[pass_.writes[0]]
        partial = slot(pass_.writes[0], 0, group, Place.ARENA)
        sent = slot(pass_.writes[0], 0, group, Place.ARENA, wire=True)
        reads, writes = [], []
        for block in range(1, len(bounds)):
            of_keys = {
                kind: slot(kind, block, group, Place.LOCAL) for kind in pass_.reads + pass_.writes if kind.of_keys
            }
            of_query[pass_.writes[0]] = total if block % 2 else partial
            reads.append([(of_query | of_keys)[kind] for kind in pass_.reads])
            writes.append([(of_query | of_keys)[kind] for kind in pass_.writes])
        instructions += [
            Attention(np.arange(len(reads)), reads, writes, [partial]),
            Copy([partial], [sent]),
            Reduction([sent], [total], []),
        ]
    return Program(Slots(*zip(*slots, strict=True)), tuple(instructions), used_bytes, 0)
