"""`dyncp simulate`."""

import json
import re
import shlex
from pathlib import Path

import pytest

from dyncp import cli
from dyncp.cost.profiled import Profiled
from dyncp.ir.cluster import PRESETS
from dyncp.strategies import STRATEGIES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")
SMALL = ("--lengths", "96,40", "--cluster", "cpu", "--head-dim", "8", "--block-tokens", "16")
WHOLE = ("--lengths", "96,40", "--nodes", "2", "--model", "8b", "--layers", "2", "--block-tokens", "16")


def run(capsys, *words):
    code = cli.main(["simulate", *words])
    out, err = capsys.readouterr()
    return code, out, err


def simulated(capsys, *words):
    code, out, err = run(capsys, *words)
    assert (code, err) == (0, "")
    return out


def test_prints_a_table(capsys):
    out = simulated(capsys, *SMALL, "--strategy", "zigzag")
    for words in ("zigzag", "136 tokens", "makespan", "waits for transfers", "between nodes", "peak memory"):
        assert words in out
    assert "Not modelled" in out and "iteration" not in out


def test_prints_one_json_object(capsys):
    out = simulated(capsys, *SMALL, "--strategy", "zigzag", "--json")
    assert out.count("\n") == 1
    data = json.loads(out)
    (one,) = data["strategies"]
    assert one["strategy"] == "zigzag" and data["model"] is None and "iteration" not in one
    for name in ("forward", "backward"):
        found = one[name]
        assert found["makespan_s"] > 0 and found["size_bytes"]["inter"] == 0 and found["size_bytes"]["intra"] > 0
        parts = ("attention_s", "move_s", "launch_s", "exposed_s", "late_s", "idle_s")
        assert sum(found[part] for part in parts) == pytest.approx(found["makespan_s"])
    assert one["total_s"] == pytest.approx(sum(one[name]["makespan_s"] for name in ("forward", "backward")))
    assert data["cluster"]["flow_bytes_per_s"] is None, "JSON has no infinity"


def test_the_default_is_dynamic_and_the_same_again(capsys):
    def figures():
        (one,) = json.loads(simulated(capsys, *SMALL, "--json"))["strategies"]
        del one["planning_s"]
        return one

    first = figures()
    assert first["strategy"] == "dynamic" and first == figures()


def test_compares_strategies(capsys):
    data = json.loads(simulated(capsys, *SMALL, "--compare", "all", "--json"))
    names = [one["strategy"] for one in data["strategies"]]
    assert sorted(names) == sorted(STRATEGIES)
    times = [one["total_s"] for one in data["strategies"] if "error" not in one]
    assert times == sorted(times)
    padded = {one["strategy"]: one.get("padding_tokens", 0) for one in data["strategies"]}
    assert padded.pop("double_ring") == 56 and not any(padded.values())
    out = simulated(capsys, *SMALL, "--compare", "ring,double_ring")
    lines = out.splitlines()
    assert any(line.startswith("double_ring*") for line in lines)
    assert "double_ring: pads to the longest sequence, 56 tokens more, as its original does" in lines
    assert "1.00" in out and "x best" in out


def test_a_strategy_that_fails_has_a_line(capsys, monkeypatch):
    from dyncp.tune import compare as module

    real = module.build

    def build(batch, shape, cluster, strategy, options):
        if strategy == "ring":
            raise ValueError("no ring today")
        return real(batch, shape, cluster, strategy, options)

    monkeypatch.setattr(module, "build", build)
    assert "ring: no plan: no ring today" in simulated(capsys, *SMALL, "--compare", "ring,zigzag").splitlines()
    code, out, err = run(capsys, *SMALL, "--strategy", "ring")
    assert (code, out) == (2, "") and "no ring today" in err


def test_notes_of_plans_are_printed(capsys):
    words = ("--lengths", "300000", "--nodes", "2")
    note = "note: the layout is that of head_ring, which is estimated to be faster"
    assert note in simulated(capsys, *words).splitlines()
    assert f"dynamic: {note}" in simulated(capsys, *words, "--compare", "dynamic,zigzag").splitlines()
    assert "note:" not in simulated(capsys, *words, "--no-portfolio")


def test_whole_iterations(capsys):
    (one,) = json.loads(simulated(capsys, *WHOLE, "--strategy", "zigzag", "--json"))["strategies"]
    found = one["iteration"]
    parts = [
        value for name, value in found.items() if name.endswith("_s") and name not in ("iteration_s", "tokens_per_s")
    ]
    assert found["iteration_s"] == pytest.approx(sum(parts)) and found["tokens"] == 136
    assert found["tokens_per_s"] == pytest.approx(136 / found["iteration_s"])
    out = simulated(capsys, *WHOLE, "--strategy", "zigzag")
    for words in (
        "iteration",
        "tokens/s",
        "tensor parallelism",
        "gradients",
        "8 query heads and 2 KV heads",
        "4 (2 nodes",
    ):
        assert words in out
    assert "tokens/s" in simulated(capsys, *WHOLE, "--compare", "ring,zigzag")


def test_a_measured_table(capsys, tmp_path):
    grid = {"full": [[1e-3]], "causal": [[1e-3]], "masked": [[1e-3]]}
    path = tmp_path / "table.json"
    path.write_text(
        json.dumps(
            {
                "q_tokens": [4096],
                "kv_tokens": [4096],
                "seconds": {"forward": grid, "backward": grid},
                "bytes_per_s": 1e12,
            }
        )
    )
    (one,) = json.loads(simulated(capsys, *SMALL, "--strategy", "data_parallel", "--cost", str(path), "--json"))[
        "strategies"
    ]
    # one block of each sequence and head group, no larger than the smallest that was measured; two ranks have one each
    assert one["forward"]["slowest_attention_s"] == pytest.approx(one["forward"]["attention_s"] * 4, rel=0.6)
    assert (one["forward"]["slowest_attention_s"] / 1e-3) == pytest.approx(
        round(one["forward"]["slowest_attention_s"] / 1e-3)
    )


def test_writes_a_trace(capsys, tmp_path):
    path = tmp_path / "trace.json"
    simulated(capsys, *SMALL, "--strategy", "zigzag", "--trace", str(path))
    assert json.loads(path.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "neither a batch file nor --lengths"),
        ((*SMALL, "--strategy", "best"), "unknown strategy 'best'"),
        ((*SMALL, "--compare", "ring,best"), "unknown strategy 'best'; choose all, or some of"),
        ((*SMALL, "--compare", "all", "--strategy", "ring"), "both --strategy and --compare"),
        ((*SMALL, "--compare", "all", "--trace", "t.json"), "both --trace and --compare"),
        ((*SMALL, "--cost", "missing.json"), "missing.json: No such file"),
        ((*SMALL, "--model", "9b"), "a model has its own heads"),
        (("--lengths", "40", "--model", "9b"), "unknown model '9b'; choose one of 8b"),
        (("--lengths", "40", "--layers", "4"), "got --layers without --model"),
        (("--lengths", "40", "--model", "8b", "--tp", "3"), "cannot be split over tp = 3"),
        (("--lengths", "40", "--model", "8b", "--ranks-per-node", "2"), "tp is 4; it must divide the 2 devices"),
        (("--lengths", "40", "--model", "8b", "--recompute", "half"), "unknown recompute 'half'"),
        (("--lengths", "40", "--model", "8b", "--layers", "0"), "layers is 0"),
        (("--lengths", "40", "--model", "8b", "--efficiency", "0"), "efficiency is 0"),
        (("--lengths", "40", "--model", "8b", "--overhead-s=-1"), "overhead_s is -1"),
        ((*SMALL, "--strategy", "ring", "--trace", "no/such/folder/t.json"), "no/such/folder/t.json"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("dyncp: error: ") and err.count("\n") == 1
    assert message in err


def first_cells(text):
    """The first column of a table, without what is below it."""
    return {re.split(r"\s{2,}", line.strip())[0] for line in text.splitlines() if re.search(r"\S  +\S", line)}


def test_every_line_of_the_tables_is_explained(capsys):
    explained = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)))
    for words in (SMALL, WHOLE):
        out = simulated(capsys, *words, "--strategy", "zigzag")
        table = out[out.index("makespan") : out.index("Not modelled")]
        names = {re.sub(r"^(attention|linear) (?=backward)", "", name) for name in first_cells(table)}
        assert names <= explained | {"block"}, names - explained
    out = simulated(capsys, *SMALL, "--compare", "ring,zigzag")
    (head,) = (line for line in out.splitlines() if "x best" in line)
    assert {"fwd + bwd", "x best", "exposed", "hidden", "late", "idle"} <= set(
        re.split(r"\s{2,}", head.strip())
    ) & explained


def test_the_readme_shows_a_real_comparison(capsys, monkeypatch):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ((command, shown),) = re.findall(r"^    \$ dyncp simulate (.*)\n((?:    .*\n|\n(?=    ))*)", readme, re.MULTILINE)
    monkeypatch.chdir(ROOT)
    out = simulated(capsys, *shlex.split(command))
    assert first_cells(shown) == first_cells(out)
    assert shown.rstrip().endswith(out.splitlines()[-1])


@pytest.mark.parametrize("command", re.findall(r"^    dyncp simulate (.*?)(?: +#.*)?$", PAGE, re.MULTILINE))
def test_the_pages_commands_run(capsys, monkeypatch, tmp_path, command):
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.chdir(tmp_path)
    assert "Not modelled" in simulated(capsys, *shlex.split(command))


def script_with(words):
    """The page's only Python block that has these words."""
    (script,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if words in block)
    return script


def test_the_page_simulates_a_cluster_of_ones_own(capsys):
    exec(script_with("Cluster("), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["dynamic", "head_ring", "zigzag"]
    assert all(re.search(r"\d ms forward +[\d.]+ ms backward", line) for line in lines)


def test_the_pages_presets_are_the_planners():
    rows = re.findall(
        r"^\| `([\w-]+)` \|.*?\| (\d+) \| (\d+) GB/s \| (\d+) GB/s \|.*\| ([\d.]+) TFLOP/s \|", PAGE, re.MULTILINE
    )
    found = {name: tuple(map(float, numbers)) for name, *numbers in rows}
    assert found == {
        name: (one.ranks_per_node, one.intra_bytes_per_s / 1e9, one.inter_bytes_per_s / 1e9, one.flops_per_s / 1e12)
        for name, one in PRESETS.items()
    }


def test_the_page_measures_a_table(monkeypatch, tmp_path):
    script = script_with("attention.json")
    monkeypatch.chdir(tmp_path)
    exec(script.replace("(128, 512, 1024), 3", "(16, 32), 1").replace("1 << 26", "1 << 16"), {})
    assert Profiled.read(tmp_path / "attention.json").q_tokens == (16, 32)
