"""Validation: one fault of each kind, and the message that names it."""

from __future__ import annotations

import numpy as np
import pytest
from builders import causal_batch, planned
from ir.handmade import edited, handmade

from dyncp.ir.blocks import TokenBlocks
from dyncp.ir.plan import Comps, Copy, RankPlan
from dyncp.ir.validate import validate_plan, validate_rank

FORWARD = "programs.0.forward"
COPY, LAUNCH, ATTENTION, WAIT, REDUCTION = (f"{FORWARD}.instructions.{at}" for at in (0, 1, 2, 3, 6))


def put(at, value):
    """A change of one number of an array."""

    def change(array):
        array[at] = value
        return array

    return change


def shorter(array):
    return array[:-1]


FAULTS = [
    ("rank", 2, "rank is 2, expected 0 to 1"),
    ("rank", -1, "rank is -1, expected 0 to 1"),
    ("header.nodes", 0, "the plan is for 0 nodes x 2 ranks, expected 1 to 65536 ranks"),
    ("header.nodes", 1 << 40, "the plan is for 1099511627776 nodes"),
    ("header.mask_names", (), r"mask names are \(\), expected at least one"),
    ("header.mask_names", ("a", "a"), r"mask names are \('a', 'a'\), expected at least one, all different"),
    ("header.mask_names", ("a",), "1 mask names but 2 weights"),
    ("header.mask_weights", (1.0, 0.0), "a mask weight is 0.0, expected a positive number"),
    ("header.mask_weights", (1.0, float("nan")), "a mask weight is nan"),
    ("header.owner", put(3, 2), r"token block owners\[3\] is 2, expected 0 to 1"),
    ("header.owner", shorter, r"token blocks: fields have shapes \[3\], \[4\], expected the same length"),
    ("header.tokens.sequence", put(0, -1), r"token block sequences\[0\] is -1"),
    ("header.tokens.stop", put(1, 4), r"token block sizes\[1\] is 0, expected at least 1"),
    ("header.tokens.stop", put(1, 1 << 40), r"token block stops\[1\] is 1099511627776"),
    ("header.tokens.role", put(2, 4), r"token block roles\[2\] is 4, expected 1, 2 or 3"),
    (
        "header.tokens.role",
        put(2, 2),
        "token block [0-9] starts at [0-9]+, but the (queries|keys) of sequence [0-9] go on at",
    ),
    ("header.tokens.start", put(1, 3), "token block 1 starts at 3, but the queries of sequence 0 go on at"),
    ("header.tokens.stop", put(0, 3), "token block 1 starts at 4, but the queries of sequence 0 go on at 3"),
    ("programs", lambda programs: programs[:1], "rank 0 has programs for 1 masks, expected 2"),
    ("programs.0.comps.index", put(0, -3), r"rank 0, mask 'near': index\[0\] is -3"),
    ("programs.0.comps.index", shorter, r"computation blocks: fields have shapes \[1\], \[2\]"),
    ("programs.0.comps.q_block", put(0, 4), r"q_block\[0\] is 4, expected 0 to 3"),
    ("programs.0.comps.kv_block", put(0, 2), r"kv_block\[0\] is 2, expected a token block with role 2"),
    ("programs.0.comps.slice_ptr", put(1, 4), r"slice_ptr: \[0, 4, 3\], expected to ascend from 0 to 3"),
    ("programs.0.comps.slice_ptr", put(0, 1), "slice_ptr: .*, expected to ascend from 0 to 3"),
    ("programs.0.comps.slice_ptr", shorter, "slice_ptr: 2 numbers, expected 3"),
    ("programs.0.comps.slices", shorter, r"slice_ptr: \[0, 1, 3\], expected to ascend from 0 to 2"),
    ("programs.0.comps.slices", lambda slices: slices[:, :5], r"slices are \(3, 5\), expected \[K, 6\]"),
    (
        "programs.0.comps.slices",
        put((0, 1), 5),
        r"computation block 0: slice 0 .*rows must lie in \[0, 4\)",
    ),
    ("programs.0.comps.slices", put((0, 5), 2), "computation block 0: .*steps must be 0 or 1"),
    ("programs.0.comps.slices", put((1, 4), 6), "computation block 1: .*keys must lie in"),
    ("programs.0.comps.slices", put((2, 2), 1), "computation block 1: row 1 sees .* which overlap"),
    ("programs.0.comps.slices", lambda slices: slices[[0, 2, 1]], "computation block 1: its slices are not sorted"),
    (f"{FORWARD}.slots.kind", put(0, 7), r"near', forward, slots: kind\[0\] is 7, expected 0 to 6"),
    (f"{FORWARD}.slots.kind", put(3, 0), r"slots: block\[3\] is 3, expected a token block that has data of the slot's"),
    (f"{FORWARD}.slots.block", put(0, -1), r"slots: block\[0\] is -1, expected 0 to 3"),
    (
        f"{FORWARD}.slots.block",
        put(0, 1),
        r"offset\[0\] is 0, expected of a local slot, the first row of a .* of rank 0",
    ),
    (f"{FORWARD}.slots.group", put(1, 2), r"slots: group\[1\] is 2, expected 0 to 1"),
    (f"{FORWARD}.slots.place", put(1, 3), r"slots: place\[1\] is 3, expected 0 to 2"),
    (f"{FORWARD}.slots.wire", put(1, 2), r"slots: wire\[1\] is 2, expected 0 to 1"),
    (f"{FORWARD}.slots.offset", put(0, 1), r"slots: offset\[0\] is 1, expected of a local slot, the first row"),
    (f"{FORWARD}.slots.offset", put(3, -8), r"slots: offset\[3\] is -8"),
    (f"{FORWARD}.slots.offset", put(9, 641), r"slots: offset\[9\] is 641, expected a multiple of 4 bytes"),
    (
        f"{FORWARD}.slots.offset",
        put(9, 652),
        r"offset\[9\] is 652, expected the slot to end within the 768 of arena_bytes",
    ),
    (f"{FORWARD}.slots.offset", shorter, r"slots: fields have shapes \[9\], \[10\]"),
    (f"{FORWARD}.arena_bytes", 759, r"offset\[9\] is 640, expected the slot to end within the 759 of arena_bytes"),
    (f"{FORWARD}.arena_bytes", -1, "arena_bytes is -1"),
    (f"{FORWARD}.arena_bytes", 1 << 30, "arena_bytes is 1073741824, expected at most .*, as its slots need no more"),
    (f"{FORWARD}.kept_bytes", 367, r"offset\[6\] is 128, expected the slot to end within the 367 of kept_bytes"),
    ("programs.0.backward.kept_bytes", 383, "kept_bytes is 383 backward, expected the forward's 384"),
    (f"{ATTENTION}.comp", [2], r"forward, instruction 2: comp\[0\] is 2, expected 0 to 1"),
    (f"{ATTENTION}.comp", [0, 1], r"instruction 2: reads are \[1, 2\], expected \[2, 2\]"),
    (f"{ATTENTION}.reads", [[0, 10]], r"instruction 2: reads\[1\] is 10, expected 0 to 9"),
    (f"{ATTENTION}.reads", [[0, 1, 2, 3]], r"instruction 2: reads are \[1, 4\], expected \[1, 2\]"),
    (f"{ATTENTION}.writes", [[-1]], r"instruction 2: writes\[0\] is -1, expected 0 to 9"),
    (f"{ATTENTION}.fresh", [99], r"instruction 2: fresh\[0\] is 99"),
    (f"{REDUCTION}.src", [10], r"instruction 6: src\[0\] is 10"),
    (f"{REDUCTION}.dst", [9, 9], r"instruction 6: fields have shapes \[1\], \[2\]"),
    (f"{REDUCTION}.fresh", [-1], r"instruction 6: fresh\[0\] is -1"),
    (f"{COPY}.dst", [10], r"instruction 0: dst\[0\] is 10"),
    (f"{COPY}.src", [], r"instruction 0: fields have shapes \[0\], \[1\]"),
    (f"{WAIT}.step", -1, "instruction 3: step is -1"),
    (f"{LAUNCH}.step", -1, "instruction 1: step is -1"),
    (f"{LAUNCH}.peer", [1, 2], r"instruction 1: peer\[1\] is 2, expected 0 to 1"),
    (f"{LAUNCH}.peer", [1, 0], r"instruction 1: peer\[1\] is 0, expected another rank"),
    (f"{LAUNCH}.send", [0, 2], r"instruction 1: send\[1\] is 2, expected 0 to 1"),
    (f"{LAUNCH}.send", [0], r"instruction 1: fields have shapes \[1\], \[2\]"),
    (f"{LAUNCH}.ptr", [0, 4, 3], r"instruction 1: ptr: \[0, 4, 3\], expected to ascend from 0 to 3"),
    (f"{LAUNCH}.ptr", [0, 2], "instruction 1: ptr: 2 numbers, expected 3"),
    (f"{LAUNCH}.slots", [3, 7], r"instruction 1: ptr: \[0, 2, 3\], expected to ascend from 0 to 2"),
    (f"{LAUNCH}.slots", [3, 7, 10], r"instruction 1: slots\[2\] is 10, expected 0 to 9"),
]


@pytest.mark.parametrize(
    ("path", "value", "message"), FAULTS, ids=[f"{n}-{fault[0]}" for n, fault in enumerate(FAULTS)]
)
def test_faults(path, value, message):
    rank_plan = handmade().rank(0)
    validate_rank(rank_plan)
    with pytest.raises(ValueError, match=message):
        validate_rank(edited(rank_plan, path, value))


def test_whole_plans():
    validate_plan(handmade())
    for strategy in ("ring", "zigzag", "data_parallel"):
        validate_plan(planned(causal_batch(70, 9, 3), 3, strategy, keep="all").plan)
    with pytest.raises(ValueError, match="the plan has programs for 1 ranks, expected 2"):
        validate_plan(edited(handmade(), "programs", lambda programs: programs[:1]))
    with pytest.raises(ValueError, match="rank 0, mask 'near', forward, slots: kind"):
        validate_plan(edited(handmade(), "programs.0.0.forward.slots.kind", put(0, 7)))


def test_slots_of_a_program_without_any():
    rank_plan = edited(handmade().rank(1), f"{FORWARD}.instructions", (Copy([2], [8]),))
    with pytest.raises(ValueError, match=r"src\[0\] is 2, expected none, as there is none"):
        validate_rank(rank_plan)


def test_slices_of_a_huge_block_take_no_memory():
    """Looking for overlaps takes memory per row, so there is a limit to the rows."""
    plan = handmade()
    tokens = TokenBlocks([0, 0, 1, 1], [0, 4, 0, 0], [4, 7, 1 << 30, 5], [3, 3, 1, 2])
    slices = [[0, 1 << 30, 0, 0, 1, 0], [0, 1 << 30, 1, 0, 2, 0]]
    comps = Comps([0], [2], [3], [0, 2], slices)
    rank_plan = edited(edited(plan.rank(0), "header.tokens", tokens), "programs.0.comps", comps)
    with pytest.raises(ValueError, match=r"computation block 0: its slices have 2147483648 rows, expected at most"):
        validate_rank(rank_plan)


def test_a_rank_without_any_block():
    plan = planned(causal_batch(3), ranks=5, strategy="data_parallel").plan
    for rank in range(5):
        validate_rank(RankPlan(plan.header, rank, plan.programs[rank], plan.digest))
    assert np.array_equal(plan.header.owned(4), [])
