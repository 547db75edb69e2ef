"""Traces: what Perfetto needs of them."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator.planning import any_planned, one_planned

from dyncp.cost.roofline import Roofline
from dyncp.report.summary import plan_figures
from dyncp.simulator import simulate
from dyncp.simulator.trace import LANES, trace_events, write_trace


def traced(planned, cluster):
    simulation = simulate(planned.plan, cluster, Roofline.of(cluster))
    return simulation, trace_events(simulation, planned.plan)


def complete(events):
    return [event for event in events if event["ph"] == "X"]


def check_tracks(events, end_us):
    """Within a track events follow one another, from 0 to the end."""
    tracks = {}
    for event in complete(events):
        tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    slack = 1e-9 * end_us + 1e-6
    for spans in tracks.values():
        spans.sort()
        assert spans[0][0] >= -slack and spans[-1][1] <= end_us + slack
        assert all(start <= stop for start, stop in spans)
        assert all(a[1] <= b[0] + slack for a, b in pairwise(spans))
    return tracks


@given(st.integers(0, 10**6))
def test_events_nest_and_lie_within_the_makespan(seed):
    simulation, events = traced(*any_planned(seed))
    ends = [sum(played.makespan_s for played in one.played) for one in (simulation.forward, simulation.backward)]
    tracks = check_tracks(events, sum(ends) * 1e6)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert named == set(tracks)


def test_a_file_in_the_trace_event_format(tmp_path):
    planned, cluster = one_planned("dynamic")
    simulation, events = traced(planned, cluster)
    path = tmp_path / "trace.json"
    write_trace(simulation, planned.plan, path)
    data = json.loads(path.read_text())
    assert data["traceEvents"] == events
    for event in events:
        assert {"name", "ph", "pid", "tid", "args"} <= set(event) and event["ph"] in ("X", "M")
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"node 0", "node 1"}
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {f"rank {rank}" for rank in range(4)} <= names and "rank 0 sends" in names
    assert all(event["pid"] == event["tid"] // LANES // 2 for event in complete(events))


def test_durations_and_bytes_are_the_simulations():
    planned, cluster = one_planned("zigzag")
    simulation, events = traced(planned, cluster)
    for name, found in (("forward", simulation.forward), ("backward", simulation.backward)):
        mine = [event for event in complete(events) if event["args"]["pass"] == name]
        attention = sum(event["dur"] for event in mine if event["cat"] == "attention")
        assert attention == pytest.approx(found.attention_s * cluster.ranks * 1e6)
        waits = sum(event["dur"] for event in mine if event["cat"] == "wait")
        assert waits == pytest.approx((found.exposed_s + found.late_s) * cluster.ranks * 1e6)
        sent = [event for event in mine if event["cat"] == "message" and event["name"].startswith("to ")]
        received = [event for event in mine if event["cat"] == "message" and event["name"].startswith("from ")]
        assert sum(event["args"]["bytes"] for event in sent) == sum(found.size_bytes.values())
        assert sum(event["args"]["bytes"] for event in received) == sum(found.size_bytes.values())
        far = sum(event["args"]["bytes"] for event in sent if event["args"]["link"] == "inter")
        assert far == found.size_bytes["inter"]
    figures = plan_figures(planned.plan)
    steps = {event["args"]["step"] for event in complete(events) if event["cat"] == "launch"}
    assert figures["messages"] and min(steps) >= 1
    starts = {event["args"]["pass"]: event["ts"] for event in reversed(complete(events))}
    assert starts["forward"] == 0.0
    assert starts["backward"] == pytest.approx(simulation.forward.makespan_s * 1e6)
