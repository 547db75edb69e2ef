"""A small model that trains under per-batch plans, beside the same training with dense attention.

Neither this package nor its configuration imports torch; `run_demo` does, when it is called.
"""

from __future__ import annotations

from typing import Any

from dyncp.demo.config import DemoConfig, DemoError

__all__ = ["DemoConfig", "DemoError", "run_demo"]


def run_demo(config: DemoConfig) -> dict[str, Any]:
    """Train under `torchrun`, train densely, compare, and write `result.json` and `demo.png`; see `demo.run`."""
    from dyncp.demo.run import run

    return run(config)
