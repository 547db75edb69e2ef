"""Real processes over gloo: the same results as in one process, and what happens when a process is lost."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("worker.py")
RANKS = 3


def start(scenario: str, folder: Path) -> dict[int, dict]:
    """Results by rank, of the ranks that lived to write one."""
    tests = WORKER.parents[1]
    path = os.pathsep.join([str(tests), str(tests.with_name("src"))])
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(folder), str(rank), str(RANKS), scenario],
            env=os.environ | {"PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    expected = processes if scenario == "healthy" else processes[:2]
    try:
        for process in expected:
            _, complaints = process.communicate(timeout=120)
            assert process.returncode == 0, complaints
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.communicate()
    return {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(expected))}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return start("healthy", tmp_path_factory.mktemp("healthy"))


def test_both_passes_equal_dense_attention_and_the_local_transport(healthy):
    for result in healthy.values():
        assert max(result["both_passes"]["errors"].values()) < 1
        assert all(result["both_passes"]["same_bits"].values())
        assert len(result["both_passes"]["errors"]) == 12


def test_a_group_has_its_own_ranks(healthy):
    assert [healthy[rank]["subgroup"].get("group_rank") for rank in range(RANKS)] == [None, 0, 1]
    assert all(healthy[rank]["subgroup"]["error"] < 1e-5 for rank in (1, 2))


def test_ranks_with_different_plans_are_told(healthy):
    messages = [healthy[rank]["different_plans"]["message"] for rank in range(RANKS)]
    assert messages[0].startswith("rank 0 holds plan ")
    assert "but rank 2 holds " in messages[0]
    assert "but rank 2 holds " in messages[1]
    assert "but rank 0 holds " in messages[2]


def test_a_plan_for_another_world_is_refused(healthy):
    for result in healthy.values():
        assert result["wrong_world"]["message"].startswith(
            "the plan is for 4 ranks, but the group has 3: plan for a cluster"
        )


@pytest.mark.parametrize(("scenario", "limit_s"), [("killed_peer", 30), ("stopped_peer", 10)])
def test_a_lost_peer_is_named_within_the_time_out(scenario, limit_s, tmp_path):
    results = start(scenario, tmp_path)
    for rank, result in results.items():
        assert result["message"].startswith(f"rank {rank}, forward pass, mask 'default', instruction ")
        assert "of step 1, peers " in result["message"]
        assert result["seconds"] < limit_s
    # rank 0 receives from rank 2, rank 1 sends to it; either may notice already when it starts
    assert "receive from rank 2" in results[0]["message"] or "could not start" in results[0]["message"]
