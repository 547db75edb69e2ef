"""What lowering sorts and counts before it begins."""

from __future__ import annotations

import numpy as np
import pytest
from builders import SHAPE, causal_batch, random_layout

from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import BACKWARD, FORWARD, KEEP, Kind
from dyncp.planner.lowering.tables import PassTable, Traffic, Work, bounds_of
from dyncp.planner.sorting import sort_by
from dyncp.strategies.api import Options


@pytest.mark.parametrize("stops", [(3,), (5, 2), (1, 40, 7), (4, 10**9, 3), (10**12, 1, 2)])
def test_sort_by_is_stable_and_counts_the_first_column_most(stops):
    rng = np.random.default_rng(len(stops))
    for count in (0, 1, 200):
        columns = [rng.integers(0, stop, count) for stop in stops]
        assert sort_by(*columns).tolist() == np.lexsort(columns[::-1]).tolist()


def test_bounds_of():
    assert bounds_of(np.array([1, 1, 2]), np.array([0, 3, 3])).tolist() == [0, 1, 2, 3]
    assert bounds_of(np.empty(0), np.empty(0)).tolist() == [0]


def test_traffic_has_everything_once():
    rng = np.random.default_rng(1)
    cluster, options = Cluster(2, 3), Options(block_tokens=5)
    layout = random_layout(rng, causal_batch(31, 17, 4), cluster, options)
    moves, blocks = layout.schedule.transfers, layout.blocks
    traffic = Traffic.of(moves, 0, blocks, cluster.ranks)
    rows = [
        (message["step"], message["src"], message["dst"], side, cell // SHAPE.groups, cell % SHAPE.groups)
        for message in traffic.messages
        for side, cell in traffic.transfers[message["start"] : message["stop"]]
    ]
    columns = (moves.step, moves.src, moves.dst, moves.side, moves.block, moves.group)
    assert rows == sorted(zip(*(column.tolist() for column in columns), strict=True))
    for rank in range(cluster.ranks):
        own = traffic.messages[traffic.by_rank[traffic.ptr[rank] : traffic.ptr[rank + 1]]]
        ends = [(m["step"], m["dst"] if m["src"] == rank else m["src"], m["src"] == rank) for m in own]
        assert ends == sorted(ends)
        assert len(own) == np.sum((traffic.messages["src"] == rank) | (traffic.messages["dst"] == rank))


def test_work_has_everything_once():
    rng = np.random.default_rng(2)
    cluster, options = Cluster(2, 3), Options(block_tokens=5)
    layout = random_layout(rng, causal_batch(31, 17, 4), cluster, options)
    blocks, comp_rank = layout.blocks, layout.placement.comp_rank
    work = Work.of(blocks, layout.placement, layout.schedule, 0, cluster.ranks)
    for rank in range(cluster.ranks):
        index = work.comps[work.comps_ptr[rank] : work.comps_ptr[rank + 1]]
        assert index.tolist() == np.flatnonzero((comp_rank == rank).any(axis=0)).tolist()
        step, row, q_cell, kv_cell = work.rows[work.ptr[rank] : work.ptr[rank + 1]].T
        comp, group = index[row], q_cell % blocks.groups
        assert (q_cell // blocks.groups).tolist() == blocks.q_block[comp].tolist()
        assert kv_cell.tolist() == (blocks.kv_block[comp] * blocks.groups + group).tolist()
        assert step.tolist() == layout.schedule.comp_step[group, comp].tolist()
        rows = list(zip(step.tolist(), group.tolist(), comp.tolist(), strict=True))
        assert rows == sorted(set(rows)) and len(rows) == np.sum(comp_rank == rank)


@pytest.mark.parametrize("keep", KEEP)
def test_a_table_is_its_pass(keep):
    for pass_ in (FORWARD, BACKWARD):
        table = PassTable.of(pass_, keep)
        assert (tuple(table.reads), tuple(table.writes)) == (pass_.reads, pass_.writes)
        for side, kinds in pass_.moves.items():
            kept = KEEP[keep] if pass_ is BACKWARD else ()
            assert [kind for kind in table.moves[side] if kind >= 0] == [kind for kind in kinds if kind not in kept]
        assert [Kind(k) for k in np.flatnonzero(table.kinds["is_kept"])] == list(KEEP[keep] if pass_ is FORWARD else ())
