"""`dyncp tune`: what to expect of each strategy on a data set, and which settings to use."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field, fields
from typing import Annotated

from tqdm import tqdm
from tyro.conf import Positional, arg

from dyncp import masks
from dyncp.commands.model_options import ModelOptions
from dyncp.commands.options import ClusterOptions
from dyncp.commands.simulate import bare, seconds
from dyncp.ir.arguments import positive_number
from dyncp.report.table import columns, format_bytes, format_seconds
from dyncp.strategies.api import Options
from dyncp.strategies.warm import warm_up
from dyncp.tune.compare import LEFT_OUT, Setting, setting_figures, strategy_names
from dyncp.tune.lengths import BYTES_PER_TOKEN, Lengths, read_lengths
from dyncp.tune.run import MARGIN, Search, Trial, Tuning, steps, tune

GB = 1e9
LEGEND = (
    "layer, exposed: one attention layer forward and backward, and waits for transfers in it, in ms. moved, between:\n"
    "its bytes over all ranks, and those between nodes. Means over batches; peak and planning are the largest."
)
PADS = "* pads to the longest sequence, as its original does."
MOST_WORDS = 40  # of a batch's lengths on a command line


@dataclass(frozen=True)
class Command:
    """Draw batches from a data set's lengths, simulate training under every strategy, try settings of `dynamic`, and
    say what to use.

    A model is always simulated, 8b when --model is left out. docs/simulator.md says what is modelled.
    """

    data: Annotated[Positional[str], arg(metavar="DATA")]
    """Lengths in tokens: a file with a JSON list or a number on each line; or a folder of text files, or the name of a
    Hugging Face data set (needs `datasets`), whose text is counted by --bytes-per-token."""
    cluster: ClusterOptions = field(default_factory=ClusterOptions)
    model: ModelOptions = field(default_factory=lambda: ModelOptions("8b"))
    planning: Options = field(default_factory=Options)
    tokens: int = 131_072
    """Most tokens of a global batch."""
    max_length: Annotated[int | None, arg(metavar="INT")] = None
    """Longer samples are cut to this; --tokens when left out."""
    mask: Annotated[str, arg(metavar="KIND[:KEY=N,...]")] = "causal"
    """Mask of every sample, as `lambda:sink=64,window=1024`."""
    bytes_per_token: float = BYTES_PER_TOKEN
    """Bytes of text that are counted as a token; 1 for byte-level models."""
    text_column: str = "text"
    """Column of a Hugging Face data set that has the text."""
    strategies: Annotated[str, arg(metavar="all|NAME,NAME,...")] = "all"
    """What to compare dynamic with."""
    batches: int = 4
    """How many batches to simulate."""
    kept_gb: float = 8.0
    """Memory of a device, in GB, that --keep may take over all layers."""
    time_limit: float = 120.0
    """Seconds after which nothing further is tried."""
    json: bool = False
    """Print one JSON object instead of text."""


def run(command: Command) -> int:
    """Do what `Command` says."""
    positive_number("--kept-gb", command.kept_gb)
    positive_number("--time-limit", command.time_limit)
    names = strategy_names(command.strategies)
    devices = command.cluster.build()
    model, training = command.model.build(command.cluster.machine)
    setting = Setting(model.shape(training.tp), devices, command.planning, None, model, training)
    mask = masks.parse_spec(command.mask)
    search = Search(
        command.tokens, command.max_length, command.batches, command.planning.seed, mask, command.kept_gb * GB,
        command.time_limit,
    )  # fmt: skip
    lengths = read_lengths(command.data, command.bytes_per_token, command.text_column)
    warm_up()  # else the first plan would seem to take long
    with tqdm(total=steps(names, search), unit="plan", disable=None, leave=False) as bar:
        tuning = tune(lengths.tokens, names, setting, search, lambda: bar.update() and None)
    if command.json:
        print(json.dumps({**setting_figures(setting), "source": lengths.source, **tuning.figures()}))
    else:
        print(tuning_text(command, lengths, tuning, setting))
    return 0


def tuning_text(command: Command, lengths: Lengths, tuning: Tuning, setting: Setting) -> str:
    """All of it for people."""
    cluster, training = setting.cluster, setting.training
    assert training is not None
    cut = [min(length, command.max_length or command.tokens) for length in lengths.tokens]
    head = [
        f"data        {lengths.source}: {tuning.samples:,} samples of {min(cut):,} to {max(cut):,} tokens, "
        f"{tuning.sample_tokens:,} in all{_cut_text(command, tuning)}",
        f"batches     {tuning.used} of {tuning.available}, up to {command.tokens:,} tokens each",
        f"ranks       {cluster.ranks} ({cluster.nodes} node{'s' * (cluster.nodes > 1)} x {cluster.ranks_per_node}), "
        f"{training.tp} device{'s' * (training.tp > 1)} each, {command.cluster.cluster}",
        f"model       {command.model.model}",
    ]
    rows: list[tuple[str, ...]] = [
        ("", "iteration", "tokens/s", "x best", "layer", "exposed", "moved", "between", "peak", "planning")
    ]
    best_s = tuning.expected[0].iteration_s
    rows += [
        (
            f"{one.strategy}{'*' if one.padding_tokens else ''}",
            seconds(one.iteration_s),
            f"{one.tokens_per_s:,.0f}",
            f"{one.iteration_s / best_s:.3f}",
            bare(one.layer_s),
            bare(one.exposed_s),
            format_bytes(one.size_bytes),
            format_bytes(one.inter_bytes),
            format_bytes(one.peak_bytes),
            format_seconds(one.planning_s),
        )
        for one in tuning.expected
    ]
    failed = [f"{failure.strategy}: no plan: {failure.reason}" for failure in tuning.failures]
    pads = [PADS] if any(one.padding_tokens for one in tuning.expected) else []
    parts = [*head, "", columns(rows), *failed, "", LEGEND, *pads, "", "settings of dynamic:", _trials_text(tuning)]
    if tuning.cut_short:
        parts.append(f"note: the {command.time_limit:g} s of --time-limit were over; {_skipped_text(tuning)}")
    return "\n".join([*parts, "", advice_text(command, tuning, setting), "", LEFT_OUT])


def _cut_text(command: Command, tuning: Tuning) -> str:
    if not tuning.shortened:
        return ""
    option = "--tokens" if command.max_length is None else "--max-length"
    return f"; {tuning.shortened:,} cut to {option}"


def _skipped_text(tuning: Tuning) -> str:
    """What there was no time for."""
    parts = []
    if tuning.skipped_batches:
        parts.append(f"not simulated: {tuning.skipped_batches} of {tuning.used + tuning.skipped_batches} batches")
    names = dict.fromkeys(name for name, _ in tuning.skipped)
    settings = [f"{name} = {', '.join(str(value) for one, value in tuning.skipped if one == name)}" for name in names]
    if settings:
        parts.append(f"not tried: {'; '.join(settings)}")
    return "; ".join(parts)


def _trials_text(tuning: Tuning) -> str:
    start = next(one for one in tuning.expected if one.strategy == "dynamic")
    rows: list[tuple[str, ...]] = [("  as given", seconds(start.iteration_s), "")]
    rows += [(f"  {trial.name} = {trial.value}", *_verdict(trial)) for trial in tuning.trials]
    return columns(rows)


def _verdict(trial: Trial) -> tuple[str, str]:
    time = "-" if trial.expected is None else seconds(trial.expected.iteration_s)
    return time, "taken" if trial.taken else trial.why_not


def advice_text(command: Command, tuning: Tuning, setting: Setting) -> str:
    """What to use, as Python and as a command."""
    best, training = tuning.best, setting.training
    assert training is not None and setting.model is not None
    kept = best.kept_bytes * setting.model.layers
    keeping = f", {format_bytes(kept)} kept over all layers" if kept else ""
    shape, options = setting.shape, _changed(tuning.options)
    arguments = ", ".join(f"{name}={value!r}" for name, value in options.items())
    longest = "" if command.max_length is None else f", max_length={command.max_length}"
    per_node = "" if command.cluster.ranks_per_node is None else f", ranks_per_node={command.cluster.ranks_per_node}"
    machines = f'Cluster.preset("{command.cluster.cluster}", nodes={command.cluster.nodes}{per_node})'
    mask = "" if command.mask == "causal" else ", mask=lambda index, length: masks.from_spec(MASK, length)"
    lines = [
        f"use {tuning.strategy}: {seconds(best.iteration_s)} an iteration, {best.tokens_per_s:,.0f} tokens/s; "
        f"a plan takes up to {format_seconds(best.planning_s)}{keeping}",
        *preferred(tuning),
        "",
        f"from dyncp import AttentionShape, Batching, Cluster, LookAhead, Options, Planning{', masks' if mask else ''}",
        "from dyncp.cost.layer import context_cluster",
        "",
        *([f'MASK = masks.parse_spec("{command.mask}")'] if mask else []),
        "planning = Planning(",
        f'    AttentionShape({shape.q_heads}, {shape.kv_heads}, {shape.head_dim}, dtype="{shape.dtype}"),',
        f"    context_cluster({machines}, tp={training.tp}),",
        f'    strategy="{tuning.strategy}",',
        f"    options=Options({arguments}),",
        ")",
        f"batching = Batching(tokens={command.tokens}{longest}{mask})",
        f"look_ahead = LookAhead(kappa={tuning.kappa}, workers={tuning.workers})",
    ]
    if len(tuning.first) <= MOST_WORDS:
        lines += ["", "of the first batch:", "", _command_line(command, tuning)]
    return "\n".join(lines)


def preferred(tuning: Tuning) -> list[str]:
    """Why `dynamic` is to be used where another strategy comes out first."""
    fastest, best = tuning.expected[0], tuning.best
    if tuning.strategy == fastest.strategy or fastest.iteration_s >= best.iteration_s:
        return []
    gain = best.iteration_s / fastest.iteration_s - 1
    return [f"({fastest.strategy} is faster by {gain:.2%}; what is less than {MARGIN:.1%} counts as no difference)"]


def _changed(options: Options) -> dict[str, object]:
    found = {one.name: getattr(options, one.name) for one in fields(options)}
    return {one.name: found[one.name] for one in fields(options) if found[one.name] != one.default}


def _command_line(command: Command, tuning: Tuning) -> str:
    words = ["dyncp", "simulate", "--lengths", ",".join(map(str, tuning.first))]
    if command.mask != "causal":
        words += ["--mask", command.mask]
    words += ["--cluster", command.cluster.cluster]
    words += ["--nodes", str(command.cluster.nodes)]
    if command.cluster.ranks_per_node is not None:
        words += ["--ranks-per-node", str(command.cluster.ranks_per_node)]
    for one in fields(ModelOptions):
        if getattr(command.model, one.name) is not None and getattr(command.model, one.name) != one.default:
            words += [f"--{one.name.replace('_', '-')}", str(getattr(command.model, one.name))]
    words += ["--strategy", tuning.strategy]
    for name, value in _changed(tuning.options).items():
        flag = name.replace("_", "-")
        words += [f"--no-{flag}"] if value is False else [f"--{flag}", str(value)]
    return shlex.join(words)
