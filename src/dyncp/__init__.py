"""Dynamic context parallelism: a parallel attention that is planned anew for every batch.

    plan = dyncp.make_plan(batch, shape, cluster)  # what every rank does; numpy only
    out = dyncp.attention(q, k, v, plan)           # runs this rank's part, differentiable; the first import of torch

What to plan: `Batch` of `Sequence`s with their `Mask`s (made by `masks`), `AttentionShape`, `Cluster`, and `Options`.
To plan while training: `DynamicLoader`, with its settings `Planning`, `Batching` and `LookAhead` and the `TcpStore` by
which the ranks hand each other plans (more in `dyncp.lookahead`).

The public names are imported on first use, so that planning works without torch. A whole `Plan` may be given to
`attention`, which takes this rank's part of it, or the part alone: `plan.rank(rank)`, which is what the loader gives.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dyncp import masks
    from dyncp.ir.batch import Batch, Sequence
    from dyncp.ir.cluster import Cluster
    from dyncp.ir.mask import Mask
    from dyncp.ir.plan import Plan
    from dyncp.ir.shape import AttentionShape
    from dyncp.lookahead.config import Batching, LookAhead, Planning
    from dyncp.lookahead.loader import DynamicLoader
    from dyncp.lookahead.stores.tcp import TcpStore
    from dyncp.runtime.attention import attention
    from dyncp.runtime.prepare import prepare
    from dyncp.strategies import make_plan
    from dyncp.strategies.api import Options

__version__ = "0.1.0"
__all__ = [
    "masks",
    "Mask",
    "Sequence",
    "Batch",
    "AttentionShape",
    "Cluster",
    "Options",
    "make_plan",
    "Plan",
    "attention",
    "prepare",
    "DynamicLoader",
    "Planning",
    "Batching",
    "LookAhead",
    "TcpStore",
]

_MODULES = {
    "Mask": "dyncp.ir.mask",
    "Sequence": "dyncp.ir.batch",
    "Batch": "dyncp.ir.batch",
    "AttentionShape": "dyncp.ir.shape",
    "Cluster": "dyncp.ir.cluster",
    "Options": "dyncp.strategies.api",
    "make_plan": "dyncp.strategies",
    "Plan": "dyncp.ir.plan",
    "attention": "dyncp.runtime.attention",
    "prepare": "dyncp.runtime.prepare",
    "DynamicLoader": "dyncp.lookahead.loader",
    "Planning": "dyncp.lookahead.config",
    "Batching": "dyncp.lookahead.config",
    "LookAhead": "dyncp.lookahead.config",
    "TcpStore": "dyncp.lookahead.stores.tcp",
}


def __getattr__(name: str) -> Any:
    if name == "masks":
        return importlib.import_module("dyncp.masks")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'dyncp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
