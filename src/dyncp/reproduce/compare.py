"""What the paper leaves open: every strategy against dyncp, and where the speed-up comes from.

A speed-up is the time of a rival over dyncp's on the same batch, forward and backward of one attention layer; over
batches it is the geometric mean. Static strategies do the same with every batch (`ulysses` and `data_parallel` deal out
whole sequences); `sequence_level` and `balanced_qo_home` plan each batch, too. Only attention counts: a rank that holds
more tokens than others, as in `ulysses` and `data_parallel`, takes longer with the rest of the model and needs more
memory, and neither is in these figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dyncp.ir.cluster import Cluster
from dyncp.reproduce import published
from dyncp.reproduce.cases import Case
from dyncp.reproduce.constants import ALL_COSTS, HARDWARE, Costs
from dyncp.reproduce.data import BATCH_TOKENS, Lengths
from dyncp.reproduce.methods import DYNCP, RING, TE, Method, dcp, greedy, rivals
from dyncp.reproduce.micro import DCP_BLOCK_TOKENS, MS
from dyncp.reproduce.points import NAMES, RATIO, At, Point, Scope

ADAPTIVE = ("dynamic", "sequence_level", "balanced_qo_home")
DEGREES = (8, 16, 32, 64, 128, 256)
MACHINES = ("p4de", "p5", "dgx-h200")
BASELINES = ("ring", "zigzag", "double_ring, padded", "head_ring")  # the paper's; under sparse masks the last alone
BEST_BASELINE, BEST_STATIC, BEST = "best baseline", "best static", "best rival"


def total_s(scope: Scope, case: Case, method: Method, costs: str) -> float:
    """Forward and backward."""
    return float(scope.bench.measure(case, method)[costs]["total_s"])


def static() -> list[Method]:
    """Rivals that do the same with every batch."""
    return [method for method in rivals() if method.strategy not in ADAPTIVE]


def speedups(
    scope: Scope,
    at: At,
    cases: Sequence[Case],
    methods: Sequence[Method],
    paper: float | None = None,
    sets: Sequence[Costs] = ALL_COSTS,
) -> list[Point]:
    """How much longer each method takes than dyncp, under sets of constants, and the least of them. The paper's value
    is over the best of its baselines."""
    points = []
    for costs in sets:
        here = at | {"constants": costs.name}
        results = [scope.bench.measure(case, DYNCP)[costs.name] for case in cases]
        own = [float(one["total_s"]) for one in results]
        points.append(Point(here, "dyncp", tuple(seconds / MS for seconds in own)))
        for name, values in ratios(scope, cases, methods, own, costs.name).items():
            points.append(Point(here, name, values, paper if name == BEST_BASELINE else None, RATIO))
        for pass_ in ("forward", "backward"):
            share = tuple(one[pass_]["hidden_share"] for one in results)
            points.append(Point(here, f"hidden {pass_}", share, unit="share"))
    return points


def ratios(
    scope: Scope, cases: Sequence[Case], methods: Sequence[Method], own: Sequence[float], costs: str
) -> dict[str, tuple[float, ...]]:
    """Of each batch, by method; and the least of each kind of method."""
    found = {}
    for method in methods:
        times = [total_s(scope, case, method, costs) for case in cases]
        found[method.name] = tuple(a / b for a, b in zip(times, own, strict=True))
    causal = all(case.mask == "causal" for case in cases)
    kinds = {
        BEST_BASELINE: [method.name for method in methods if method.name in (BASELINES if causal else BASELINES[-1:])],
        BEST_STATIC: [method.name for method in methods if method.strategy not in ADAPTIVE],
        BEST: [method.name for method in methods if method.strategy != "dynamic"],
    }
    least = {
        kind: tuple(map(min, zip(*(found[name] for name in names), strict=True)))
        for kind, names in kinds.items()
        if names
    }
    return least | found


def every_rival(scope: Scope) -> list[Point]:
    """Every strategy, data set, scale and mask, beside the paper's speed-up over the best of its baselines."""
    methods = [*rivals(), dcp(DCP_BLOCK_TOKENS)]
    points = []
    for dataset in scope.datasets:
        for mask in scope.few(scope.masks):
            for scale in scope.scales:
                cases = [Case(lengths, mask, scope.cluster) for lengths in scope.lengths(dataset, scale)]
                at = {"data": NAMES[dataset], "mask": mask, "scale": f"{scale:g}"}
                points += speedups(scope, at, cases, methods, published.speedup(dataset, scale, mask))
    return points


def mixed(scope: Scope) -> list[Point]:
    """Batches in which the four masks take turns."""
    points = []
    for dataset in scope.datasets:
        for scale in scope.scales:
            cases = [Case(lengths, "mixed", scope.cluster) for lengths in scope.lengths(dataset, scale)]
            points += speedups(scope, {"data": NAMES[dataset], "scale": f"{scale:g}"}, cases, rivals())
    return points


def machines(scope: Scope) -> list[Point]:
    """The same batches on other machines."""
    points = []
    for name in scope.few(MACHINES):
        cluster = Cluster.preset(name, scope.cluster.nodes, scope.cluster.ranks_per_node)
        for dataset in scope.datasets:
            for mask in ("causal", "lambda"):
                cases = [Case(lengths, mask, cluster) for lengths in scope.lengths(dataset)]
                at = {"machine": name, "data": NAMES[dataset], "mask": mask}
                points += speedups(scope, at, cases, rivals(), sets=(HARDWARE,))
    return points


def degrees(scope: Scope) -> list[Point]:
    """The same tokens on more and more ranks. Rings of many ranks and sequences make large plans: two of them do."""
    points = []
    for ranks in scope.few(DEGREES[: 3 if scope.quick else None]):
        per_node = scope.cluster.ranks_per_node
        cluster = replace(scope.cluster, nodes=max(1, ranks // per_node), ranks_per_node=min(ranks, per_node))
        for dataset in scope.datasets:
            cases = [Case(lengths, "causal", cluster) for lengths in scope.lengths(dataset, 4.0)[:1]]
            points += speedups(scope, {"ranks": str(ranks), "data": NAMES[dataset]}, cases, (RING, TE))
    return points


def split(scope: Scope) -> list[Point]:
    """Where the speed-up over the best static strategy comes from.

    With S the speed-up on some batches:

        masks     S(batch) / S(the same lengths, all causal)
        lengths   S(the same lengths, all causal) / S(one causal sequence of the batch's tokens)
        the rest  S(one causal sequence of the batch's tokens): what is left where nothing varies
        schedule  dyncp with the greedy schedule over dyncp, on the batch: a part of each of the others

    The first three multiply to S(batch).
    """
    points = []
    for dataset in scope.datasets:
        for mask in scope.few(scope.masks):
            for scale in scope.few(scope.scales):
                at = {"data": NAMES[dataset], "mask": mask, "scale": f"{scale:g}"}
                for costs in ALL_COSTS:
                    points += parts(scope, at, scope.lengths(dataset, scale), mask, costs.name)
    return points


def parts(scope: Scope, at: At, batches: Sequence[Lengths], mask: str, costs: str) -> list[Point]:
    """The factors of one setting."""
    here = at | {"constants": costs}
    cases = [Case(lengths, mask, scope.cluster) for lengths in batches]
    causal = [replace(case, mask="causal") for case in cases]
    single = Case((BATCH_TOKENS,), "causal", scope.cluster)
    whole, lengths_only = ([over_static(scope, case, costs) for case in some] for some in (cases, causal))
    rest = over_static(scope, single, costs)
    slower = tuple(total_s(scope, case, greedy(), costs) / total_s(scope, case, DYNCP, costs) for case in cases)
    columns = {
        "all": tuple(whole),
        "masks": tuple(a / b for a, b in zip(whole, lengths_only, strict=True)),
        "lengths": tuple(value / rest for value in lengths_only),
        "the rest": (rest,),
        "schedule": slower,
    }
    return [Point(here, name, values, unit=RATIO) for name, values in columns.items()]


def over_static(scope: Scope, case: Case, costs: str) -> float:
    """The least that a static strategy takes longer than dyncp."""
    return min(total_s(scope, case, method, costs) for method in static()) / total_s(scope, case, DYNCP, costs)
