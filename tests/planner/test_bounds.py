"""The lower bound: below every placement there is, near the best of some, and the figures it is known to have."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from builders import causal_batch, random_batch, random_mask

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.ir.placement import Placement
from dyncp.ir.plan import FORWARD, PASSES, side_token_bytes
from dyncp.ir.schedule import Side
from dyncp.ir.shape import AttentionShape
from dyncp.planner.blockgen import make_blocks, uniform_cut
from dyncp.planner.partition.bounds import _Cases, _Cells, _least_bytes, _token_price, lower_bound
from dyncp.planner.partition.nets import Nets
from dyncp.strategies.api import Options
from dyncp.strategies.data_parallel import data_parallel
from dyncp.strategies.ring import ring, zigzag

LAYER = AttentionShape(8, 2, 128)
# 40 documents with a long tail, 131,072 tokens
LONG_TAIL = [
    *(2473, 1680, 5352, 2397, 917, 3523, 14481, 8478, 713, 307, 804, 2179, 63, 1475, 316, 683, 905, 1274, 3797, 9783),
    *(1689, 15904, 755, 3470, 7941, 2358, 671, 514, 1031, 2850, 450, 1496, 1613, 4610, 2826, 3490, 768, 1686, 6638),
    8712,
]


FOUR_NODES = Cluster(4, 8)


def bound(batch, shape=LAYER, cluster=FOUR_NODES, epsilon=0.1, token_epsilon=0.02, keep="none", wire="model"):
    return lower_bound(batch, shape, cluster, epsilon, token_epsilon, keep, wire)


def pass_bytes(shape, passes, keep="none", wire="model"):
    """Bytes per token of the query side and of the KV side."""
    sides = np.sum([side_token_bytes(shape, pass_, keep, wire) for pass_ in passes], axis=0)
    return sides[Side.Q_IN] + sides[Side.Q_OUT], sides[Side.KV_IN] + sides[Side.KV_OUT]


def least_bytes(mask, ranks, groups, sides, epsilon, token_epsilon):
    """The best of all placements of single tokens and single pairs within the limits; None where none is."""
    tokens, (rows, keys) = mask.q_length, np.nonzero(mask.dense())
    pairs = len(rows)
    of_pair = np.array(list(itertools.product(range(ranks), repeat=pairs)))  # [ranks ** pairs, pairs]
    load = np.stack([(of_pair == rank).sum(axis=1) for rank in range(ranks)], axis=1)
    touched = []  # bool[ranks ** pairs, tokens, ranks], of each side
    for end in (rows, keys):
        found = np.zeros((len(of_pair), tokens, ranks), bool)
        for pair in range(pairs):
            found[np.arange(len(of_pair)), end[pair], of_pair[:, pair]] = True
        touched.append(found)
    everywhere = sum(size * side.sum(axis=(1, 2)) for size, side in zip(sides, touched, strict=True))
    loads, which = np.unique(load, axis=0, return_inverse=True)
    of_groups = np.meshgrid(*[np.arange(len(loads))] * groups, indexing="ij")  # the loads of each group, all ways
    total = sum(loads[axis] for axis in of_groups)
    allowed = total.max(axis=-1) <= (1 + epsilon) * groups * pairs / ranks + 1e-9
    best = None
    for owner in itertools.product(range(ranks), repeat=tokens):
        if np.bincount(owner, minlength=ranks).max() > (1 + token_epsilon) * tokens / ranks + 1e-9 or not allowed.any():
            continue
        here = [size * side[:, np.arange(tokens), owner].sum(axis=1) for size, side in zip(sides, touched, strict=True)]
        of_load = np.full(len(loads), np.inf)
        np.minimum.at(of_load, which.ravel(), everywhere - sum(here))
        found = float(sum(of_load[axis] for axis in of_groups)[allowed].min())
        best = found if best is None else min(best, found)
    return best


def small_mask(rng, tokens, pairs):
    """A mask of at most `pairs` pairs, of one kind or another."""
    kind = rng.integers(5)
    if kind == 0:
        return masks.causal(min(tokens, 3))
    if kind == 1:
        return masks.sliding_window(tokens, 2)
    if kind == 2:
        return masks.from_dense(np.tri(min(tokens, 3), dtype=bool).T)
    dense = (rng.random((tokens, tokens)) < 0.6) if kind == 3 else random_mask(rng, tokens, tokens).dense().copy()
    rows, keys = np.nonzero(dense)
    drop = rng.permutation(len(rows))[pairs:]
    dense[rows[drop], keys[drop]] = False
    return masks.from_dense(dense)


@pytest.mark.parametrize("seed", range(40))
def test_never_above_the_best_of_all_placements(seed):
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 4))
    groups = int(rng.integers(1, 3))
    mask = small_mask(rng, int(rng.integers(3, 5)), {2: 8, 3: 6}[ranks])
    shape = AttentionShape(groups * int(rng.choice([1, 4])), groups, 2, int(rng.choice([2, 16])))
    epsilon, token_epsilon = float(rng.choice([0.0, 0.2, 0.5, 1.0])), float(rng.choice([0.4, 0.6, 1.0]))
    found = bound(Batch([Sequence(mask.q_length, mask)]), shape, Cluster(1, ranks), epsilon, token_epsilon)
    for passes, figure in (((FORWARD,), found.forward), (PASSES, found.both)):
        best = least_bytes(mask, ranks, groups, pass_bytes(shape, passes), epsilon, token_epsilon)
        if best is not None:
            assert figure.total_bytes <= best


@pytest.mark.parametrize(
    ("mask", "ranks", "groups", "epsilon"),
    [
        (masks.full(2), 2, 1, 0.0),  # each fetches the other's key
        (masks.full(2), 2, 2, 0.5),
        (masks.full(3), 3, 1, 0.0),
    ],
)
def test_the_best_of_some(mask, ranks, groups, epsilon):
    shape = AttentionShape(4 * groups, groups, 16)
    best = least_bytes(mask, ranks, groups, pass_bytes(shape, (FORWARD,)), epsilon, 0.0)
    found = bound(Batch([Sequence(mask.q_length, mask)]), shape, Cluster(1, ranks), epsilon, 0.0)
    assert best > 0 and 0.999 * best <= found.forward.total_bytes <= best


def moved(blocks, placement, shape, cluster, passes, keep="none", wire="model"):
    """Bytes between ranks and between nodes: what each part touches of a token block that it does not own."""
    totals = []
    for per_part in (1, cluster.ranks_per_node):
        owner, comp = placement.block_rank // per_part, placement.comp_rank // per_part
        total = 0.0
        for size, block in zip(pass_bytes(shape, passes, keep, wire), (blocks.q_block, blocks.kv_block), strict=True):
            group = np.arange(blocks.groups)[:, None]
            touch = np.stack(np.broadcast_arrays(blocks.mask, group, block, comp)).reshape(4, -1)
            mask, _, block, part = np.unique(touch, axis=1)
            away = part != owner[block]
            total += size * float((np.asarray(blocks.mask_weights)[mask] * blocks.tokens.tokens[block])[away].sum())
        totals.append(total)
    return totals


def tolerances(blocks, placement, ranks):
    """How far a placement's largest loads lie above the means."""
    worst = 0.0
    for mask in range(len(blocks.mask_names)):
        part = blocks.of_mask(mask)
        pairs = np.broadcast_to(blocks.pairs[part], placement.comp_rank[:, part].shape)
        load = np.bincount(placement.comp_rank[:, part].ravel(), pairs.ravel(), ranks)
        worst = max(worst, load.max() / max(load.mean(), 1e-30) - 1)
    load = np.bincount(placement.block_rank, blocks.tokens.tokens, ranks)
    return max(worst, 0), load.max() / load.mean() - 1


def check(batch, blocks, placement, shape, cluster, keep="none", wire="model"):
    """Holds the bound against a placement; returns both (total bytes, of both passes)."""
    found = bound(batch, shape, cluster, *tolerances(blocks, placement, cluster.ranks), keep, wire)
    for passes, figure in (((FORWARD,), found.forward), (PASSES, found.both)):
        total, inter_node = moved(blocks, placement, shape, cluster, passes, keep, wire)
        assert figure.total_bytes <= total
        assert figure.inter_node_bytes <= min(inter_node, figure.total_bytes)
    assert total == pytest.approx(
        Nets.of_batch(blocks, shape, keep, wire).cut_bytes(
            placement.block_rank, placement.comp_rank.ravel(), cluster.ranks
        )
    )
    return found.both.total_bytes, total


@pytest.mark.parametrize("seed", range(60))
def test_below_random_placements(seed):
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, [("default",), ("a", "b")][seed % 2], cross=seed % 3 == 0)
    cluster = Cluster(int(rng.integers(1, 4)), int(rng.integers(1, 4)))
    shape = AttentionShape(4, int(rng.choice([1, 2, 4])), 8)
    blocks = make_blocks(batch, shape.groups, uniform_cut(int(rng.integers(1, 9))))
    keep, wire = str(rng.choice(["none", "kv", "all"])), str(rng.choice(["model", "float32"]))
    # at random; and so that much is local: neighbours together, computation where the queries are
    scattered = Placement(
        rng.integers(0, cluster.ranks, len(blocks.tokens)), rng.integers(0, cluster.ranks, (blocks.groups, len(blocks)))
    )
    middle = np.cumsum(blocks.tokens.tokens) - blocks.tokens.tokens / 2
    rank = (middle * cluster.ranks // blocks.tokens.tokens.sum()).astype(int)
    together = Placement(rank, np.broadcast_to(rank[blocks.q_block], (blocks.groups, len(blocks))))
    for placement in (scattered, together):
        check(batch, blocks, placement, shape, cluster, keep, wire)


SEQUENCES = {
    "causal": [masks.causal(512)],
    "full": [masks.full(300)],
    "window": [masks.sliding_window(700, 60)],
    "lambda": [masks.lambda_(600, 8, 50)],
    "blockwise": [masks.causal_blockwise(640, 16, 1, 2)],
    "shared question": [masks.shared_question(100, [90, 110, 100])],
    "prefix": [masks.prefix_lm(400, 100)],
    "documents": [masks.document([200, 30, 170, 90])],
    "mixed": [masks.causal(500), masks.full(40), masks.sliding_window(300, 20), masks.causal(7)],
    "cross": [masks.full(120, 300)],
}


def batch_of(kind):
    same = [mask.q_length == mask.k_length for mask in SEQUENCES[kind]]
    return Batch(
        [
            Sequence(mask.q_length, mask, None if alike else mask.k_length)
            for mask, alike in zip(SEQUENCES[kind], same, strict=True)
        ]
    )


@pytest.mark.parametrize("strategy", [ring, zigzag, data_parallel])
@pytest.mark.parametrize("cluster", [Cluster(1, 2), Cluster(2, 3), Cluster(4, 4)], ids=str)
@pytest.mark.parametrize("kind", SEQUENCES)
def test_below_the_classical_schemes(kind, cluster, strategy):
    for shape in (AttentionShape(8, 2, 16), AttentionShape(4, 4, 16)):
        layout = strategy(batch_of(kind), shape, cluster, Options(block_tokens=32))
        check(batch_of(kind), layout.blocks, layout.placement, shape, cluster)


@pytest.mark.parametrize(("kind", "strategy", "least"), [("full", ring, 0.95), ("causal", ring, 0.7)])
def test_near_a_scheme(kind, strategy, least):
    shape = AttentionShape(8, 2, 16)
    layout = strategy(batch_of(kind), shape, Cluster(1, 2), Options())
    found, total = check(batch_of(kind), layout.blocks, layout.placement, shape, Cluster(1, 2))
    assert found >= least * total


@pytest.mark.parametrize(("ranks", "q_heads", "kv_heads"), [(32, 8, 2), (32, 32, 8), (32, 8, 8), (256, 32, 8)])
def test_one_causal_sequence(ranks, q_heads, kv_heads):
    """The closed form: (1 + q)(1 + k) >= G R / 2 in units of owned tokens, at the least c_q q + c_k k."""
    shape = AttentionShape(q_heads, kv_heads, 128)
    found = bound(causal_batch(131_072), shape, Cluster(ranks // 8, 8), 0.0, 0.0)
    c_q, c_k = pass_bytes(shape, (FORWARD,))
    expected = 131_072 * (2 * np.sqrt(c_q * c_k * kv_heads * ranks / 2) - c_q - c_k)
    assert found.forward.total_bytes == pytest.approx(expected, rel=0.02)
    assert found.forward.total_bytes <= expected  # which leaves out that passive head groups have work at home


@pytest.mark.parametrize(
    ("kind", "forward", "inter_node"),
    [
        (masks.causal, 1160, 200),
        (lambda length: masks.lambda_(length, 64, 4096), 108, 8.2),
        (lambda length: masks.causal_blockwise(length, 256, 1, 2), 20.0, 1.5),
        (lambda length: masks.shared_question(*masks.shared_question_split(length)), 742, 69),
    ],
)
def test_figures_of_one_sequence(kind, forward, inter_node):
    """Pinned, in MB, so that no change makes the bound worse unseen."""
    found = bound(Batch([Sequence(131_072, kind(131_072))]), epsilon=0.05)
    assert found.forward.total_bytes == pytest.approx(forward * 1e6, rel=0.03)
    assert found.forward.inter_node_bytes == pytest.approx(inter_node * 1e6, rel=0.05)


@pytest.mark.parametrize(
    ("kind", "forward"),
    [
        (masks.causal, 121),
        (lambda length: masks.lambda_(length, 64, 4096), 39),
        (lambda length: masks.causal_blockwise(length, 256, 1, 2), 5.2),
        (lambda length: masks.shared_question(*masks.shared_question_split(length)), 47),
    ],
)
def test_figures_of_the_long_tail(kind, forward):
    found = bound(Batch([Sequence(length, kind(length)) for length in LONG_TAIL]))
    assert found.forward.total_bytes == pytest.approx(forward * 1e6, rel=0.03)
    assert found.forward.inter_node_bytes == 0  # every sequence fits into a node


@pytest.mark.parametrize("kind", SEQUENCES)
@pytest.mark.parametrize("cluster", [Cluster(1, 3), Cluster(2, 4), Cluster(4, 8)], ids=str)
def test_more_tolerance_never_needs_more(kind, cluster):
    """But for the few per cent that the search for prices leaves."""
    grid = [0.0, 0.05, 0.1, 0.6]
    found = np.array([[bound(batch_of(kind), LAYER, cluster, a, b).forward.total_bytes for b in grid] for a in grid])
    for more, less in ((found[1:], found[:-1]), (found[:, 1:], found[:, :-1])):
        assert np.all(more <= 1.03 * less)
    assert found[-1, -1] < found[0, 0] or found[0, 0] == 0


@pytest.mark.parametrize(
    ("batch", "cluster"),
    [
        (causal_batch(4096, 17), Cluster(1, 1)),
        (causal_batch(*[512] * 64), Cluster(4, 8)),  # each sequence fits into a rank
        (Batch([Sequence(600, masks.document([100] * 6))]), Cluster(2, 3)),  # so do the documents of one
        (Batch([Sequence(64, masks.from_slices(64, 64, []))]), Cluster(2, 2)),  # nothing sees anything
        (Batch([Sequence(64, masks.sliding_window(64, 1))]), Cluster(2, 2)),  # tokens see themselves
    ],
    ids=["one rank", "data parallel", "documents", "nothing", "diagonal"],
)
def test_zero_where_nothing_needs_to_move(batch, cluster):
    found = bound(batch, LAYER, cluster, 0.05, 0.05)
    assert (found.forward.total_bytes, found.both.total_bytes) == (0, 0)
    assert (found.forward.inter_node_bytes, found.both.inter_node_bytes) == (0, 0)


def test_masks_add_up_by_weight():
    both = Batch([Sequence(900, {"a": masks.causal(900), "b": masks.sliding_window(900, 50)})], {"a": 1.0, "b": 5.0})
    apart = [bound(Batch([Sequence(900, both.sequences[0].masks[name])])).both.total_bytes for name in "ab"]
    assert bound(both).both.total_bytes == pytest.approx(apart[0] + 5 * apart[1])


def test_both_passes_need_at_least_their_sum():
    batch = causal_batch(131_072)
    found = bound(batch)
    backward = bound(batch, keep="all")  # sends less
    assert found.both.total_bytes > backward.both.total_bytes > found.forward.total_bytes
    assert bound(batch, wire="float32").forward.total_bytes > found.forward.total_bytes


@pytest.mark.parametrize("epsilon", [0.0, 1e-300, 3.0, 1.7e308])
def test_any_tolerance(epsilon):
    found = bound(causal_batch(300, 5), LAYER, Cluster(2, 2), epsilon, epsilon)
    assert (found.both.total_bytes == 0) == (epsilon >= 3)


def test_one_token_for_two_ranks():
    """Balance wants one head group on each, so one of them fetches everything of it."""
    needed = sum(pass_bytes(LAYER, (FORWARD,)))
    assert 0.7 * needed < bound(causal_batch(1), LAYER, Cluster(1, 2), 0.0, 0.0).forward.total_bytes <= needed


def test_queries_and_keys_exchanged():
    """Where all keys but a few are seen by few rows, it is the keys that have a degree."""
    dense = masks.lambda_(300, 8, 30).dense()
    shape = AttentionShape(2, 2, 16)  # a query side costs a KV side and 6 per cent
    figures = [
        bound(Batch([Sequence(300, masks.from_dense(mask))]), shape, Cluster(1, 6)).forward.total_bytes
        for mask in (dense, dense.T)
    ]
    assert figures[0] > 0 and figures[0] == pytest.approx(figures[1], rel=0.07)


@pytest.mark.parametrize("seed", range(40))
def test_no_part_gains_at_the_prices(seed):
    """The inequality that the bound from prices rests on, for all numbers of tokens, rows, keys and pairs of a part."""
    rng = np.random.default_rng(seed)
    groups, most, degree = (int(number) for number in rng.integers(1, [4, 9, 25]))
    pairs, one_sided = int(rng.integers(1, 80)), bool(rng.random() < 0.5)
    work = min(int(rng.integers(1, 60)), groups * pairs)
    c_q, c_k = rng.integers(1, 9, 2).astype(float)
    row = (c_q, c_k, 40.0, pairs, degree, one_sided, work, most)
    case = _Cases(*(np.array([[value]]) for value in row))
    cells = _Cells.of_case(case)
    largest = min(pairs, work)
    worth = rng.random() * _least_bytes(case, cells.most, np.zeros((1, 1))) / cells.most
    price = float(_token_price(case, cells, groups, worth).item())
    for tokens in range(most + 1):
        gain = np.full(largest + 1, -np.inf)  # of each number of pairs of one group
        for keys, rows in itertools.product(range(degree + 60), range(60)):
            own = sum(min(degree, i + keys) for i in range(1, tokens + 1))
            seen = own if one_sided else tokens * min(degree, tokens + keys)
            seen = min(largest, seen + rows * min(degree, tokens + keys))
            gain[seen] = max(gain[seen], -c_q * rows - c_k * keys)
        gain = worth.item() * np.arange(largest + 1) + np.maximum.accumulate(gain[::-1])[::-1]
        total = np.where(np.arange(work + 1) == 0, 0.0, -np.inf)  # of each number of pairs of all groups so far
        for _ in range(groups):
            total = np.array([max(total[i - j] + gain[j] for j in range(min(i, largest) + 1)) for i in range(work + 1)])
        assert total.max() <= price * tokens + 1e-9
