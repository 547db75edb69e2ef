import statistics
from random import Random

import pytest

from dyncp import masks
from dyncp.reproduce.data import BATCH_TOKENS, DATASETS, FULL, MASK_NAMES, batch_of, batches_of, pack, read_lengths


@pytest.mark.parametrize(("dataset", "median"), [("longdatacollections", 2000), ("longalign", 13_000)])
def test_lengths_have_the_published_shape(dataset, median):
    random = Random(1)
    lengths = [DATASETS[dataset].draw(random) for _ in range(4000)]
    assert statistics.median(lengths) == pytest.approx(median, rel=0.1)
    assert min(lengths) >= DATASETS[dataset].least
    assert max(lengths) <= DATASETS[dataset].most


@pytest.mark.parametrize("scale", [0.5, 1, 2, 4])
@pytest.mark.parametrize("dataset", DATASETS)
def test_batches_are_full_and_the_same_every_time(dataset, scale):
    batches = batches_of(dataset, scale, 5, seed=3)
    assert len(batches) == 5
    for lengths in batches:
        assert FULL * BATCH_TOKENS <= sum(lengths) <= BATCH_TOKENS
    assert batches == batches_of(dataset, scale, 5, seed=3)
    assert batches[:2] == batches_of(dataset, scale, 2, seed=3)
    assert batches != batches_of(dataset, scale, 5, seed=4)


def test_a_larger_scale_means_fewer_sequences():
    counts = [sum(map(len, batches_of("longalign", scale, 10))) for scale in (0.5, 1, 2, 4)]
    assert counts == sorted(counts, reverse=True)


def test_packing_keeps_the_order_and_discards_what_is_not_full():
    assert list(pack([60, 30, 50, 40, 9, 80, 70], 100, FULL)) == [(60, 30), (50, 40, 9), (80,)]
    assert list(pack([10, 95, 10, 95, 1], 100, FULL)) == [(95,)]


def test_own_lengths_take_the_place_of_a_distribution():
    batches = batches_of("longalign", 1.0, 3, own=(40_000, 30_000))
    assert {length for lengths in batches for length in lengths} == {40_000, 30_000}
    with pytest.raises(ValueError, match="make 0 batches of 131072 tokens"):
        batches_of("longalign", 1.0, 1, own=(200_000,))


def test_a_file_of_lengths(tmp_path):
    path = tmp_path / "lengths"
    path.write_text("[3, 4]")
    assert read_lengths(path) == [3, 4]
    path.write_text("3\n4\n")
    assert read_lengths(path) == [3, 4]
    for text in ("", "a\n", "[1, 2.5]", "[", "[0]"):
        path.write_text(text)
        with pytest.raises(ValueError, match="lengths"):
            read_lengths(path)


def test_masks_of_a_batch():
    length = 10_000
    made = {name: batch_of((length,), name).sequences[0].masks["default"] for name in MASK_NAMES}
    assert made["lambda"] == masks.lambda_(length, 64, 4096)
    assert made["causal_blockwise"] == masks.causal_blockwise(length, 256, 1, 2)
    assert batch_of((length,), "window:512").sequences[0].masks["default"] == masks.lambda_(length, 64, 512)
    mixed = batch_of((length,) * 5, "mixed").sequences
    assert [sequence.masks["default"] for sequence in mixed] == [*made.values(), made["causal"]]
