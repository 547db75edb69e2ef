"""What the README shows works."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from dyncp import batch_file, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_example_runs_under_torchrun(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    words = f"-m torch.distributed.run --standalone --nproc-per-node 4 {script}".split()
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    counts = [int(count) for count in re.findall(r"rank \d: (\d+) of 3700 tokens", result.stdout)]
    assert len(counts) == 4 and sum(counts) == 3700


def test_the_picture_is_made_by_the_command_beside_it(tmp_path, capsys, monkeypatch):
    (command,) = re.findall(r"^    dyncp (plan .* --picture docs/plan.png)$", README, re.MULTILINE)
    words = [str(tmp_path / "plan.png") if word == "docs/plan.png" else word for word in shlex.split(command)]
    monkeypatch.chdir(ROOT)
    assert cli.main(words) == 0
    assert (tmp_path / "plan.png").exists()


def test_the_batch_file_page_describes_a_batch(tmp_path):
    page = (ROOT / "docs" / "batch-files.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    batch = batch_file.batch_from_dict(json.loads(example))
    assert [sequence.length for sequence in batch.sequences] == [4096, 1024, 300]


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"
