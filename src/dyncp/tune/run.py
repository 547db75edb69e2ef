"""What to expect of each strategy on the batches of a data set, and which settings suit them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from dyncp.ir.arguments import whole_number
from dyncp.ir.batch import Batch, Sequence
from dyncp.lookahead.sampler import TokenBudgetSampler
from dyncp.masks import from_spec
from dyncp.strategies.api import SCHEDULES, Options
from dyncp.tune.compare import Failure, Outcome, Setting, run_strategy

# settings of `dynamic` that are tried one after the other, the best of each kept
CHOICES: dict[str, tuple[Any, ...]] = {
    "block_tokens": (512, 1024, 2048, 4096),
    "schedule": SCHEDULES,
    "divisions": (2, 4, 8),
    "keep": ("kv", "all"),
}
MARGIN = 0.005  # of the time: what a setting, or another strategy, must gain to be taken
SPARE_WORKERS = 1.5  # times the planning that is needed on average


@dataclass(frozen=True, slots=True)
class Search:
    """How much is tried.

    Args:
        tokens: most tokens of a batch.
        max_length: longer samples are cut to this; `tokens` when left out.
        batches: how many of the first epoch's batches are simulated.
        seed: of the shuffle.
        mask: of every sequence, as data (`dyncp.masks.from_spec`).
        kept_bytes: memory of a device that the forward may keep for the backward, over all layers (`Options.keep`).
        seconds: after that long nothing further is tried; the first batch is simulated in any case.

    Raises:
        ValueError: a number out of range.
    """

    tokens: int = 131_072
    max_length: int | None = None
    batches: int = 4
    seed: int = 0
    mask: Any = field(default_factory=lambda: {"kind": "causal"})
    kept_bytes: float = 8e9
    seconds: float = 120.0

    def __post_init__(self) -> None:
        for name in ("tokens", "batches"):
            whole_number(name, getattr(self, name), 1)
        whole_number("seed", self.seed, 0)
        if self.max_length is not None:
            whole_number("max_length", self.max_length, 1, self.tokens)


@dataclass(frozen=True, slots=True)
class Expectation:
    """Means over batches of what a strategy takes. Bytes are one layer's, forward and backward, on all ranks."""

    strategy: str
    batches: int
    iteration_s: float
    tokens_per_s: float
    layer_s: float
    exposed_s: float
    size_bytes: float
    inter_bytes: float
    peak_bytes: int
    kept_bytes: int
    planning_s: float  # the longest
    padding_tokens: float

    @classmethod
    def of(cls, outcomes: list[Outcome]) -> Expectation:
        """Of the same strategy on several batches."""
        passes = [(one.simulation.forward, one.simulation.backward) for one in outcomes]
        wholes = [one.iteration for one in outcomes if one.iteration is not None]
        assert len(wholes) == len(outcomes)
        total_s = sum(whole.total_s for whole in wholes)
        return cls(
            strategy=outcomes[0].strategy,
            batches=len(outcomes),
            iteration_s=total_s / len(outcomes),
            tokens_per_s=sum(whole.tokens for whole in wholes) / total_s,
            layer_s=float(np.mean([one.simulation.total_s for one in outcomes])),
            exposed_s=float(np.mean([a.exposed_s + b.exposed_s for a, b in passes])),
            size_bytes=float(np.mean([sum(one.size_bytes.values()) for pair in passes for one in pair])) * 2,
            inter_bytes=float(np.mean([one.size_bytes["inter"] for pair in passes for one in pair])) * 2,
            peak_bytes=max(one.peak_bytes for pair in passes for one in pair),
            kept_bytes=max(_kept_bytes(one) for one in outcomes),
            planning_s=max(sum(one.planned.seconds.values()) for one in outcomes),
            padding_tokens=float(np.mean([one.padding for one in outcomes])),
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting that was tried for `dynamic`."""

    name: str
    value: Any
    expected: Expectation | None  # None where it fails
    taken: bool
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was found.

    Args:
        samples, sample_tokens: of the data set, after the cut.
        shortened: how many of the samples were cut.
        available: how many batches an epoch has.
        used: how many were simulated.
        expected: by strategy, the fastest first.
        failures: strategies that cannot plan one of the batches.
        trials: settings of `dynamic`, in the order in which they were tried.
        strategy, options: what to use.
        best: what to expect of that.
        kappa, workers: of the loader.
        first: lengths of the first batch.
        skipped_batches, skipped: how many batches, and which settings, there was no time for.
    """

    samples: int
    sample_tokens: int
    shortened: int
    available: int
    used: int
    expected: tuple[Expectation, ...]
    failures: tuple[Failure, ...]
    trials: tuple[Trial, ...]
    strategy: str
    options: Options
    best: Expectation
    kappa: int
    workers: int
    first: tuple[int, ...]
    skipped_batches: int
    skipped: tuple[tuple[str, Any], ...]

    @property
    def cut_short(self) -> bool:
        """Whether time ran out before all was tried."""
        return self.skipped_batches > 0 or bool(self.skipped)

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "samples": self.samples,
            "sample_tokens": self.sample_tokens,
            "shortened": self.shortened,
            "batches": {"epoch": self.available, "simulated": self.used},
            "strategies": [asdict(one) for one in self.expected] + [one.figures() for one in self.failures],
            "trials": [asdict(trial) for trial in self.trials],
            "recommended": {
                "strategy": self.strategy,
                "options": asdict(self.options),
                "expected": asdict(self.best),
                "kappa": self.kappa,
                "workers": self.workers,
            },
            "cut_short": self.cut_short,
            "skipped": {"batches": self.skipped_batches, "settings": [list(one) for one in self.skipped]},
        }


def tune(
    lengths: tuple[int, ...],
    strategies: list[str],
    setting: Setting,
    search: Search,
    progress: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuning:
    """Simulate batches under every strategy, then settings of `dynamic`.

    Args:
        lengths: of all samples.
        strategies: names; `dynamic` is added where it is missing.
        setting: cluster, model and the options to begin from; it needs a model.
        search: how much is tried.
        progress: called after each strategy on each batch, and after each trial; `steps` says how often at most.
        clock: the time, in seconds.

    Raises:
        ValueError: no model, no lengths, or a batch that `dynamic` cannot plan.
    """
    if setting.model is None or setting.training is None:
        raise ValueError("tuning compares whole iterations; give a model")
    until = clock() + search.seconds
    longest = search.max_length or search.tokens
    sampler = TokenBudgetSampler(lengths, search.tokens, longest, search.seed)
    batches = list(batches_of(sampler, search))
    names = list(dict.fromkeys(["dynamic", *strategies]))
    expected, failures, used = _expectations(batches, names, setting, progress, lambda: clock() >= until)
    first = next(one for one in expected if one.strategy == "dynamic")
    options, best, trials, skipped = _try_settings(
        batches[:used], setting, search, first, progress, lambda: clock() >= until
    )
    strategy = "dynamic"
    if expected[0].iteration_s < best.iteration_s * (1 - MARGIN):
        strategy, options, best = expected[0].strategy, setting.options, expected[0]
    kappa, workers = look_ahead(best, setting.cluster.ranks)
    return Tuning(
        samples=len(sampler.lengths),
        sample_tokens=int(sampler.lengths.sum()),
        shortened=sum(length > longest for length in lengths),
        available=len(sampler.batches(0)),
        used=used,
        expected=expected,
        failures=failures,
        trials=tuple(trials),
        strategy=strategy,
        options=options,
        best=best,
        kappa=kappa,
        workers=workers,
        first=tuple(sequence.length for sequence in batches[0].sequences),
        skipped_batches=len(batches) - used,
        skipped=tuple(skipped),
    )


def _expectations(
    batches: list[Batch],
    names: list[str],
    setting: Setting,
    progress: Callable[[], None],
    late: Callable[[], bool],
) -> tuple[tuple[Expectation, ...], tuple[Failure, ...], int]:
    """What to expect of each strategy, the fastest first; those that fail; and how many batches there was time for."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    failures: dict[str, Failure] = {}
    used = 0
    for batch in batches:
        if used and late():
            break
        for name in names:
            if name not in failures:
                _add(outcomes[name], failures, batch, name, setting)
            progress()
        if "dynamic" in failures:
            raise ValueError(failures["dynamic"].reason)
        used += 1
    expected = [Expectation.of(found) for name, found in outcomes.items() if name not in failures]
    return tuple(sorted(expected, key=lambda one: one.iteration_s)), tuple(failures.values()), used


def steps(strategies: list[str], search: Search) -> int:
    """How often `tune` calls `progress` at most."""
    return len({"dynamic", *strategies}) * search.batches + sum(len(values) for values in CHOICES.values())


def batches_of(sampler: TokenBudgetSampler, search: Search) -> Iterator[Batch]:
    """The first batches of the first epoch, as the loader would make them; the epoch's last, which is smaller, only
    where there is no other."""
    chosen = sampler.batches(0)
    for indices in (chosen[:-1] or chosen)[: search.batches]:
        found = sampler.lengths[indices].tolist()
        yield Batch(tuple(Sequence(length, from_spec(search.mask, length)) for length in found))


def look_ahead(best: Expectation, ranks: int) -> tuple[int, int]:
    """(kappa, workers) of `LookAhead`: `kappa` iterations take longer than a plan, and all workers together plan faster
    than training uses plans up (docs/training.md)."""
    kappa = max(2, math.ceil(best.planning_s / best.iteration_s) + 1)
    workers = max(1, math.ceil(SPARE_WORKERS * best.planning_s / (best.iteration_s * ranks)))
    return kappa, workers


def _add(found: list[Outcome], failures: dict[str, Failure], batch: Batch, name: str, setting: Setting) -> None:
    try:
        found.append(run_strategy(batch, name, setting))
    except (ValueError, MemoryError) as error:
        failures[name] = Failure(name, " ".join(str(error).split()) or type(error).__name__)


def _try_settings(
    batches: list[Batch],
    setting: Setting,
    search: Search,
    best: Expectation,
    progress: Callable[[], None],
    late: Callable[[], bool],
) -> tuple[Options, Expectation, list[Trial], list[tuple[str, Any]]]:
    """One setting after the other, the best of each kept for the next; and those that there was no time for."""
    options, trials, skipped = setting.options, [], []
    for name, values in CHOICES.items():
        kept = options
        for value in values:
            if value == getattr(options, name):
                continue
            if late():
                skipped.append((name, value))
                continue
            tried = replace(kept, **{name: value})
            trial = _trial(batches, replace(setting, options=tried), search, best, (name, value))
            if trial.taken and trial.expected is not None:
                options, best = tried, trial.expected
            trials.append(trial)
            progress()
    return options, best, trials, skipped


def _trial(batches: list[Batch], setting: Setting, search: Search, best: Expectation, tried: tuple[str, Any]) -> Trial:
    found: list[Outcome] = []
    failures: dict[str, Failure] = {}
    for batch in batches:
        _add(found, failures, batch, "dynamic", setting)
    if failures:
        return Trial(*tried, None, False, failures["dynamic"].reason)
    expected = Expectation.of(found)
    layers = setting.model.layers if setting.model is not None else 1
    if expected.kept_bytes * layers > search.kept_bytes:
        return Trial(*tried, expected, False, "keeps too much memory")
    if expected.iteration_s < best.iteration_s * (1 - MARGIN):
        return Trial(*tried, expected, True)
    faster = expected.iteration_s < best.iteration_s
    return Trial(*tried, expected, False, f"less than {MARGIN:.1%} faster" if faster else "no faster")


def _kept_bytes(outcome: Outcome) -> int:
    """Of the rank that keeps most, in one layer."""
    return max(program.forward.kept_bytes for rank in outcome.planned.plan.programs for program in rank)
