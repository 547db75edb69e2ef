"""Every configuration of the Triton kernels compiled for GPUs, on a machine without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALL_DIMS = [64, 128, 192, 256]
RUNS = [  # target, dtype and dims of keys, the longest first
    (100, "bfloat16", ALL_DIMS),
    (90, "bfloat16", ALL_DIMS),
    (80, "bfloat16", ALL_DIMS),
    (90, "float16", [128]),
    (90, "float32", [128]),
    (89, "bfloat16", [128]),
]


def compile_all(run: tuple[int, str, list[int]], folder: Path) -> list[dict]:
    target, dtype, dims = run
    out = folder / f"{target}-{dtype}.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "TRITON_CACHE_DIR": str(folder / "cache")}
    words = ["--targets", str(target), "--dtypes", dtype, "--dims", *map(str, dims), "--out", str(out)]
    command = [sys.executable, "-m", "benchmarks.gpu.compiled", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("compiled")
    with ThreadPoolExecutor(2) as pool:
        return [row for part in pool.map(lambda run: compile_all(run, folder), RUNS) for row in part]


def some(rows: list[dict], **wanted) -> list[dict]:
    found = [row for row in rows if all(row[name] in values for name, values in wanted.items())]
    assert found
    return found


def test_every_kernel_shape_and_target_is_there(rows):
    kernels = {"forward", "backward", "merge_outputs", "sum_gradients", "copy_slots"}
    for target, dtype, dims in RUNS:
        for dim in dims:
            found = [row for row in some(rows, target=[target], dtype=[dtype]) if row["dims"][0] == dim]
            assert kernels <= {row["kernel"] for row in found}


def test_attention_in_half_precision_is_on_matrix_units_and_loads_16_bytes_at_once(rows):
    for row in some(rows, kernel=["forward", "backward"], dtype=["bfloat16", "float16"]):
        assert row["matrix"] > 0, row
        assert row["copies_of_16_bytes"] > 0 or row["target"] == 89, row  # which may have no room to load ahead


def test_loops_load_ahead(rows):
    """They wait for what was loaded before, once or a few times in one go through; a loop that Triton does not pipeline
    waits for each load by itself."""
    half = some(rows, dtype=["bfloat16", "float16"], kernel=["forward", "backward", "forward, softcap"])
    for row in half:
        assert len(row["waits"]) == (4 if row["kernel"] == "backward" else 2)
        assert max(row["waits"]) <= 5, row


def test_what_is_spilled(rows):
    """Next to nothing, but at head dim 256 and in the backward, which holds two gradients of a tile; there a small part
    of 255 registers of 4 bytes."""
    half = some(rows, dtype=["bfloat16", "float16"])
    for row in some(
        half,
        kernel=["forward", "forward, softcap", "forward, odd heads", "merge_outputs", "sum_gradients", "copy_slots"],
    ):
        assert row["stack_bytes"] <= (16 if max(row["dims"]) <= 192 else 160), row
    for row in some(half, kernel=["backward", "backward, softcap", "backward, odd heads"]):
        assert row["stack_bytes"] <= (160 if max(row["dims"]) <= 128 else 300), row
