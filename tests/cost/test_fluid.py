"""Messages over shared links: cases computed by hand, and what holds whatever is played."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dyncp.cost.fluid import (
    EXPOSED,
    HIDDEN,
    IDLE,
    LATE,
    LAUNCH,
    WAIT,
    WORK,
    Messages,
    Operations,
    fair_rates,
    links_of,
    play,
)
from dyncp.ir.cluster import Cluster


def cluster(nodes=1, ranks_per_node=4, intra=100.0, inter=100.0, intra_latency=0.0, inter_latency=0.0, flow=math.inf):
    return Cluster(nodes, ranks_per_node, intra, inter, intra_latency, inter_latency, flow_bytes_per_s=flow)


def operations(*ranks):
    """Each rank a list of ("work", seconds), ("launch", group) or ("wait", group)."""
    kinds = {"work": WORK, "launch": LAUNCH, "wait": WAIT}
    rows = [row for rank in ranks for row in rank]
    return Operations(
        np.cumsum([0, *map(len, ranks)]),
        np.array([kinds[word] for word, _ in rows], "int64"),
        np.array([value if word == "work" else 0.0 for word, value in rows], "float64"),
        np.array([0 if word == "work" else value for word, value in rows], "int64"),
    )


def messages(*rows):
    """Each (src, dst, bytes, group of the sender, group of the receiver)."""
    columns = np.array(rows, "float64").reshape(-1, 5).T
    src, dst, size, out, into = (np.ascontiguousarray(column) for column in columns)
    return Messages(src.astype("int64"), dst.astype("int64"), size, out.astype("int64"), into.astype("int64"))


def exchange(*rows, on=None):
    """Played messages (src, dst, bytes) that all ranks launch at once, in one group each, and wait for."""
    on = on or cluster()
    each = [[("launch", rank), ("wait", rank)] for rank in range(on.ranks)]
    return play(operations(*each), messages(*((src, dst, size, src, dst) for src, dst, size in rows)), on)


def test_two_messages_share_the_way_out_of_a_rank():
    played = exchange((0, 1, 100.0), (0, 2, 50.0))
    # 50 B/s each until the shorter one has arrived after 1 s; the other has 50 B left, at 100 B/s
    assert played.arrived.tolist() == pytest.approx([1.5, 1.0])


def test_two_messages_share_the_way_in():
    assert exchange((0, 2, 100.0), (1, 2, 100.0)).arrived.tolist() == pytest.approx([2.0, 2.0])


def test_ways_in_and_out_are_apart():
    assert exchange((0, 1, 100.0), (1, 0, 100.0)).arrived.tolist() == pytest.approx([1.0, 1.0])


def test_shares_are_max_min_fair():
    # rank 0's way out has three messages, so 33.3 B/s each; what that leaves of the way in of rank 3 is the fourth's
    played = exchange((0, 1, 100.0), (0, 2, 100.0), (0, 3, 100.0), (4, 3, 100.0), on=cluster(ranks_per_node=5))
    assert played.arrived.tolist() == pytest.approx([3.0, 3.0, 3.0, 1.5])


def test_three_messages_along_a_chain_get_half_each():
    played = exchange((0, 1, 100.0), (0, 2, 100.0), (3, 2, 100.0))
    assert played.arrived.tolist() == pytest.approx([2.0, 2.0, 2.0])


def test_nodes_share_their_link_and_a_message_has_a_cap():
    two = cluster(nodes=2, ranks_per_node=2)
    assert exchange((0, 2, 100.0), (1, 3, 100.0), on=two).arrived.tolist() == pytest.approx([2.0, 2.0])
    capped = cluster(nodes=2, ranks_per_node=2, flow=25.0)
    assert exchange((0, 2, 100.0), (1, 3, 100.0), on=capped).arrived.tolist() == pytest.approx([4.0, 4.0])
    # three messages between nodes: caps of 30 leave none more than its cap, and 10 of the link unused
    third = cluster(nodes=2, ranks_per_node=3, flow=30.0)
    assert exchange((0, 3, 30.0), (1, 4, 60.0), (2, 5, 90.0), on=third).arrived.tolist() == pytest.approx([1, 2, 3])


def test_a_rank_has_a_limit_of_its_own_between_nodes():
    own = replace(cluster(nodes=2, ranks_per_node=3), rank_bytes_per_s=40.0)
    # two messages of rank 0 share its 40 B/s; that of rank 1 has 40 of the node's 100
    played = exchange((0, 3, 20.0), (0, 4, 20.0), (1, 5, 40.0), on=own)
    assert played.arrived.tolist() == pytest.approx([1.0, 1.0, 1.0])
    inside = exchange((0, 1, 100.0), on=own)
    assert inside.arrived.tolist() == pytest.approx([1.0])


def test_a_message_within_a_node_does_not_use_the_nodes_link():
    played = exchange((0, 1, 100.0), (0, 2, 100.0), on=cluster(nodes=2, ranks_per_node=2))
    assert played.arrived.tolist() == pytest.approx([1.0, 1.0])


def test_latency_comes_before_the_bytes():
    slow = cluster(nodes=2, ranks_per_node=1, inter_latency=0.5)
    assert exchange((0, 1, 100.0), on=slow).arrived.tolist() == pytest.approx([1.5])
    assert exchange((0, 1, 100.0), on=cluster(intra_latency=0.25)).arrived.tolist() == pytest.approx([1.25])


def test_a_peer_that_launches_late():
    ranks = [[("launch", 0), ("wait", 0)], [("work", 2.0), ("launch", 1), ("wait", 1)]]
    played = play(operations(*ranks), messages((0, 1, 100.0, 0, 1)), cluster(ranks_per_node=2))
    assert played.sent.tolist() == pytest.approx([2.0]) and played.arrived.tolist() == pytest.approx([3.0])
    assert played.spent[:, 0].tolist() == pytest.approx([0.0, 1.0, 2.0, 0.0])
    assert played.spent[LATE, 0] == pytest.approx(2.0) and played.spent[EXPOSED].tolist() == pytest.approx([1.0, 1.0])


def test_computation_hides_transfers():
    rank = [[("launch", r), ("work", 5.0 + r), ("wait", r)] for r in range(2)]
    played = play(operations(*rank), messages((0, 1, 100.0, 0, 1)), cluster(ranks_per_node=2))
    assert played.makespan_s == pytest.approx(6.0)
    assert played.spent[HIDDEN].tolist() == pytest.approx([1.0, 1.0])
    assert played.spent[EXPOSED].tolist() == pytest.approx([0.0, 0.0])
    assert played.spent[IDLE].tolist() == pytest.approx([1.0, 0.0])


def test_ranks_share_cores():
    both = operations([("work", 1.0)], [("work", 2.0)])
    played = play(both, messages(), cluster(ranks_per_node=2), cores=1)
    # half speed each until the first is done after 2 s; the second then has 1 s left
    assert played.stop.tolist() == pytest.approx([2.0, 3.0])
    assert play(both, messages(), cluster(ranks_per_node=2), cores=2).stop.tolist() == pytest.approx([1.0, 2.0])


def test_a_peer_that_never_launches_is_an_error():
    ranks = [[("launch", 0), ("wait", 0)], [("work", 1.0)]]
    with pytest.raises(ValueError, match="rank 0 waits for a transfer that never ends"):
        play(operations(*ranks), messages((0, 1, 100.0, 0, 1)), cluster(ranks_per_node=2))


def test_two_ranks_that_wait_for_each_other_are_an_error():
    ranks = [[("launch", 0), ("wait", 0), ("launch", 1)], [("launch", 3), ("wait", 3), ("launch", 2)]]
    rows = messages((0, 1, 1.0, 0, 2), (1, 0, 1.0, 3, 1))
    with pytest.raises(ValueError, match="never ends"):
        play(operations(*ranks), rows, cluster(ranks_per_node=2))


def test_no_bytes_take_the_latency_alone():
    assert exchange((0, 1, 0.0), on=cluster(intra_latency=0.25)).arrived.tolist() == pytest.approx([0.25])
    assert exchange((0, 1, 0.0)).arrived.tolist() == [0.0]


def test_infinite_rates():
    free = cluster(nodes=2, ranks_per_node=2, intra=math.inf, inter=math.inf)
    played = exchange((0, 1, 1e12), (0, 2, 1e12), (3, 2, 1e12), on=free)
    assert played.arrived.tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)


def test_nothing_to_do():
    played = play(operations([], []), messages(), cluster(ranks_per_node=2))
    assert played.makespan_s == 0.0 and not played.spent.any()


def test_what_nobody_waits_for_is_not_idle_time():
    ranks = [[("launch", 0), ("work", 0.5)], [("launch", 1)]]
    played = play(operations(*ranks), messages((0, 1, 100.0, 0, 1)), cluster(ranks_per_node=2))
    assert played.makespan_s == pytest.approx(0.5) and played.arrived.tolist() == pytest.approx([1.0])
    assert played.spent[IDLE].tolist() == pytest.approx([0.0, 0.5])


@st.composite
def any_program(draw):
    """A few rounds of work and messages between random ranks."""
    nodes, per_node = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ranks = nodes * per_node
    number = st.sampled_from([0.0, 0.5, 1.0, 3.0])
    each, rows = [[] for _ in range(ranks)], []
    for step in range(draw(st.integers(1, 3))):
        group = [step * ranks + rank for rank in range(ranks)]
        for _ in range(draw(st.integers(0, 6))):
            src, dst = draw(st.integers(0, ranks - 1)), draw(st.integers(0, ranks - 1))
            if src != dst:
                rows.append((src, dst, 100 * draw(number), group[src], group[dst]))
        for rank in range(ranks):
            before, during = draw(number), draw(number)
            each[rank] += [("work", before), ("launch", group[rank]), ("work", during), ("wait", group[rank])]
    flow = draw(st.sampled_from([math.inf, 30.0]))
    latency = draw(st.sampled_from([0.0, 0.1]))
    return operations(*each), messages(*rows), cluster(nodes, per_node, 100.0, 50.0, latency, 2 * latency, flow)


@given(any_program(), st.sampled_from([math.inf, 2.0]))
def test_time_adds_up_and_no_link_is_faster_than_it_is(program, cores):
    todo, moved, on = program
    played = play(todo, moved, on, cores)
    rank = np.repeat(np.arange(on.ranks), np.diff(todo.ptr))
    busy = np.bincount(rank, np.where(todo.kind == WAIT, 0.0, played.stop - played.start), on.ranks)
    total = busy + played.spent[EXPOSED] + played.spent[LATE] + played.spent[IDLE]
    np.testing.assert_allclose(total, played.makespan_s, rtol=1e-9, atol=1e-9)
    assert (played.spent[HIDDEN] <= busy + 1e-9).all()
    assert (np.bincount(rank, todo.seconds, on.ranks) <= played.makespan_s + 1e-9).all()
    assert todo.seconds.sum() <= played.makespan_s * min(cores, on.ranks) + 1e-9
    for node in range(on.nodes):
        far = moved.src // on.ranks_per_node != moved.dst // on.ranks_per_node
        out = moved.size_bytes[far & (moved.src // on.ranks_per_node == node)].sum()
        assert out / on.inter_bytes_per_s <= played.makespan_s + 1e-9
    for end in (moved.src, moved.dst):
        near = np.bincount(end[~far], moved.size_bytes[~far], on.ranks)
        assert (near / on.intra_bytes_per_s <= played.makespan_s + 1e-9).all()
    cap = np.where(far, min(on.flow_bytes_per_s, on.inter_bytes_per_s), on.intra_bytes_per_s)
    latency = np.where(far, on.inter_latency_s, on.intra_latency_s)
    assert (played.arrived - played.sent >= moved.size_bytes / cap + latency - 1e-9).all()
    again = play(todo, moved, on, cores)
    assert all(np.array_equal(a, b) for a, b in zip(played, again, strict=True))


def filled(links, count):
    """Max-min fair rates by their definition: all rise alike, until a port is full or a message has its cap."""
    uses = np.zeros((len(links.capacity), count), bool)
    for message in range(count):
        uses[links.port[message, : links.ports[message]], message] = True
    rate, rising = np.zeros(count), np.ones(count, bool)
    while rising.any():
        step = (links.cap - rate)[rising].min()
        for mine, capacity in zip(uses, links.capacity, strict=True):
            if (mine & rising).any():
                step = min(step, (capacity - rate[mine].sum()) / (mine & rising).sum())
        rate[rising] += step
        for mine, capacity in zip(uses, links.capacity, strict=True):
            if rate[mine].sum() >= capacity * (1 - 1e-9):
                rising &= ~mine
        rising &= rate < links.cap * (1 - 1e-9)
    return rate


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=20), st.sampled_from([math.inf, 7.0, 20.0]))
def test_rates_are_max_min_fair(pairs, flow):
    on = cluster(nodes=3, ranks_per_node=3, intra=100.0, inter=50.0, flow=flow)
    moved = messages(*((src, dst, 1.0, 0, 0) for src, dst in pairs if src != dst))
    count, links = len(moved.src), links_of(moved, on)
    rate, ports = np.zeros(count), len(links.capacity)
    scratch = (np.zeros(ports), np.zeros(ports), np.zeros(ports, bool), np.zeros(ports), np.zeros(count, "int64"))
    fair_rates(np.arange(count), count, links.port, links.ports, links.cap, links.capacity, rate, *scratch)
    np.testing.assert_allclose(rate, filled(links, count), rtol=1e-6)
