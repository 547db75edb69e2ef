"""Real processes over gloo: the same results as in one process, and what happens when a process is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dyncp.runtime.transports.torch_dist import TorchDistTransport, matched_order, receives_first

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


def test_over_gloo_receives_come_first_and_from_the_next_rank_on():
    first, second = torch.zeros(1), torch.ones(1)
    ordered = receives_first([(0, first), (3, first), (0, second)], [(1, first), (3, first), (0, first)], 2, 4)
    assert [(peer, is_send) for peer, is_send, _ in ordered] == [
        (3, False), (0, False), (1, False), (3, True), (0, True), (0, True),
    ]  # fmt: skip
    assert [data.item() for _, _, data in ordered[-2:]] == [0.0, 1.0]  # to one peer in the order given


def test_over_nccl_both_sides_of_a_pair_have_one_order():
    data = torch.zeros(1)
    orders = {rank: matched_order([(1 - rank, data)], [(1 - rank, data)], rank, 2) for rank in (0, 1)}
    assert [is_send for _, is_send, _ in orders[0]] == [True, False]  # the message from rank 0, then that from rank 1
    assert [is_send for _, is_send, _ in orders[1]] == [False, True]
    crowd = matched_order([(3, data), (0, data)], [(1, data)], 2, 4)
    assert [(peer, is_send) for peer, is_send, _ in crowd] == [(0, True), (1, False), (3, True)]


@pytest.mark.parametrize("how", ["p2p", "all_to_all", "p2p as on GPUs", "all_to_all as on GPUs"])
def test_both_passes_equal_dense_attention_and_the_local_transport(healthy, how):
    for checks in healthy.values():
        result = {
            "p2p": checks["both_passes"],
            "all_to_all": checks["all_to_all"],
            **{f"{exchange} as on GPUs": result for exchange, result in checks["as_on_gpus"].items()},
        }[how]
        assert all(error < 1 for error in result["errors"].values())
        assert all(result["same_bits"].values())
        assert len(result["errors"]) == 20


def test_some_ranks_have_no_messages_in_steps_of_others(healthy):
    steps = [healthy[rank]["both_passes"]["steps"] for rank in range(RANKS)]
    assert [each["idle"] for each in steps] == [[1, 5], [1, 2, 3, 5], [1, 2, 3, 5]]
    assert [each["silent"] for each in steps] == [[], [1, 3], [1, 3]]


def test_a_group_has_its_own_ranks(healthy):
    assert [healthy[rank]["subgroup"].get("group_rank") for rank in range(RANKS)] == [None, 0, 1]
    assert all(healthy[rank]["subgroup"]["error"] < 1e-5 for rank in (1, 2))


def test_without_a_process_group():
    with pytest.raises(ValueError, match=r"torch\.distributed is not initialized: call"):
        TorchDistTransport()


def test_a_rank_outside_of_the_group_is_refused(healthy):
    assert re.match("group is .*; expected a process group that this process is in", healthy[0]["subgroup"]["message"])


@pytest.mark.parametrize("check", ["different_plans", "different_plans_all_to_all"])
@pytest.mark.parametrize("kind", ["shorter", "longer", "strategy", "mask"])
def test_ranks_that_run_different_things_are_told(healthy, kind, check):
    """Whatever the sizes of messages: a longer one than expected would end the process."""
    messages = [healthy[rank][check][kind] for rank in range(RANKS)]
    for rank, other in ((0, 2), (1, 2), (2, 0)):
        assert messages[rank].startswith(f"rank {rank} runs the forward pass of plan ")
        assert f"; but rank {other} runs the forward pass of plan " in messages[rank]
    assert all(healthy[rank][check]["same"] is None for rank in range(RANKS))


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
    assert re.search(r": rank 0: receive from rank 2 \(\d+ bytes\) (failed|could not start)", results[0]["message"])
    assert re.search(r": rank 1: send to rank 2 \(\d+ bytes\) (failed|could not start)", results[1]["message"])


def test_a_peer_lost_in_an_all_to_all_is_named_among_the_peers(tmp_path):
    for rank, result in start("killed_peer_all_to_all", tmp_path).items():
        assert result["message"].startswith(f"rank {rank}, forward pass, mask 'default', instruction ")
        assert re.search(rf": rank {rank}: .*rank 2 \(\d+ bytes\).* (failed|could not start)", result["message"])
        assert result["seconds"] < 30


def test_a_peer_lost_before_the_comparison_is_named(tmp_path):
    for rank, result in start("killed_before_comparing", tmp_path).items():
        step = r"before instruction 0 of \d+ \(comparing plans with all ranks\)"
        assert re.match(
            rf"rank {rank}, forward pass, mask 'default', {step}: rank {rank}: .* rank 2 \(256 bytes\)",
            result["message"],
        )
        assert result["seconds"] < 30
