"""Mt-KaHyPar, a multilevel hypergraph partitioner, as a pure function.

What its version 1.7 needs for that, found by trying: one thread; a deterministic preset (the others give other results
from call to call of one process, whatever the seed and the number of threads); no vertex of weight 0 (fixed ones are
moved, or the process dies); limits that add up to the vertices' weight; and sums that fit 32 bits. The deterministic
presets do not look at the seed, but at the order of the vertices.

It is an optional dependency, and is imported when it is first needed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.planner.partition.ownership import longest_first

COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # of a terminal, in the solver's messages
LARGEST = 2**30  # bound on the sum of all weights
PRESETS = {
    "deterministic": "DETERMINISTIC_QUALITY",
    # yardsticks, not reproducible
    "default": "DEFAULT",
    "highest_quality": "HIGHEST_QUALITY",
}


@dataclass(frozen=True, slots=True, eq=False)
class Hypergraph:
    """Pins in no order, and the weights of vertices and edges."""

    pin_edge: Ints  # int64[P]
    pin_vertex: Ints  # int64[P]
    edge_weight: Ints  # float64[E]
    vertex_weight: Ints  # float64[V]
    fixed: Ints  # int64[V], the part that a vertex must be in, -1 for any


class Partition(NamedTuple):
    """The answer of the solver."""

    part: Ints  # int64[V]
    failure: str = ""  # why it gave up, on one line; then the vertices are only dealt out evenly


def _module() -> Any:
    try:
        import mtkahypar
    except ModuleNotFoundError as error:
        raise ValueError("the partitioner 'hypergraph' needs Mt-KaHyPar: pip install 'dyncp[hypergraph]'") from error
    return mtkahypar


@cache
def _library() -> Any:
    return _module().initialize(1, False)


def partition(graph: Hypergraph, limits: Ints, shuffle: int | None = None, preset: str = "deterministic") -> Partition:
    """The part of each vertex, with a small sum of edge weight x (parts touched - 1).

    Args:
        graph: at least one vertex; finite weights of at least 0, of any scale.
        limits: float64[K], the largest vertex weight of each part. The solver may fail to keep them.
        shuffle: the seed of another order of the vertices than the given one.
        preset: a key of `PRESETS`; only with "deterministic" the same arguments give the same answer.

    Raises:
        ValueError: Mt-KaHyPar is not installed.
    """
    if len(limits) == 1:  # the process would die
        return Partition(np.zeros(len(graph.vertex_weight), "int64"))
    order = np.arange(len(graph.vertex_weight))
    if shuffle is not None:
        order = np.random.default_rng(shuffle).permutation(order)
    place = np.argsort(order)
    mtkahypar = _module()
    weights, most = _whole_weights(graph.vertex_weight[order], limits)
    context = _library().context_from_preset(getattr(mtkahypar.PresetType, PRESETS[preset]))
    context.set_partitioning_parameters(len(limits), 0.03, mtkahypar.Objective.KM1)  # limits stand in for the epsilon
    context.set_individual_target_block_weights(most.tolist())
    context.logging = False
    pins, edges = _edges(graph, place, len(limits))
    try:
        hypergraph = _library().create_hypergraph(context, len(weights), len(pins), pins, weights.tolist(), edges)
        if np.any(graph.fixed >= 0):
            hypergraph.add_fixed_vertices(graph.fixed[order].tolist(), len(limits))
        mtkahypar.set_seed(0)
        return Partition(np.array(hypergraph.partition(context).get_partition(), "int64")[place])
    except (mtkahypar.InvalidInputError, mtkahypar.UnsupportedOperationError, mtkahypar.SystemError) as error:
        evenly = longest_first(graph.vertex_weight, len(limits))
        failure = " ".join(COLOUR.sub("", str(error)).split())
        return Partition(np.where(graph.fixed >= 0, graph.fixed, evenly), failure)


def _whole_weights(weights: Ints, limits: Ints) -> tuple[Ints, Ints]:
    """Weights and limits as integers of bounded sums, int64[V] and int64[K]."""
    total = float(weights.sum())
    limits = np.minimum(limits, total)  # a higher one means nothing
    scale = LARGEST / 2 / (max(total, float(limits.sum())) or 1.0)
    whole = np.maximum(1, np.rint(weights * scale)).astype("int64")
    most = np.ceil(limits * scale).astype("int64")
    short = int(whole.sum() - most.sum())  # by rounding: tight limits, or many vertices of nearly no weight
    return whole, most + max(0, -(-short // len(most)))


def _edges(graph: Hypergraph, place: Ints, parts: int) -> tuple[list[list[int]], list[int]]:
    """Pins and integer weight of each edge that can be cut; vertex v has number place[v]."""
    by_edge = np.argsort(graph.pin_edge, kind="stable")
    sizes = np.bincount(graph.pin_edge, minlength=len(graph.edge_weight))
    pins = np.split(place[graph.pin_vertex[by_edge]], np.cumsum(sizes)[:-1])
    cuttable = np.flatnonzero(sizes > 1)
    weights = graph.edge_weight[cuttable]
    largest_cut = float(weights @ (np.minimum(sizes[cuttable], parts) - 1))
    scaled = np.maximum(1, np.rint(weights * (LARGEST / (largest_cut or 1.0)))).astype("int64")
    return [pins[edge].tolist() for edge in cuttable], scaled.tolist()
