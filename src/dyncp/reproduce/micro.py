"""Figures of one attention layer: times (13, 14) and what the planner does (17 to 20)."""

from __future__ import annotations

from dyncp.ir.batch import DEFAULT_MASK
from dyncp.reproduce import published
from dyncp.reproduce.cases import Case, Figures
from dyncp.reproduce.constants import HARDWARE, PUBLISHED
from dyncp.reproduce.data import batch_of
from dyncp.reproduce.methods import BASELINES, BLOCK_TOKENS, DYNCP, PAPER_NAMES, TE, Method, at_block, dcp
from dyncp.reproduce.points import NAMES, RATIO, At, Point, Scope

PASS_NAMES = ("forward", "backward")
DCP_BLOCK_TOKENS = 2048  # of DCP as published, where one size has to do: it plans several times faster than with 512
EPSILONS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
WINDOWS = (1024, 2048, 4096, 8192, 16384, 32768)
MS, MB = 1e-3, 1e6


def measured(
    scope: Scope, method: Method, dataset: str, mask: str, scale: float = 1.0, costs: str = PUBLISHED.name
) -> list[Figures]:
    """Of each batch of a point."""
    cases = [Case(lengths, mask, scope.cluster) for lengths in scope.lengths(dataset, scale)]
    return [scope.bench.measure(case, method)[costs] for case in cases]


def figure_13(scope: Scope) -> list[Point]:
    """Attention under causal masks."""
    return bars(scope, (*BASELINES, dcp(DCP_BLOCK_TOKENS), DYNCP), ("causal",))


def figure_14(scope: Scope) -> list[Point]:
    """Attention under sparse masks."""
    return bars(
        scope, (TE, dcp(DCP_BLOCK_TOKENS), DYNCP), scope.few([mask for mask in scope.masks if mask != "causal"])
    )


def bars(scope: Scope, methods: tuple[Method, ...], masks: tuple[str, ...] | list[str]) -> list[Point]:
    """Both passes of every method, under the constants of the published implementations."""
    points = []
    for mask in masks:
        for dataset in scope.datasets:
            for scale in scope.scales:
                for method in methods:
                    results = measured(scope, method, dataset, mask, scale)
                    name = PAPER_NAMES.get(method.name, method.name)
                    for pass_ in PASS_NAMES:
                        at = {"data": NAMES[dataset], "mask": mask, "scale": f"{scale:g}", "pass": pass_}
                        ours = tuple(one[pass_]["makespan_s"] / MS for one in results)
                        points.append(
                            Point(at, method.name, ours, published.micro_ms(name, dataset, scale, mask, pass_))
                        )
    return points


def between_mb(results: list[Figures]) -> tuple[float, ...]:
    """Bytes between nodes, forward."""
    return tuple(one["forward"]["size_bytes"]["inter"] / MB for one in results)


def moved_mb(results: list[Figures]) -> tuple[float, ...]:
    """Bytes between ranks, forward."""
    return tuple(sum(one["forward"]["size_bytes"].values()) / MB for one in results)


def block_sizes(scope: Scope) -> tuple[int, ...]:
    """The paper's; in a quick look the larger ones, which are planned faster."""
    return BLOCK_TOKENS[-2:] if scope.quick else BLOCK_TOKENS


def figure_17(scope: Scope) -> list[Point]:
    """Bytes between nodes against the block size: causal, LongAlign."""
    said = published.paper()["text"]["17"]
    dataset, points = scope.datasets[-1], []
    ring = between_mb(measured(scope, TE, dataset, "causal"))
    auto = between_mb(measured(scope, at_block("auto"), dataset, "causal", costs=HARDWARE.name))
    points.append(Point({"block": "none"}, "TE", ring, said["TE"], "MB"))
    points.append(Point({"block": "auto"}, DYNCP.name, auto, sum(said["DCP"]) / 2, "MB"))
    for block_tokens in block_sizes(scope):
        for method in (dcp(block_tokens), at_block(block_tokens)):
            ours = between_mb(measured(scope, method, dataset, "causal", costs=HARDWARE.name))
            points.append(Point({"block": str(block_tokens)}, method.name, ours, sum(said["DCP"]) / 2, "MB"))
    return points


def figure_18(scope: Scope) -> list[Point]:
    """Seconds of planning against the block size."""
    said = published.paper()["text"]["18"]
    points = []
    for mask in scope.few(scope.masks):
        for block_tokens in block_sizes(scope):
            value = said["causal"].get(str(block_tokens)) if mask == "causal" else said["sparse"]
            paper = sum(value) / 2 if isinstance(value, list) else value
            for method in (dcp(block_tokens), at_block(block_tokens, portfolio=True)):
                results = measured(scope, method, scope.datasets[-1], mask, costs=HARDWARE.name)
                ours = tuple(one["planning_s"] for one in results)
                points.append(Point({"mask": mask, "block": str(block_tokens)}, method.name, ours, paper, "s"))
    return points


def figure_19(scope: Scope) -> list[Point]:
    """Bytes between ranks against the density of the mask: lambda with windows of several sizes, and causal."""
    dataset, points = scope.datasets[-1], []
    masks = [f"window:{window}" for window in scope.few(WINDOWS)] + ["causal"]
    for mask in masks:
        at: At = {"mask": mask, "density": f"{mean_density(scope, dataset, mask):.3f}"}
        for method in (dcp(DCP_BLOCK_TOKENS), at_block("auto")):
            ours = moved_mb(measured(scope, method, dataset, mask, costs=HARDWARE.name))
            points.append(Point(at, method.name, ours, unit="MB"))
    return points


def mean_density(scope: Scope, dataset: str, mask: str) -> float:
    """Over all batches."""
    pairs = [
        (sequence.masks[DEFAULT_MASK].pairs(), sequence.length * (sequence.length + 1) // 2)
        for lengths in scope.lengths(dataset)
        for sequence in batch_of(lengths, mask).sequences
    ]
    return sum(pair[0] for pair in pairs) / sum(pair[1] for pair in pairs)


def figure_20(scope: Scope) -> list[Point]:
    """Bytes between nodes against the imbalance that is allowed: causal, LongAlign."""
    points = []
    for epsilon in scope.few(EPSILONS):
        for method in (dcp(DCP_BLOCK_TOKENS, epsilon=epsilon), at_block("auto", epsilon)):
            results = measured(scope, method, scope.datasets[-1], "causal", costs=HARDWARE.name)
            reached = sum(one["compute_imbalance"] for one in results) / len(results)
            paper = None
            for at, value in published.paper()["text"]["20"].items():
                if at != "unit" and abs(reached - float(at)) < 0.15:
                    paper = value
            at = {"allowed": f"{1 + epsilon:g}"}
            points.append(Point(at, method.name, between_mb(results), paper, "MB"))
            imbalances = tuple(one["compute_imbalance"] for one in results)
            points.append(Point(at, f"{method.name}: imbalance reached", imbalances, unit=RATIO))
    return points
