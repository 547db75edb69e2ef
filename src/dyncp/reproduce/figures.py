"""All figures: what makes them, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dyncp.reproduce import compare, micro, training
from dyncp.reproduce.points import Point, Scope


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure.

    Args:
        title: of its section.
        text: what it shows, and which set of constants it uses.
        make: its points.
        x: key of `Point.at` along the axis of the plot.
        panels: keys that have a panel each.
        shown: methods in the plot; all when empty.
        where: values of `Point.at` that the plot is of.
        log: whether the plot's values are on a logarithmic axis.
    """

    title: str
    text: str
    make: Callable[[Scope], list[Point]]
    x: str
    panels: tuple[str, ...]
    shown: tuple[str, ...] = ()
    where: Mapping[str, str] = field(default_factory=dict)
    log: bool = False


BARS = "Milliseconds of one attention layer on 4 x 8 A100, with the `published` constants."
SPEEDUPS = "Time over dyncp's, forward and backward; above 1 dyncp is faster."
BESTS = (compare.BEST_BASELINE, compare.BEST_STATIC, compare.BEST)
HARDWARE = {"constants": "hardware"}
FIGURES = {
    "13": Figure(
        "Figure 13: attention, causal", f"{BARS} The dyncp column is beside DCP's bars.", micro.figure_13,
        "scale", ("data", "pass"),
    ),
    "14": Figure(
        "Figure 14: attention, sparse masks", f"{BARS} The dyncp column is beside DCP's bars.", micro.figure_14,
        "scale", ("data", "pass", "mask"),
    ),
    "15": Figure(
        "Figures 15 and 16: iterations, LongDataCollections",
        "Seconds of an iteration of the 8B model on 8 x 8 A100, TP 4 x CP 16, in batches of as many tokens as the "
        "longest sequence may have, with the `hardware` constants (the two of the iteration model were fitted with "
        "these to Megatron-LM's causal bars). Megatron-LM's attention is TransformerEngine's.",
        training.figure_15, "longest", ("data", "mask"),
    ),
    "16": Figure(
        "Figures 15 and 16: iterations, LongAlign", "The same on the other data set.",
        training.figure_16, "longest", ("data", "mask"),
    ),
    "17": Figure(
        "Figure 17: bytes between nodes against the block size",
        "MB of the forward pass, causal, LongAlign, 4 x 8 A100. The paper's values are read off its text: about 400 "
        "for Megatron-LM, 150 to 200 (here 175) for DCP. Of dyncp it is the "
        "planner's own placement, also where another layout would be faster.",
        micro.figure_17, "block", (),
    ),
    "18": Figure(
        "Figure 18: planning time against the block size",
        "Seconds on one core of the machine that made this page, LongAlign, 4 x 8 ranks. The paper's are of its "
        "planner: causal about 30 at 512 and 5 to 7 at 4096, sparse masks 2 to 20 (here the middle).",
        micro.figure_18, "block", ("mask",), log=True,
    ),
    "19": Figure(
        "Figure 19: bytes against the density of the mask",
        "MB between ranks, forward, LongAlign: lambda masks with windows of several sizes, and causal. Density is the "
        "mask's pairs over a causal mask's. The paper says: nearly linear. Of dyncp it is the planner's own placement.",
        micro.figure_19, "density", (),
    ),
    "20": Figure(
        "Figure 20: bytes between nodes against imbalance",
        "MB of the forward pass, causal, LongAlign, against the imbalance of computation that is allowed. The paper's "
        "are 160 at 1.2 and 100 at 2.6. Of dyncp it is the planner's own placement.",
        micro.figure_20, "allowed", (), shown=("DCP as published", "dyncp"),
    ),
    "22": Figure(
        "Figure 22: where time goes",
        "Milliseconds of an iteration's attention (32 layers, both passes, means over ranks), LongAlign with sequences "
        "of up to 131,072 tokens, TP 4 x CP 16, `hardware` constants. The paper has communication falling from 800 to "
        "350 under sparse masks, and its hidden part from 400 to 200 under causal ones.",
        training.figure_22, "part", ("mask",),
    ),
    "rivals": Figure(
        "Every strategy against dyncp",
        f"{SPEEDUPS} `best baseline` is the fastest of the paper's (ring, zigzag, padded double ring, head + ring; "
        "under sparse masks head + ring alone), beside the paper's own speed-up; `best static` the fastest of all that "
        "do the same with every batch; `best rival` the fastest of all but DCP. `hidden` is the part of dyncp's "
        "communication that could hide and does.",
        compare.every_rival, "scale", ("data", "mask"), shown=BESTS, where=HARDWARE, log=True,
    ),
    "split": Figure(
        "Where the speed-up comes from",
        "S is the speed-up over the best static strategy. `masks` is S over S of the same lengths all causal; "
        "`lengths` is that over S of one causal sequence of 131,072 tokens; `the rest` is what is left where nothing "
        "varies; the three multiply to `all`. `schedule`, a part of each of them, is dyncp with the greedy schedule "
        "over dyncp.",
        compare.split, "scale", ("data", "mask"), shown=("masks", "lengths", "the rest", "schedule"), where=HARDWARE,
        log=True,
    ),
    "degree": Figure(
        "More ranks",
        f"The same 131,072 tokens on 8 to 256 ranks, causal, lengths x 4, one batch. {SPEEDUPS} There are two rivals "
        "here.",
        compare.degrees, "ranks", ("data",), shown=("RFA ring", "TE"), where=HARDWARE, log=True,
    ),
    "machines": Figure(
        "Other machines", f"Scale 1 on 4 x 8 devices of three presets. {SPEEDUPS}",
        compare.machines, "machine", ("data", "mask"), shown=BESTS, where=HARDWARE, log=True,
    ),
    "mixed": Figure(
        "Mixed masks", f"Batches in which causal, lambda, causal blockwise and shared question take turns. {SPEEDUPS}",
        compare.mixed, "scale", ("data",), shown=BESTS, where=HARDWARE, log=True,
    ),
}  # fmt: skip
