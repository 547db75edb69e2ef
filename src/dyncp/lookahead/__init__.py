"""Planning ahead of training (paper, section 6.1): the data loader, what it is told, what it gives, and the stores.

`DynamicLoader` is the loader; `Planning`, `Batching` and `LookAhead` are its settings; `TcpStore` and `MemoryStore` are
the stores. The first use of `TcpStore` imports torch, so that planner processes need not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dyncp.lookahead.config import Batching, LookAhead, MaskFunction, Planning
from dyncp.lookahead.loader import DynamicLoader, LoaderReport, LocalBatch, MapDataset
from dyncp.lookahead.producer import PlanningError
from dyncp.lookahead.stores.api import PlanStore
from dyncp.lookahead.stores.memory import MemoryStore

if TYPE_CHECKING:
    from dyncp.lookahead.stores.tcp import TcpStore

__all__ = [
    "Batching",
    "DynamicLoader",
    "LoaderReport",
    "LocalBatch",
    "LookAhead",
    "MapDataset",
    "MaskFunction",
    "MemoryStore",
    "PlanStore",
    "Planning",
    "PlanningError",
    "TcpStore",
]


def __getattr__(name: str) -> Any:
    if name == "TcpStore":
        return importlib.import_module("dyncp.lookahead.stores.tcp").TcpStore
    raise AttributeError(f"module 'dyncp.lookahead' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
