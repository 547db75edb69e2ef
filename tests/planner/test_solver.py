"""The solver's wrapper: weights and limits of any scale, and what happens when the solver gives up."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import mtkahypar
import numpy as np
import pytest
from builders import SHAPE, causal_batch
from hypothesis import given
from hypothesis import strategies as st

from dyncp.ir.cluster import Cluster
from dyncp.planner.blockgen import make_blocks, uniform_cut
from dyncp.planner.partition import solver
from dyncp.planner.partition.balance import unmet
from dyncp.planner.partition.hypergraph import place
from dyncp.planner.partition.refine import Limits
from dyncp.planner.partition.solver import LARGEST, Hypergraph, partition
from dyncp.strategies.api import Options


def chain(weights, edge=1.0, fixed=None):
    """Neighbours share an edge."""
    count = len(weights)
    first = np.arange(count - 1)
    return Hypergraph(
        np.concatenate([first, first]),
        np.concatenate([first, first + 1]),
        np.full(count - 1, edge),
        np.asarray(weights, "float64"),
        np.full(count, -1) if fixed is None else np.asarray(fixed),
    )


def test_the_solver_keeps_fixed_vertices_and_limits():
    """A chain of 40 vertices behind two fixed ones without weight: cut once, in the middle."""
    first = np.arange(39)
    graph = Hypergraph(
        np.concatenate([first, first, [39, 39, 40, 40]]),
        np.concatenate([first, first + 1, [40, 0, 41, 39]]),
        np.ones(41),
        np.concatenate([np.ones(40), [0, 0]]),
        np.concatenate([np.full(40, -1), [1, 0]]),
    )
    for shuffle in (None, 0, 1):
        part = partition(graph, np.full(2, 21.0), shuffle).part
        assert part[40:].tolist() == [1, 0]
        assert np.bincount(part[:40]).max() <= 21
        assert np.count_nonzero(np.diff(part[:40])) == 1


@pytest.mark.parametrize("scale", [1e-300, 1e-16, 1e-3, 1.0, 1e300])
def test_the_scale_of_weights_does_not_matter(scale):
    found = partition(chain(np.full(40, scale), edge=scale), np.full(2, 21.0 * scale))
    assert found.failure == ""
    assert np.array_equal(found.part, partition(chain(np.ones(40)), np.full(2, 21.0)).part)


def test_one_part_needs_no_solver():
    assert partition(chain([3, 2, 1]), np.full(1, 6.0)).part.tolist() == [0, 0, 0]


@given(
    weights=st.lists(st.floats(0, 1) | st.just(1e-30) | st.floats(1e9, 1e12), min_size=1, max_size=60),
    parts=st.integers(1, 9),
    epsilon=st.sampled_from([0.0, 1e-300, 1e-9, 1e-6, 0.1, 1e308, np.inf]),
)
def test_limits_always_hold_all_weights(weights, parts, epsilon):
    """Also where rounding up the small ones has made them heavier."""
    weights = np.array(weights)
    with np.errstate(over="ignore", invalid="ignore"):
        limit = np.nan_to_num((1 + epsilon) * weights.sum() / parts, posinf=np.inf)
    whole, most = solver._whole_weights(weights, np.full(parts, limit))
    assert whole.min() >= 1 and whole.sum() <= most.sum() < 2 * LARGEST
    found = partition(chain(weights), np.full(parts, limit))
    assert found.failure == ""
    assert found.part.shape == weights.shape and found.part.min() >= 0 and found.part.max() < parts


def giving_up(error):
    """A library whose solver raises."""

    def partition(context):
        raise error

    library = solver._library()
    graph = SimpleNamespace(partition=partition, add_fixed_vertices=lambda *_: None)
    return lambda: SimpleNamespace(context_from_preset=library.context_from_preset, create_hypergraph=lambda *_: graph)


MESSAGE = "\x1b[1;91m[Invalid Input] \x1b[0m Sum of weights\nis 3."


@pytest.mark.parametrize(
    "kind", [mtkahypar.InvalidInputError, mtkahypar.UnsupportedOperationError, mtkahypar.SystemError]
)
def test_when_the_solver_gives_up_vertices_are_dealt_out_evenly(monkeypatch, kind):
    monkeypatch.setattr(solver, "_library", giving_up(kind(MESSAGE)))
    found = partition(chain([5, 4, 3, 2, 1, 1], fixed=[-1, 0, -1, -1, -1, -1]), np.full(2, 9.0))
    assert found.failure == "[Invalid Input] Sum of weights is 3."  # one line, without colours
    assert found.part[1] == 0
    assert np.bincount(found.part, [5, 4, 3, 2, 1, 1]).max() <= 12


def test_other_errors_are_not_hidden(monkeypatch):
    monkeypatch.setattr(solver, "_library", giving_up(KeyError("a bug")))
    with pytest.raises(KeyError, match="a bug"):
        partition(chain([1, 1]), np.full(2, 1.0))


def test_a_placement_without_the_solver_is_balanced_and_says_so(monkeypatch):
    monkeypatch.setattr(solver, "_library", giving_up(mtkahypar.InvalidInputError(MESSAGE)))
    blocks = make_blocks(causal_batch(3000, 2000, 777), SHAPE.groups, uniform_cut(64))
    placement, notes = place(blocks, SHAPE, Cluster(2, 2), Options(epsilon=0.05, token_epsilon=0.02))
    assert notes == ("the partitioner gave up and blocks were dealt out evenly: [Invalid Input] Sum of weights is 3.",)
    assert unmet(blocks, placement, Cluster(2, 2), Limits(0.05, 0.02), blocks.work) == ()


def test_what_to_install_is_said_where_the_solver_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "mtkahypar", None)
    with pytest.raises(ValueError, match=r"^the partitioner 'hypergraph' needs Mt-KaHyPar: pip install 'dyncp\[hyper"):
        partition(chain([1, 1]), np.full(2, 1.0))
