from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from benchmarks.network import calibrate
from benchmarks.network.batches import SHAPE, Case
from benchmarks.network.calibrate import LinkFigures
from benchmarks.network.pieces import Piece, form_masks, seconds_of
from dyncp.cost.model import FORMS, Work
from dyncp.cost.profiled import Profiled, interpolate
from dyncp.cost.roofline import Roofline
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import BACKWARD, FORWARD, PASSES, Kind
from dyncp.runtime.dense import dense_attention
from dyncp.simulator import simulate
from dyncp.strategies import build


@pytest.fixture(scope="module")
def table():
    cells = [cell for part in (0, 1) for cell in calibrate.measure_attention(SHAPE, (16, 64), part, 2)]
    figures = {"bytes_per_s": calibrate.measure_moves(SHAPE), "instruction_s": calibrate.measure_instruction(SHAPE)}
    return calibrate.table_of([{"share": 1.0, "cells": cells, **figures}], (16, 64))


@pytest.mark.parametrize("form", ["full", "causal", "masked"])
def test_a_piece_computes_attention(form):
    for mask in form_masks(form, 48, 48):
        piece = Piece(mask, SHAPE)
        piece.local["lse"].fill_(-float("inf"))
        piece.attention(FORWARD)()
        want = dense_attention(piece.local["q"], piece.local["k"], piece.local["v"], mask)
        torch.testing.assert_close(piece.local["o"], want)


@pytest.mark.parametrize("size", [(16, 16), (16, 200), (200, 16), (1, 1)])
def test_masked_blocks_have_about_half_of_the_pairs(size):
    pairs = [mask.pairs() for mask in form_masks("masked", *size)]
    assert np.mean(pairs) == pytest.approx(size[0] * size[1] / 2, rel=0.1, abs=1)


def test_moves_say_their_bytes():
    _, size_bytes = Piece(form_masks("full", 32, 16)[0], SHAPE).moves(Kind.KV, False, 4)
    assert size_bytes == 2 * 4 * 16 * 2 * 64 * 4
    call, _ = Piece(form_masks("full", 32, 16)[0], SHAPE).moves(Kind.DKV, True, 4)
    assert seconds_of(call, 0.01) > 0


def test_between_causal_squares_time_depends_on_squares_alone():
    grid = calibrate.squares_only(np.array([1.0, 16.0]))
    middle = interpolate((16, 64), (16, 64), grid, np.array([32]), np.array([32]))
    assert middle == pytest.approx(4.0)


def test_a_table_predicts_a_plan(table):
    plan = build(Case("longtail", 256, "causal").batch(), SHAPE, Cluster(2, 1), "ring").plan
    cluster = calibrate.cluster_of(2, LinkFigures(1e-3, 1e7), table, SHAPE)
    simulated = simulate(plan, cluster, calibrate.with_cores(table, 1.5))
    work_s = calibrate.computation_s(plan, table)
    assert simulated.total_s >= work_s / 2
    assert simulated.total_s >= sum(part.size_bytes["inter"] for part in (simulated.forward, simulated.backward)) / 2e7


def test_the_table_has_every_size(table):
    for pass_ in (FORWARD, BACKWARD):
        assert {np.shape(grid) for grid in table.seconds[pass_.name].values()} == {(2, 2)}
    assert table.bytes_per_s > 0
    assert table.instruction_s > 0


def test_every_cell_is_in_one_part():
    whole = calibrate.measure_attention(SHAPE, (4, 8))
    parts = [cell[:4] for part in range(3) for cell in calibrate.measure_attention(SHAPE, (4, 8), part, 3)]
    assert sorted(parts) == sorted(cell[:4] for cell in whole)
    assert len(parts) == 2 * (4 + 2 + 4)


def test_a_share_of_a_processor_takes_longer():
    cells = [(pass_.name, form, 0, 0, 1e-3) for pass_ in PASSES for form in FORMS]
    measured = {"cells": cells, "bytes_per_s": 1e9, "instruction_s": 1e-6}
    whole, half = (calibrate.table_of([measured | {"share": share}], (64,)) for share in (1.0, 0.5))
    assert half.seconds["forward"]["full"][0][0] == 2 * whole.seconds["forward"]["full"][0][0] == 2e-3
    assert (half.bytes_per_s, half.instruction_s) == (0.5e9, 2e-6)


def test_the_planner_is_told_what_fits_the_table():
    made = Roofline(30e9, math.inf, backward=0.9, launch_s=0.0, block_s=4e-4)
    sizes = (128, 256, 512)
    seconds = {}
    for pass_ in PASSES:
        grid = np.zeros((3, 3))
        for i, rows in enumerate(sizes):
            for j, keys in enumerate(sizes):
                number = np.arange(SHAPE.groups)
                both = [np.full(SHAPE.groups, value) for value in (rows, keys, rows * keys)]
                grid[i, j] = made.attention_s(pass_, SHAPE, Work(0 * number, 0 * number, *both), 1)[0] / SHAPE.groups
        seconds[pass_.name] = dict.fromkeys(FORMS, grid.tolist())
    table = Profiled(sizes, sizes, seconds, bytes_per_s=1e9, instruction_s=1e-5)
    assert calibrate.fitted(table, SHAPE) == pytest.approx((4e-4, 30e9, 0.9))
    link = LinkFigures(1e-3, 14e6, ring_bytes_per_s=13e6)
    cluster = calibrate.cluster_of(4, link, table, SHAPE)
    assert (cluster.inter_bytes_per_s, cluster.flow_bytes_per_s, cluster.inter_latency_s) == (13e6, 14e6, 1e-3)
    assert (cluster.launch_s, cluster.block_s) == pytest.approx((1e-5, 3.9e-4))
    assert cluster.cores == math.inf
    shared = calibrate.cluster_of(4, link, calibrate.with_cores(table, 2.0), SHAPE)
    assert shared.flops_per_s == pytest.approx(15e9)


def test_masks_are_checked_against_the_table(table):
    measured = [{"name": "window", "size": [64, 64, 1000], "seconds": {"forward": 1e-3, "backward": 2e-3}}]
    checks = calibrate.mask_checks(measured, 0.5, table)
    assert [(check["pass"], check["measured_s"]) for check in checks] == [("forward", 2e-3), ("backward", 4e-3)]
    assert all(check["priced_s"] > 0 for check in checks)
    assert calibrate.priced_s(table, SHAPE) > 0


def test_the_rate_gives_the_ratio_asked_for():
    rate = calibrate.rate_for(14e6, 0.5, 2, ratio=3.0)
    assert 8 * 14e6 / rate / (0.5 / 2) == pytest.approx(3.0, rel=0.05)
    assert rate == 150e6


def test_plans_use_links_both_ways():
    assert LinkFigures(1e-3, 10.0, 9.0, 9.5, 8.0, 7.0).loaded_bytes_per_s == 8.0
    assert LinkFigures(1e-3, 10.0, 9.0).loaded_bytes_per_s == 9.0


def test_cores_from_how_hosts_slow_each_other_down():
    assert calibrate.cores_of([1.0, 1.0, 1.5, 2.0]) == 2
    assert calibrate.cores_of([1.0, 0.98]) == 2
