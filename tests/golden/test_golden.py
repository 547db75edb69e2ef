"""Small plans stored as text, so that a change of what the planner makes is seen as a diff.

`pytest --refresh-golden` writes them anew. A plan that changes without a reason in the commit is a bug.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
from builders import causal_batch

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.check import check_plan
from dyncp.ir.cluster import Cluster
from dyncp.ir.codec import read_plan, to_text, write_plan
from dyncp.ir.placement import Placement
from dyncp.ir.plan import Plan, PlanHeader
from dyncp.ir.shape import AttentionShape
from dyncp.planner.blockgen import make_blocks, uniform_cut
from dyncp.planner.lower import lower
from dyncp.planner.scheduling.greedy import greedy_schedule
from dyncp.strategies import make_plan
from dyncp.strategies.api import Options

FOLDER = Path(__file__).parent
SHAPE = AttentionShape(2, 1, 4, dtype="bfloat16")
PAIR = Cluster(1, 2)


def ring() -> Plan:
    return make_plan(causal_batch(8), SHAPE, PAIR, "ring")


def zigzag() -> Plan:
    return make_plan(causal_batch(8), SHAPE, PAIR, "zigzag", Options(keep="kv"))


def data_parallel() -> Plan:
    """Two masks, and a sequence whose queries look at other keys."""
    both = Sequence(4, {"full": masks.full(4), "window": masks.sliding_window(4, 2)})
    cross = Sequence(3, {"full": masks.full(3, 2), "window": masks.full(3, 2)}, kv_length=2)
    return make_plan(Batch([both, cross], {"full": 1, "window": 5}), SHAPE, PAIR, "data_parallel")


def dynamic() -> Plan:
    """A placement written by hand, so that no solver has a say: rank 1 computes one block away from both its ends."""
    batch = Batch([Sequence(12, masks.lambda_(12, 2, 5))])
    options = Options(block_tokens=4, divisions=2, keep="all", wire="float32")
    shape = AttentionShape(2, 2, 4, dtype="float32")
    blocks = make_blocks(batch, shape.groups, uniform_cut(options.block_tokens))
    assert list(zip(blocks.q_block, blocks.kv_block, strict=True)) == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)]
    placement = Placement([0, 0, 1], [[0, 0, 0, 0, 1, 1], [0, 1, 0, 1, 1, 1]])
    schedule = greedy_schedule(blocks, placement, shape, PAIR, options)
    header = PlanHeader(
        "dynamic",
        shape,
        PAIR.nodes,
        PAIR.ranks_per_node,
        options.keep,
        options.wire,
        blocks.mask_names,
        blocks.mask_weights,
        blocks.tokens,
        placement.block_rank,
    )
    plan = lower(header, batch, blocks, placement, schedule)
    check_plan(plan, blocks)
    return plan


@pytest.mark.parametrize("make", [ring, zigzag, data_parallel, dynamic], ids=lambda make: make.__name__)
def test_golden(make, refresh_golden):
    path, plan = FOLDER / f"{make.__name__}.txt", make()
    check_plan(plan)
    if refresh_golden:
        write_plan(plan, path)
    stored = path.read_text(encoding="utf-8")
    if stored != to_text(plan):
        lines = difflib.unified_diff(stored.splitlines(), to_text(plan).splitlines(), "stored", "made now", lineterm="")
        pytest.fail("\n".join([*lines, "if that is meant: pytest --refresh-golden"]))
    assert read_plan(path) == plan
