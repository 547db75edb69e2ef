"""Where results were measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import dyncp

PACKAGES = ("numpy", "numba", "mtkahypar")
CPU_INFO = Path("/proc/cpuinfo")  # where Linux describes the processor


def machine() -> dict[str, str | int | None]:
    """Processor, cores, and the versions of what was used."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "dyncp": dyncp.__version__,
        **{name: package_version(name) for name in PACKAGES},
    }


def cpu_model() -> str:
    """The processor's name."""
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def package_version(name: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
