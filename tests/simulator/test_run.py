"""Simulations of plans: what holds for every plan."""

from dataclasses import replace

import numpy as np
import pytest
from builders import SHAPE, assert_same_elsewhere, causal_batch
from hypothesis import given
from hypothesis import strategies as st
from simulator.planning import any_planned, one_planned

from dyncp import masks
from dyncp.cost.roofline import Roofline
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import FORWARD, PASSES, Attention, Copy, Kind, Reduction
from dyncp.report.summary import plan_figures
from dyncp.simulator import simulate
from dyncp.simulator.program import ATTENTION, MOVE, Track, messages_of, pairs_of, track_of
from dyncp.simulator.run import rank_seconds
from dyncp.strategies import build

seeds = st.integers(0, 10**6)


def results(simulation):
    return [simulation.forward, simulation.backward]


@given(seeds)
def test_bytes_are_those_that_the_plan_counts(seed):
    planned, cluster = any_planned(seed)
    simulation = simulate(planned.plan, cluster, Roofline.of(cluster))
    figures = plan_figures(planned.plan)
    for found, counted in zip(results(simulation), (figures, figures["backward"]), strict=True):
        near, far = found.size_bytes["intra"], found.size_bytes["inter"]
        assert near + far == pytest.approx(counted["total_bytes"], abs=1)
        assert far == pytest.approx(counted["inter_node_bytes"], abs=1)
        assert found.peak_bytes == counted["peak_buffer_bytes"]


@given(seeds)
def test_every_ranks_time_adds_up(seed):
    planned, cluster = any_planned(seed)
    for found in results(simulate(planned.plan, cluster, Roofline.of(cluster))):
        for track, played in zip(found.tracks, found.played, strict=True):
            attention, move, launch, hidden, exposed, late, idle, hideable = rank_seconds(track, played)
            total = attention + move + launch + exposed + late + idle
            np.testing.assert_allclose(total, played.makespan_s, rtol=1e-9, atol=1e-12)
            assert (hidden <= attention + move + launch + 1e-12).all() and (hidden <= hideable + 1e-12).all()
        mean = found.attention_s + found.move_s + found.launch_s + found.exposed_s + found.late_s + found.idle_s
        assert mean == pytest.approx(found.makespan_s)
        assert 0 <= found.hidden_share <= 1 + 1e-9 and found.slowest_attention_s <= found.makespan_s + 1e-12


@given(seeds)
def test_is_no_faster_than_work_and_links_allow(seed):
    planned, cluster = any_planned(seed)
    per_node = cluster.ranks_per_node
    for found in results(simulate(planned.plan, cluster, Roofline.of(cluster))):
        for track, played in zip(found.tracks, found.played, strict=True):
            most = played.makespan_s * (1 + 1e-9) + 1e-12
            operations, messages = track.operations, track.messages
            rank = np.repeat(np.arange(cluster.ranks), np.diff(operations.ptr))
            assert (np.bincount(rank, operations.seconds, cluster.ranks) <= most).all()
            far = messages.src // per_node != messages.dst // per_node
            for end in (messages.src, messages.dst):
                near_bytes = np.bincount(end[~far], messages.size_bytes[~far], cluster.ranks)
                far_bytes = np.bincount(end[far] // per_node, messages.size_bytes[far], cluster.nodes)
                assert (near_bytes / cluster.intra_bytes_per_s <= most).all()
                of_rank = np.bincount(end[far], messages.size_bytes[far], cluster.ranks)
                assert (far_bytes / cluster.inter_bytes_per_s <= most).all()
                assert (of_rank / cluster.rank_bytes_per_s <= most).all()
            cap = np.where(far, min(cluster.flow_bytes_per_s, cluster.inter_bytes_per_s), cluster.intra_bytes_per_s)
            assert (messages.size_bytes / cap <= most).all()


def numbers():
    planned, cluster = any_planned(7)
    return [found.figures() for found in results(simulate(planned.plan, cluster, Roofline.of(cluster)))]


def test_the_same_arguments_give_the_same_numbers():
    assert_same_elsewhere(numbers)


def test_a_rank_alone_takes_what_its_attention_takes():
    cluster = Cluster(1, 1, launch_s=0.0, block_s=0.0)
    plan = build(causal_batch(50), SHAPE, cluster, "data_parallel").plan
    found = simulate(plan, cluster, Roofline.of(cluster))
    assert found.forward.makespan_s == found.forward.attention_s > 0
    assert found.total_s == found.forward.makespan_s + found.backward.makespan_s
    assert found.forward.hidden_share == 1.0 and found.forward.exposed_s == 0.0


def test_masks_count_as_often_as_their_weight_says():
    def simulated(weights):
        both = {"a": masks.causal(60), "b": masks.sliding_window(60, 9)}
        names = {name: both[name] for name in weights}
        plan = build(Batch([Sequence(60, names)], weights), SHAPE, Cluster(1, 3), "ring").plan
        return simulate(plan, Cluster(1, 3), Roofline.of(Cluster(1, 3))).forward

    together, a, b = simulated({"a": 1, "b": 3}), simulated({"a": 1}), simulated({"b": 1})
    for name in ("makespan_s", "attention_s", "exposed_s", "late_s", "idle_s"):
        expected = getattr(a, name) + 3 * getattr(b, name)
        assert getattr(together, name) == pytest.approx(expected)
    assert together.size_bytes["intra"] == a.size_bytes["intra"] + 3 * b.size_bytes["intra"]


def test_more_bandwidth_is_never_slower_on_a_ring():
    planned, cluster = one_planned("ring")
    slow = replace(cluster, intra_bytes_per_s=1e8, inter_bytes_per_s=1e7)
    times = [simulate(planned.plan, on, Roofline.of(cluster)).total_s for on in (slow, cluster)]
    assert times[0] > times[1]


def test_cores_are_shared():
    planned, cluster = one_planned()
    one = replace(Roofline.of(cluster), cores=1.0)
    found = simulate(planned.plan, cluster, one).forward
    todo = sum(track.operations.seconds.sum() for track in found.tracks)
    assert found.makespan_s >= todo * (1 - 1e-9)
    assert found.makespan_s > simulate(planned.plan, cluster, Roofline.of(cluster)).forward.makespan_s


def test_another_cluster_is_refused():
    planned, _ = one_planned()
    with pytest.raises(ValueError, match=r"the plan is for 2 x 2 ranks, the cluster has 1 x 4"):
        simulate(planned.plan, Cluster(1, 4), Roofline.of(Cluster(1, 4)))


def test_every_attention_has_its_time_and_every_pair_is_counted():
    planned, cluster = one_planned("dynamic")
    simulation = simulate(planned.plan, cluster, Roofline.of(cluster))
    expected = sum(sequence.masks["default"].pairs() for sequence in planned.batch.sequences)
    for pass_, found in zip(PASSES, results(simulation), strict=True):
        track: Track = found.tracks[0]
        programs = [getattr(rank[0], pass_.name) for rank in planned.plan.programs]
        kinds = [isinstance(one, Attention) for program in programs for one in program.instructions]
        assert (track.label == ATTENTION).tolist() == kinds
        assert (track.operations.seconds[track.label == ATTENTION] > 0).all()
        pairs = sum(
            int(pairs_of(rank[0].comps)[one.comp].sum())
            for rank, program in zip(planned.plan.programs, programs, strict=True)
            for one in program.instructions
            if isinstance(one, Attention)
        )
        assert pairs == expected * planned.plan.header.shape.groups


def test_both_ends_of_a_message_must_agree():
    good = {(0, 1, 3): [(1, 0, 8), (0, 1, 8)]}
    assert messages_of(good).size_bytes.tolist() == [8.0]
    for ends in ([(1, 0, 8)], [(1, 0, 8), (0, 1, 9)], [(1, 0, 8), (1, 1, 8)]):
        with pytest.raises(ValueError, match="rank 0 and rank 1 do not agree on the message of step 3"):
            messages_of({(0, 1, 3): ends})
    assert len(messages_of({}).src) == 0


def test_copies_and_reductions_read_and_write():
    planned, _ = one_planned("dynamic")
    header, cost = planned.plan.header, Roofline(1e12, 1e6, instruction_s=0.0)
    track = track_of(planned.plan, 0, FORWARD, cost)
    sizes = {(kind, wire): header.piece_bytes(kind, bool(wire)) for kind in Kind for wire in (0, 1)}
    expected = []
    for rank in planned.plan.programs:
        slots = rank[0].forward.slots
        for one in rank[0].forward.instructions:
            if isinstance(one, (Copy, Reduction)):
                used = np.concatenate([one.src, one.dst])
                keys = zip(
                    slots.kind[used].tolist(), slots.wire[used].tolist(), slots.block[used].tolist(), strict=True
                )
                expected.append(sum(int(sizes[Kind(kind), wire][block]) for kind, wire, block in keys) / 1e6)
    assert len(expected) > 3
    assert track.operations.seconds[track.label == MOVE].tolist() == pytest.approx(expected)
