import numpy as np
from builders import causal_batch, planned

from dyncp.demo.traffic import RankLoad, rank_load, strategy_figures
from dyncp.report.summary import summarize


def test_the_loads_of_the_ranks_add_up_to_the_summary_of_the_plan():
    made = planned(causal_batch(40, 9, 23), ranks=3, strategy="ring")
    loads = [rank_load(made.plan.rank(rank)) for rank in range(3)]
    summary = summarize(made)
    assert sum(load.forward_bytes for load in loads) == summary["total_bytes"] > 0
    assert sum(load.backward_bytes for load in loads) == summary["backward"]["total_bytes"] > 0
    assert sum(load.tokens for load in loads) == 72
    assert sum(load.pairs for load in loads) == 2 * summary["pairs"]  # two head groups
    pairs = np.array([load.pairs for load in loads])
    assert pairs.max() / pairs.mean() == summary["compute_imbalance"]


def test_figures_over_steps():
    steps = [[RankLoad(10, 20, 6, 5), RankLoad(0, 4, 2, 5)], [RankLoad(1, 1, 0, 9), RankLoad(1, 1, 4, 1)]]
    figures = strategy_figures(steps, layers=2)
    assert figures["forward_bytes"] == 2 * 12
    assert figures["backward_bytes"] == 2 * 26
    assert figures["bytes_per_step"] == [68, 8]
    assert figures["total_bytes"] == 76
    assert figures["compute_imbalance"] == (6 + 4) / (4 + 2)
    assert figures["token_imbalance"] == (5 + 9) / (5 + 5)
    assert figures["compute_imbalance_per_step"] == [1.5, 2.0]
