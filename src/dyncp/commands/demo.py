"""`dyncp demo`: the options are those of `DemoConfig`."""

from __future__ import annotations

import sys

from dyncp.demo import DemoConfig as Command
from dyncp.demo import DemoError, run_demo


def run(command: Command) -> int:
    """Train, compare and report; 1 when the curves differ or a process fails."""
    try:
        run_demo(command)
    except DemoError as error:
        print(f"dyncp: the demo failed: {error}", file=sys.stderr)
        return 1
    return 0
