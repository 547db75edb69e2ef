from itertools import combinations

import pytest
from matplotlib.figure import Figure

from dyncp.demo.picture import draw
from dyncp.demo.run import BASELINES
from dyncp.strategies import STRATEGIES

DENSE = [5.0, 4.0, 3.5, 3.25]


@pytest.fixture
def drawn(monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: figures.append(self))
    return figures


def result(losses, strategy="dynamic"):
    figures = {"bytes_per_step": [10**6] * 4, "compute_imbalance": 1.2, "token_imbalance": 1.0}
    return {
        "config": {"masks": ["causal"], "ranks": 2, "steps": 4, "tokens": 64, "strategy": strategy},
        "parameters": 1000,
        "loss": {"distributed": losses, "dense": DENSE, "largest_difference": 1e-6, "tolerance": 1e-3},
        "strategies": dict.fromkeys(dict.fromkeys((strategy, *BASELINES)), figures),
    }


def test_equal_losses_are_points_of_another_kind_below_the_others(drawn):
    gaps = [1e-6, 0.0, 2e-9, 0.0]
    assert draw(result([loss + gap for loss, gap in zip(DENSE, gaps, strict=True)]), "demo.png")
    axes = drawn[0].axes[1]
    above, equal, _ = axes.get_lines()
    assert (above.get_linestyle(), equal.get_linestyle()) == ("None", "None"), "no lines between steps"
    assert above.get_marker() != equal.get_marker()
    assert (above.get_xdata().tolist(), equal.get_xdata().tolist()) == ([0, 2], [1, 3])
    assert max(equal.get_ydata()) < min(above.get_ydata())
    assert "exactly 0 in 2 of 4 steps" in equal.get_label()


@pytest.mark.parametrize("losses", [DENSE, [loss + 1 for loss in DENSE]])
def test_losses_that_are_all_equal_or_all_differ_are_drawn(tmp_path, losses):
    assert draw(result(losses), tmp_path / "demo.png")
    assert (tmp_path / "demo.png").exists()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_strategy_hides_another_that_moves_the_same(drawn, strategy):
    """Of two lines in one place the upper one is thinner, or has gaps."""
    draw(result(DENSE, strategy), "demo.png")
    lines = drawn[0].axes[2].get_lines()
    assert {line.get_label().split()[0] for line in lines} == {strategy, *BASELINES}
    for below, above in combinations(lines, 2):
        assert above.get_linewidth() < below.get_linewidth() or above.get_linestyle() != "-"
        assert above.get_color() != below.get_color()


def test_the_imbalance_says_how_steps_are_taken_together(drawn):
    draw(result(DENSE), "demo.png")
    assert "sum of max / sum of mean over steps" in drawn[0].axes[3].get_ylabel()
