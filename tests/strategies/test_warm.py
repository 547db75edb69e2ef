"""The warm-up leaves nothing to compile, and compiling is announced."""

import gc
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from builders import random_batch
from numba.core.dispatcher import Dispatcher

from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.ir.shape import AttentionShape
from dyncp.jit import _Announcer
from dyncp.masks import causal
from dyncp.strategies import STRATEGIES, build
from dyncp.strategies.api import OBJECTIVES, Options
from dyncp.strategies.warm import warm_up


def versions():
    """How many versions of each compiled function there are."""
    functions = [found for found in gc.get_objects() if isinstance(found, Dispatcher)]
    ours = [function for function in functions if function.py_func.__module__.startswith("dyncp.")]
    return {f"{f.py_func.__module__}.{f.py_func.__name__}": len(f.signatures) for f in ours}


def plan_many():
    warm_up()
    before = versions()
    assert sum(map(bool, before.values())) > 10  # the others are parts of these
    for seed in range(12):
        rng = np.random.default_rng(seed)
        names = ("a", "b")[: 1 + seed % 2]
        batches = [random_batch(rng, names, cross=seed % 4 == 3), Batch([Sequence(5000, causal(5000))])]
        cluster = Cluster(int(rng.integers(1, 4)), int(rng.integers(1, 5)))
        options = Options((7, 64, "auto")[seed % 3], objective=OBJECTIVES[seed % 3], effort=0.05, seed=seed)
        for batch in batches:
            for strategy in STRATEGIES:
                build(batch, AttentionShape(4, 2, 16), cluster, strategy, options)
    assert versions() == before


def test_planning_compiles_nothing_that_the_warm_up_has_not():
    # in a process of its own, as other tests compile as well
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path[:0] = {[*sys.path, here]!r}; import test_warm; test_warm.plan_many()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compiling_is_announced_once(caplog):
    announcer = _Announcer()
    ours, other = (
        SimpleNamespace(data={"dispatcher": SimpleNamespace(py_func=SimpleNamespace(__module__=name))})
        for name in ("dyncp.planner.memory", "elsewhere.loops")
    )
    with caplog.at_level(logging.WARNING, "dyncp"):
        for event in (other, ours, ours):
            announcer.on_start(event)
    assert [record.getMessage() for record in caplog.records] == [
        "compiling parts of dyncp, which are kept for later: up to half a minute"
    ]
