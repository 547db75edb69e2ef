"""The benchmarks of planning ahead run, and the soak sees what it is to see."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2]))  # the benchmarks are no part of the package

from benchmarks.lookahead import hidden, run, soak, table
from benchmarks.lookahead.expected import SoakData, WrongBatch
from dyncp.lookahead import DynamicLoader, LookAhead


@pytest.mark.parametrize("section", run.SECTIONS)
def test_every_section_runs(section, tmp_path, capsys):
    out = tmp_path / "result.json"
    assert run.main(["--quick", "--only", section, "--out", str(out)]) == 0
    tables = json.loads(out.read_text())["tables"]
    assert tables and all(rows for rows in tables.values())
    printed = capsys.readouterr().out
    assert all(f"{name}: " in printed for name in tables)


def test_a_short_soak_with_kills_and_a_restart_finds_nothing():
    result = soak.soak(soak.Settings(iterations=400, seconds=10, kill_s=0.3, restarts=1, epoch=150))
    assert not result["problems"]
    assert result["kills"] >= 1 and result["restarts"] == 1
    assert result["iterations"] >= 20 and result["batches_checked"] == 2 * result["iterations"]
    assert [mark["part"] for mark in result["marks"]] == list(soak.MARKS)
    assert "nothing lost, doubled or planned wrong" in soak.result_text(result)


@pytest.fixture(scope="module")
def one_rank():
    """The data of a soak, and the first batches of its first pass."""
    data = SoakData(20, 1, "zigzag")
    with DynamicLoader(data, data.planning, data.batching, LookAhead(workers=0)) as loader:
        return data, list(loader)


def test_the_soak_knows_what_batches_must_be(one_rank):
    data, batches = one_rank
    wanted = data.batches(0)
    assert len(batches) == len(wanted) and data.batches(1) != wanted
    rungs = {data.check(batch, 0, at, wanted[at], 0) for at, batch in enumerate(batches)}
    assert rungs == {"asked"}


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("iteration", lambda batch: batch.iteration + 1),
        ("samples", lambda batch: batch.samples[::-1]),
        ("lengths", lambda batch: (*batch.lengths, 1)),
        ("sequence_ids", lambda batch: batch.sequence_ids.flip(0)),
        ("input_ids", lambda batch: batch.input_ids + 1),
        ("position_ids", lambda batch: batch.position_ids[:-1]),
        ("labels", lambda batch: batch.labels.roll(1)),
        ("num_label_tokens", lambda batch: 0),
    ],
)
def test_the_soak_sees_a_batch_that_is_wrong(one_rank, field, change):
    data, batches = one_rank
    wrong = replace(batches[0], **{field: change(batches[0])})
    with pytest.raises(WrongBatch, match=field):
        data.check(wrong, 0, 0, data.batches(0)[0], 0)


def test_the_soak_sees_another_plan(one_rank):
    data, batches = one_rank
    wanted = data.batches(0)
    other = next(batch for batch in batches if batch.lengths != batches[0].lengths)
    with pytest.raises(WrongBatch, match="which is of no rung"):
        data.check(replace(batches[0], plan=other.plan), 0, 0, wanted[0], 0)


def test_only_children_are_killed():
    assert not soak.kill_child(os.getpid())
    assert not soak.kill_child(os.getppid())


def test_waiting_by_arithmetic():
    assert hidden.expected_s(0.1, 1.0, 12, 10) == 0.1
    assert hidden.expected_s(0.1, 1.0, 12, 2) == 0.5
    assert hidden.expected_s(0.1, 1.0, 1, 10) == 0.55


def test_the_worst_is_held_against_its_target():
    rows = [{"waited_share": share, "target": 0.01} for share in (0.001, 0.02)] + [{"target": None}]
    (line,) = table.targets({"sleeping": rows})
    assert line.endswith("at most 0.01 asked, 0.02 at worst; 1 of 2 met")
