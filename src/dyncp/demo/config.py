"""Options of the demo."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, replace
from pathlib import Path

from dyncp.ir.cluster import Cluster
from dyncp.lookahead.config import Batching, LookAhead
from dyncp.masks import from_spec, parse_spec
from dyncp.strategies import STRATEGIES
from dyncp.strategies.api import Options

# Arguments that suit documents of some thousand tokens, for masks named without any.
MASK_DEFAULTS = {
    "lambda": "lambda:sink=16,window=256",
    "sliding_window": "sliding_window:window=256",
    "causal_blockwise": "causal_blockwise:block=128,sink_blocks=1,window_blocks=2",
    "shared_question": "shared_question:fraction=0.2,answers=4",
}


class DemoError(RuntimeError):
    """The demo did not do what it shows: a process failed, or the loss curves differ."""


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """Train a byte-level GPT of 590,000 parameters under per-batch plans, on several processes of this machine;
    then train it again in one process with dense attention, and compare."""

    ranks: int = 4
    """Training processes."""
    nodes: int = 1
    """Nodes that the planner believes the ranks are on."""
    steps: int = 40
    """Optimiser steps."""
    tokens: int = 6144
    """Most tokens of a global batch."""
    max_length: int = 3072
    """Longer documents are cut to this many tokens (bytes)."""
    masks: tuple[str, ...] = ("causal", "lambda", "causal_blockwise", "shared_question")
    """Mask kinds, one of which is drawn for each document; arguments as in `lambda:sink=64,window=1024`."""
    strategy: str = "dynamic"
    """How to plan: dynamic, ring, zigzag or data_parallel."""
    data: Path | None = None
    """Folder of text files to train on; Python's standard library when left out."""
    block_tokens: int = 256
    """Tokens of a block."""
    keep: str = "none"
    """Remote data that the forward keeps for the backward: none, kv or all."""
    kappa: int = 4
    """Iterations that are planned ahead."""
    workers: int = 1
    """Planner processes of each training process."""
    seed: int = 0
    """Of the weights, the shuffle, the masks and the planner."""
    out: Path = Path("demo-out")
    """Folder for result.json and demo.png."""

    def __post_init__(self) -> None:
        for name in ("ranks", "nodes", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.ranks % self.nodes:
            raise ValueError(f"{self.ranks} ranks cannot be shared by {self.nodes} nodes; choose a number that divides")
        if self.max_length < 2:
            raise ValueError(f"max_length is {self.max_length}; it must be at least 2: tokens predict the next one")
        if not self.masks:
            raise ValueError("no masks; give at least one, such as causal")
        # what is checked elsewhere, before any process starts
        for mask in self.masks:
            from_spec(parse_spec(MASK_DEFAULTS.get(mask, mask)), self.max_length)
        if self.strategy not in STRATEGIES:
            raise ValueError(f"unknown strategy {self.strategy!r}; choose one of {', '.join(STRATEGIES)}")
        Batching(self.tokens, self.max_length)
        LookAhead(self.kappa, self.workers)
        assert self.options and self.cluster

    @property
    def cluster(self) -> Cluster:
        """The ranks as the planner sees them."""
        return Cluster.preset("cpu", self.nodes, self.ranks // self.nodes)

    @property
    def options(self) -> Options:
        """The planner's options."""
        # a toy fills no tiles, and would mostly take a fixed scheme
        plain = Options(balance="pairs", portfolio=False)
        return replace(plain, block_tokens=self.block_tokens, keep=self.keep, seed=self.seed)

    def to_json(self) -> str:
        """The configuration as text, for the training processes."""
        return json.dumps(dataclasses.asdict(self), default=str, indent=1)

    @classmethod
    def from_json(cls, text: str) -> DemoConfig:
        """The reverse of `to_json`."""
        values = json.loads(text)
        values["masks"] = tuple(values["masks"])
        values["out"] = Path(values["out"])
        values["data"] = values["data"] and Path(values["data"])
        return cls(**values)
