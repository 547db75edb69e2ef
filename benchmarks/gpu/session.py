"""What all sections share, and what one finds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.clock import Clock
from benchmarks.gpu.scale import Scale
from dyncp.cost.profiled import Profiled
from dyncp.ir.plan import Plan

Row = dict[str, Any]


@dataclass(slots=True)
class Session:
    """One run of the benchmark.

    Args:
        clock: of the device.
        scale: sizes.
        kernels: names of dyncp's kernels; the first are those that targets are for.
        table_path: where the table of times is written.
        table: once it is measured.
        replayed: plans whose ranks ran alone, by name of their batch, for what is asked of them later.
    """

    clock: Clock
    scale: Scale
    kernels: tuple[str, ...]
    table_path: Path
    table: Profiled | None = None
    replayed: dict[str, Plan] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """What is measured."""
        return self.clock.device


@dataclass(slots=True)
class Findings:
    """What a section found."""

    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)  # for lack of time
