"""Computation and transfers in time: what every rank does in order, over links that are shared.

A rank works through its operations one after the other. Messages travel beside them: a message sets out when both of
its ranks have launched it, takes the latency of its link, and then moves at a rate that it shares with the messages
under way. Rates are max-min fair: every message has as much as the ports that it goes through can give it, equal parts
where they are short. Inside a node a message goes through the sender's way out and the receiver's way in; between nodes
through those of both to the network and through those of their nodes, which their ranks share, and is no faster than
one message can be.

This is an event-driven simulation of a fluid model: between two events all rates are constant. It has no chance in it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.cluster import Cluster
from dyncp.jit import jit, lean_jit

WORK, LAUNCH, WAIT = range(3)  # kinds of operations
COMPUTING, WAITING, DONE = range(3)  # what a rank is at
NONE = -1
FASTEST = 1e30  # bytes/s
HIDDEN, EXPOSED, LATE, IDLE = range(4)  # rows of Played.spent


class Operations(NamedTuple):
    """What every rank does in order. An operation first takes its seconds; then a LAUNCH starts the messages of its
    group, and a WAIT waits for them. A group is what one rank launches at once, and waits for at once."""

    ptr: Ints  # int64[R + 1], bounds of the ranks
    kind: Ints  # int64[n]
    seconds: Ints  # float64[n]
    group: Ints  # int64[n], of LAUNCH and WAIT


class Messages(NamedTuple):
    """What moves: each message is in a group of its sender and in one of its receiver."""

    src: Ints  # int64[m]
    dst: Ints  # int64[m]
    size_bytes: Ints  # float64[m]
    src_group: Ints  # int64[m]
    dst_group: Ints  # int64[m]


class Played(NamedTuple):
    """What happened when."""

    start: Ints  # float64[n], of each operation
    stop: Ints  # float64[n]
    sent: Ints  # float64[m], when both sides of each message were there
    arrived: Ints  # float64[m]
    spent: (
        Ints  # float64[4, R], seconds: transfers while it computes (HIDDEN), waiting for transfers (EXPOSED), waiting
    )
    # for a peer that has not launched them yet (LATE), and nothing more to do while others have (IDLE)

    @property
    def makespan_s(self) -> float:
        """When the last rank is done."""
        return float(self.stop.max(initial=0.0))


class Links(NamedTuple):
    """Ports and latencies of each message."""

    port: Ints  # int64[m, 4], the ports that it goes through
    ports: Ints  # int64[m], how many
    latency_s: Ints  # float64[m]
    cap: Ints  # float64[m], bytes/s that one message has at most
    capacity: Ints  # float64[ports], bytes/s


def play(operations: Operations, messages: Messages, cluster: Cluster, cores: float = np.inf) -> Played:
    """Let all ranks run.

    Args:
        operations: of all ranks.
        messages: between them.
        cluster: its links.
        cores: how many ranks compute at once at full speed; more of them share.

    Raises:
        ValueError: ranks that wait for each other forever.
    """
    links = links_of(messages, cluster)
    groups = int(max(operations.group.max(initial=NONE), messages.src_group.max(initial=NONE))) + 1
    groups = max(groups, int(messages.dst_group.max(initial=NONE)) + 1)
    of_group = np.concatenate([messages.src_group, messages.dst_group])
    by_group = np.argsort(of_group, kind="stable") % max(len(messages.src), 1)
    group_ptr = np.concatenate([[0], np.cumsum(np.bincount(of_group, minlength=groups))])
    count, ranks = len(operations.kind), cluster.ranks
    start, stop = np.zeros(count), np.zeros(count)
    sent, arrived = np.zeros(len(messages.src)), np.full(len(messages.src), np.inf)
    spent = np.zeros((4, ranks))
    stuck = run(
        tuple(operations), tuple(messages), tuple(links), by_group, group_ptr, float(cores), start, stop, sent, arrived,
        spent,
    )  # fmt: skip
    if stuck != NONE:
        raise ValueError(f"rank {stuck} waits for a transfer that never ends: its peer does not launch it")
    return Played(start, stop, sent, arrived, spent)


def links_of(messages: Messages, cluster: Cluster) -> Links:
    """The ports: of each rank out and in, inside its node and to other nodes, then of each node out and in."""
    ranks, nodes, per_node = cluster.ranks, cluster.nodes, cluster.ranks_per_node
    src, dst = messages.src, messages.dst
    far = src // per_node != dst // per_node
    rates = cluster.intra_bytes_per_s, cluster.rank_bytes_per_s, cluster.inter_bytes_per_s, cluster.flow_bytes_per_s
    intra, rank, inter, flow = (min(rate, FASTEST) for rate in rates)  # infinite rates have no shares
    near = np.stack([src, ranks + dst, np.zeros_like(src), np.zeros_like(src)], axis=1)
    nic, gate = 2 * ranks, 4 * ranks
    across = [nic + src, nic + ranks + dst, gate + src // per_node, gate + nodes + dst // per_node]
    return Links(
        np.where(far[:, None], np.stack(across, axis=1), near),
        np.where(far, 4, 2),
        np.where(far, cluster.inter_latency_s, cluster.intra_latency_s),
        np.where(far, min(flow, rank, inter), intra),
        np.repeat([intra, rank, inter], [2 * ranks, 2 * ranks, 2 * nodes]),
    )


@jit
def run(
    operations: tuple[Ints, ...],
    messages: tuple[Ints, ...],
    links: tuple[Ints, ...],
    by_group: Ints,
    group_ptr: Ints,
    cores: float,
    start: Ints,
    stop: Ints,
    sent: Ints,
    arrived: Ints,
    spent: Ints,
) -> int:
    """The events, one after the other; fills in the last five arguments, which are the fields of `Played`.

    The first three are the fields of the types of these names; `by_group`, int64[2 m], has the messages of each group,
    group by group, and `group_ptr`, int64[groups + 1], its bounds. Returns a rank that waits forever, or NONE.
    """
    ptr, kind, seconds, group = operations
    src, dst, size_bytes, _, _ = messages
    port, ports, latency_s, cap, capacity = links
    ranks, count = len(ptr) - 1, len(src)
    at, state, left = ptr[:-1].copy(), np.full(ranks, DONE), np.zeros(ranks)
    open_ = np.diff(group_ptr)  # messages of each group that have not arrived
    sides = np.zeros(count, np.int64)  # how many ranks have launched each message
    ready, remaining, rate = np.zeros(count), size_bytes.copy(), np.zeros(count)
    coming, active = np.empty(count, np.int64), np.empty(count, np.int64)  # not yet over the latency; moving
    flying = np.zeros(ranks, np.int64)  # messages of each rank under way
    comings = actives = 0
    users, share, tight, spare = (np.zeros(len(capacity)), np.zeros(len(capacity)), np.zeros(len(capacity), np.bool_),
                                  np.zeros(len(capacity)))  # fmt: skip
    unsettled = np.empty(count, np.int64)
    now, computing = 0.0, 0
    waking = np.arange(ranks)
    wakings = ranks
    for rank in range(ranks):
        if at[rank] < ptr[rank + 1]:
            state[rank], left[rank] = COMPUTING, seconds[at[rank]]
            start[at[rank]] = 0.0
            computing += 1
    while True:
        # let ranks go on that have ended an operation
        changed = False
        while wakings > 0:
            wakings -= 1
            rank = waking[wakings]
            while state[rank] != DONE:
                i = at[rank]
                if state[rank] == COMPUTING:
                    if left[rank] > 0.0:
                        break
                    computing -= 1
                    state[rank] = WAITING
                    if kind[i] == LAUNCH:
                        for n in range(group_ptr[group[i]], group_ptr[group[i] + 1]):
                            message = by_group[n]
                            sides[message] += 1
                            if sides[message] == 2:
                                sent[message] = now
                                ready[message] = now + latency_s[message]
                                coming[comings] = message
                                comings += 1
                                flying[src[message]] += 1
                                flying[dst[message]] += 1
                if kind[i] == WAIT and open_[group[i]] > 0:
                    break
                stop[i] = now
                at[rank] += 1
                if at[rank] == ptr[rank + 1]:
                    state[rank] = DONE
                else:
                    state[rank], left[rank] = COMPUTING, seconds[at[rank]]
                    start[at[rank]] = now
                    computing += 1
        # when something ends next
        speed = 1.0 if computing <= cores else cores / computing
        step = np.inf
        over = True  # of all ranks; what nobody waits for may still travel
        for rank in range(ranks):
            over = over and state[rank] == DONE
            if state[rank] == COMPUTING:
                step = min(step, left[rank] / speed)
        for n in range(comings):
            step = min(step, ready[coming[n]] - now)
        for n in range(actives):
            step = min(step, remaining[active[n]] / rate[active[n]])
        if step == np.inf:
            for rank in range(ranks):
                if state[rank] != DONE:
                    return rank
            return NONE
        step = max(step, 0.0)
        now += step
        least = 1e-12 * max(now, 1e-3)  # of time: what ends within it ends now
        for rank in range(ranks):
            if state[rank] == COMPUTING:
                left[rank] -= step * speed
                if left[rank] <= least * speed:
                    left[rank] = 0.0
                    waking[wakings] = rank
                    wakings += 1
                if flying[rank] > 0:
                    spent[HIDDEN, rank] += step
            elif state[rank] == WAITING:
                spent[EXPOSED if flying[rank] > 0 else LATE, rank] += step
            elif not over:
                spent[IDLE, rank] += step
        kept = 0
        for n in range(actives):
            message = active[n]
            remaining[message] -= step * rate[message]
            if remaining[message] <= least * rate[message]:
                arrived[message] = now
                changed = True
                for side in range(2):
                    rank = src[message] if side == 0 else dst[message]
                    flying[rank] -= 1
                    which = messages[3][message] if side == 0 else messages[4][message]
                    open_[which] -= 1
                    if open_[which] == 0 and state[rank] == WAITING and group[at[rank]] == which:
                        waking[wakings] = rank
                        wakings += 1
            else:
                active[kept] = message
                kept += 1
        actives = kept
        kept = 0
        for n in range(comings):
            message = coming[n]
            if ready[message] - now <= least:
                active[actives] = message
                actives += 1
                changed = True
            else:
                coming[kept] = message
                kept += 1
        comings = kept
        if changed:
            fair_rates(active, actives, port, ports, cap, capacity, rate, users, share, tight, spare, unsettled)


@lean_jit
def fair_rates(
    active: Ints,
    actives: int,
    port: Ints,
    ports: Ints,
    cap: Ints,
    capacity: Ints,
    rate: Ints,
    users: Ints,
    share: Ints,
    tight: Ints,
    spare: Ints,
    unsettled: Ints,
) -> None:
    """Max-min fair rates of the first `actives` messages in `active`, into `rate`; the rest is scratch memory.

    In rounds: a message that cannot use its share of the tightest of its ports has its cap; a port that is the tightest
    one for all of its messages is shared equally among them; what these leave is shared in the next round.
    """
    for i in range(len(capacity)):
        users[i], spare[i] = 0.0, capacity[i]
    for n in range(actives):
        message = active[n]
        unsettled[n] = message
        for k in range(ports[message]):
            users[port[message, k]] += 1
    left = actives
    while left > 0:
        for i in range(len(capacity)):
            share[i] = spare[i] / users[i] if users[i] > 0 else np.inf
            tight[i] = True
        capped = False
        for n in range(left):
            message = unsettled[n]
            least = np.inf
            for k in range(ports[message]):
                least = min(least, share[port[message, k]])
            rate[message] = least
            if cap[message] <= least:
                capped = True
            for k in range(ports[message]):
                if share[port[message, k]] > least:
                    tight[port[message, k]] = False
        kept = 0
        for n in range(left):
            message = unsettled[n]
            settled = capped and cap[message] <= rate[message]
            for k in range(0 if capped else ports[message]):
                i = port[message, k]
                settled = settled or (tight[i] and share[i] == rate[message])
            if settled:
                rate[message] = min(rate[message], cap[message])
                for k in range(ports[message]):
                    i = port[message, k]
                    users[i] -= 1
                    spare[i] = max(spare[i] - rate[message], 0.0)
            else:
                unsettled[kept] = message
                kept += 1
        left = kept
