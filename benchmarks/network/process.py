"""What the benchmark's processes ask of the operating system."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PR_SET_PDEATHSIG = 1
NICE, MESSAGES_NICE = -10, -20
AUTOGROUP = Path("/proc/self/autogroup")


def environment(**more: str) -> dict[str, str]:
    """The environment of a process that finds the benchmark and the package, on one thread."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)} | more


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends, however that happens."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent process has ended")


def go_first() -> None:
    """Put this process before other work of the machine: as the session that it leads, where sessions share by turns,
    or by itself."""
    if AUTOGROUP.exists():
        AUTOGROUP.write_text(str(NICE))
    else:
        os.nice(NICE)


def messages_go_first() -> None:
    """Let the threads that move messages go before computation, as network cards need no processor for that. (No
    realtime priority: these threads spin on locks that computation may hold.)
    """
    for thread in map(int, os.listdir("/proc/self/task")):
        if thread != os.getpid():
            os.setpriority(os.PRIO_PROCESS, thread, MESSAGES_NICE)
