"""What else the machine does: measurements wait for a moment without it, and note what came in between."""

from __future__ import annotations

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
QUIET_SHARE = 0.05  # of the processors, that others may take
SAMPLE_S = 0.2
LONGEST_S = 15.0  # to wait for one moment


class Patience:
    """Waits for quiet moments, in all no longer than it was given.

    Args:
        left_s: seconds to spend on waiting.
    """

    def __init__(self, left_s: float) -> None:
        self.left_s = left_s

    def wait(self) -> bool:
        """Return when nothing else works, or patience is at an end; whether it is quiet."""
        started = time.monotonic()
        longest_s = min(LONGEST_S, self.left_s)
        while True:
            quiet = busy_share(SAMPLE_S) <= QUIET_SHARE
            waited_s = time.monotonic() - started
            if quiet or waited_s >= longest_s:
                self.left_s -= max(0.0, waited_s - SAMPLE_S)
                return quiet


def busy_share(sample_s: float) -> float:
    """Of all processors, what is at work for a moment in which this benchmark does nothing."""
    worked_s, started = processors_busy_s(), time.monotonic()
    time.sleep(sample_s)
    return (processors_busy_s() - worked_s) / ((time.monotonic() - started) * processors())


def processors() -> int:
    """How many this machine has."""
    return os.cpu_count() or 1


def processors_busy_s() -> float:
    """Seconds that all processors together have worked for processes since the machine started."""
    user, nice, system, *_ = map(int, STAT.read_text().splitlines()[0].split()[1:])
    return (user + nice + system) / TICKS_PER_S
