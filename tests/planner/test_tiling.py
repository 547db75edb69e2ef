"""Tiles of computation: everything in one, each with its share of the work, and no more to move than along a curve."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from any_batch import any_batch
from builders import SHAPE, causal_batch, random_mask

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.shape import AttentionShape
from dyncp.planner.blockgen import make_blocks, uniform_cut
from dyncp.planner.partition.nets import Nets, loads
from dyncp.planner.partition.tiling import NEAR, tile

MASKS = {
    "causal": masks.causal,
    "lambda": lambda length: masks.lambda_(length, length // 32, length // 8),
    "shared question": lambda length: masks.shared_question(*masks.shared_question_split(length)),
}
ROUNDED = 2 * NEAR  # of a tile: it may begin and end with a strip that is nearly there


def sheets(batch, block_tokens, shape=SHAPE):
    """(nets, sheet of each computation block)"""
    blocks = make_blocks(batch, shape.groups, uniform_cut(block_tokens))
    sequence = blocks.tokens.sequence[blocks.q_block].astype("int64")
    sheet = np.tile(sequence, shape.groups) * shape.groups + np.repeat(np.arange(shape.groups), len(blocks))
    return Nets.of_batch(blocks, shape, "none", "model", (1.0, 1.0)), sheet


def moved(nets, part, parts):
    """Bytes that move if each token block is owned where it is used: the perimeter of the tiles."""
    return float(nets.edge_bytes @ (np.maximum((nets.pin_counts(part, parts) > 0).sum(axis=1), 1) - 1))


def curve_cut(nets, sheet, parts, height):
    """The yardstick: head group by head group, in strips of `height` rows that snake along the keys, cut into pieces of
    equal work."""
    row, column = nets.edge_token[nets.q_edge], nets.edge_token[nets.kv_edge]
    strip = row // height
    order = np.lexsort((row, np.where(strip % 2 == 0, column, -column), strip, sheet))
    work = nets.work[order]
    part = np.empty(len(order), "int64")
    part[order] = np.minimum((np.cumsum(work) - work / 2) * parts / work.sum(), parts - 1)
    return part


@pytest.mark.parametrize("name", MASKS)
def test_no_worse_than_a_cut_along_a_curve(name):
    """The best of all heights, on average; in no case much worse."""
    ratios = []
    for shape in (AttentionShape(8, 2, 128), AttentionShape(8, 8, 128), AttentionShape(32, 8, 128)):
        nets, sheet = sheets(Batch([Sequence(2048, MASKS[name](2048))]), 64, shape)
        for parts in (2, 4, 7, 16, 32):
            best = min(moved(nets, curve_cut(nets, sheet, parts, h), parts) for h in range(1, 17))
            found = moved(nets, tile(nets, sheet, np.ones(parts)), parts)
            ratios.append(found / best if best else 1.0 + (found > 0))
    assert np.mean(ratios) <= 1.0
    assert max(ratios) < 1.1


@pytest.mark.parametrize("seed", range(15))
def test_every_block_has_a_part(seed):
    """Of any mask, with rows that see nothing and holes in them."""
    rng = np.random.default_rng(seed)
    nets, sheet = sheets(any_batch(rng, 50), int(rng.integers(2, 9)))
    for mask in range(int(nets.mask.max(initial=-1)) + 1):
        part, comps = nets.of_mask(mask)
        for targets in (np.ones(1), np.ones(5), rng.uniform(0, 2, 7), np.ones(1000)):
            found = tile(part, sheet[comps], targets)
            assert found.shape == comps.shape
            assert not len(found) or (found.min() >= 0 and found.max() < len(targets))


def test_nothing_to_cut():
    nets, sheet = sheets(Batch([Sequence(9, masks.from_dense(np.zeros((9, 9), bool)))]), 4)
    assert tile(nets, sheet, np.ones(3)).tolist() == []


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 13, 24])
def test_parts_have_equal_work(parts):
    for name, mask in MASKS.items():
        nets, sheet = sheets(Batch([Sequence(1024, mask(1024))]), 16)
        load = loads(nets.work, tile(nets, sheet, np.ones(parts)), parts)
        slack = ROUNDED + 2 * nets.work.max() / load.mean()
        assert np.allclose(load, load.mean(), rtol=slack), name


def test_parts_have_the_work_that_they_should_have():
    """In any unit; a part that should have nothing has what another lacks of its last strip, at most."""
    nets, sheet = sheets(causal_batch(1024), 16)
    share = np.array([3.0, 0.0, 1.0, 2.0, 0.0, 0.0, 2.0])
    total = float(nets.work.sum())
    for unit in (1.0, 1e-6, 1e12):
        part = tile(nets, sheet, share * unit)
        load = loads(nets.work, part, len(share))
        assert np.allclose(load, share / 8 * total, rtol=ROUNDED, atol=NEAR * total / 8)
    one = loads(nets.work, tile(nets, sheet, np.array([0.0, 0.0, 1.0, 0.0])), 4)
    assert one[2] > (1 - ROUNDED) * total


def test_sheets_are_cut_one_after_the_other():
    """In the order of their numbers, so that targets of one node after the other can be given."""
    nets, sheet = sheets(causal_batch(128, 96, 64), 8)
    for order in (np.arange(6), np.array([4, 2, 0, 5, 1, 3])):
        part = tile(nets, order[sheet], np.ones(5))
        by_sheet = [part[order[sheet] == n] for n in range(6)]
        assert all(a.max() <= b.min() for a, b in pairwise(by_sheet))


def test_work_counts_and_not_area():
    """The lower half of the rows has a quarter of the pairs."""
    dense = np.zeros((128, 128), bool)
    dense[:64, :] = True
    dense[64:, ::3] = True
    nets, sheet = sheets(Batch([Sequence(128, masks.from_dense(dense))]), 4)
    load = loads(nets.work, tile(nets, sheet, np.ones(4)), 4)
    assert np.allclose(load, load.mean(), rtol=ROUNDED)


def test_tiles_are_cut_along_keys_where_rows_are_cheap():
    """With eight query heads to one of KV rows are dear, and strips are whole; with wide V keys are."""
    touched = {}
    for name, shape in {"dear rows": AttentionShape(16, 1, 16), "dear keys": AttentionShape(2, 2, 16, 128)}.items():
        nets, sheet = sheets(Batch([Sequence(512, masks.full(512))]), 16, shape)
        part = tile(nets, sheet, np.ones(16))
        parts = (nets.pin_counts(part, 16) > 0).sum(axis=1)
        touched[name] = parts[nets.q_edge].mean() / parts[nets.kv_edge].mean()
    assert touched["dear rows"] < 0.5 * touched["dear keys"]


def test_the_same_arguments_give_the_same_tiles():
    rng = np.random.default_rng(0)
    batch = Batch([Sequence(60, random_mask(rng, 60, 60)), Sequence(33, random_mask(rng, 33, 33))])
    nets, sheet = sheets(batch, 3)
    assert np.array_equal(tile(nets, sheet, np.ones(6)), tile(nets, sheet, np.ones(6)))
