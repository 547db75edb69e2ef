"""One batch by one method on one cluster: planned, simulated, and kept on disk."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import dyncp
from dyncp.cost.layer import Model, context_cluster
from dyncp.cost.roofline import Roofline
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import FORWARD, PASSES
from dyncp.ir.shape import AttentionShape
from dyncp.planner.partition.nets import loads
from dyncp.reproduce.constants import ALL_COSTS
from dyncp.reproduce.data import Lengths, batch_of
from dyncp.reproduce.methods import Method
from dyncp.simulator.iteration import Training, iteration
from dyncp.simulator.run import Simulation, simulate
from dyncp.strategies import Planned, build
from dyncp.strategies.padding import as_run

SOURCES = ("ir", "masks", "cost", "planner", "strategies", "simulator", "reproduce")
SHAPE = AttentionShape(8, 2, 128)  # of the micro-benchmarks, bfloat16
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A batch, and where.

    Args:
        lengths: of its sequences.
        mask: as in `data.batch_of`.
        cluster: its devices; with a model there are `training.tp` for each rank of the plan.
        shape: of the attention.
        training: how the 8B model is trained around the attention; None for the attention alone.
    """

    lengths: Lengths
    mask: str
    cluster: Cluster
    shape: AttentionShape = SHAPE
    training: Training | None = None

    @property
    def seen(self) -> Cluster:
        """The ranks of the plan."""
        return self.cluster if self.training is None else context_cluster(self.cluster, self.training.tp)


@dataclass(frozen=True, slots=True)
class Bench:
    """Measures cases, and keeps what it found under a folder; the same case is not computed twice."""

    folder: Path

    def measure(self, case: Case, method: Method) -> dict[str, Figures]:
        """Figures by the name of the set of constants (those of the fastest variant): seconds and bytes of both
        passes, seconds of planning, pairs of the ranks and, with a model, seconds of an iteration.

        What is kept belongs to the sources: another version of the planner or of the model computes anew.
        """
        key = json.dumps(
            [
                asdict(case),
                asdict(method),
                [[costs.name, dict(costs.overheads)] for costs in ALL_COSTS],
                source_digest(),
            ]
        )
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        if path.exists():
            kept: dict[str, Figures] = json.loads(path.read_text(encoding="utf-8"))
            return kept
        found = compute(case, method)
        self.folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(path)
        return found


@cache
def source_digest() -> str:
    """Of the code that results depend on."""
    root = Path(dyncp.__file__).parent
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            if folder != "reproduce" or path.name in ("cases.py", "data.py", "methods.py", "constants.py"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def compute(case: Case, method: Method) -> dict[str, Figures]:
    """See `Bench.measure`."""
    best: dict[str, Figures] = {}
    for variant in range(len(method.variants)):
        planned = None
        for costs in ALL_COSTS:
            cluster = costs.cluster(case.seen, method.kernel(case.mask), method.split)
            if planned is None or method.timed:
                planned, planning_s = plan_of(case, method, variant, cluster)
            result = simulate(planned.plan, cluster, Roofline.of(cluster))
            if costs.name not in best or result.total_s < best[costs.name]["total_s"]:
                best[costs.name] = figures_of(case, planned, result, planning_s)
    return best


def plan_of(case: Case, method: Method, variant: int, cluster: Cluster) -> tuple[Planned, float]:
    """The plan, and the seconds that it took."""
    batch = batch_of(case.lengths, case.mask)
    if method.padded:
        batch = as_run(batch, method.strategy)
    started = time.perf_counter()
    planned = build(batch, case.shape, cluster, method.strategy, method.variants[variant])
    return planned, time.perf_counter() - started


def figures_of(case: Case, planned: Planned, result: Simulation, planning_s: float) -> Figures:
    """All that the figures need."""
    found: Figures = {
        "total_s": result.total_s,
        "planning_s": planning_s,
        "block_tokens": int(planned.plan.header.tokens.tokens.max()),
        "compute_imbalance": compute_imbalance(planned),
    }
    for pass_ in PASSES:
        found[pass_.name] = (result.forward if pass_ is FORWARD else result.backward).figures()
    if case.training is not None:
        whole = iteration(result, planned.plan.header, Model(), case.cluster, case.training, sum(case.lengths))
        found["iteration"] = whole.figures()
    return found


def compute_imbalance(planned: Planned) -> float:
    """The most that a rank computes, over the mean, in pairs; of several masks the worst."""
    blocks, comp_rank, ranks = planned.layout.blocks, planned.layout.placement.comp_rank, planned.plan.header.ranks
    worst = 1.0
    for mask in range(len(blocks.mask_names)):
        part = blocks.of_mask(mask)
        work = loads(np.tile(blocks.pairs[part], blocks.groups), comp_rank[:, part].ravel(), ranks)
        worst = max(worst, float(work.max() / work.mean()))
    return worst
