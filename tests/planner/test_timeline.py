"""The timeline schedule: correct whatever the recipe, as few bytes as the greedy one, and earlier by the clock."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from builders import SHAPE, random_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from dyncp import masks
from dyncp.bench.corpus import MASKS, lengths_of
from dyncp.cost.roofline import Roofline
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.check import check_plan
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import KEEP, PASSES, side_token_bytes
from dyncp.ir.shape import AttentionShape
from dyncp.planner.scheduling import timeline
from dyncp.planner.scheduling.clock import schedule_seconds
from dyncp.planner.scheduling.greedy import greedy_schedule
from dyncp.planner.scheduling.timeline import RECIPES, TRIALS, Recipe, recipes, timeline_schedule
from dyncp.simulator import simulate
from dyncp.strategies import build, lower_layout
from dyncp.strategies.api import Layout, Options


def moved_bytes(layout, shape, options, between=None):
    transfers = layout.schedule.transfers
    sides = np.sum([side_token_bytes(shape, pass_, options.keep, options.wire) for pass_ in PASSES], axis=0)
    size = sides[transfers.side] * layout.blocks.tokens.tokens[transfers.block]
    if between is not None:
        size = size[transfers.src // between != transfers.dst // between]
    return int(size.sum())


RECIPE = st.builds(
    Recipe,
    st.integers(1, 6),
    st.sampled_from([1.0, 1.5, 2.5]),
    st.sampled_from([0.1, 0.5, 1.0]),
    st.integers(0, 4),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    nodes=st.integers(1, 3),
    per_node=st.integers(1, 4),
    recipe=RECIPE,
    keep=st.sampled_from(list(KEEP)),
    names=st.sampled_from([("a",), ("a", "b")]),
)
def test_every_recipe_makes_correct_plans(seed, nodes, per_node, recipe, keep, names):
    rng = np.random.default_rng(seed)
    batch, cluster = random_batch(rng, names, cross=seed % 4 == 0), Cluster(nodes, per_node)
    options = Options(block_tokens=6, keep=keep, seed=seed, effort=0.05, portfolio=False, schedule="greedy")
    made = build(batch, SHAPE, cluster, "dynamic", options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "recipes", lambda *_: [recipe])
        blocks, placement = made.layout.blocks, made.layout.placement
        schedule = timeline_schedule(blocks, placement, SHAPE, cluster, Roofline.of(cluster), options)
    layout = Layout(blocks, placement, schedule)
    check_plan(lower_layout(layout, batch, SHAPE, cluster, "dynamic", options), blocks, batch)
    for between in (None, per_node):  # each piece crosses as often as in the paper's schedule
        assert moved_bytes(layout, SHAPE, options, between) == moved_bytes(made.layout, SHAPE, options, between)


WIDE = AttentionShape(8, 2, 128)
CASES = [
    (kind, mask) for kind in ("single", "longtail", "longalign") for mask in ("causal", "lambda", "shared_question")
]


def test_it_ends_before_the_greedy_schedule():
    """Nowhere later, but for the granularity of blocks, and well before it on the whole."""
    gains = []
    for kind, mask in CASES:
        random, cluster = Random(5), Cluster.preset("p4de", 2)
        lengths = [65536] if kind == "single" else lengths_of(kind, 65536, random)
        batch = Batch([Sequence(n, {"default": MASKS[mask]["default"](n, random)}) for n in lengths])
        options, cost = Options(portfolio=False), Roofline.of(cluster)
        layout = build(batch, WIDE, cluster, "dynamic", options).layout
        blocks, placement = layout.blocks, layout.placement
        greedy = greedy_schedule(blocks, placement, WIDE, cluster, options)
        own, other = (
            schedule_seconds(blocks, placement, schedule, WIDE, cluster, cost, ("none", "model"))
            for schedule in (layout.schedule, greedy)
        )
        assert own < 1.005 * other, (kind, mask)
        gains.append(other / own)
    assert np.prod(gains) ** (1 / len(gains)) > 1.03


@pytest.mark.parametrize("strategy", ["dynamic", "zigzag", "allgather", "sequence_level"])
@pytest.mark.parametrize("keep", ["none", "kv"])
def test_the_clock_says_what_the_simulator_says(strategy, keep):
    """But for copies and reductions, which it takes together."""
    cluster, options = Cluster.preset("p4de", 2, 4), Options(keep=keep)
    names = {"a": masks.causal, "b": lambda n: masks.sliding_window(n, 512)}
    batch = Batch([Sequence(n, {k: make(n) for k, make in names.items()}) for n in (20000, 9000, 3000)], {"b": 3.0})
    made = build(batch, WIDE, cluster, strategy, options)
    layout, cost = made.layout, Roofline.of(cluster)
    seconds = schedule_seconds(
        layout.blocks, layout.placement, layout.schedule, WIDE, cluster, cost, (keep, options.wire)
    )
    assert seconds == pytest.approx(simulate(made.plan, cluster, cost).total_s, rel=0.05)


def test_how_many_recipes_are_tried():
    assert recipes(0, "auto") == [RECIPES[0]]
    assert recipes(1, "auto") == list(RECIPES)
    for most, count in TRIALS:
        assert len(recipes(most, "auto")) == count
    assert recipes(TRIALS[-1][0] + 1, "auto") == [RECIPES[0]]


@pytest.mark.parametrize("divisions", [1, 2, 3, 5, 8])
def test_divisions_can_be_asked_for(divisions):
    """Then there is none with more, but for what is passed on inside a node or is needed at all."""
    assert all(recipe.waves + 1 + recipe.tail <= max(divisions, 2 + recipe.tail) for recipe in recipes(9, divisions))
    batch, cluster = Batch([Sequence(4096, masks.causal(4096))]), Cluster(1, 4)
    made = build(batch, WIDE, cluster, "dynamic", Options(divisions=divisions, portfolio=False))
    check_plan(made.plan, made.layout.blocks, batch)


def test_nothing_waits_where_nothing_moves():
    batch, cluster = Batch([Sequence(100, masks.causal(100)) for _ in range(4)]), Cluster(2, 2)
    layout = build(batch, WIDE, cluster, "dynamic", Options(portfolio=False)).layout
    assert len(layout.schedule.transfers) == 0
