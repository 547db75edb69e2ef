"""Planning ahead of training (paper, section 6.1): the data loader, what it is told, what it gives, and the stores.

`DynamicLoader` is the loader; `Planning`, `Batching` and `LookAhead` are its settings; `TcpStore`, `FileStore`,
`RedisStore` and `MemoryStore` are the stores, and `open_store` makes one from an address. The first use of `TcpStore`
imports torch, so that planner processes need not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dyncp.lookahead.config import Batching, LookAhead, MaskFunction, Planning
from dyncp.lookahead.health import LoaderReport
from dyncp.lookahead.loader import DynamicLoader
from dyncp.lookahead.local_batch import LocalBatch
from dyncp.lookahead.producer import PlanningError
from dyncp.lookahead.source import MapDataset
from dyncp.lookahead.stores.api import PlanStore, StoreError
from dyncp.lookahead.stores.file import FileStore
from dyncp.lookahead.stores.memory import MemoryStore
from dyncp.lookahead.stores.open import open_store
from dyncp.lookahead.stores.redis import RedisStore

if TYPE_CHECKING:
    from dyncp.lookahead.stores.tcp import TcpStore

__all__ = [
    "Batching",
    "DynamicLoader",
    "FileStore",
    "LoaderReport",
    "LocalBatch",
    "LookAhead",
    "MapDataset",
    "MaskFunction",
    "MemoryStore",
    "PlanStore",
    "Planning",
    "PlanningError",
    "RedisStore",
    "StoreError",
    "TcpStore",
    "open_store",
]


def __getattr__(name: str) -> Any:
    if name == "TcpStore":
        return importlib.import_module("dyncp.lookahead.stores.tcp").TcpStore
    raise AttributeError(f"module 'dyncp.lookahead' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
