"""Figures of whole iterations: their time (15, 16), and where it goes (22)."""

from __future__ import annotations

from dyncp.cost.layer import PEAK_FLOPS_PER_S, Model
from dyncp.ir.cluster import Cluster
from dyncp.reproduce import published
from dyncp.reproduce.cases import Case, Figures
from dyncp.reproduce.constants import HARDWARE
from dyncp.reproduce.methods import DYNCP, TE, Method, dcp
from dyncp.reproduce.micro import DCP_BLOCK_TOKENS, MS
from dyncp.reproduce.points import NAMES, Point, Scope
from dyncp.simulator.iteration import Training

LONGEST = (16_384, 32_768, 65_536, 131_072)
NODES, TP = 8, 4
TRAINING = Training(PEAK_FLOPS_PER_S["p4de"], TP)


def measured(scope: Scope, method: Method, dataset: str, mask: str, longest: int) -> list[Figures]:
    """Of each batch of a point."""
    cluster, shape = Cluster.preset("p4de", NODES), Model().shape(TP)
    batches = scope.lengths(dataset, tokens=longest)
    cases = [Case(lengths, mask, cluster, shape, TRAINING) for lengths in batches]
    return [scope.bench.measure(case, method)[HARDWARE.name] for case in cases]


def figure_15(scope: Scope) -> list[Point]:
    """Iterations on the first data set."""
    return iterations(scope, scope.datasets[0])


def figure_16(scope: Scope) -> list[Point]:
    """Iterations on the second data set."""
    return iterations(scope, scope.datasets[-1])


def iterations(scope: Scope, dataset: str) -> list[Point]:
    """Seconds of an iteration of the 8B model; Megatron-LM's attention is TransformerEngine's."""
    points = []
    for mask in scope.few(scope.masks):
        for longest in scope.few(LONGEST):
            at = {"data": NAMES[dataset], "mask": mask, "longest": str(longest)}
            for method, name in ((TE, "MLM"), (dcp(DCP_BLOCK_TOKENS), "DCP"), (DYNCP, "DCP")):
                results = measured(scope, method, dataset, mask, longest)
                ours = tuple(one["iteration"]["iteration_s"] for one in results)
                said = published.iteration_s(name, dataset, longest, mask)
                points.append(Point(at, "Megatron-LM" if method is TE else method.name, ours, said, "s"))
    return points


PARTS = ("attention_s", "exposed_s", "hidden_s", "late_s", "idle_s")


def figure_22(scope: Scope) -> list[Point]:
    """Where an iteration's attention goes: milliseconds over all layers and both passes, means over ranks. Exposed,
    late and idle are time in which a rank does not compute; hidden is communication behind computation."""
    points = []
    for mask in scope.few(scope.masks):
        for method in (TE, dcp(DCP_BLOCK_TOKENS), DYNCP):
            results = measured(scope, method, scope.datasets[-1], mask, LONGEST[-1])
            for part in PARTS:
                ours = tuple(Model().layers * (one["forward"][part] + one["backward"][part]) / MS for one in results)
                at = {"mask": mask, "part": part.removesuffix("_s")}
                points.append(Point(at, "Megatron-LM" if method is TE else method.name, ours, said(mask, part, method)))
    return points


def said(mask: str, part: str, method: Method) -> float | None:
    """What the paper's text has of it: communication under sparse masks, what is hidden under causal ones."""
    values = published.paper()["text"]["22"]
    which = 0 if method is TE else 1
    if mask == "causal":
        return values["causal overlapped"][which] if part == "hidden_s" else None
    return values["sparse communication"][which] if part == "exposed_s" and mask == "lambda" else None
