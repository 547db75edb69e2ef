import json

import hypothesis.strategies as st
import pytest
from hypothesis import given
from masks.dense_masks import dense_masks

from dyncp import masks
from dyncp.batch_file import batch_from_dict, batch_to_dict, read_batch, write_batch
from dyncp.ir.batch import Batch, Sequence

LAMBDA = {"kind": "lambda", "sink": 2, "window": 3}
CAUSAL = {"kind": "causal"}


def test_a_batch_file_is_read(tmp_path):
    path = tmp_path / "batch.json"
    path.write_text(
        '{"sequences": [{"length": 4096, "mask": {"kind": "lambda", "sink": 64, "window": 1024}},'
        ' {"length": 1024, "mask": {"kind": "slices",'
        ' "slices": [[0, 512, 0, 512, "causal"], [512, 1024, 0, 512, "full"]]}}, {"length": 7}]}'
    )
    slices = masks.from_slices(1024, 1024, [[0, 512, 0, 512, "causal"], [512, 1024, 0, 512, "full"]])
    assert read_batch(path) == Batch(
        (
            Sequence(4096, {"default": masks.lambda_(4096, 64, 1024)}),
            Sequence(1024, {"default": slices}),
            Sequence(7, {"default": masks.causal(7)}),
        )
    )


def test_named_masks_and_weights():
    batch = batch_from_dict(
        {
            "sequences": [
                {"length": 9, "mask": CAUSAL},
                {"length": 8, "masks": {"full": CAUSAL, "window": LAMBDA}},
                {"length": 7},
            ],
            "weights": {"window": 5},
        }
    )
    assert batch.mask_names == ("full", "window")
    assert batch.weights == {"full": 1.0, "window": 5}
    assert batch.sequences[0].masks == {"full": masks.causal(9), "window": masks.causal(9)}
    assert batch.sequences[1].masks["window"] == masks.lambda_(8, 2, 3)
    assert batch.sequences[2].masks == {"full": masks.causal(7), "window": masks.causal(7)}


def test_weights_in_sequences_agree():
    first = {"length": 8, "masks": {"a": CAUSAL, "b": LAMBDA}, "weights": {"a": 2}}
    assert batch_from_dict({"sequences": [first, {"length": 3}, first]}).weights == {"a": 2, "b": 1.0}
    again = first | {"weights": {"b": 1, "a": 2}}
    assert batch_from_dict({"sequences": [first, again]}).weights == {"a": 2, "b": 1.0}
    with pytest.raises(ValueError, match=r"sequence 2 has the weights \{'a': 3\} but sequence 0 has \{'a': 2\}"):
        batch_from_dict({"sequences": [first, {"length": 3}, first | {"weights": {"a": 3}}]})
    with pytest.raises(ValueError, match=r"sequence 0 has the weights .* but the batch has"):
        batch_from_dict({"sequences": [first], "weights": {"a": 4}})


def test_cross_attention():
    batch = batch_from_dict({"sequences": [{"length": 3, "kv_length": 5, "mask": {"kind": "full"}}]})
    assert batch.sequences[0] == Sequence(3, {"default": masks.full(3, 5)}, kv_length=5)


@given(st.lists(dense_masks(8), min_size=1, max_size=4), st.booleans(), st.sampled_from([None, 1, 2.5]))
def test_written_batches_are_read_back(tmp_path_factory, dense_list: list, is_named: bool, weight: float | None):
    path = tmp_path_factory.mktemp("batch") / "batch.json"
    sequences = []
    for dense in dense_list:
        mask = masks.from_dense(dense)
        named = {"b": mask, "a": masks.full(*dense.shape)} if is_named else {"default": mask}
        sequences.append(Sequence(dense.shape[0], named, dense.shape[1]))
    weights = None if weight is None else {"b" if is_named else "default": weight}
    batch = Batch(tuple(sequences), weights)
    write_batch(batch, path)
    again = read_batch(path)
    assert again == batch
    assert again.mask_names == batch.mask_names
    assert batch_from_dict(batch_to_dict(batch)) == batch


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (5, "sequence 1 is 5; expected an object with the keys length"),
        ({}, "sequence 1: it has no length"),
        ({"mask": CAUSAL}, "sequence 1: it has no length"),
        ({"length": 0}, "sequence 1: length is 0; expected a whole number from 1"),
        ({"length": -4}, "sequence 1: length is -4"),
        ({"length": True}, "sequence 1: length is True"),
        ({"length": 4.5}, "sequence 1: length is 4.5"),
        ({"length": "4"}, "sequence 1: length is '4'"),
        ({"length": 10**30}, "sequence 1: length is 1000"),
        ({"length": 4, "kv_length": 0}, "sequence 1: kv_length is 0"),
        ({"length": 4, "kv_length": None}, "sequence 1: kv_length is None"),
        ({"length": 4, "kv_length": 5, "mask": LAMBDA}, "sequence 1: kind 'lambda' with 4 queries and 5 keys"),
        ({"length": 4, "lenght": 4}, "sequence 1 has the unknown key 'lenght'; the keys are length, kv_length"),
        ({"length": 4, "mask": None}, "sequence 1: a mask is None"),
        ({"length": 4, "mask": "causal"}, "sequence 1: a mask is 'causal'"),
        ({"length": 4, "mask": {"kind": "x"}}, "sequence 1: unknown mask kind 'x'"),
        ({"length": 4, "mask": {"kind": "document", "lengths": [5]}}, "sequence 1: .* 5 tokens but its sequence has 4"),
        ({"length": 4, "mask": {"kind": "slices", "slices": [[0, 5, 0, 4, "full"]]}}, "sequence 1: slices.*queries"),
        ({"length": 4, "mask": CAUSAL, "masks": {"a": CAUSAL}}, "sequence 1 has both mask and masks"),
        ({"length": 4, "masks": {}}, r"sequence 1: masks is \{\}; expected an object of at least one named mask"),
        ({"length": 4, "masks": [CAUSAL]}, "sequence 1: masks is .*; expected an object"),
        (
            {"length": 4, "masks": {"a": {"kind": "lambda"}}},
            "sequence 1: mask 'a': mask kind 'lambda' with the keys none",
        ),
        ({"length": 4, "weights": 3}, "sequence 1: weights is 3; expected an object of numbers"),
        ({"length": 4, "weights": {"other": 2}}, "sequence 1: weight for unknown mask 'other'; the batch has default"),
        ({"length": 4, "weights": {"default": True}}, "sequence 1: weights is .*; expected an object of numbers"),
    ],
)
def test_a_bad_sequence_is_named(sequence, message: str):
    with pytest.raises(ValueError, match=message):
        batch_from_dict({"sequences": [{"length": 4}, sequence]})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], r"a batch is \[\]; expected an object with the keys sequences, weights"),
        ({}, "sequences is None; expected a list of at least one sequence"),
        ({"sequences": []}, r"sequences is \[\]; expected a list"),
        ({"sequences": {"length": 4}}, "expected a list"),
        ({"sequence": [{"length": 4}]}, "a batch has the unknown key 'sequence'"),
        ({"sequences": [{"length": 4}], "weights": {"other": 2}}, "weight for unknown mask 'other'"),
        ({"sequences": [{"length": 4}], "weights": {"default": 0}}, "weight of mask 'default' is 0"),
        ({"sequences": [{"length": 4}], "weights": {"default": float("inf")}}, "the batch: weights is"),
        ({"sequences": [{"length": 4}], "weights": {"default": 10**400}}, "the batch: weights is"),
        ({"sequences": [{"length": 4}], "weights": {"default": "2"}}, "the batch: weights is"),
        (
            {"sequences": [{"length": 4, "masks": {"a": CAUSAL}}, {"length": 4, "masks": {"b": CAUSAL}}]},
            "sequence 1 has masks b but sequence 0 has a",
        ),
    ],
)
def test_a_bad_batch_is_refused(data, message: str):
    with pytest.raises(ValueError, match=message):
        batch_from_dict(data)


def test_bad_files_are_refused(tmp_path):
    path = tmp_path / "batch.json"
    with pytest.raises(ValueError, match=r"cannot read the batch file .*batch\.json: No such file"):
        read_batch(path)
    path.write_text('{"sequences": [{"length": 4}')
    with pytest.raises(ValueError, match=r"batch.json is not JSON: .*line 1"):
        read_batch(path)
    path.write_bytes(b"\xff\xfe\x00plan")
    with pytest.raises(ValueError, match="is not JSON"):
        read_batch(path)
    for text in ("[" * 100_000, "[" + "1" * 5000 + "]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not JSON"):
            read_batch(path)
    path.write_text(json.dumps([1]))
    with pytest.raises(ValueError, match=r"a batch is \[1\]"):
        read_batch(path)


@pytest.mark.parametrize(
    "text", ['{"sequences": [{"length": 100, "length": 50}]}', '{"sequences": [], "sequences": []}']
)
def test_two_values_under_one_key_are_refused(tmp_path, text):
    path = tmp_path / "batch.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"is not JSON: an object has the key '(length|sequences)' twice"):
        read_batch(path)
