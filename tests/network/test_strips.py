"""What the kernel does with masks, strip by strip, in a plan's predicted times."""

import numpy as np
import pytest

from benchmarks.network.batches import SHAPE, Case
from benchmarks.network.calibrate import checked_masks, computation_s
from benchmarks.network.strips import Strips
from dyncp.cost.model import FORMS, Work
from dyncp.cost.profiled import Profiled
from dyncp.ir.cluster import Cluster
from dyncp.ir.plan import FORWARD, PASSES
from dyncp.strategies import build
from dyncp.strategies.api import Options

SIZES = (16, 4096)
AREA = np.outer(SIZES, SIZES) * 1e-9


@pytest.fixture
def table():
    """Times in proportion to rows x keys, half of that for causal blocks."""
    factor = {"full": 1.0, "causal": 0.5, "masked": 1.0}
    seconds = {pass_.name: {form: (AREA * factor[form]).tolist() for form in FORMS} for pass_ in PASSES}
    return Profiled(SIZES, SIZES, seconds, bytes_per_s=1e9)


def work_s(case, table, block_tokens):
    plan = build(case.batch(), SHAPE, Cluster(2, 1), "data_parallel", Options(block_tokens=block_tokens)).plan
    return plan, Strips.of(plan, table)


def test_blocks_without_a_mask_are_as_in_the_table(table):
    _, cost = work_s(Case("single", 64, "causal"), table, 64)
    work = Work(*(np.array([value]) for value in (0, 0, 64, 64, 64 * 64)))
    assert cost.attention_s(FORWARD, SHAPE, work, 1) == pytest.approx(table.attention_s(FORWARD, SHAPE, work, 1))
    assert (cost.cores, cost.launch_s, cost.instruction_s) == (table.cores, table.launch_s, table.instruction_s)
    assert cost.move_s(np.array([1e9])) == pytest.approx([1.0])


def test_a_window_beside_sink_tokens_costs_all_strips_to_the_left(table):
    case = Case("single", 2048, "lambda")
    _, cost = work_s(case, table, 4096)
    (mask,) = (sequence.masks["default"] for sequence in case.batch().sequences)
    work = Work(*(np.array([value]) for value in (0, 0, 2048, 2048, mask.pairs())))
    strips = sum(512 * keys for keys in (512, 1024, 1536, 2048)) * 1e-9
    assert cost.attention_s(FORWARD, SHAPE, work, 1)[0] == pytest.approx(strips)


def test_smaller_blocks_let_the_kernel_skip_more(table):
    case = Case("single", 2048, "lambda")
    times = []
    for block_tokens in (2048, 256):
        plan, cost = work_s(case, table, block_tokens)
        times.append(computation_s(plan, cost))
    assert times[1] < 0.5 * times[0]


def test_masks_that_are_checked_have_few_pairs():
    for name, mask in checked_masks():
        assert 0 < mask.pairs() <= 0.51 * mask.q_length * mask.k_length, name
