"""Where and when something was measured."""

from __future__ import annotations

import datetime
import re
import shutil
import subprocess
from typing import Any

from dyncp.bench.machine import machine, package_version


def described() -> dict[str, Any]:
    """The machine, the versions that planning ahead depends on, and the date."""
    versions = {name: package_version(name) for name in ("torch", "msgspec", "redis")}
    return {**machine(), **versions, "redis-server": redis_version(), "date": datetime.date.today().isoformat()}


def redis_version() -> str | None:
    """The version of `redis-server`, where it is installed."""
    if shutil.which("redis-server") is None:
        return None
    words = subprocess.run(["redis-server", "--version"], check=True, capture_output=True, text=True).stdout
    found = re.search(r"v=(\S+)", words)
    return found.group(1) if found else None
