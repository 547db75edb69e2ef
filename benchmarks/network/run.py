"""Attention of several hosts over a measured network, by every strategy, beside what the simulator predicts.

    PYTHONPATH=src python -m benchmarks.network.run [--quick] [--runs 5] [--out FILE.json]

Hosts are network namespaces of this machine; needs Linux, root, and iproute2. See docs/network-benchmark.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.network import batches, calibrate, measure, shares, table, topology
from benchmarks.network.quiet import Patience
from benchmarks.network.strips import Strips
from benchmarks.network.team import Team, TeamError, team
from dyncp.cost.profiled import Profiled
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import HAS_Q
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import Plan
from dyncp.report.summary import plan_figures
from dyncp.simulator import simulate
from dyncp.strategies import STRATEGIES, build
from dyncp.strategies.api import Options
from dyncp.strategies.padding import as_run

# Tokens cost nothing where attention is all there is, but in training they do; others let them be uneven.
# Of a long sequence in one piece the CPU kernel can skip little, of smaller blocks more.
VARIANTS = {
    "dynamic, any tokens": ("dynamic", Options(token_epsilon=1.0)),
    "data_parallel, small blocks": ("data_parallel", Options(block_tokens=256)),
}
TOLERANCE = 1e-4  # between strategies, in fp32
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}  # of rates, in bits/s


@dataclass(frozen=True, slots=True)
class Cell:
    """One strategy on one batch: its plan, and the row of figures about it."""

    plan: Plan
    lengths: tuple[int, ...]  # without padding
    row: dict[str, Any]
    runs: list[measure.Timed]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    lacking = topology.missing()
    if lacking:
        print(lacking, file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    try:
        result = benchmark(options)
    except TeamError as error:
        print(f"bench-network: {error}", file=sys.stderr)
        return 1
    print(table.result_text(result))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nwrote {options.out}")
    worst = max(row["difference"] for case in result["cases"] for row in case["strategies"] if "difference" in row)
    if not worst <= TOLERANCE:
        print(f"results of strategies differ by {worst:.1e}, more than {TOLERANCE:g}", file=sys.stderr)
        return 1
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=bits_per_s, help="of every link, as 200M, in bits/s; chosen when left out")
    parser.add_argument("--hosts", type=int, default=4, help="how many, at least 2")
    parser.add_argument("--runs", type=int, default=5, help="of every strategy on every batch")
    parser.add_argument(
        "--strategies", type=names, default=list(STRATEGIES), help="with commas between; all if left out"
    )
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait, in all, for others to be idle")
    parser.add_argument("--out", type=Path, help="the result as JSON")
    parser.add_argument("--quick", action="store_true", help="two small batches, two runs and a coarse calibration")
    options = parser.parse_args(arguments)
    if options.hosts < 2 or options.runs < 1:
        parser.error("give at least 2 hosts and 1 run")
    if options.quick:
        options.runs = min(options.runs, 2)
    return options


def bits_per_s(text: str) -> float:
    """A rate: `200M` is 200e6."""
    number = text.rstrip("kKmMgG")
    unit = text[len(number) :].lower()
    if unit not in UNITS or not number.replace(".", "", 1).isdigit() or not float(number) > 0:
        raise argparse.ArgumentTypeError(f"rate {text!r}; expected bits/s as 200M or 1.5G")
    return float(number) * UNITS[unit]


def names(text: str) -> list[str]:
    """Strategies by name."""
    wanted = text.split(",")
    unknown = [name for name in wanted if name not in STRATEGIES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown {', '.join(unknown)}; choose from {', '.join(STRATEGIES)}")
    return wanted


def benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Calibrate, plan, run and predict."""
    cases = batches.QUICK_CASES if options.quick else batches.CASES
    patience = Patience(options.patience)
    with (
        tempfile.TemporaryDirectory(prefix="dyncp-net-") as name,
        shares.shares(options.hosts, shares.share_of(options.hosts)) as held,
    ):
        if held.lacking:
            say(f"no control groups ({held.lacking}), so hosts share {os.cpu_count()} processors")
        say("measuring blocks of attention")
        patience.wait()
        times, checks = calibrate.calibrated(Path(name), held, options.quick)
        if held.lacking:
            times = calibrate.with_cores(times, len(os.sched_getaffinity(0)))
        rate = chosen_rate(options, cases[0], times)
        say(f"links of {rate['bits_per_s'] / 1e6:g} Mbit/s: {rate['why']}")
        with (
            topology.network(options.hosts, rate["bits_per_s"]) as hosts,
            team(hosts, held, Path(name)) as workers,
        ):
            say("measuring links, and how hosts slow each other down")
            link = calibrate.measure_link(workers, patience)
            alone_s, slower = calibrate.measure_slowdown(workers, batches.SHAPE, patience)
            if held.lacking:
                times = calibrate.with_cores(times, calibrate.cores_of(slower))
            cluster = calibrate.cluster_of(options.hosts, link, times, batches.SHAPE)
            bench = Bench(workers, Path(name), cluster, times, options.strategies, options.runs, patience)
            results = [bench.case(case) for case in cases]
    return {
        "hosts": options.hosts,
        "processors": os.cpu_count(),
        "machine": {"python": platform.python_version(), "torch": torch.__version__, "kernel": platform.release()},
        "rate": rate,
        "link": asdict(link),
        "share": None if held.lacking else checks["share"],
        "cores": None if math.isinf(times.cores) else times.cores,
        "slower": slower,
        "alone_s": alone_s,
        "alone_priced_s": calibrate.priced_s(times, batches.SHAPE),
        "masks": checks["masks"],
        "cluster": asdict(cluster),
        "table": asdict(times),
        "cases": results,
    }


def chosen_rate(options: argparse.Namespace, case: batches.Case, times: Profiled) -> dict[str, Any]:
    """The rate of links in bits/s, and why it is that."""
    plan = build(case.batch(), batches.SHAPE, Cluster(options.hosts, 1), "zigzag").plan
    work_s, at_once = calibrate.computation_s(plan, times), min(times.cores, options.hosts)
    ring_bytes = link_bytes(plan)
    rate = options.rate or calibrate.rate_for(ring_bytes, work_s, at_once)
    ratio = 8 * ring_bytes / rate / (work_s / at_once)
    why = (
        f"on {case.name} a ring's {ring_bytes / 1e6:.1f} MB per link take {ratio:.1f} times as long as the computation "
        f"({work_s:.2f} s, {at_once:g} hosts at once); {'asked for' if options.rate else 'chosen for that'}"
    )
    return {"bits_per_s": rate, "ratio": ratio, "why": why}


def link_bytes(plan: Plan) -> float:
    """What the host that receives most receives, forward and backward."""
    figures = plan_figures(plan)
    return float(figures["max_recv_bytes"] + figures["backward"]["max_recv_bytes"])


@dataclass(frozen=True, slots=True)
class Bench:
    """What runs a batch: hosts, a folder for files, the cluster as measured, and how often what should run."""

    workers: Team
    folder: Path
    cluster: Cluster
    times: Profiled
    strategies: Sequence[str]
    runs: int
    patience: Patience

    def case(self, case: batches.Case) -> dict[str, Any]:
        """All strategies on one batch: planned, compared with each other once, then timed in turns."""
        batch = case.batch()
        rows = [self.planned(batch, name) for name in with_variants(self.strategies)]
        cells = [row for row in rows if isinstance(row, Cell)]
        self.compare(cells)
        turn = 0
        while waiting := [cell for cell in cells if measure.needs_more(cell.runs, self.runs)]:
            turn += 1
            say(f"{case.name}: turn {turn}, {len(waiting)} strategies")
            for cell in waiting:
                measure.load(self.workers, cell.plan, cell.lengths, self.folder)
                self.patience.wait()
                cell.runs.append(measure.run_once(self.workers))
        for cell in cells:
            cell.row.update(summary(cell.runs, self.runs))
        lengths = [sequence.length for sequence in batch.sequences]
        return {
            "name": case.name,
            "tokens": sum(lengths),
            "sequences": len(lengths),
            "lengths": lengths,
            "strategies": [row.row if isinstance(row, Cell) else row for row in rows],
        }

    def planned(self, batch: Batch, name: str) -> Cell | dict[str, Any]:
        """The plan and prediction of a strategy or a variant, or in words why it has none."""
        strategy, options = VARIANTS.get(name, (name, Options()))
        try:
            plan = build(as_run(batch, strategy), batches.SHAPE, self.cluster, strategy, options).plan
        except ValueError as error:
            return {"strategy": name, "refused": str(error)}
        lengths = tuple(sequence.length for sequence in batch.sequences)
        row = {"strategy": name, "link_bytes": link_bytes(plan), "tokens": token_imbalance(plan, lengths)}
        return Cell(plan, lengths, row | predict(plan, self.cluster, self.times), [])

    def compare(self, cells: Sequence[Cell]) -> None:
        """Run every plan once, untimed, and note how far its results are from those of the first."""
        want = None
        for cell in cells:
            measure.load(self.workers, cell.plan, cell.lengths, self.folder)
            measure.run_once(self.workers, compare=True, save=self.folder)
            got = measure.gathered(cell.plan, cell.lengths, self.folder)
            want = want or got
            cell.row["difference"] = measure.difference(got, want)


def with_variants(strategies: Sequence[str]) -> list[str]:
    """Strategies, and after each its variants."""
    return [each for name in strategies for each in (name, *(v for v, (of, _) in VARIANTS.items() if of == name))]


def token_imbalance(plan: Plan, lengths: Sequence[int]) -> float:
    """Most tokens of a rank over the mean, padding included (which training computes on as well)."""
    counts = [len(plan.header.local_tokens(rank, HAS_Q)[0]) for rank in range(plan.header.ranks)]
    return max(counts) * len(counts) / sum(lengths)


def predict(plan: Plan, cluster: Cluster, times: Profiled) -> dict[str, float]:
    """What the simulator says of a plan: with masks as the kernel cuts them, and with masks by their pairs alone."""
    simulated = simulate(plan, cluster, Strips.of(plan, times))
    forward_s, backward_s = simulated.forward.makespan_s, simulated.backward.makespan_s
    return {
        "predicted_s": forward_s + backward_s,
        "predicted_forward_s": forward_s,
        "predicted_backward_s": backward_s,
        "predicted_exposed_s": simulated.forward.exposed_s + simulated.backward.exposed_s,
        "by_pairs_s": simulate(plan, cluster, times).total_s,
    }


def summary(runs: Sequence[measure.Timed], count: int) -> dict[str, Any]:
    """The figures of the quietest runs: medians, and least and most of the whole."""
    used = measure.quietest(runs, count)
    totals = [run.total_s for run in used]
    return {
        "measured_s": median(totals),
        "least_s": min(totals),
        "most_s": max(totals),
        "forward_s": median(run.forward_s for run in used),
        "backward_s": median(run.backward_s for run in used),
        "others_share": median(run.others_share for run in used),
        "runs": [asdict(run) for run in runs],
    }


def say(words: str) -> None:
    """Progress, beside the result."""
    print(f"[{time.strftime('%H:%M:%S')}] {words}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
