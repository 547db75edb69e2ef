"""Plans a case several times, and asks the others what they would make of it."""

from __future__ import annotations

import gc
import importlib.util
import time
from dataclasses import asdict
from math import ceil
from pathlib import Path

import numpy as np

from dyncp.bench.corpus import Case
from dyncp.bench.results import Figures, Result, Run, Setting, Solved
from dyncp.bench.rings import ring_figures
from dyncp.ir import codec
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.blocks import Blocks
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.shape import AttentionShape
from dyncp.masks import causal
from dyncp.planner.partition import hypergraph
from dyncp.planner.partition.bounds import PassBound, lower_bound
from dyncp.planner.partition.estimate import received_bytes
from dyncp.planner.partition.nets import Nets, loads
from dyncp.planner.partition.place import Search
from dyncp.planner.partition.size import cut_batch
from dyncp.report.summary import plan_figures
from dyncp.strategies import Planned, build
from dyncp.strategies.api import Options

PRESETS = ("default", "highest_quality")  # of Mt-KaHyPar
MOST_BLOCKS = 30_000  # computation blocks that it is given: beyond, it takes minutes
MOST_FINER = 12_000  # and those that it may try besides
PROCESS = Path("/proc/self")  # what Linux says of memory


def warm_up() -> None:
    """Compile, or load, everything that planning uses, outside of what is measured."""
    lengths = (4096, 900, 300, 120, 40)
    shape, cluster = AttentionShape(2, 2, 16), Cluster(2, 2)
    one = Batch(Sequence(length, causal(length)) for length in lengths)
    two = Batch(Sequence(length, {"a": causal(length), "b": causal(length)}) for length in lengths)
    for batch in (one, two):
        for objective in ("total", "time"):
            options = Options(block_tokens=32, objective=objective, portfolio=False)
            planned = build(batch, shape, cluster, "dynamic", options)
            codec.encode_rank(planned.plan.rank(0))


def measure(case: Case, seeds: int, solvers: bool) -> Result:
    """All figures of a case.

    Args:
        case: what to plan.
        seeds: how many plans are made, with the seeds 0, 1, ...; `case.most_runs` at most.
        solvers: whether to give the case to the general solver, too.
    """
    batch, shape, cluster, options = case.batch(), case.shape, case.cluster, case.options()
    blocks = cut_batch(batch, shape.groups, cluster.ranks, None, case.epsilon)  # those that planning begins with
    found = {preset: solve(case, batch, blocks, preset) for preset in PRESETS} if solvers else {}
    compared = any(solved.figures for solved in found.values())
    runs = tuple(run(case, batch, seed, compared) for seed in range(min(seeds, case.most_runs)))
    setting = setting_of(case, batch, blocks)
    bound = bound_of(batch, case, max(run.plan.compute for run in runs), max(run.plan.tokens for run in runs))
    return Result(
        name=case.name,
        setting=setting,
        block_tokens=int(blocks.tokens.tokens.max()),
        token_blocks=len(blocks.tokens),
        computation_blocks=len(blocks) * blocks.groups,
        runs=runs,
        bound_bytes=bound.total_bytes,
        bound_inter_node_bytes=bound.inter_node_bytes,
        ring=ring_figures(batch, shape, cluster, options, zigzag=False),
        zigzag=ring_figures(batch, shape, cluster, options, zigzag=True),
        solvers=found,
        limits=case.limits,
    )


def setting_of(case: Case, batch: Batch, blocks: Blocks) -> Setting:
    """A case in numbers."""
    cluster, options = case.cluster, case.options()
    mean = batch.tokens / cluster.ranks
    return Setting(
        sequences=len(batch.sequences),
        tokens=batch.tokens,
        pairs=float(blocks.work.sum()),
        mask=case.mask,
        nodes=cluster.nodes,
        ranks=cluster.ranks,
        q_heads=case.shape.q_heads,
        kv_heads=case.shape.kv_heads,
        objective=case.objective,
        options={name: value for name, value in asdict(options).items() if name != "seed"},
        crossed=Search(case.shape, cluster, options).crossed,
        most_compute=1 + case.epsilon,
        most_tokens=max(1 + options.token_epsilon, ceil(mean) / mean),  # tokens are whole
    )


def run(case: Case, batch: Batch, seed: int, compared: bool) -> Run:
    """One plan of a case; `compared` says whether its placement is judged by the solver's formula, too."""
    options = case.options(seed)
    gc.collect()
    forget_peak()
    cpu_s = time.process_time()
    planned = build(batch, case.shape, case.cluster, "dynamic", options)
    cpu_s = time.process_time() - cpu_s
    peak = peak_bytes()
    started = time.perf_counter()
    encoded = sum(len(codec.encode_rank(planned.plan.rank(rank))) for rank in range(case.cluster.ranks))
    seconds = {**planned.seconds, "encode": time.perf_counter() - started}
    layout = planned.layout
    judged = placed(layout.blocks, layout.placement, case.shape, case.cluster, options) if compared else None
    return Run(seed, seconds, cpu_s, peak, encoded, sent(planned, case.cluster), judged)


def sent(planned: Planned, cluster: Cluster) -> Figures:
    """What a plan moves, counted from its messages."""
    summary = plan_figures(planned.plan, planned.layout.blocks)
    weights = planned.options.pass_weights
    total, between = (
        weights[0] * summary[key] + weights[1] * summary["backward"][key] for key in ("total_bytes", "inter_node_bytes")
    )
    return Figures(total, between, *balance(planned.layout.blocks, planned.layout.placement, cluster.ranks))


def placed(blocks: Blocks, placement: Placement, shape: AttentionShape, cluster: Cluster, options: Options) -> Figures:
    """What a placement moves, by the planner's formula: the plans of two placements differ in more than that."""
    nets = Nets.of_batch(blocks, shape, options.keep, options.wire, options.pass_weights)
    received, entered = received_bytes(nets, placement.block_rank, placement.comp_rank.ravel(), cluster)
    return Figures(float(received.sum()), float(entered.sum()), *balance(blocks, placement, cluster.ranks))


def balance(blocks: Blocks, placement: Placement, ranks: int) -> tuple[float, float]:
    """The largest rank's share over the mean, of computation (under the mask where it is largest) and of tokens."""
    compute = 1.0
    for mask in range(len(blocks.mask_names)):
        part = blocks.of_mask(mask)
        pairs = np.tile(blocks.pairs[part], blocks.groups)
        work = loads(pairs, placement.comp_rank[:, part].ravel(), ranks)
        compute = max(compute, float(work.max() / max(work.mean(), 1e-30)))
    tokens = loads(blocks.tokens.tokens, placement.block_rank, ranks)
    return compute, float(tokens.max() / tokens.mean())


def bound_of(batch: Batch, case: Case, compute: float, tokens: float) -> PassBound:
    """The lower bound under the case's limits, or under the balance that was found where that is not within them."""
    options = case.options()
    epsilon, token_epsilon = max(case.epsilon, compute - 1), max(options.token_epsilon, tokens - 1)
    found = lower_bound(batch, case.shape, case.cluster, epsilon, token_epsilon, options.keep, options.wire)
    return found.forward if case.forward_only else found.both


def solve(case: Case, batch: Batch, blocks: Blocks, preset: str) -> Solved:
    """What Mt-KaHyPar makes of the blocks that planning begins with, or of blocks half as large where it does better
    with those: under the same limits and for the same objective."""
    if importlib.util.find_spec("mtkahypar") is None:
        return Solved("Mt-KaHyPar is not installed")
    cluster, options = case.cluster, case.options()
    count = len(blocks) * blocks.groups
    if count > MOST_BLOCKS:
        return Solved(f"more than {MOST_BLOCKS:,} computation blocks")
    tried = [blocks]
    half = max(1, int(blocks.tokens.tokens.max()) // 2)
    finer = cut_batch(batch, blocks.groups, cluster.ranks, half, case.epsilon)
    if count < len(finer) * finer.groups <= MOST_FINER:
        tried.append(finer)
    setting = setting_of(case, batch, blocks)
    found: list[tuple[tuple[int, float], Solved]] = []
    for cut in tried:
        started = time.perf_counter()
        placement, notes = hypergraph.place(cut, case.shape, cluster, options, preset)
        seconds = time.perf_counter() - started
        figures = placed(cut, placement, case.shape, cluster, options)
        solved = Solved("", seconds, int(cut.tokens.tokens.max()), figures, notes)
        found.append(((len(setting.broken(figures)), setting.cost(figures)), solved))
    return min(found, key=lambda entry: entry[0])[1]


def forget_peak() -> None:
    """Let the process's memory be counted anew."""
    if (PROCESS / "clear_refs").exists():
        try:
            (PROCESS / "clear_refs").write_text("5")
        except OSError:
            return  # not allowed: then the peak is that of all cases so far


def peak_bytes() -> int | None:
    """The most memory that the process had since `forget_peak`."""
    if not (PROCESS / "status").exists():
        return None
    for line in (PROCESS / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None
