"""The checker sees every kind of fault, planted into plans that pass it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders import causal_batch, planned, random_batch

from dyncp.ir.check import PlanError, check_plan
from dyncp.ir.plan import Attention, CommLaunch, CommWait, Copy, Kind, Place, Plan, Reduction


@pytest.fixture(scope="module")
def good():
    return planned(causal_batch(30, 7), keep="kv")


def with_program(plan: Plan, rank: int, change, pass_name: str = "forward") -> Plan:
    """The plan with one program changed by `change(program) -> fields to replace`."""
    programs = list(plan.programs)
    one = programs[rank][0]
    program = getattr(one, pass_name)
    programs[rank] = (replace(one, **{pass_name: replace(program, **change(program))}),)
    return replace(plan, programs=tuple(programs))


def edit(kind: type, change, which: int = 0):
    """A change of the which-th instruction of a kind; `change` gives the instruction(s) to put in its place."""

    def apply(program):
        at = [i for i, instruction in enumerate(program.instructions) if isinstance(instruction, kind)][which]
        new = change(program.instructions[at])
        return {"instructions": (*program.instructions[:at], *new, *program.instructions[at + 1 :])}

    return apply


def slots_edit(field: str, choose, value):
    """A change of one field of the first slot that `choose` accepts."""

    def apply(program):
        slots = program.slots
        index = next(i for i in range(len(slots)) if choose(slots, i))
        column = getattr(slots, field).copy()
        column[index] = value(slots, index) if callable(value) else value
        return {"slots": replace(slots, **{field: column})}

    return apply


def drop_items(keep: slice):
    return lambda a: [replace(a, comp=a.comp[keep], reads=a.reads[keep], writes=a.writes[keep])]


def refused(plan: Plan, good, message: str) -> str:
    with pytest.raises(PlanError, match=message) as caught:
        check_plan(plan, good.layout.blocks)
    return str(caught.value)


def test_accepts_good_plans(good):
    check_plan(good.plan, good.layout.blocks)
    check_plan(good.plan)


def test_missing_computation_block(good):
    bad = with_program(good.plan, 1, edit(Attention, drop_items(slice(1, None))))
    message = refused(bad, good, "ends without computation blocks")
    assert "rank  step 0" in message and "[" in message  # the table of ranks by steps, the bad cell marked


def test_computation_block_twice(good):
    bad = with_program(
        good.plan,
        1,
        edit(Attention, lambda a: [a, replace(a, fresh=a.fresh[:0])]),
    )
    refused(bad, good, "added twice")


def test_read_before_wait(good):
    def swap(program):
        order = list(program.instructions)
        wait = next(i for i, one in enumerate(order) if isinstance(one, CommWait))
        use = next(i for i, one in enumerate(order) if isinstance(one, Attention) and i > wait)
        order.insert(use, order.pop(wait))
        return {"instructions": tuple(order)}

    refused(with_program(good.plan, 2, swap), good, "has not been waited for")


def test_read_of_nothing(good):
    bad = with_program(good.plan, 0, edit(Copy, lambda _: []), "backward")
    refused(bad, good, "that nothing has written")


def test_transfer_never_waited(good):
    def drop_last_wait(program):
        at = max(i for i, one in enumerate(program.instructions) if isinstance(one, CommWait))
        return {"instructions": (*program.instructions[:at], *program.instructions[at + 1 :])}

    refused(with_program(good.plan, 0, drop_last_wait), good, "never waited for")


def test_lost_receive_is_a_deadlock(good):
    def sends_only(launch):
        keep = np.flatnonzero(launch.send)
        runs = [launch.slots[launch.ptr[i] : launch.ptr[i + 1]] for i in keep]
        ptr = np.cumsum([0] + [len(run) for run in runs])
        return [replace(launch, peer=launch.peer[keep], send=launch.send[keep], ptr=ptr, slots=np.concatenate(runs))]

    bad = with_program(good.plan, 1, edit(CommLaunch, sends_only))
    refused(bad, good, "reads slot|deadlock: waits for ever|is sent at step")


def test_true_deadlock():
    """Two ranks that each receive before they send, each after the other's wait."""
    one = planned(causal_batch(16), ranks=2, strategy="ring")

    def wait_first(program):
        order = list(program.instructions)
        launch = next(i for i, item in enumerate(order) if isinstance(item, CommLaunch))
        step, item = order[launch].step, order[launch]
        receive = np.flatnonzero(item.send == 0)
        send = np.flatnonzero(item.send)

        def part(index, step):
            runs = [item.slots[item.ptr[i] : item.ptr[i + 1]] for i in index]
            ptr = np.cumsum([0] + [len(run) for run in runs])
            return CommLaunch(step, item.peer[index], item.send[index], ptr, np.concatenate(runs))

        order[launch : launch + 1] = [part(receive, step), CommWait(step), part(send, step)]
        return {"instructions": tuple(order)}

    bad = with_program(with_program(one.plan, 0, wait_first), 1, wait_first)
    refused(bad, one, "deadlock: waits for ever .*does not send")


def test_messages_in_another_order(good):
    def swap(launch):
        receive = int(np.flatnonzero(launch.send == 0)[0])
        slots = launch.slots.copy()
        run = slice(launch.ptr[receive], launch.ptr[receive + 1])
        slots[run] = slots[run][::-1]
        return [replace(launch, slots=slots)]

    refused(with_program(good.plan, 1, edit(CommLaunch, swap)), good, "do not lie one behind the other|is sent at step")


def test_contents_that_differ(good):
    bad = with_program(
        good.plan,
        1,
        slots_edit("group", lambda s, i: s.place[i] == Place.KEPT, lambda s, i: 1 - s.group[i]),
    )
    refused(bad, good, "is sent at step 1 with .* and received")


def test_overwritten_while_live(good):
    """A slot moved onto another one that is still to be read."""
    plan = planned(causal_batch(30, 7), strategy="ring", keep="none")

    def collide(program):
        slots, launches = program.slots, [i for i in program.instructions if isinstance(i, CommLaunch)]
        first = next(
            launches[0].slots[launches[0].ptr[i]] for i in range(len(launches[0].peer)) if not launches[0].send[i]
        )
        offset = slots.offset.copy()
        sums = [i for i in range(len(slots)) if slots.kind[i] == Kind.DKV and slots.place[i] == Place.ARENA]
        offset[sums[0]] = offset[first]
        return {"slots": replace(slots, offset=offset)}

    refused(with_program(plan.plan, 1, collide, "backward"), plan, "overwritten|transfer in flight")


def test_slot_outside_memory(good):
    bad = with_program(good.plan, 0, lambda program: {"kept_bytes": program.kept_bytes - 4})
    refused(bad, good, "outside its memory")


def test_local_slot_of_a_foreign_block(good):
    foreign = int(good.plan.header.owned(1)[0])
    bad = with_program(good.plan, 0, slots_edit("block", lambda s, i: s.place[i] == Place.LOCAL, foreign))
    refused(bad, good, "does not own the block")


def test_local_slot_at_a_wrong_row(good):
    bad = with_program(
        good.plan, 0, slots_edit("offset", lambda s, i: s.place[i] == Place.LOCAL, lambda s, i: s.offset[i] + 1)
    )
    refused(bad, good, "the block is at row")


def test_lost_partial_result(good):
    lose_first = edit(Reduction, lambda r: [replace(r, src=r.src[1:], dst=r.dst[1:])], -1)
    refused(with_program(good.plan, 0, lose_first, "backward"), good, "ends without computation blocks")


def test_partial_result_added_twice(good):
    bad = with_program(good.plan, 0, edit(Reduction, lambda r: [r, r], -1), "backward")
    refused(bad, good, "added twice")


def test_kept_data_at_another_place(good):
    bad = with_program(
        good.plan, 1, slots_edit("offset", lambda s, i: s.place[i] == Place.KEPT and s.offset[i] > 0, 0), "backward"
    )
    refused(bad, good, "that nothing has written")


def test_mask_of_a_block_changed(good):
    rank = good.plan.programs[2][0]
    slices = rank.comps.slices.copy()
    slices[0, 4] -= 1
    programs = (*good.plan.programs[:2], (replace(rank, comps=replace(rank.comps, slices=slices)),))
    refused(replace(good.plan, programs=programs), good, "pairs, not")


def test_unknown_computation_block(good):
    rank = good.plan.programs[2][0]
    index = rank.comps.index.copy()
    index[-1] = 1000
    programs = (*good.plan.programs[:2], (replace(rank, comps=replace(rank.comps, index=index)),))
    refused(replace(good.plan, programs=programs), good, "is not in the batch")


def test_wait_without_launch(good):
    bad = with_program(good.plan, 0, edit(CommLaunch, lambda _: []))
    refused(bad, good, "which were not launched")


def test_owner_that_does_not_exist(good):
    header = replace(good.plan.header, owner=good.plan.header.owner + 1)
    refused(replace(good.plan, header=header), good, "the plan has 3 ranks")


def test_wrong_slot_kind(good):
    def swap_reads(attention):
        return [replace(attention, reads=attention.reads[:, ::-1])]

    refused(with_program(good.plan, 0, edit(Attention, swap_reads)), good, "is used as")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("strategy", ["ring", "zigzag", "data_parallel", "dynamic"])
def test_accepts_random_plans(seed, strategy):
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, names=("full", "window"), cross=seed % 2 == 1)
    for keep in ("none", "kv", "all"):
        made = planned(batch, ranks=int(rng.integers(1, 6)), strategy=strategy, keep=keep)
        check_plan(made.plan, made.layout.blocks)
