"""A plan's time on a modelled cluster, and what it goes into.

What is modelled: computation and memory moves by a cost model, one after the other on each rank; messages beside them,
with latency and fair shares of links, from the moment both ranks have launched them (`cost/fluid.py`). What is not:
switches beyond the nodes' own links, protocols and congestion, computation slowed down by transfers on the same device,
ranks that differ, and the model around attention (see `iteration.py` for that).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dyncp.cost.fluid import EXPOSED, HIDDEN, IDLE, LATE, Played, play
from dyncp.cost.model import CostModel
from dyncp.ir.arrays import Ints
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import PASSES, Pass, Plan
from dyncp.simulator.program import LABELS, Track, track_of


@dataclass(frozen=True, slots=True, eq=False)
class PassResult:
    """One pass of one attention layer; of several masks the sum over masks, times the layers that use each.

    Seconds with `mean` are means over ranks. On every rank attention, moves, launches, exposed, late and idle add up
    to the makespan.

    Args:
        makespan_s: until the last rank is done.
        attention_s, move_s, launch_s: computing, copying and reducing, and launching transfers, mean.
        slowest_attention_s: attention of the rank that has most.
        exposed_s: waiting while transfers are under way, mean.
        hidden_s: transfers under way while the rank computes, mean.
        hideable_s: the most that could be hidden: of each rank the shorter of its transfers and its computation, mean.
        late_s: waiting for a peer that has not launched its side yet, mean.
        idle_s: done, while others are not, mean.
        size_bytes: by class of link, `intra` and `inter`.
        peak_bytes: scratch memory of the rank with most (arena and what is kept).
        tracks, played: the details, one for each mask.
    """

    makespan_s: float
    attention_s: float
    slowest_attention_s: float
    move_s: float
    launch_s: float
    exposed_s: float
    hidden_s: float
    hideable_s: float
    late_s: float
    idle_s: float
    size_bytes: dict[str, int]
    peak_bytes: int
    tracks: tuple[Track, ...]
    played: tuple[Played, ...]

    @property
    def hidden_share(self) -> float:
        """What part of the communication that could hide does; 1 without any."""
        return self.hidden_s / self.hideable_s if self.hideable_s > 0 else 1.0

    def figures(self) -> dict[str, Any]:
        """All of it but the details, for JSON."""
        names = [name for name in self.__slots__ if name not in ("tracks", "played")]
        return {name: getattr(self, name) for name in names} | {"hidden_share": self.hidden_share}


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """A plan on a modelled cluster."""

    forward: PassResult
    backward: PassResult

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return self.forward.makespan_s + self.backward.makespan_s


def simulate(plan: Plan, cluster: Cluster, cost: CostModel) -> Simulation:
    """Run a plan on a modelled cluster; the same arguments give the same result.

    Args:
        plan: of as many nodes and ranks as the cluster has.
        cluster: links.
        cost: what instructions take.

    Raises:
        ValueError: another number of ranks, or a plan that does not end.
    """
    header = plan.header
    if (header.nodes, header.ranks_per_node) != (cluster.nodes, cluster.ranks_per_node):
        raise ValueError(
            f"the plan is for {header.nodes} x {header.ranks_per_node} ranks, the cluster has {cluster.nodes} x "
            f"{cluster.ranks_per_node}: simulate it on the cluster it was made for"
        )
    return Simulation(*(_simulate_pass(plan, pass_, cluster, cost) for pass_ in PASSES))


def _simulate_pass(plan: Plan, pass_: Pass, cluster: Cluster, cost: CostModel) -> PassResult:
    tracks = tuple(track_of(plan, mask, pass_, cost) for mask in range(len(plan.header.mask_names)))
    played = tuple(play(track.operations, track.messages, cluster, cost.cores) for track in tracks)
    weights = plan.header.mask_weights
    times = [rank_seconds(*both) for both in zip(tracks, played, strict=True)]  # by mask, float64[8, R]
    total = np.sum([weight * time for weight, time in zip(weights, times, strict=True)], axis=0)
    attention, move, launch, hidden, exposed, late, idle, hideable = total.mean(axis=1).tolist()
    far, near = 0.0, 0.0
    for weight, track in zip(weights, tracks, strict=True):
        crosses = track.messages.src // cluster.ranks_per_node != track.messages.dst // cluster.ranks_per_node
        far += weight * float(track.messages.size_bytes[crosses].sum())
        near += weight * float(track.messages.size_bytes[~crosses].sum())
    programs = [rank[mask] for rank in plan.programs for mask in range(len(tracks))]
    peaks = [getattr(program, pass_.name) for program in programs]
    return PassResult(
        makespan_s=sum(weight * one.makespan_s for weight, one in zip(weights, played, strict=True)),
        attention_s=attention,
        slowest_attention_s=float(total[0].max(initial=0.0)),
        move_s=move,
        launch_s=launch,
        exposed_s=exposed,
        hidden_s=hidden,
        hideable_s=hideable,
        late_s=late,
        idle_s=idle,
        size_bytes={"intra": round(near), "inter": round(far)},
        peak_bytes=max(program.arena_bytes + program.kept_bytes for program in peaks),
        tracks=tracks,
        played=played,
    )


def rank_seconds(track: Track, played: Played) -> Ints:
    """float64[8, R]: attention, moves, launches, hidden, exposed, late, idle and hideable seconds of each rank."""
    operations = track.operations
    ranks = len(operations.ptr) - 1
    rank = np.repeat(np.arange(ranks), np.diff(operations.ptr))
    took = played.stop - played.start
    busy = [np.bincount(rank, np.where(track.label == label, took, 0.0), ranks) for label in range(len(LABELS) - 1)]
    hidden, exposed = played.spent[HIDDEN], played.spent[EXPOSED]
    hideable = np.minimum(hidden + exposed, np.sum(busy, axis=0))
    return np.array([*busy, hidden, exposed, played.spent[LATE], played.spent[IDLE], hideable])
