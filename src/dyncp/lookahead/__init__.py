"""Planning ahead of training (paper, section 6.1): the data loader, its planner processes and the stores."""

from dyncp.lookahead.config import Batching, LookAhead, Planning
from dyncp.lookahead.loader import DynamicLoader, LoaderReport, LocalBatch
from dyncp.lookahead.producer import PlanningError
from dyncp.lookahead.stores.api import PlanStore

__all__ = [
    "Batching",
    "DynamicLoader",
    "LoaderReport",
    "LocalBatch",
    "LookAhead",
    "PlanStore",
    "Planning",
    "PlanningError",
]
