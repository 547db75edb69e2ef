"""Lowering: schedules become plans that pass the checker, with no more transfers and memory than they need."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders import SHAPE, causal_batch, planned, random_batch, random_layout

from dyncp.ir.check import check_plan
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.plan import BACKWARD, FORWARD, CommLaunch, Copy, Reduction, side_token_bytes
from dyncp.ir.schedule import Schedule, Side, Transfers
from dyncp.planner.blockgen import make_blocks, uniform_cut
from dyncp.strategies import lower_layout
from dyncp.strategies.api import Layout, Options


def random_case(seed: int, keep: str):
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, names=("a", "b")[: 1 + seed % 2], cross=seed % 3 == 0)
    cluster = Cluster(int(rng.integers(1, 3)), int(rng.integers(1, 4)))
    options = Options(block_tokens=6, divisions=int(rng.integers(1, 5)), keep=keep)
    return random_layout(rng, batch, cluster, options), batch, cluster, options


@pytest.mark.parametrize("keep", ["none", "kv", "all"])
@pytest.mark.parametrize("seed", range(12))
def test_random_placements(seed, keep):
    layout, batch, cluster, options = random_case(seed, keep)
    blocks, schedule = layout.blocks, layout.schedule
    plan = lower_layout(layout, batch, SHAPE, cluster, "random", options)
    header = plan.header
    check_plan(plan, blocks)
    for mask in range(len(blocks.mask_names)):
        rows = schedule.transfers.take(schedule.transfers.mask == mask)
        for pass_ in (FORWARD, BACKWARD):
            wanted = side_token_bytes(SHAPE, pass_, keep, "model")
            expected = sum(wanted[s] * blocks.tokens.tokens[b] for s, b in zip(rows.side, rows.block, strict=True))
            programs = [getattr(rank[mask], pass_.name) for rank in plan.programs]
            assert sum(sent_bytes(header, program) for program in programs) == expected


def sent_bytes(header, program) -> int:
    total = 0
    for launch in program.instructions:
        if isinstance(launch, CommLaunch):
            for i in np.flatnonzero(launch.send):
                for slot in launch.slots[launch.ptr[i] : launch.ptr[i + 1]]:
                    kind, wire = program.slots.kind[slot], bool(program.slots.wire[slot])
                    total += header.piece_bytes(type(FORWARD.reads[0])(kind), wire)[program.slots.block[slot]]
    return int(total)


def test_one_message_per_peer_step_and_direction():
    plan = planned(causal_batch(30, 9, 17), ranks=4, strategy="ring").plan
    for programs in plan.programs:
        for program in (programs[0].forward, programs[0].backward):
            for launch in program.instructions:
                if isinstance(launch, CommLaunch):
                    pairs = list(zip(launch.peer.tolist(), launch.send.tolist(), strict=True))
                    assert len(pairs) == len(set(pairs))


def test_ring_passes_on_without_a_copy():
    """Each rank packs its own KV once; what it passes on is sent from where it was received."""
    plan = planned(causal_batch(64), ranks=4, strategy="ring").plan
    for programs in plan.programs:
        copies = [one for one in programs[0].forward.instructions if isinstance(one, Copy)]
        assert [len(copy.dst) for copy in copies] == [SHAPE.groups]


def test_ring_memory_does_not_grow_with_the_ranks():
    """Three messages of KV are alive at once: one being sent, one being read, one arriving."""
    for ranks in (4, 8):
        plan = planned(causal_batch(32 * ranks), ranks=ranks, strategy="ring").plan
        message = 32 * SHAPE.kv_heads * 2 * SHAPE.head_dim * 4
        assert max(programs[0].forward.arena_bytes for programs in plan.programs) <= 3 * message


def test_keep_moves_less_in_the_backward():
    moved = {}
    for keep in ("none", "kv", "all"):
        made = planned(causal_batch(64, 20), ranks=4, strategy="ring", keep=keep)
        programs = [rank[0].backward for rank in made.plan.programs]
        moved[keep] = sum(sent_bytes(made.plan.header, program) for program in programs)
        assert all(rank[0].forward.kept_bytes == rank[0].backward.kept_bytes for rank in made.plan.programs)
        assert (keep == "none") == all(rank[0].forward.kept_bytes == 0 for rank in made.plan.programs)
    assert moved["none"] > moved["kv"] == moved["all"]  # a ring moves no Q


def test_sent_on_partial_results_merge():
    """A partial result may travel over another rank, which adds its own share."""
    batch = causal_batch(12)
    blocks = make_blocks(batch, SHAPE.groups, uniform_cut(6))  # computation blocks (0,0) (1,0) (1,1)
    placement = Placement([0, 0], np.broadcast_to([0, 1, 2], (2, 3)))
    rows = []
    for group in range(2):
        rows += [(0, Side.KV_IN, 0, group, 0, 1, 1), (0, Side.Q_IN, 1, group, 0, 1, 1)]
        rows += [(0, Side.KV_IN, 1, group, 0, 2, 1), (0, Side.Q_IN, 1, group, 0, 2, 1)]
        rows += [(0, Side.Q_OUT, 1, group, 1, 2, 3), (0, Side.Q_OUT, 1, group, 2, 0, 4)]
        rows += [(0, Side.KV_OUT, 0, group, 1, 0, 3), (0, Side.KV_OUT, 1, group, 2, 0, 3)]
    schedule = Schedule(np.broadcast_to([0, 1, 1], (2, 3)), Transfers(*np.array(rows).T))
    plan = lower_layout(Layout(blocks, placement, schedule), batch, SHAPE, Cluster(1, 3), "tree", Options())
    check_plan(plan, blocks)


def changed(layout: Layout, **columns) -> Layout:
    """The layout with other columns of its transfers."""
    return replace(layout, schedule=Schedule(layout.schedule.comp_step, replace(layout.schedule.transfers, **columns)))


def test_broken_schedules_are_refused():
    layout, batch, cluster, options = random_case(0, "none")
    moves = layout.schedule.transfers

    def lowered(layout: Layout):
        return lower_layout(layout, batch, SHAPE, cluster, "broken", options)

    def with_moves(transfers: Transfers):
        return lowered(replace(layout, schedule=Schedule(layout.schedule.comp_step, transfers)))

    def with_one_more(row: int, **columns):
        one = replace(moves.take(np.array([row])), **{name: [value] for name, value in columns.items()})
        return with_moves(Transfers.concatenate([moves, one]))

    inputs, outputs = (np.flatnonzero(moves.side == side) for side in (Side.KV_IN, Side.Q_OUT))
    without = moves.take(np.delete(np.arange(len(moves)), inputs[0]))
    with pytest.raises(ValueError, match="no transfer has brought it"):
        with_moves(without)
    with pytest.raises(ValueError, match="steps start at 1"):
        lowered(changed(layout, step=moves.step * 0))
    with pytest.raises(ValueError, match=r"sends the OUT of block \d+, head group \d twice in one message at step"):
        with_one_more(outputs[0])
    owner, other = int(moves.dst[outputs[0]]), int(moves.src[outputs[0]])
    with pytest.raises(
        ValueError, match=rf"rank {owner} sends away the OUT of block \d+, head group \d, which it owns"
    ):
        with_one_more(outputs[0], src=owner, dst=other)


def test_numbers_out_of_range_are_refused():
    layout, batch, cluster, options = random_case(0, "none")
    moves, blocks = layout.schedule.transfers, layout.blocks

    def lowered(layout: Layout):
        return lower_layout(layout, batch, SHAPE, cluster, "broken", options)

    for name, value, match in (
        ("side", 4, "the side of a transfer is 4, expected 0 to 3"),
        ("block", len(blocks.tokens), "the block of a transfer is"),
        ("group", -1, "the head group of a transfer is -1"),
        ("src", cluster.ranks, "the source of a transfer"),
        ("dst", -1, "the destination of a transfer is -1"),
    ):
        with pytest.raises(ValueError, match=match):
            lowered(changed(layout, **{name: np.full(len(moves), value)}))
    shape = layout.placement.comp_rank.shape
    for placement, step, match in (
        (Placement(layout.placement.block_rank, np.full(shape, cluster.ranks)), np.zeros(shape), "the rank of a comp"),
        (layout.placement, np.full(shape, -1), "the step of a computation block is -1"),
        (layout.placement, np.zeros((1, 2)), r"comp_step is \[1, 2\], expected"),
    ):
        with pytest.raises(ValueError, match=match):
            lowered(replace(layout, placement=placement, schedule=Schedule(step, moves)))


def test_a_result_may_start_empty_on_its_way():
    """A rank that has nothing to add passes nothing on, as a fresh partial result."""
    batch = causal_batch(12)
    blocks = make_blocks(batch, SHAPE.groups, uniform_cut(6))
    placement = Placement([0, 0], np.zeros((2, 3)))
    moves = Transfers(*np.array([(0, Side.Q_OUT, 1, 0, 1, 0, 3)]).T)
    plan = lower_layout(
        Layout(blocks, placement, Schedule(np.zeros((2, 3)), moves)), batch, SHAPE, Cluster(1, 2), "empty", Options()
    )
    check_plan(plan, blocks, batch)
    assert [len(one.fresh) for one in plan.programs[1][0].forward.instructions if isinstance(one, Reduction)] == [1]
