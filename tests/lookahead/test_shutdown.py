"""However a trainer ends, its planner processes end with it, in the middle of a plan too."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lookahead.test_workers import SOURCE, gone, process_is_there

TRAINER = """
import sys, time
import numpy as np
from dyncp import AttentionShape, Batching, Cluster, DynamicLoader, LookAhead, Planning
dataset = [np.arange(1, 30 + i) for i in range(90)]
planning = Planning(AttentionShape(2, 1, 8), Cluster(1, 1), "zigzag")
loader = DynamicLoader(dataset, planning, Batching(128), LookAhead(9, 2), planner="lookahead.planners:slow_later")
with loader:
    for batch in loader:
        if batch.iteration == 3:
            print(*loader._producer.pids, flush=True)
            {end}
"""


@pytest.mark.parametrize(
    ("end", "number", "words"),
    [
        ("raise RuntimeError('the loss is NaN')", None, "RuntimeError: the loss is NaN"),
        ("sys.exit(3)", None, ""),
        ("break", None, ""),
        ("next(iter(batch for batch in loader if batch.iteration > 20))", signal.SIGINT, "KeyboardInterrupt"),
        ("time.sleep(600)", signal.SIGINT, "KeyboardInterrupt"),
        ("time.sleep(600)", signal.SIGTERM, ""),
        ("time.sleep(600)", signal.SIGKILL, ""),
    ],
)
def test_no_planner_process_outlives_its_trainer(tmp_path, end, number, words):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(SOURCE), str(Path(__file__).parents[1])]),
        "FAULTS_FOLDER": str(tmp_path),
        "SLOW_S": "600",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER.format(end=end)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        planners = [int(word) for word in process.stdout.readline().split()]
        assert len(planners) == 2
        if number:
            assert all(process_is_there(planner) for planner in planners)
            time.sleep(0.3)
            process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert all(gone(planner) for planner in planners)
    assert words in errors
    assert errors.count("Traceback") == (1 if words else 0)
