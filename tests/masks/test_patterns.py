import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from masks import dense_masks as oracle

from dyncp import masks
from dyncp.ir.mask import Mask

LENGTH = st.integers(1, 24)
PARTS = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def assert_same(mask: Mask, dense: oracle.Dense) -> None:
    mask.check()
    np.testing.assert_array_equal(mask.dense(), dense)
    assert mask.pairs() == dense.sum()


@given(LENGTH, st.none() | LENGTH)
def test_full(length: int, k_length: int | None):
    assert_same(masks.full(length, k_length), np.ones((length, k_length or length), bool))


@given(LENGTH, st.none() | LENGTH)
def test_causal(length: int, k_length: int | None):
    assert_same(masks.causal(length, k_length), oracle.causal(length, k_length or length))


def test_causal_with_fewer_keys_leaves_the_first_queries_blind():
    assert masks.causal(5, 2).rows(0, 5).tolist() == [[[0, 0]], [[0, 0]], [[0, 0]], [[0, 1]], [[0, 2]]]


@given(LENGTH, LENGTH)
def test_sliding_window(length: int, window: int):
    assert_same(masks.sliding_window(length, window), oracle.lambda_(length, 0, window))


@settings(max_examples=100)
@given(LENGTH, st.integers(0, 24), LENGTH)
def test_lambda(length: int, sink: int, window: int):
    assert_same(masks.lambda_(length, sink, window), oracle.lambda_(length, sink, window))


@settings(max_examples=150)
@given(LENGTH, st.integers(1, 6), st.integers(0, 3), st.integers(1, 3))
def test_causal_blockwise(length: int, block: int, sink_blocks: int, window_blocks: int):
    expected = oracle.causal_blockwise(length, block, sink_blocks, window_blocks)
    assert_same(masks.causal_blockwise(length, block, sink_blocks, window_blocks), expected)


@given(LENGTH, st.data())
def test_prefix_lm(length: int, data):
    prefix = data.draw(st.integers(0, length))
    assert_same(masks.prefix_lm(length, prefix), oracle.prefix_lm(length, prefix))


@given(PARTS)
def test_document(lengths: list[int]):
    assert_same(masks.document(lengths), oracle.document(lengths))


@given(st.integers(1, 8), st.just([]) | PARTS)
def test_shared_question(question: int, answers: list[int]):
    assert_same(masks.shared_question(question, answers), oracle.shared_question(question, answers))


@settings(max_examples=200)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=9), st.data())
def test_tree(lengths: list[int], data):
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(len(lengths))]
    assert_same(masks.tree(parents, lengths), oracle.tree(parents, lengths))


def test_constructors_use_few_slices():
    assert len(masks.lambda_(1000, 4, 50).slices) == 3
    assert len(masks.causal_blockwise(1000, 16, 1, 2).slices) == 4
    assert len(masks.shared_question(100, [50] * 10).slices) == 11, "all answers share one slice of the question"
    assert masks.tree([-1, 0, 1, 2], [5, 1, 7, 2]) == masks.causal(15), "a chain is one run of ancestors"
    # node 3 follows its sibling 2: it sees nodes 0 and 1, one run, as node 2's other sibling does
    assert len(masks.tree([-1, 0, 1, 1, 1], [3, 3, 2, 2, 2]).slices) == 4


@settings(max_examples=100)
@given(LENGTH, st.integers(1, 9), st.integers(0, 3), st.integers(1, 3))
def test_patterns_are_the_shortest_form(length: int, block: int, sink: int, window: int):
    for mask in (
        masks.causal(length, block),
        masks.lambda_(length, sink, window),
        masks.causal_blockwise(length, block, sink, window),
        masks.prefix_lm(length, min(sink, length)),
    ):
        assert len(Mask.from_intervals(mask.q_length, mask.k_length, mask.rows(0, length)).slices) <= len(mask.slices)


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        (masks.causal(131_072), 8_590_000_128),
        (masks.lambda_(131_072, sink=64, window=4096), 536_608_800),
        (masks.causal_blockwise(131_072, block=256, sink_blocks=1, window_blocks=2), 133_824_000),
        (masks.shared_question(*masks.shared_question_split(131_072)), 4_466_800_068),
    ],
)
def test_pairs_of_the_papers_masks_at_131072_tokens(mask: Mask, pairs: int):
    assert mask.pairs() == pairs
    bounds = np.arange(0, 131_072 + 1, 2048)
    assert mask.pairs_blocks(bounds, bounds)[2].sum() == pairs


# A batch of 40 sequences with a long tail, 131,072 tokens, on which other planners have been measured.
LONGTAIL = [
    *(2473, 1680, 5352, 2397, 917, 3523, 14481, 8478, 713, 307, 804, 2179, 63, 1475, 316, 683, 905, 1274, 3797, 9783),
    *(
        1689,
        15904,
        755,
        3470,
        7941,
        2358,
        671,
        514,
        1031,
        2850,
        450,
        1496,
        1613,
        4610,
        2826,
        3490,
        768,
        1686,
        6638,
        8712,
    ),
]


@pytest.mark.parametrize(
    ("make", "pairs"),
    [
        (masks.causal, 488_185_982),
        (lambda length: masks.lambda_(length, 64, 4096), 319_419_581),
        (lambda length: masks.causal_blockwise(length, 256, 1, 2), 98_755_198),
        (lambda length: masks.shared_question(*masks.shared_question_split(length)), 253_855_316),
    ],
)
def test_pairs_of_a_long_tailed_batch(make, pairs: int):
    assert sum(LONGTAIL) == 131_072
    assert sum(make(length).pairs() for length in LONGTAIL) == pairs


def test_more_answers_than_tokens_cost_nothing():
    assert masks.shared_question_split(100, 0.2, 2_000_000_000) == (20, [80])
    assert masks.shared_question_split(1, 0.2, 2_000_000_000) == (1, [])


def test_millions_of_parts_are_refused_early():
    """Two interleaved chains: no node is next to its parent, so each sees a range of keys of its own per ancestor."""
    count = 10_000
    with pytest.raises(ValueError, match=r"at most 4194304 .* put each node next to its parent"):
        masks.tree([-1, -1, *range(count - 2)], [1] * count)
    with pytest.raises(ValueError, match=r"10000000 answers"):
        masks.shared_question_split(2**31 - 1, 0.2, 10_000_000)


def test_the_limit_counts_slices(monkeypatch):
    parents, lengths = [-1, -1, 0, 1, 2, 3], [1] * 6
    count = len(masks.tree(parents, lengths).slices)
    monkeypatch.setattr("dyncp.masks.patterns.MAX_SLICES", count)
    assert len(masks.tree(parents, lengths).slices) == count
    monkeypatch.setattr("dyncp.masks.patterns.MAX_SLICES", count - 1)
    with pytest.raises(ValueError, match=f"{count} slices or more"):
        masks.tree(parents, lengths)


def test_shared_question_split():
    assert masks.shared_question_split(131_072) == (26_214, [26_214, 26_214, 26_214, 26_216])
    assert masks.shared_question_split(100, fraction=0.29, answers=3) == (29, [23, 23, 25])
    assert masks.shared_question_split(5) == (1, [1, 1, 1, 1])
    assert masks.shared_question_split(3) == (1, [2]), "empty answers are left out"
    assert masks.shared_question_split(1) == (1, [])


@given(st.integers(1, 10_000), st.floats(0.01, 0.99), st.integers(1, 9))
def test_shared_question_split_covers_the_sequence(length: int, fraction: float, answers: int):
    question, parts = masks.shared_question_split(length, fraction, answers)
    assert question >= 1
    assert question + sum(parts) == length
    assert min(parts, default=1) >= 1
    assert len(parts) <= answers


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.full(0), "length is 0; expected a whole number from 1"),
        (lambda: masks.full(4, 0), "k_length is 0"),
        (lambda: masks.causal(-3), "length is -3"),
        (lambda: masks.causal(True), "length is True"),
        (lambda: masks.causal(4.0), "length is 4.0"),
        (lambda: masks.causal(10**30), "whole number from 1 to 2147483647"),
        (lambda: masks.sliding_window(4, 0), "window is 0"),
        (lambda: masks.lambda_(4, -1, 2), "sink is -1"),
        (lambda: masks.lambda_(4, 1, 0), "window is 0"),
        (lambda: masks.lambda_(4, "1", 2), "sink is '1'"),
        (lambda: masks.causal_blockwise(4, 0, 1, 2), "block is 0"),
        (lambda: masks.causal_blockwise(4, 2, -1, 2), "sink_blocks is -1"),
        (lambda: masks.causal_blockwise(4, 2, 1, 0), "window_blocks is 0"),
        (lambda: masks.prefix_lm(4, 5), "prefix is 5, but the sequence has 4 tokens"),
        (lambda: masks.prefix_lm(4, -1), "prefix is -1"),
        (lambda: masks.document([]), "lengths is empty"),
        (lambda: masks.document([3, 0]), r"lengths\[1\] is 0"),
        (lambda: masks.document(7), "lengths is 7; expected a list"),
        (lambda: masks.document("12"), "lengths is '12'; expected a list"),
        (lambda: masks.shared_question(0, [1]), "question is 0"),
        (lambda: masks.shared_question(1, [1, -2]), r"answers\[1\] is -2"),
        (lambda: masks.shared_question_split(0), "length is 0"),
        (lambda: masks.shared_question_split(9, 1.0), "fraction is 1.0; expected a number between 0 and 1"),
        (lambda: masks.shared_question_split(9, "0.5"), "fraction is '0.5'"),
        (lambda: masks.shared_question_split(9, 0.5, 0), "answers is 0"),
        (lambda: masks.tree([], []), "lengths is empty"),
        (lambda: masks.tree([-1, 0], [3]), "2 parents but 1 lengths"),
        (lambda: masks.tree([-1, 1], [3, 3]), "node 1 has parent 1; a parent comes before its children"),
        (lambda: masks.tree([-1, -2], [3, 3]), r"parents\[1\] is -2"),
    ],
)
def test_bad_arguments_are_refused(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
