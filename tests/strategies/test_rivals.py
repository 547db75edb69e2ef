"""The strategies of other systems: right, and what they move is what their originals move."""

from __future__ import annotations

import numpy as np
import pytest
from any_batch import any_batch, any_cluster
from builders import SHAPE, causal_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.blocks import HAS_KV
from dyncp.ir.check import check_plan
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import BACKWARD, FORWARD, KEEP, side_token_bytes
from dyncp.ir.schedule import Side
from dyncp.ir.shape import AttentionShape
from dyncp.strategies import build
from dyncp.strategies.api import Options
from dyncp.strategies.balanced_qo_home import MOST_TOKENS
from dyncp.strategies.double_ring import inner_ring
from dyncp.strategies.exchange import turns
from dyncp.verify import Case, verify

HEADS = ("double_ring", "head_ring", "ulysses", "usp")
RINGS = ("ring", "zigzag", "double_ring", "head_ring", "usp")
RIVALS = (*HEADS, "allgather", "sequence_level", "balanced_qo_home")
RANKS = Cluster(1, 4)
LAYOUTS = ((1, 1), (1, 3), (2, 2), (2, 4), (4, 1), (1, 8))


def varied_batch() -> Batch:
    """Lengths and masks of all sorts under two names: one token, fewer tokens than chunks, other tokens as keys."""

    def both(length, other):
        return Sequence(length, {"a": masks.causal(length), "b": other})

    keys = {"a": masks.full(21, 50), "b": masks.from_slices(21, 50, [[3, 21, 10, 40, "causal"]])}
    return Batch(
        [
            both(90, masks.sliding_window(90, 20)),
            both(1, masks.full(1)),
            both(7, masks.full(7)),
            both(37, masks.lambda_(37, 3, 9)),
            Sequence(21, keys, 50),
            both(40, masks.shared_question(10, [16, 14])),
        ],
        {"a": 2.0},
    )


def made(strategy, batch, shape=SHAPE, cluster=RANKS, **options):
    planned = build(batch, shape, cluster, strategy, Options(**options))
    check_plan(planned.plan, planned.layout.blocks, batch)
    return planned


def per_token(shape, pass_):
    return np.array(side_token_bytes(shape, pass_, "none", "model"))


def moved_bytes(planned, *sides, pass_=FORWARD, between_nodes=False):
    """Bytes of the transfers of some sides (of all), of all masks alike."""
    moves, header = planned.layout.schedule.transfers, planned.plan.header
    size = per_token(header.shape, pass_)[moves.side] * planned.layout.blocks.tokens.tokens[moves.block]
    chosen = np.isin(moves.side, sides) if sides else np.ones(len(moves), bool)
    if between_nodes:
        chosen &= moves.src // header.ranks_per_node != moves.dst // header.ranks_per_node
    return int(size[chosen].sum())


def all_bytes(batch, shape, side, pass_=FORWARD):
    """What one side of all tokens has, in all head groups."""
    return batch.tokens * shape.groups * int(per_token(shape, pass_)[side])


def ratios(planned):
    """max / mean of computation (of each mask) and of tokens."""
    blocks, placement, ranks = planned.layout.blocks, planned.layout.placement, planned.plan.header.ranks
    tokens = np.bincount(placement.block_rank, blocks.tokens.tokens, ranks)
    works = []
    for mask in range(len(blocks.mask_names)):
        part = blocks.of_mask(mask)
        pairs = np.tile(blocks.pairs[part], blocks.groups)
        work = np.bincount(placement.comp_rank[:, part].ravel(), pairs, ranks)
        works.append(work.max() / work.mean())
    return max(works), tokens.max() / tokens.mean()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))
@pytest.mark.parametrize("strategy", RIVALS)
def test_equals_dense_attention(strategy, layout):
    number = LAYOUTS.index(layout)
    shape = AttentionShape(12, (4, 3, 2, 4, 1, 6)[number], 8, dtype="float32")
    options = Options(
        block_tokens="auto" if number == 1 else 20,
        head_degree=(2, 2, 2, 2, 2, 4)[number],
        inner_ring=("auto", 3, 1, "auto", 2, 2)[number],
        keep=list(KEEP)[number % 3],
    )
    case = Case(varied_batch(), shape, Cluster(*layout), strategy, options)
    assert max(verify(case).values()) <= case.tolerance


@given(
    seed=st.integers(0, 2**16),
    groups=st.sampled_from([1, 2, 3, 4, 6, 8]),
    head_degree=st.integers(1, 6),
    inner_ring=st.sampled_from(["auto", 1, 2, 3, 4, 8]),
    block_tokens=st.one_of(st.just("auto"), st.integers(1, 30)),
    strategy=st.sampled_from(RIVALS),
    keep=st.sampled_from(sorted(KEEP)),
)
@settings(max_examples=60)
def test_plans_of_any_batch_pass_the_check(seed, groups, strategy, **words):
    rng = np.random.default_rng(seed)
    batch, cluster = any_batch(rng, 40, 4), any_cluster(rng, 12)
    shape = AttentionShape(2 * groups, groups, 4, dtype="float32")
    planned = build(batch, shape, cluster, strategy, Options(**words))
    check_plan(planned.plan, planned.layout.blocks, batch)


# Bytes. Lengths divide, so the numbers are exact.

BATCH = causal_batch(480, 96, 192)
SHAPE_8 = AttentionShape(16, 8, 8, 16, dtype="float32")


@pytest.mark.parametrize(
    ("strategy", "heads", "options"),
    [
        ("ring", 1, {}),
        ("zigzag", 1, {}),
        ("head_ring", 2, {}),
        ("head_ring", 4, {"head_degree": 4}),
        ("double_ring", 2, {}),
        ("double_ring", 1, {"head_degree": 3}),
        ("double_ring", 2, {"inner_ring": 1}),
        ("usp", 4, {}),
        ("ulysses", 8, {}),
    ],
)
def test_bytes_of_rings_and_head_exchanges(strategy, heads, options):
    """KV goes past all contexts but its own; of Q, KV and O what belongs to other lanes moves there (and back)."""
    cluster = Cluster(2, 4)
    planned = made(strategy, BATCH, SHAPE_8, cluster, **options)
    ring = cluster.ranks // heads
    other_lanes = (heads - 1) / heads
    for pass_ in (FORWARD, BACKWARD):
        for side, hops in ((Side.KV_IN, ring - 1), (Side.KV_OUT, ring - 1), (Side.Q_IN, 0), (Side.Q_OUT, 0)):
            expected = all_bytes(BATCH, SHAPE_8, side, pass_) * (hops + other_lanes)
            assert moved_bytes(planned, side, pass_=pass_) == expected


@pytest.mark.parametrize("strategy", ["allgather", "usp", "double_ring"])
def test_kv_crosses_to_each_node_once(strategy):
    """In a ring of whole nodes, and in an all-gather of two levels."""
    planned = made(strategy, BATCH, SHAPE_8, Cluster(3, 4), head_degree=2)
    for side in (Side.KV_IN, Side.KV_OUT):
        expected = 2 * all_bytes(BATCH, SHAPE_8, side, BACKWARD)
        assert moved_bytes(planned, side, pass_=BACKWARD, between_nodes=True) == expected
    assert moved_bytes(planned, Side.Q_IN, Side.Q_OUT, between_nodes=True) == 0


def test_bytes_of_an_all_gather():
    for cluster in (Cluster(1, 6), Cluster(3, 2), Cluster(6, 1)):
        planned = made("allgather", BATCH, SHAPE_8, cluster)
        assert moved_bytes(planned) == 5 * all_bytes(BATCH, SHAPE_8, Side.KV_IN)
        expected = sum(5 * all_bytes(BATCH, SHAPE_8, side, BACKWARD) for side in (Side.KV_IN, Side.KV_OUT))
        assert moved_bytes(planned, pass_=BACKWARD) == expected


def test_an_all_gather_computes_when_all_is_there_and_crosses_evenly():
    planned = made("allgather", BATCH, SHAPE_8, Cluster(2, 4))
    schedule = planned.layout.schedule
    moves = schedule.transfers
    last = int(schedule.comp_step.max())
    assert schedule.comp_step.min() == last == moves.step[moves.side == Side.KV_IN].max() == 2
    assert moves.step[moves.side == Side.KV_OUT].min() == 4
    assert planned.layout.schedule.comp_step.shape == planned.layout.placement.comp_rank.shape
    entering = (moves.src // 4 != moves.dst // 4) & (moves.side == Side.KV_IN)
    size = planned.layout.blocks.tokens.tokens[moves.block]
    assert len(set(np.bincount(moves.dst[entering], size[entering], 8).tolist())) == 1


@pytest.mark.parametrize("strategy", ["zigzag", "double_ring", "head_ring", "usp", "allgather"])
def test_zigzags_balance_a_causal_mask(strategy):
    work, tokens = ratios(made(strategy, causal_batch(1600, 320), SHAPE_8, Cluster(2, 4)))
    assert work <= 1.01
    assert tokens <= 1.001


@pytest.mark.parametrize("strategy", [*RINGS, "allgather", "ulysses"])
def test_what_moves_does_not_depend_on_the_mask(strategy):
    both = [Batch([Sequence(320, mask)]) for mask in (masks.full(320), masks.sliding_window(320, 5))]
    full, window = (made(strategy, batch, SHAPE_8, Cluster(2, 4)) for batch in both)
    assert moved_bytes(full, pass_=BACKWARD) == moved_bytes(window, pass_=BACKWARD)
    assert len(window.layout.blocks) <= len(full.layout.blocks)


# Head exchange


@pytest.mark.parametrize("strategy", HEADS)
def test_each_rank_computes_its_own_heads(strategy):
    planned = made(strategy, BATCH, SHAPE_8, Cluster(2, 4), head_degree=4)
    heads = 8 if strategy == "ulysses" else 4
    lanes = planned.layout.placement.comp_rank % heads
    assert (lanes == (np.arange(8) // (8 // heads))[:, None]).all()
    moves = planned.layout.schedule.transfers
    exchanged = np.isin(moves.side, [Side.Q_IN, Side.Q_OUT])
    assert (moves.src[exchanged] // heads == moves.dst[exchanged] // heads).all()


@pytest.mark.parametrize(("groups", "ranks", "heads"), [(8, 8, 8), (2, 8, 2), (6, 4, 2), (3, 8, 1), (1, 5, 1)])
def test_ulysses_has_groups_of_as_many_ranks_as_head_groups_allow(groups, ranks, heads):
    lengths = (240, 120, 120, 60, 60)
    planned = made("ulysses", causal_batch(*lengths), AttentionShape(groups, groups, 4), Cluster(1, ranks))
    owner, sequence = planned.layout.placement.block_rank, planned.layout.blocks.tokens.sequence
    team = [set((owner[sequence == s] // heads).tolist()) for s in range(len(lengths))]
    assert all(len(one) == 1 for one in team)
    assert len(planned.layout.blocks.tokens) == heads * len(lengths)
    if ranks == 4:  # two groups: 240 and 60, 120, 120, 60
        assert team[0] != team[1] == team[2]


def test_degrees_fall_back_to_what_divides():
    for groups, cluster, wanted, heads in (
        (3, Cluster(2, 3), 2, 1),
        (4, Cluster(1, 6), 4, 2),
        (2, Cluster(1, 8), 6, 2),
    ):
        for strategy in ("head_ring", "double_ring"):
            planned = made(strategy, BATCH, AttentionShape(groups, groups, 4), cluster, head_degree=wanted)
            assert planned.layout.schedule.comp_step.max() == cluster.ranks // heads - (heads == 1)


# Rings in rings


def test_one_inner_ring_or_inner_rings_of_one_are_the_plain_ring():
    cluster = Cluster(1, 6)
    plain = made("zigzag", BATCH, SHAPE_8, cluster).plan.programs
    for inner in (1, 6):
        assert_same_programs(made("double_ring", BATCH, SHAPE_8, cluster, head_degree=1, inner_ring=inner), plain)
    assert_same_programs(made("head_ring", BATCH, SHAPE_8, cluster, head_degree=1), plain)


def assert_same_programs(planned, programs):
    for ours, theirs in zip(planned.plan.programs, programs, strict=True):
        for name in ("forward", "backward"):
            one, other = getattr(ours[0], name), getattr(theirs[0], name)
            assert [type(i) for i in one.instructions] == [type(i) for i in other.instructions]
            for field in ("kind", "block", "group", "place", "offset"):
                assert getattr(one.slots, field).tolist() == getattr(other.slots, field).tolist()


def test_inner_rings_lie_inside_a_node():
    for cluster, heads, inner in (
        (Cluster(4, 8), 2, 4),
        (Cluster(4, 8), 1, 8),
        (Cluster(4, 8), 8, 1),
        (Cluster(2, 6), 1, 2),
        (Cluster(2, 6), 2, 1),
        (Cluster(2, 3), 2, 1),
        (Cluster(1, 1), 1, 1),
    ):
        assert inner_ring(cluster.ranks // heads, heads, cluster, Options()) == inner
    assert inner_ring(12, 1, Cluster(2, 6), Options(inner_ring=8)) == 4


def test_outer_hops_overlap_with_a_round_of_the_inner_ring():
    """Two inner rings of four on two nodes: what crosses is spread over the four steps of a round, in both passes."""
    planned = made("double_ring", causal_batch(480, 480, 480, 480), SHAPE_8, Cluster(2, 4), head_degree=1)
    moves = planned.layout.schedule.transfers
    crosses = moves.src // 4 != moves.dst // 4
    size = planned.layout.blocks.tokens.tokens[moves.block]
    for side, first in ((Side.KV_IN, 1), (Side.KV_OUT, 10)):
        chosen = crosses & (moves.side == side)
        steps = np.bincount(moves.step[chosen], size[chosen])
        assert np.flatnonzero(steps).tolist() == list(range(first, first + 4))
        assert len(set(steps[first:].tolist())) == 1
        assert set(((moves.dst - moves.src)[chosen] % 8).tolist()) == {4}
    inside = moves.side == Side.KV_IN
    assert set(((moves.dst - moves.src)[inside & ~crosses] % 4).tolist()) == {1}


def test_turns_are_even():
    rank, size = np.array([0, 0, 0, 0, 1, 1, 2]), np.array([5, 5, 5, 5, 1, 9, 3])
    assert turns(rank, size, np.full(7, 2)).tolist() == [0, 0, 1, 1, 0, 1, 1]
    assert turns(rank, size, np.ones(7, int)).tolist() == [0] * 7


# Balanced, Q and O at home


def test_q_and_o_stay_at_home():
    for batch in (varied_batch(), BATCH):
        planned = made("balanced_qo_home", batch, SHAPE_8, Cluster(2, 4), block_tokens=20)
        layout = planned.layout
        assert moved_bytes(planned, Side.Q_IN, Side.Q_OUT, pass_=BACKWARD) == 0
        assert moved_bytes(planned, Side.KV_IN) > 0
        assert (layout.placement.comp_rank == layout.placement.block_rank[layout.blocks.q_block]).all()


def test_chunks_are_even_in_tokens_and_work():
    work, tokens = ratios(made("balanced_qo_home", causal_batch(3000, 800, 200, 96), SHAPE_8, Cluster(2, 4)))
    assert work <= 1.02
    assert tokens == 1.0


def test_chunk_sizes():
    for length, options, most, count in (
        (4096, {}, 64, 64),
        (131072, {}, MOST_TOKENS, 64),
        (1000, {"block_tokens": 100}, 84, 12),
        (3, {}, 1, 3),
    ):
        planned = build(causal_batch(length), SHAPE, Cluster(1, 4), "balanced_qo_home", Options(**options))
        tokens = planned.layout.blocks.tokens.tokens
        assert (tokens.max(), len(tokens)) == (most, count)
        chunks = np.bincount(planned.layout.placement.block_rank, minlength=4)
        assert chunks.max() == -(-count // 4)


def test_only_needed_kv_moves():
    """Each rank has each KV block that its queries see, once, and no other."""
    batch = Batch([Sequence(512, masks.sliding_window(512, 20)), Sequence(100, masks.causal(100))])
    planned = made("balanced_qo_home", batch, SHAPE, Cluster(2, 3))
    blocks, placement, moves = planned.layout.blocks, planned.layout.placement, planned.layout.schedule.transfers
    rank = placement.block_rank[blocks.q_block]
    away = rank != placement.block_rank[blocks.kv_block]
    needed = set(zip(rank[away].tolist(), blocks.kv_block[away].tolist(), strict=True))
    came = (moves.side == Side.KV_IN) & (moves.group == 0)
    assert sorted(needed) == sorted(zip(moves.dst[came].tolist(), moves.block[came].tolist(), strict=True))


def test_keys_of_other_tokens_are_even():
    batch = Batch([Sequence(30, masks.full(30, 400), 400), Sequence(10, masks.full(10, 80), 80)])
    planned = made("balanced_qo_home", batch, SHAPE, Cluster(1, 4))
    tokens = planned.layout.blocks.tokens
    keys = np.bincount(planned.layout.placement.block_rank, tokens.tokens * ((tokens.role & HAS_KV) > 0), 4)
    assert keys.max() - keys.min() <= 8


@pytest.mark.parametrize("name", ["head_degree", "inner_ring"])
@pytest.mark.parametrize("value", [0, 1.5, True, "most"])
def test_bad_options(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value!r}; expected a whole number from 1"):
        Options(**{name: value})
