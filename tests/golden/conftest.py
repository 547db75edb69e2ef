"""`pytest --refresh-golden` writes the stored plans anew; review the change with `git diff`."""

from __future__ import annotations

import pytest


@pytest.fixture
def refresh_golden(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--refresh-golden"))
