import sys

import numpy as np
import pytest
from builders import causal_batch, planned
from matplotlib.figure import Figure

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.report.picture import plan_picture, rank_colours, rank_matrix, step_grid
from dyncp.report.summary import summarize
from dyncp.report.table import format_bytes


def test_every_pair_has_the_rank_that_computes_it():
    """At one pixel a token the matrix is exact: the mask, in the colours of a ring's ranks."""
    made = planned(Batch([Sequence(6, masks.causal(6)), Sequence(4, masks.sliding_window(4, 2))]), ranks=2)
    ranks = rank_matrix(made, 0, 10)
    expected = np.full((10, 10), -1)
    expected[:6, :6] = np.where(masks.causal(6).dense(), [[0], [0], [0], [1], [1], [1]], -1)
    expected[6:, 6:] = np.where(masks.sliding_window(4, 2).dense(), [[0], [0], [1], [1]], -1)
    assert np.array_equal(ranks, expected)


def test_steps_hold_all_work_and_all_bytes():
    made = planned(causal_batch(40, 13), ranks=4)
    pairs, arrived = step_grid(made, 0)
    figures = summarize(made)
    assert pairs.shape == arrived.shape == (4, 4)
    assert pairs.sum() == figures["pairs"] * 2, "of two head groups"
    assert arrived.sum() == figures["total_bytes"]
    assert not arrived[:, 0].any()


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 8), (4, 1), (4, 8)])
def test_ranks_have_colours_of_their_own(nodes, per_node):
    colours = rank_colours(nodes, per_node)
    assert len(set(colours)) == nodes * per_node
    assert all(0 <= part <= 1 for colour in colours for part in colour)


def test_draws_a_png(tmp_path):
    path = tmp_path / "plan.png"
    batch = Batch([Sequence(20, {"a": masks.causal(20), "b": masks.full(20)}, None)])
    plan_picture(planned(batch), path, mask="b")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no mask 'c' in this plan; it has a, b"):
        plan_picture(planned(batch), path, mask="c")


def test_shows_the_figures_of_the_mask_that_is_drawn(monkeypatch, tmp_path):
    """Of two ranks one has half of the work under the first mask, and three quarters of it under the second."""
    named = {"local": masks.document([20, 20]), "global": masks.causal(40)}
    made = planned(Batch([Sequence(40, named)], {"local": 5, "global": 1}), 2, "ring")
    figures = summarize(made)["masks"]
    assert [round(part["compute_imbalance"], 2) for part in figures.values()] == [1.0, 1.49]
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: drawn.append(self))
    for name in ("local", "global"):
        plan_picture(made, tmp_path / "plan.png", name)
        title = drawn[-1].get_suptitle()
        assert title.endswith(
            f"{format_bytes(figures[name]['total_bytes'])} move forward under mask {name!r} (one of 2)"
        )
        shares = [text.get_text() for text in drawn[-1].axes[1].texts]
        assert f"{figures[name]['compute_imbalance']:.2f}" in shares
    plan_picture(planned(causal_batch(20)), tmp_path / "plan.png")
    assert drawn[-1].get_suptitle().endswith("B move forward")


def test_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"dyncp\[viz\]"):
        plan_picture(planned(causal_batch(20)), tmp_path / "plan.png")
