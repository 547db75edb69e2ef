import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from masks.dense_masks import Dense, dense_masks, rectangle, rectangles

from dyncp import masks
from dyncp.ir.mask import Mask


@settings(max_examples=200)
@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_from_slices_is_the_union_of_the_rectangles(q_length: int, k_length: int, data):
    pieces = data.draw(st.lists(rectangles(q_length, k_length), max_size=5))
    expected = np.zeros((q_length, k_length), bool)
    for piece in pieces:
        expected |= rectangle(q_length, k_length, piece)
    mask = masks.from_slices(q_length, k_length, pieces)
    mask.check()
    np.testing.assert_array_equal(mask.dense(), expected)


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("full", [[2, 5]] * 3),
        ("causal", [[2, 3], [2, 4], [2, 5]]),
        ("inv_causal", [[2, 5], [3, 5], [4, 5]]),
        ("bi_causal", [[2, 3], [3, 4], [4, 5]]),
    ],
)
def test_kinds_of_rectangles(kind: str, rows: list):
    mask = masks.from_slices(4, 6, [[1, 4, 2, 5, kind]])
    assert mask.rows(0, 4)[:, 0].tolist() == [[0, 0], *rows]


def test_rectangles_wider_or_higher_than_their_diagonal():
    def rows(piece: list) -> list:
        return masks.from_slices(3, 5, [piece]).rows(0, 3)[:, 0].tolist()

    assert rows([0, 3, 0, 5, "causal"]) == [[0, 3], [0, 4], [0, 5]]
    assert rows([0, 3, 0, 2, "causal"]) == [[0, 0], [0, 1], [0, 2]]
    assert rows([0, 3, 0, 2, "inv_causal"]) == [[0, 2], [1, 2], [0, 0]]
    assert rows([0, 3, 0, 5, "bi_causal"]) == [[0, 3], [1, 4], [2, 5]]
    assert rows([0, 3, 0, 2, "bi_causal"]) == [[0, 0], [0, 0], [0, 0]]


def test_rectangles_that_do_not_overlap_are_kept_as_they_are():
    pieces = [[0, 4, 0, 2, "full"], [0, 4, 2, 6, "causal"], [4, 8, 0, 4, "inv_causal"]]
    mask = masks.from_slices(8, 8, pieces)
    assert masks.to_slices(mask) == pieces


@given(dense_masks())
def test_to_slices_is_the_reverse_of_from_slices(dense: Dense):
    mask = masks.from_dense(dense)
    assert masks.from_slices(*dense.shape, masks.to_slices(mask)) == mask


@given(dense_masks())
def test_from_dense_and_back(dense: Dense):
    mask = masks.from_dense(dense)
    mask.check()
    np.testing.assert_array_equal(mask.dense(), dense)


@given(dense_masks(), st.integers(1, 60))
def test_from_mask_mod_in_parts(dense: Dense, chunk: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dyncp.masks.build.CHUNK_PAIRS", chunk)
        mask = masks.from_mask_mod(lambda q, k: dense[q, k], *dense.shape)
    assert mask == masks.from_dense(dense)


def test_from_mask_mod_finds_the_patterns():
    assert masks.from_mask_mod(lambda q, k: k <= q, 50, 50) == masks.causal(50)
    window = masks.from_mask_mod(lambda q, k: (k <= q) & (q - k < 8) | (k < 4) & (k <= q), 50, 50)
    assert window == masks.lambda_(50, 4, 8)
    assert masks.from_mask_mod(lambda q, k: k < 3, 5, 4) == masks.from_slices(5, 4, [[0, 5, 0, 3, "full"]])
    assert masks.from_mask_mod(lambda q, k: np.True_, 5, 4) == masks.full(5, 4)
    assert masks.from_mask_mod(lambda q, k: q < 0, 5, 4) == Mask(5, 4, [])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.from_slices(0, 4, []), "q_length is 0"),
        (lambda: masks.from_slices(4, 4, "full"), "expected a list of"),
        (lambda: masks.from_slices(4, 4, [[0, 4, 0, 4]]), r"slices\[0\] is \[0, 4, 0, 4\]; expected \[q_start"),
        (lambda: masks.from_slices(4, 4, [[0, 4, 0, 4, "upper"]]), "kind 'upper'; choose one of full, causal"),
        (lambda: masks.from_slices(4, 4, [[0, 4, 0, 4, 1]]), "kind 1; choose"),
        (
            lambda: masks.from_slices(4, 4, [[0, 4, 0, 4, "full"], [0, 5, 0, 4, "full"]]),
            r"slices\[1\].*queries \[0, 5\)",
        ),
        (lambda: masks.from_slices(4, 3, [[0, 4, 0, 4, "full"]]), r"keys \[0, 4\); expected start < stop <= 3"),
        (lambda: masks.from_slices(4, 4, [[2, 2, 0, 4, "full"]]), r"queries \[2, 2\)"),
        (lambda: masks.from_slices(4, 4, [[0, 2, 3, 1, "full"]]), r"keys \[3, 1\)"),
        (lambda: masks.from_slices(4, 4, [[-1, 2, 0, 1, "full"]]), r"slices\[0\]\[0\] is -1"),
        (lambda: masks.from_slices(4, 4, [[0, True, 0, 1, "full"]]), r"slices\[0\]\[1\] is True"),
        (lambda: masks.from_dense(np.ones((3, 3))), r"float64\[3, 3\]; expected bool"),
        (lambda: masks.from_dense(np.ones(3, bool)), r"bool\[3\]; expected"),
        (lambda: masks.from_dense(np.ones((0, 3), bool)), r"bool\[0, 3\]; expected"),
        (lambda: masks.from_mask_mod(lambda q, k: k <= q, 3, 0), "k_length is 0"),
        (lambda: masks.from_mask_mod(lambda q, k: q - k, 3, 3), r"mask_mod returned int64\[3, 3\]"),
        (lambda: masks.from_mask_mod(lambda q, k: np.ones((3, 2), bool), 3, 3), r"mask_mod returned bool\[3, 2\]"),
        (lambda: masks.from_mask_mod(lambda q, k: np.ones((1, 3, 3), bool), 3, 3), r"bool\[1, 3, 3\]"),
    ],
)
def test_bad_arguments_are_refused(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
