"""What the README and the pages in docs/ show works."""

import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest

import dyncp.lookahead
from dyncp import Options, batch_file, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def page(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def torchrun(script, ranks, folder, *arguments):
    """What a script prints under torchrun."""
    file = folder / f"script{ranks}.py"
    file.write_text(script, encoding="utf-8")
    words = f"-m torch.distributed.run --standalone --nproc-per-node {ranks} {file}".split()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words, *arguments]
    result = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def losses(output):
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]


def labels(output):
    """The first column of a table."""
    return [re.split(r"\s{2,}", line.strip())[0] for line in output.splitlines() if line.strip()]


def test_the_example_runs_under_torchrun(tmp_path):
    (example,) = blocks(README, "python")
    output = torchrun(example, 4, tmp_path)
    counts = [int(count) for count in re.findall(r"rank \d: (\d+) of 3700 tokens", output)]
    assert len(counts) == 4 and sum(counts) == 3700


@pytest.mark.parametrize("number", [0, 1])
def test_the_training_scripts_give_the_same_losses_on_two_ranks_and_on_one(tmp_path, number):
    script = blocks(page("training.md"), "python")[number]
    with ThreadPoolExecutor() as pool:
        two, one = map(losses, pool.map(lambda ranks: torchrun(script, ranks, tmp_path), (2, 1)))
    assert len(two) > 3 and two[-1] < two[0]
    assert two == pytest.approx(one, abs=(1e-3, 2e-2)[number])  # fp32, and bf16


def test_the_script_for_gpus_gives_the_same_losses_on_two_ranks_and_on_one(tmp_path):
    (script,) = blocks(page("gpus.md"), "python")
    with ThreadPoolExecutor() as pool:
        two, one = map(losses, pool.map(lambda ranks: torchrun(script, ranks, tmp_path), (2, 1)))
    assert len(two) > 3 and two[-1] < two[0]
    assert two == pytest.approx(one, abs=1e-3)


def test_a_run_that_is_resumed_prints_what_the_unbroken_one_does(tmp_path):
    script = blocks(page("training.md"), "python")[2]

    def run(folder, *steps):
        folder.mkdir()
        printed = [torchrun(script, 2, folder, str(number)) for number in steps]
        return [line for text in printed for line in text.splitlines() if re.match("step .*: loss|held out", line)]

    with ThreadPoolExecutor() as pool:
        unbroken, resumed = pool.map(lambda words: run(*words), [(tmp_path / "a", 9), (tmp_path / "b", 5, 9)])
    steps = [line for line in resumed if line.startswith("step")]
    assert steps == unbroken[:-1] and len(steps) == 9
    assert resumed[-1] == unbroken[-1]
    assert losses("\n".join(steps))[-1] < losses("\n".join(steps))[0]


def test_the_training_page_has_no_other_scripts():
    assert len(blocks(page("training.md"), "python")) == 3


def test_the_training_page_describes_every_option():
    described = re.findall(r"^\| (`Options\..*?) \|", page("training.md"), re.MULTILINE)
    names = re.findall(r"`(?:Options\.)?(\w+)`", " ".join(described))
    assert sorted(names) == sorted(option.name for option in fields(Options))


def test_the_picture_is_made_by_the_command_beside_it(tmp_path, capsys, monkeypatch):
    (command,) = re.findall(r"^    dyncp (plan .* --picture docs/plan.png)$", README, re.MULTILINE)
    words = [str(tmp_path / "plan.png") if word == "docs/plan.png" else word for word in shlex.split(command)]
    monkeypatch.chdir(ROOT)
    assert cli.main(words) == 0
    assert (tmp_path / "plan.png").exists()


@pytest.mark.parametrize("name", ["plan", "verify"])
def test_the_tables_have_the_lines_that_the_readme_shows(capsys, name):
    pattern = rf"^    \$ dyncp ({name} .*)\n((?:    .*\n|\n(?=    ))*)"
    ((command, shown),) = re.findall(pattern, README, re.MULTILINE)
    assert cli.main(shlex.split(command)) == 0
    printed = labels(capsys.readouterr().out)
    assert labels(shown) == printed
    if name == "plan":
        explained = re.findall(r"`([a-z ]+)`", page("plans.md"))
        assert set(printed) - {"strategy", "ranks", "shape", "forward"} <= set(explained)


def test_the_batch_file_page_describes_batches():
    one, several = (batch_file.batch_from_dict(json.loads(text)) for text in blocks(page("batch-files.md"), "json"))
    assert [sequence.length for sequence in one.sequences] == [4096, 1024, 300]
    assert several.weights == {"window": 5, "global": 1}
    assert several.sequences[1].keys == 1000


def test_the_masks_page_makes_masks():
    names = {}
    for block in blocks(page("masks.md"), "python"):
        exec(block, names)
    assert names["batch"].mask_names == ("window", "global")


def test_the_architecture_page_explains_lines_of_a_real_plan(capsys):
    text = page("architecture.md")
    (command,) = re.findall(r"^    dyncp (plan .* --text)$", text, re.MULTILINE)
    assert cli.main(shlex.split(command)) == 0
    printed = iter(capsys.readouterr().out.splitlines())
    (shown,) = blocks(text, "text")
    for line in shown.splitlines():
        line = re.sub(r" +#.*", "", line)
        assert line in ("", "...") or line in printed, f"the plan has no line {line!r}, or not there"


def test_names_on_the_pages_exist():
    found = {name for file in PAGES for name in re.findall(r"dyncp(?:\.\w+)+", file.read_text(encoding="utf-8"))}
    assert "dyncp.ir.codec.read_plan" in found
    for name in found | {f"dyncp.lookahead.{name}" for name in dyncp.lookahead.__all__}:
        pkgutil.resolve_name(name)


def test_links_lead_somewhere():
    for file in PAGES:
        for link in re.findall(r"\]\(([^)]+)\)", file.read_text(encoding="utf-8")):
            if link.startswith("https://"):
                continue
            name, _, heading = link.partition("#")
            target = file.parent / name if name else file
            assert target.exists(), f"{file.name}: {link}"
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE) if heading else []
            slugs = [re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert not heading or heading in slugs, f"{file.name}: {link}"
