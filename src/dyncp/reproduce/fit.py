"""How well the constants fit the published bars.

The constants are eight: p4de's `flow_bytes_per_s`, `flops_per_s` and `backward_rate` in `ir/cluster.py`, the three of
`constants.py`, and two of the iteration model (`GEMM_EFFICIENCY`, `OVERHEAD_S`). The first six were found by going over
a coarse grid, one constant at a time, so that the bars of the baselines come out with the least error, forward and
backward, under causal and sparse masks. DCP's own bars were not looked at.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from dyncp.cost.roofline import Roofline
from dyncp.ir.plan import Plan
from dyncp.report.table import columns
from dyncp.reproduce import published
from dyncp.reproduce.cases import Case, plan_of
from dyncp.reproduce.constants import BLOCKWISE_LAUNCH_S, LIBRARY_LAUNCH_S, PAIR_S, Costs, Overheads
from dyncp.reproduce.data import MASK_NAMES
from dyncp.reproduce.methods import BASELINES, PAPER_NAMES, TE, Method
from dyncp.reproduce.points import NAMES, Point, Scope
from dyncp.simulator.run import simulate

CLEAR = 1.1  # bars that differ by less have no order
STEPS = (0.9, 1.1)  # to either side of a constant, to see whether the fit is better there
DATASETS = {name: dataset for dataset, name in NAMES.items()}
Bar = tuple[Method, Case, str, float]  # with the data set and the scale


def outlier(point: Point) -> bool:
    """Whether the paper's bar does not go with its neighbours."""
    at = point.at
    name = PAPER_NAMES.get(point.method, point.method)
    return (name, DATASETS[at["data"]], float(at["scale"]), at["mask"], at["pass"]) in published.OUTLIERS


def errors(points: Sequence[Point]) -> list[list[str]]:
    """Rows of a table: for each method, kind of mask and pass how many bars there are, the median and the largest of
    |ours / paper - 1|, and the mean with its sign."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for point in points:
        if not outlier(point) and point.ratio is not None:
            kind = "causal" if point.at["mask"] == "causal" else "sparse"
            groups.setdefault((point.method, kind, point.at["pass"]), []).append(point.ratio - 1)
    rows = [["method", "mask", "pass", "bars", "median", "largest", "mean"]]
    for key, values in groups.items():
        sizes = [abs(value) for value in values]
        shown = (statistics.median(sizes), max(sizes))
        mean = statistics.fmean(values)
        rows.append([*key, str(len(values)), *(f"{value:.0%}" for value in shown), f"{mean:+.0%}"])
    return rows


def median_error(points: Sequence[Point], methods: Sequence[str]) -> float:
    """Of all bars of some methods, outliers aside."""
    chosen = [point for point in points if point.method in methods and not outlier(point)]
    return statistics.median(abs(point.ratio - 1) for point in chosen if point.ratio is not None)


def order_kept(points: Sequence[Point], methods: Sequence[str]) -> tuple[int, int]:
    """Of all pairs of bars of one group that clearly differ in the paper, how many are in the same order here."""
    kept = pairs = 0
    groups: dict[str, list[Point]] = {}
    for point in points:
        if point.method in methods and not outlier(point):
            groups.setdefault(str(point.at), []).append(point)
    for group in groups.values():
        for one, other in combinations(group, 2):
            assert one.paper is not None
            assert other.paper is not None
            if max(one.paper, other.paper) > CLEAR * min(one.paper, other.paper):
                pairs += 1
                kept += (one.paper < other.paper) == (one.mean < other.mean)
    return kept, pairs


def bars_of(scope: Scope) -> list[tuple[Bar, list[Plan]]]:
    """All bars of the baselines, and their plans, which do not depend on the constants."""
    found = []
    for dataset in scope.datasets:
        for scale in scope.scales:
            lengths = scope.lengths(dataset, scale)[0]
            for method in BASELINES:
                for mask in MASK_NAMES if method is TE else ("causal",):
                    case = Case(lengths, mask, scope.cluster)
                    plans = [plan_of(case, method, i, scope.cluster)[0].plan for i in range(len(method.variants))]
                    found.append(((method, case, dataset, scale), plans))
    return found


def score(bars: Sequence[tuple[Bar, list[Plan]]], values: Mapping[str, float]) -> float:
    """What the fit makes small: the mean over groups of their median error and of their mean error."""
    pair_s = values["pair_s"]
    costs = Costs(
        "tried",
        {
            "library": Overheads(values["library_launch_s"], pair_s),
            "extended": Overheads(values["blockwise_launch_s"], pair_s),
        },
    )
    groups: dict[tuple[str, str, bool], list[float]] = {}
    for (method, case, dataset, scale), plans in bars:
        cluster = replace(
            costs.cluster(case.cluster, method.kernel(case.mask), method.split),
            flow_bytes_per_s=values["flow_bytes_per_s"],
            flops_per_s=values["flops_per_s"],
            backward_rate=values["backward_rate"],
        )
        best = min((simulate(plan, cluster, Roofline.of(cluster)) for plan in plans), key=lambda one: one.total_s)
        name = PAPER_NAMES.get(method.name, method.name)
        for pass_, seconds in (("forward", best.forward.makespan_s), ("backward", best.backward.makespan_s)):
            if (name, dataset, scale, case.mask, pass_) not in published.OUTLIERS:
                error = abs(seconds * 1e3 / published.micro_ms(name, dataset, scale, case.mask, pass_) - 1)
                groups.setdefault((name, pass_, case.mask == "causal"), []).append(error)
    return statistics.fmean((statistics.median(group) + statistics.fmean(group)) / 2 for group in groups.values())


def constants(scope: Scope) -> dict[str, float]:
    """The six that were fitted to the bars of attention."""
    cluster = scope.cluster
    return {
        "flow_bytes_per_s": cluster.flow_bytes_per_s,
        "flops_per_s": cluster.flops_per_s,
        "backward_rate": cluster.backward_rate,
        "library_launch_s": LIBRARY_LAUNCH_S,
        "blockwise_launch_s": BLOCKWISE_LAUNCH_S,
        "pair_s": PAIR_S,
    }


def sensitivity(scope: Scope) -> list[list[str]]:
    """Rows of a table: what the fit makes small, at the constants and with each of them a little smaller or larger."""
    bars, values = bars_of(scope), constants(scope)
    here = score(bars, values)
    rows = [["constant", "value", *(f"error at {step:g} x" for step in (STEPS[0], 1.0, STEPS[1]))]]
    for name, value in values.items():
        below, above = (score(bars, values | {name: value * step}) for step in STEPS)
        rows.append([name, f"{value:.4g}", *(f"{error:.1%}" for error in (below, here, above))])
    return rows


def error_text(points: Sequence[Point]) -> str:
    """The tables of errors, and a line for each of the two targets."""
    names = [method.name for method in BASELINES]
    kept, pairs = order_kept(points, names)
    lines = [columns(errors(points)), ""]
    lines.append(f"baselines: {median_error(points, names):.0%} median; {kept} of {pairs} clear orders kept")
    if any(point.method == "DCP as published" for point in points):
        kept, pairs = order_kept(points, [*names, "DCP as published"])
        own = median_error(points, ["DCP as published"])
        lines.append(f"DCP as published (never fitted): {own:.0%} median; {kept} of {pairs} orders kept with baselines")
    return "\n".join(lines)
