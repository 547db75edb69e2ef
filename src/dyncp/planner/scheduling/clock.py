"""How long a schedule takes, before it is lowered: what the simulator would say of its plan, but for the copies and
reductions of each step, which are taken together."""

from __future__ import annotations

import numpy as np

from dyncp.cost.fluid import LAUNCH, WAIT, WORK, Messages, Operations, play
from dyncp.cost.model import CostModel, Work
from dyncp.ir.arrays import Ints
from dyncp.ir.blocks import Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.plan import PASSES, Pass, side_token_bytes
from dyncp.ir.schedule import Schedule, Transfers
from dyncp.ir.shape import AttentionShape
from dyncp.planner.scheduling.needs import totals
from dyncp.planner.sorting import pointers


class Clock:
    """Times schedules of one placement under one mask; `moved` is the options `keep` and `wire`."""

    def __init__(
        self,
        blocks: Blocks,
        placement: Placement,
        mask: int,
        shape: AttentionShape,
        cluster: Cluster,
        cost: CostModel,
        moved: tuple[str, str],
    ) -> None:
        self.mask, self.shape, self.cluster, self.cost, self.moved = mask, shape, cluster, cost, moved
        part, tokens = blocks.of_mask(mask), blocks.tokens.tokens
        self._tokens = tokens
        self._comp_rank = placement.comp_rank[:, part].ravel().astype("int64")
        columns = np.arange(len(blocks)), tokens[blocks.q_block], tokens[blocks.kv_block], blocks.pairs
        self._items = [np.tile(column[part], blocks.groups) for column in columns]  # Work without `launch`

    def seconds(self, comp_step: Ints, transfers: Transfers) -> tuple[float, float]:
        """Forward and backward of a schedule: the steps of the computation blocks, int32[C], and the transfers of this
        mask."""
        forward, backward = (self._pass_seconds(pass_, comp_step, transfers) for pass_ in PASSES)
        return forward, backward

    def _pass_seconds(self, pass_: Pass, comp_step: Ints, transfers: Transfers) -> float:
        ranks, cost = self.cluster.ranks, self.cost
        steps = int(max(comp_step.max(initial=0), transfers.step.max(initial=0))) + 1
        step, messages = self._messages(pass_, transfers, steps)
        groups, count = int(messages.dst_group.max(initial=-1)) + 1, len(step)
        groups = max(groups, int(messages.src_group.max(initial=-1)) + 1)
        both = np.concatenate([messages.src_group, messages.dst_group])
        group_rank, group_step = np.zeros((2, groups), "int64")
        group_rank[both] = np.concatenate([messages.src, messages.dst])
        group_step[both] = np.tile(step, 2)
        # what is sent is packed, what comes is put away or merged: a copy each
        moved = totals(both, np.tile(messages.size_bytes, 2), groups)
        move_s = cost.move_s(2 * moved) + 2 * cost.instruction_s if count else np.zeros(0)
        launch = self._comp_rank * steps + joined(group_rank, group_step, ranks, steps)[self._comp_rank, comp_step]
        work_s = cost.attention_s(pass_, self.shape, Work(launch, *self._items), ranks * steps)
        busy = np.flatnonzero(work_s > 0)
        # in each step: wait for its messages, launch those of the next, compute
        order_key = np.concatenate(
            [
                (group_rank * steps + group_step) * 3,
                (group_rank * steps + group_step - 1) * 3 + 1,
                busy * 3 + 2,
            ]
        )
        order = np.argsort(order_key, kind="stable")
        numbers = np.arange(groups)
        operations = Operations(
            pointers(order_key[order] // (3 * steps), ranks),
            np.repeat([WAIT, LAUNCH, WORK], [groups, groups, len(busy)])[order],
            np.concatenate([np.zeros(groups), move_s, work_s[busy]])[order],
            np.concatenate([numbers, numbers, np.zeros(len(busy), "int64")])[order],
        )
        return play(operations, messages, self.cluster, cost.cores).makespan_s

    def _messages(self, pass_: Pass, transfers: Transfers, steps: int) -> tuple[Ints, Messages]:
        """The step of each message, and the messages: all that one rank sends another at a step. A group is what a rank
        sends and receives at a step."""
        ranks = self.cluster.ranks
        of_side = np.array(side_token_bytes(self.shape, pass_, *self.moved), "float64")
        sizes = of_side[transfers.side] * self._tokens[transfers.block]
        used = np.flatnonzero(sizes > 0)
        src, dst, step = (getattr(transfers, name)[used].astype("int64") for name in ("src", "dst", "step"))
        key, of = np.unique((step * ranks + src) * ranks + dst, return_inverse=True)
        step, pair = np.divmod(key, ranks * ranks)
        src, dst = np.divmod(pair, ranks)
        _, group = np.unique(np.concatenate([src, dst]) * steps + np.tile(step, 2), return_inverse=True)
        size_bytes = totals(of, sizes[used], len(key))
        return step, Messages(src, dst, size_bytes, group[: len(key)], group[len(key) :])


def joined(rank: Ints, step: Ints, ranks: int, steps: int) -> Ints:
    """int64[R, steps]: the step in which each rank computes what is due at a step, where `rank` and `step` say when it
    has messages: lowering joins steps between which a rank has nothing to wait for or to launch."""
    parted = np.zeros((ranks, steps + 1), bool)
    parted[rank, step] = True
    parted[:, :-1] |= parted[:, 1:]
    parted[rank, step] = True
    found: Ints = np.maximum.accumulate(np.where(parted[:, :steps], np.arange(steps), 0), axis=1)
    return found


def schedule_seconds(
    blocks: Blocks,
    placement: Placement,
    schedule: Schedule,
    shape: AttentionShape,
    cluster: Cluster,
    cost: CostModel,
    moved: tuple[str, str],
) -> float:
    """Forward and backward of all layers: of each mask, times the layers that use it. `moved` is `keep` and `wire`."""
    total = 0.0
    for mask, weight in enumerate(blocks.mask_weights):
        clock = Clock(blocks, placement, mask, shape, cluster, cost, moved)
        transfers = schedule.transfers.take(schedule.transfers.mask == mask)
        total += weight * sum(clock.seconds(schedule.comp_step[:, blocks.of_mask(mask)].ravel(), transfers))
    return total
