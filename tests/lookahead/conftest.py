import os
from pathlib import Path

import pytest


@pytest.fixture
def faults(monkeypatch, tmp_path):
    """A folder in which planners that misbehave count what they did; planner processes find them in planners.py."""
    folder = tmp_path / "faults"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("FAULTS_FOLDER", str(folder))
    monkeypatch.setenv("FAULTS_OWNER", str(os.getpid()))
    return folder
