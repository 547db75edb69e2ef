"""The paper's own values."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

SHORT = {"longdatacollections": ("ldc", "LDC"), "longalign": ("longalign", "LongAlign")}
PASS_NAMES = {"forward": "FW", "backward": "BW"}
OUTLIERS = (  # bars that do not go with their neighbours
    ("RFA_ring", "longdatacollections", 1.0, "causal", "forward"),
    ("DCP", "longdatacollections", 1.0, "lambda", "forward"),
)


@cache
def paper() -> dict[str, Any]:
    """All of them, as in `paper_figures.json`."""
    text = files("dyncp.reproduce").joinpath("paper_figures.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def micro_ms(method: str, dataset: str, scale: float, mask: str, pass_: str) -> float:
    """A bar of figure 13 (causal) or 14 (all masks), in milliseconds.

    Args:
        method: as the bars are named: RFA_ring, RFA_zigzag, LoongTrain, TE or DCP.
        dataset: a key of `data.DATASETS`.
        scale: of the lengths.
        mask: one of `data.MASK_NAMES`.
        pass_: forward or backward.
    """
    short, what, scale_name = SHORT[dataset][0], PASS_NAMES[pass_], f"{scale:.1f}"
    if mask == "causal":
        bars = paper()["micro_causal"][f"microbenchmark_{short}_msl131072_N4D32_causal_{what}"]
        return float(bars[method][scale_name])
    bars = paper()["micro_masks"][f"microbenchmark_{short}_msl131072_N4D32_masks"]
    return float(bars[f"{method}_{what}"][scale_name][mask])


def iteration_s(method: str, dataset: str, longest: int, mask: str) -> float:
    """A bar of figures 15 and 16, in seconds; `method` is MLM or DCP."""
    return float(paper()["e2e"][f"e2e_{SHORT[dataset][1]}_msl{longest}"][method][mask])


def speedup(dataset: str, scale: float, mask: str) -> float:
    """The paper's own: forward and backward of the fastest baseline over DCP's."""
    rivals = ("RFA_ring", "RFA_zigzag", "LoongTrain", "TE") if mask == "causal" else ("TE",)
    both = {
        method: sum(micro_ms(method, dataset, scale, mask, pass_) for pass_ in PASS_NAMES)
        for method in (*rivals, "DCP")
    }
    return min(both[name] for name in rivals) / both["DCP"]
