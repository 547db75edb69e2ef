"""Mt-KaHyPar, a multilevel hypergraph partitioner, as a pure function.

What its version 1.7 needs for that, found by trying: one thread; a deterministic preset (the others give other results
from call to call of one process, whatever the seed and the number of threads); no vertex of weight 0 (fixed ones are
moved, or the process dies); and sums that fit 32 bits. The deterministic presets do not look at the seed, but at the
order of the vertices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mtkahypar
import numpy as np

from dyncp.ir.arrays import Ints

LARGEST = 2**30  # bound on the sum of all weights


@dataclass(frozen=True, slots=True, eq=False)
class Hypergraph:
    """Pins in no order, and the weights of vertices and edges."""

    pin_edge: Ints  # int64[P]
    pin_vertex: Ints  # int64[P]
    edge_weight: Ints  # float64[E]
    vertex_weight: Ints  # float64[V]
    fixed: Ints  # int64[V], the part that a vertex must be in, -1 for any


@cache
def _library() -> Any:
    return mtkahypar.initialize(1, False)


def partition(graph: Hypergraph, limits: Ints, shuffle: int | None = None) -> Ints:
    """int64[V]: the part of each vertex, with a small sum of edge weight x (parts touched - 1).

    Args:
        graph: at least one vertex.
        limits: float64[K], the largest vertex weight of each part. The solver may fail to keep them.
        shuffle: the seed of another order of the vertices than the given one.
    """
    order = np.arange(len(graph.vertex_weight))
    if shuffle is not None:
        order = np.random.default_rng(shuffle).permutation(order)
    place = np.argsort(order)
    scale = LARGEST / 2 / max(float(graph.vertex_weight.sum()), float(np.sum(limits)), 1.0)
    weights = np.maximum(1, np.rint(graph.vertex_weight[order] * scale)).astype("int64")
    context = _library().context_from_preset(mtkahypar.PresetType.DETERMINISTIC_QUALITY)
    context.set_partitioning_parameters(len(limits), 0.03, mtkahypar.Objective.KM1)  # limits stand in for the epsilon
    context.set_individual_target_block_weights(np.ceil(np.asarray(limits) * scale).astype("int64").tolist())
    context.logging = False
    pins, edge_weights = _edges(graph, place, len(limits))
    hypergraph = _library().create_hypergraph(context, len(weights), len(pins), pins, weights.tolist(), edge_weights)
    if np.any(graph.fixed >= 0):
        hypergraph.add_fixed_vertices(graph.fixed[order].tolist(), len(limits))
    mtkahypar.set_seed(0)
    return np.array(hypergraph.partition(context).get_partition(), "int64")[place]


def _edges(graph: Hypergraph, place: Ints, parts: int) -> tuple[list[list[int]], list[int]]:
    """Pins and integer weight of each edge that can be cut; vertex v has number place[v]."""
    by_edge = np.argsort(graph.pin_edge, kind="stable")
    sizes = np.bincount(graph.pin_edge, minlength=len(graph.edge_weight))
    pins = np.split(place[graph.pin_vertex[by_edge]], np.cumsum(sizes)[:-1])
    cuttable = np.flatnonzero(sizes > 1)
    weights = graph.edge_weight[cuttable]
    largest_cut = float(weights @ (np.minimum(sizes[cuttable], parts) - 1))
    scaled = np.maximum(1, np.rint(weights * (LARGEST / max(largest_cut, 1.0)))).astype("int64")
    return [pins[edge].tolist() for edge in cuttable], scaled.tolist()
