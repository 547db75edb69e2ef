"""A processor of its own for each host: a control group that holds the host's computation to a share of one processor.

Processors of this machine are fewer than hosts. Without shares, a host would compute faster while others wait, and an
uneven share of computation would cost nothing. Only the thread that computes is in the group; those that move messages
are not, as a network card needs no processor of its host. Groups are named as namespaces are, and removed as they are.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.network.topology import PREFIX, own_prefix, signals_exit, signals_ignored, stale_prefix

V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
# Short, so that a host computes evenly; with half of it, a busy machine leaves a host less than its share.
PERIOD_US = 10_000
WEIGHT_V1, WEIGHT_V2 = 9548, 932  # as a process of niceness -10 has
COMPUTING = "computing"  # in version 2, a group of single threads in the group of their process
USED_SHARE = 0.7  # of all processors; the rest moves messages
PATIENCE_S = 3.0


@dataclass(frozen=True, slots=True)
class Shares:
    """The groups of all hosts, or why there are none.

    Args:
        folders: of the groups, by host; None for each host that has none.
        share: of one processor, that each host's computation has.
        lacking: in words, why there are no groups; None if there are.
    """

    folders: Sequence[Path | None]
    share: float
    lacking: str | None = None


def share_of(hosts: int) -> float:
    """The share of one processor that each of some hosts can have on this machine."""
    return min(1.0, round(USED_SHARE * (os.cpu_count() or 1) / hosts, 2))


@contextlib.contextmanager
def shares(hosts: int, share: float) -> Iterator[Shares]:
    """A group for each host, for the time of a `with` block; all are removed again however it ends.

    What dead processes left behind is removed first. SIGTERM and SIGHUP end the block as ctrl-C does.
    """
    root = V1 if (V1 / "tasks").exists() else V2
    remove_stale(root)
    own = own_prefix()
    with signals_exit():
        try:
            yield _made(root, own, hosts, share)
        finally:
            with signals_ignored():
                remove(root, own)


def join(folder: Path, process: int, thread: int) -> None:
    """Hold one thread of a process to the share of a group; its other threads stay free."""
    if (folder / COMPUTING).exists():
        (folder / "cgroup.procs").write_text(str(process))
        (folder / COMPUTING / "cgroup.threads").write_text(str(thread))
    else:
        (folder / "tasks").write_text(str(thread))


def groups(root: Path, prefix: str) -> list[Path]:
    """The groups whose names begin so."""
    return sorted(path for path in root.glob(f"{prefix}*") if path.is_dir())


def remove(root: Path, prefix: str) -> None:
    """Remove all groups whose names begin so, and end what runs in them."""
    for folder in groups(root, prefix):
        deadline_s = time.monotonic() + PATIENCE_S
        while folder.exists() and time.monotonic() < deadline_s:
            for pid in _processes(folder) - {os.getpid()}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):  # until they are gone
                if (folder / COMPUTING).exists():
                    (folder / COMPUTING).rmdir()
                folder.rmdir()
                break
            time.sleep(0.02)


def remove_stale(root: Path) -> None:
    """Remove the groups of processes of this benchmark that are no more."""
    for prefix in sorted({prefix for path in groups(root, f"{PREFIX}-") if (prefix := stale_prefix(path.name))}):
        remove(root, prefix)


def _made(root: Path, own: str, hosts: int, share: float) -> Shares:
    folders = [root / f"{own}host{number}" for number in range(hosts)]
    try:
        for folder in folders:
            folder.mkdir()
            _limit(root, folder, round(share * PERIOD_US))
    except OSError as error:
        return Shares([None] * hosts, 1.0, f"{error.strerror}: {error.filename}")
    return Shares(folders, share)


def _limit(root: Path, folder: Path, quota_us: int) -> None:
    if root == V1:
        for name, value in (("cfs_period_us", PERIOD_US), ("cfs_quota_us", quota_us), ("shares", WEIGHT_V1)):
            (folder / f"cpu.{name}").write_text(str(value))
        return
    for above in (root, folder):
        enabled = above / "cgroup.subtree_control"
        if above == folder:
            (folder / COMPUTING).mkdir()
            (folder / COMPUTING / "cgroup.type").write_text("threaded")
        if "cpu" not in enabled.read_text().split():
            enabled.write_text("+cpu")
    (folder / COMPUTING / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
    (folder / "cpu.weight").write_text(str(WEIGHT_V2))


def _processes(folder: Path) -> set[int]:
    found: set[int] = set()
    for path in (folder / "cgroup.procs", folder / COMPUTING / "cgroup.threads"):
        with contextlib.suppress(OSError):
            found.update(map(int, path.read_text().split()))
    return found
