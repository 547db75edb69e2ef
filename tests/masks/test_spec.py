import pytest
from hypothesis import given
from masks.dense_masks import Dense, dense_masks

from dyncp import masks
from dyncp.ir.mask import Mask
from dyncp.masks.spec import FORMS

# spec, the same on a command line (None: it cannot be written there), length, mask
SPECS: list[tuple[dict, str | None, int, Mask]] = [
    ({"kind": "full"}, "full", 9, masks.full(9)),
    ({"kind": "causal"}, "causal", 9, masks.causal(9)),
    ({"kind": "sliding_window", "window": 3}, "sliding_window:window=3", 9, masks.sliding_window(9, 3)),
    ({"kind": "lambda", "sink": 2, "window": 3}, "lambda:sink=2,window=3", 9, masks.lambda_(9, 2, 3)),
    (
        {"kind": "causal_blockwise", "block": 2, "sink_blocks": 1, "window_blocks": 2},
        "causal_blockwise: block=2, sink_blocks=1, window_blocks=2",
        15,
        masks.causal_blockwise(15, 2, 1, 2),
    ),
    (
        {"kind": "shared_question", "question": 4, "answers": [3, 5]},
        "shared_question:question=4,answers=3+5",
        12,
        masks.shared_question(4, [3, 5]),
    ),
    (
        {"kind": "shared_question", "question": 4, "answers": [3]},
        "shared_question:question=4,answers=3",
        7,
        masks.shared_question(4, [3]),
    ),
    (
        {"kind": "shared_question", "fraction": 0.25, "answers": 2},
        "shared_question:fraction=0.25,answers=2",
        12,
        masks.shared_question(3, [4, 5]),
    ),
    ({"kind": "document", "lengths": [3, 4]}, "document:lengths=3+4", 7, masks.document([3, 4])),
    ({"kind": "prefix_lm", "prefix": 4}, "prefix_lm:prefix=4", 9, masks.prefix_lm(9, 4)),
    (
        {"kind": "tree", "parents": [-1, 0, 0], "lengths": [3, 2, 2]},
        "tree:parents=-1+0+0,lengths=3+2+2",
        7,
        masks.tree([-1, 0, 0], [3, 2, 2]),
    ),
    (
        {"kind": "slices", "slices": [[0, 5, 0, 5, "causal"], [5, 9, 0, 5, "full"]]},
        None,
        9,
        masks.from_slices(9, 9, [[0, 5, 0, 5, "causal"], [5, 9, 0, 5, "full"]]),
    ),
]


@pytest.mark.parametrize(("spec", "text", "length", "mask"), SPECS)
def test_spec_is_the_constructor_of_that_name(spec: dict, text: str | None, length: int, mask: Mask):
    assert masks.from_spec(spec, length) == mask
    assert masks.from_spec(spec, length, length) == mask
    if text is not None:
        assert masks.parse_spec(text) == spec
    assert masks.from_spec(masks.to_spec(mask), length) == mask


def test_every_kind_is_tested():
    assert {spec["kind"] for spec, *_ in SPECS} == set(FORMS)
    assert len(SPECS) > sum(len(forms) for forms in FORMS.values())


def test_other_numbers_of_keys():
    assert masks.from_spec({"kind": "full"}, 4, 6) == masks.full(4, 6)
    assert masks.from_spec({"kind": "causal"}, 4, 6) == masks.causal(4, 6)
    spec = {"kind": "slices", "slices": [[0, 4, 3, 6, "full"]]}
    assert masks.from_spec(spec, 4, 6) == masks.from_slices(4, 6, spec["slices"])


@given(dense_masks())
def test_to_spec_and_back(dense: Dense):
    mask = masks.from_dense(dense)
    assert masks.from_spec(masks.to_spec(mask), *dense.shape) == mask


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (None, "a mask is None; expected an object with a kind, one of full, causal, sliding_window"),
        ("causal", "a mask is 'causal'; expected an object"),
        ({}, "expected an object with a kind"),
        ({"kind": "causl"}, "unknown mask kind 'causl'; choose one of full, causal, sliding_window"),
        ({"kind": ["causal"]}, "unknown mask kind"),
        ({"kind": "causal", "window": 4}, "'causal' with the keys window: it takes no more keys"),
        ({"kind": "lambda", "sink": 4}, "'lambda' with the keys sink: it takes sink, window"),
        ({"kind": "lambda"}, "'lambda' with the keys none: it takes sink, window"),
        ({"kind": "lambda", "sink": 4, "windows": 3}, "it takes sink, window"),
        ({"kind": "lambda", "sink": 4, "window": "3"}, "window is '3'"),
        ({"kind": "lambda", "sink": 4, "window": 2.5}, "window is 2.5"),
        ({"kind": "lambda", "sink": True, "window": 2}, "sink is True"),
        ({"kind": "shared_question", "answers": 3}, "it takes question, answers or fraction, answers"),
        ({"kind": "shared_question", "question": 4, "answers": 5}, "answers is 5; expected a list"),
        ({"kind": "shared_question", "fraction": 0.2, "answers": [5]}, r"answers is \[5\]"),
        ({"kind": "shared_question", "question": 4, "answers": [3]}, "add up to 7 tokens but its sequence has 9"),
        ({"kind": "document", "lengths": [4, 6]}, "add up to 10 tokens but its sequence has 9"),
        ({"kind": "tree", "parents": [-1], "lengths": [3]}, "add up to 3 tokens but its sequence has 9"),
        ({"kind": "prefix_lm", "prefix": 10}, "prefix is 10, but the sequence has 9 tokens"),
        ({"kind": "slices", "slices": [[0, 10, 0, 9, "full"]]}, r"queries \[0, 10\)"),
    ],
)
def test_bad_specs_are_refused(spec, message: str):
    with pytest.raises(ValueError, match=message):
        masks.from_spec(spec, 9)


def test_bad_lengths_are_refused():
    with pytest.raises(ValueError, match="length is 0"):
        masks.from_spec({"kind": "causal"}, 0)
    with pytest.raises(ValueError, match="kv_length is 0"):
        masks.from_spec({"kind": "causal"}, 4, 0)
    with pytest.raises(
        ValueError, match="'document' with 9 queries and 8 keys: only full, causal, slices take different"
    ):
        masks.from_spec({"kind": "document", "lengths": [4, 5]}, 9, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown mask kind ''"),
        ("lamda:sink=1,window=2", "unknown mask kind 'lamda'"),
        ("lambda", "it takes sink, window"),
        ("lambda:sink=1", "it takes sink, window"),
        ("lambda:sink=1,window", "has the part 'window'; expected each key once, as key=value"),
        ("lambda:sink=1,window=", "has the part 'window='"),
        ("lambda:sink=1,sink=2", "has the part 'sink=2'"),
        ("lambda:sink=1,window=2,", "has the part ''"),
        ("lambda:sink=1,window=2.5", "window is '2.5'; expected a whole number"),
        ("document:lengths=3+x", r"lengths is '3\+x'; expected whole numbers joined by \+"),
        ("shared_question:fraction=a,answers=4", "fraction is 'a'; expected a number"),
        ("slices:slices=0", "slices cannot be given in a text; write the mask in a batch file"),
        ("lambda:kind=1,sink=1,window=2", "has the part 'kind=1'"),
    ],
)
def test_bad_texts_are_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        masks.parse_spec(text)
