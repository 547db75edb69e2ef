"""The checker sees every kind of fault, planted into plans that pass it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders import causal_batch, planned, random_batch

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.check import check_plan
from dyncp.ir.plan import Attention, CommLaunch, CommWait, Copy, Kind, Place, Plan, PlanError, Reduction

SLOT_COLUMNS = ("kind", "block", "group", "place", "wire", "offset")


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
        check_plan(plan, good.layout.blocks, good.batch)
    return str(caught.value)


def test_accepts_good_plans(good):
    check_plan(good.plan, good.layout.blocks, good.batch)
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
    refused(bad, good, "message 0 from rank 0 to rank 1 is sent at step 1 .* received at step 2")


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

    refused(with_program(good.plan, 1, edit(CommLaunch, swap)), good, "do not lie one behind the other")


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

    refused(with_program(plan.plan, 1, collide, "backward"), plan, "writes slot .* over slot")


def test_overwritten_between_write_and_read():
    """The message of the next step received where this step's still has to be read."""
    plan = planned(causal_batch(30, 7), strategy="zigzag", keep="none")

    def collide(program):
        slots, launches = program.slots, [i for i in program.instructions if isinstance(i, CommLaunch)]
        offset = slots.offset.copy()
        arrive = [
            next(launch.slots[launch.ptr[i] : launch.ptr[i + 1]] for i in np.flatnonzero(launch.send == 0))
            for launch in launches[:2]
        ]
        offset[arrive[1]] += offset[arrive[0][0]] - offset[arrive[1][0]]
        return {"slots": replace(slots, offset=offset)}

    refused(with_program(plan.plan, 1, collide), plan, r"that slot .* has overwritten")


def test_slot_outside_memory(good):
    bad = with_program(good.plan, 0, lambda program: {"kept_bytes": program.kept_bytes - 4})
    refused(bad, good, "to end within the")


def test_local_slot_of_a_foreign_block(good):
    foreign = int(good.plan.header.owned(1)[0])
    bad = with_program(good.plan, 0, slots_edit("block", lambda s, i: s.place[i] == Place.LOCAL, foreign))
    refused(bad, good, "the first row of a token block of rank 0")


def test_local_slot_at_a_wrong_row(good):
    bad = with_program(
        good.plan, 0, slots_edit("offset", lambda s, i: s.place[i] == Place.LOCAL, lambda s, i: s.offset[i] + 1)
    )
    refused(bad, good, "the first row of a token block of rank 0")


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
    refused(replace(good.plan, header=header), good, "owners.* expected 0 to 2")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("start", 0, "token block 1 starts at 0, but the queries of sequence 0 go on at 10"),
        ("stop", 10, "token block sizes.* is 0"),
        ("sequence", 1, "go on at"),
        ("role", 4, "token block roles.* is 4"),
    ],
)
def test_token_table_with_holes(good, field, value, message):
    """Tokens owned twice, or by nobody."""
    tokens = good.plan.header.tokens
    changed = getattr(tokens, field).copy()
    changed[1] = value
    header = replace(good.plan.header, tokens=replace(tokens, **{field: changed}))
    refused(replace(good.plan, header=header), good, message)


def test_blocks_of_another_cut(good):
    """The same batch, in blocks that the plan was not made from."""
    other = planned(good.batch, ranks=4)
    with pytest.raises(PlanError, match=r"the (sequence|start|stop) of token blocks is"):
        check_plan(good.plan, other.layout.blocks, good.batch)


@pytest.mark.parametrize("lengths", [(31, 7), (30, 8), (30,), (30, 7, 5), (12, 7)])
def test_another_batch(good, lengths):
    """Tokens that nobody computes, a sequence too many or too few; without the blocks to compare with."""
    with pytest.raises(PlanError, match=r"the plan is for sequences of \[30, 7\]... queries, not"):
        check_plan(good.plan, batch=causal_batch(*lengths))


def test_other_mask_names(good):
    batch = Batch([Sequence(length, {"other": masks.causal(length)}) for length in (30, 7)])
    with pytest.raises(PlanError, match="the plan has masks"):
        check_plan(good.plan, batch=batch)


def test_weights_of_another_batch(good):
    header = replace(good.plan.header, mask_weights=(2.0,))
    refused(replace(good.plan, header=header), good, "the plan has masks")


def test_mask_of_a_block_with_the_same_number_of_pairs():
    """A full rectangle of the mask, moved within its computation block."""
    mask = masks.from_slices(16, 16, [[0, 8, 0, 8, "full"]])
    one = planned(Batch([Sequence(16, mask)]), ranks=1, strategy="data_parallel", block_tokens=16)
    rank = one.plan.programs[0][0]
    moved = rank.comps.slices + np.array([8, 8, 8, 0, 8, 0])
    bad = replace(one.plan, programs=((replace(rank, comps=replace(rank.comps, slices=moved)),),))
    check_plan(bad, one.layout.blocks)  # which counts pairs alone
    refused(bad, one, "the mask inside computation block 0 .* is not that of sequence 0")


def test_the_same_mask_in_other_slices_is_accepted():
    one = planned(causal_batch(16), ranks=1, strategy="data_parallel", block_tokens=16)
    rank = one.plan.programs[0][0]
    halves = np.array([[0, 8, 0, 0, 1, 1], [8, 16, 0, 0, 9, 1]])
    comps = replace(rank.comps, slices=halves, slice_ptr=np.array([0, 2]))
    other = replace(one.plan, programs=((replace(rank, comps=comps),),))
    check_plan(other, one.layout.blocks, one.batch)


@pytest.mark.parametrize("kind", [Kind.Q, Kind.KV])
def test_clearing_an_input(good, kind):
    """It would zero the caller's own tensor, which the backward still reads."""

    def clear(program):
        slots = program.slots
        slot = next(i for i in range(len(slots)) if slots.kind[i] == kind and slots.place[i] == Place.LOCAL)
        last = max(i for i, one in enumerate(program.instructions) if isinstance(one, Attention))
        attention = program.instructions[last]
        changed = replace(attention, fresh=np.append(attention.fresh, slot))
        return {"instructions": (*program.instructions[:last], changed, *program.instructions[last + 1 :])}

    refused(with_program(good.plan, 0, clear), good, "which is an input")


def test_copy_onto_its_own_source(good):
    """A copy whose parts overlap depends on the order in which bytes are moved."""

    def collide(program):
        copy = next(one for one in program.instructions if isinstance(one, Copy) and program.slots.place[one.src[0]])
        offset = program.slots.offset.copy()
        offset[copy.dst[0]] = offset[copy.src[0]] + 4
        size = {"arena_bytes": program.arena_bytes + 4}
        return {"slots": replace(program.slots, offset=offset), **size}

    plan = planned(causal_batch(30, 7), ranks=3, strategy="ring", wire="float32")
    refused(with_program(plan.plan, 1, collide, "backward"), plan, "writes slot .* over slot")


def sent_twice(plan: Plan, overwrite_at: int) -> Plan:
    """Rank 0 sends its KV to rank 1 at step 1 and, from the same slots, once more at step 2; instruction `overwrite_at`
    of those below writes the slots again."""

    def sender(program):
        launch = next(one for one in program.instructions if isinstance(one, CommLaunch))
        send = int(np.flatnonzero(launch.send)[0])
        run = launch.slots[launch.ptr[send] : launch.ptr[send + 1]]
        once_more = CommLaunch(2, [1], [1], [0, len(run)], run)
        pack = next(one for one in program.instructions if isinstance(one, Copy))
        order = list(program.instructions)
        order[order.index(launch) + 1 : order.index(launch) + 1] = [once_more]
        waits = [CommWait(1), CommWait(2)]
        order = [one for one in order if not isinstance(one, CommWait)]
        first_use = 1 + max(i for i, one in enumerate(order) if isinstance(one, CommLaunch))
        tail = [*waits[:overwrite_at], pack, *waits[overwrite_at:]]
        return {"instructions": (*order[: first_use + 1], *tail, *order[first_use + 1 :])}

    def receiver(program):
        launch = next(one for one in program.instructions if isinstance(one, CommLaunch))
        receive = int(np.flatnonzero(launch.send == 0)[0])
        run = launch.slots[launch.ptr[receive] : launch.ptr[receive + 1]]
        slots = program.slots
        columns = {name: np.append(getattr(slots, name), getattr(slots, name)[run]) for name in SLOT_COLUMNS}
        shift = program.arena_bytes - int(slots.offset[run[0]])
        columns["offset"][len(slots) :] += shift
        again = CommLaunch(2, [0], [0], [0, len(run)], np.arange(len(slots), len(slots) + len(run)))
        at = program.instructions.index(launch) + 1
        instructions = (*program.instructions[:at], again, *program.instructions[at:], CommWait(2))
        arena_bytes = program.arena_bytes + 4096
        return {"slots": replace(slots, **columns), "instructions": instructions, "arena_bytes": arena_bytes}

    return with_program(with_program(plan, 0, sender), 1, receiver)


def test_memory_of_two_sends_in_flight():
    """Slots sent at two steps are in use until both have been waited for, not only the first."""
    one = planned(causal_batch(16), ranks=2, strategy="ring")
    check_plan(sent_twice(one.plan, 2), one.layout.blocks, one.batch)  # written after both waits
    refused(sent_twice(one.plan, 1), one, "writes slot .* that a transfer in flight uses")
    refused(sent_twice(one.plan, 0), one, "writes slot .* that a transfer in flight uses")


def test_sum_into_the_wire_dtype(good):
    def into_wire(program):
        at, reduction = next(
            (i, x) for i, x in enumerate(program.instructions) if isinstance(x, Reduction) and len(x.src)
        )
        changed = replace(reduction, src=reduction.dst, dst=reduction.src)
        return {"instructions": (*program.instructions[:at], changed, *program.instructions[at + 1 :])}

    refused(with_program(good.plan, 0, into_wire, "backward"), good, "which is not in fp32")


def test_numbers_out_of_range_are_plan_errors(good):
    bad = with_program(good.plan, 0, edit(Copy, lambda copy: [replace(copy, src=copy.src + 10_000)]))
    refused(bad, good, "src.* expected 0 to")


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
        check_plan(made.plan, made.layout.blocks, made.batch)
