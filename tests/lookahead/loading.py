"""Datasets and loaders that several loader tests start from."""

from __future__ import annotations

import contextlib

import numpy as np

from dyncp.ir.cluster import Cluster
from dyncp.ir.shape import AttentionShape
from dyncp.lookahead import Batching, DynamicLoader, LookAhead, Planning
from dyncp.lookahead.stores.memory import MemoryStore
from dyncp.strategies.api import Options

SHAPE = AttentionShape(4, 2, 8, dtype="float32")
LENGTHS = (40, 7, 1, 23, 64, 12, 33, 2, 9, 80, 5, 17)
IN_PROCESS = LookAhead(kappa=2, workers=0, timeout_s=20)
LONG_TAIL_CUT = 50


class Counting:
    """Random tokens; remembers which samples were read."""

    def __init__(self, lengths=LENGTHS):
        rng = np.random.default_rng(7)
        self.samples = [rng.integers(0, 1000, length) for length in lengths]
        self.lengths = lengths
        self.read = []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.read.append(index)
        return self.samples[index]


def planning(ranks: int, strategy: str = "zigzag") -> Planning:
    return Planning(SHAPE, Cluster(1, ranks), strategy, Options(block_tokens=16))


@contextlib.contextmanager
def open_loaders(datasets, batching=None, lookahead=IN_PROCESS, strategy="zigzag", store=None, **more):
    """A loader for each dataset, one per rank, that share a store in this process."""
    store = MemoryStore() if store is None else store
    batching = batching or Batching(128, LONG_TAIL_CUT, seed=3)
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                DynamicLoader(
                    dataset,
                    planning(len(datasets), strategy),
                    batching,
                    lookahead,
                    rank=rank,
                    store=store,
                    **{"run": "0"} | more,
                )
            )
            for rank, dataset in enumerate(datasets)
        ]


def in_turns(loaders):
    """The steps of a pass, each a tuple of what the ranks have in it."""
    return zip(*map(iter, loaders), strict=True)
