"""A plan store in a folder that all hosts share."""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

from dyncp.lookahead.stores.api import StoreError, check_name, check_small, wait_for

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
DRAFT = ".draft-"  # begins the names of files that are being written; no key's name begins with a dot
STALE_S = 3600.0  # age at which a draft's writer is taken for dead
SWEEP_S = 600.0  # between two looks for such drafts
TRIES = 50  # of a put whose folder is deleted, with the last key in it, while it writes


class FileStore:
    """`PlanStore` in a folder: a file for each key, under `folder/job`. Folders below that come and go with their keys.

    A value is written beside its place and then moved there, so that nobody sees a part of it, and a writer that dies
    leaves a draft that a later one removes.

    Args:
        folder: where all hosts see the same files. It must exist: to make it might hide that it is not mounted.
        job: of all keys.

    Raises:
        ValueError: a job name that cannot be one.
    """

    def __init__(self, folder: str | os.PathLike[str], job: str) -> None:
        self._folder = Path(os.path.abspath(folder))
        self.address = f"file:{self._folder}"
        self.job = check_name("job", job)
        self.lasting = True
        self._root = self._folder / _file_name(job)
        self._sweeping = threading.Lock()
        self._next_sweep_s = 0.0  # by this process's own clock

    def put(self, key: str, value: bytes) -> None:
        """See `PlanStore.put`."""
        self._write(key, value, _replace)

    def add(self, key: str, value: bytes) -> bool:
        """See `PlanStore.add`."""
        check_small(key, value)
        return self._write(key, value, _link)

    def get(self, key: str, timeout_s: float) -> bytes:
        """See `PlanStore.get`."""
        path = self._path(key)
        return wait_for(lambda: self._read(path), key, timeout_s)

    def delete(self, key: str) -> None:
        """See `PlanStore.delete`."""
        path = self._path(key)
        with self._reached():
            try:
                path.unlink()
            except FileNotFoundError:
                self._check_folder()
                return
        self._remove_empty(path.parent)

    def _path(self, key: str) -> Path:
        *folders, name = (_file_name(part) for part in key.split("/"))
        return self._root.joinpath(*folders, name + "=")  # so that "a" can be a key beside "a/b"

    def _read(self, path: Path) -> bytes | None:
        with self._reached():
            try:
                return path.read_bytes()
            except FileNotFoundError:
                self._check_folder()
                return None

    def _write(self, key: str, value: bytes, publish: Callable[[Path, Path], bool]) -> bool:
        path = self._path(key)
        with self._reached():
            self._sweep_now_and_then()
            for _ in range(TRIES):
                draft = path.parent / f"{DRAFT}{uuid.uuid4().hex}"
                try:
                    # Not synced to disk: plans outlive the processes that write them, and need not outlive the host.
                    with open(draft, "xb") as file:
                        file.write(value)
                    return publish(draft, path)
                except FileNotFoundError:  # no such folder yet, or no more
                    self._make_folders(path.parent)
                finally:
                    with suppress(OSError):  # it was moved; or the folder is out of reach, and a sweep has to do it
                        draft.unlink()
        raise StoreError(f"the plan store {self.address} cannot be written: {path.parent} vanished {TRIES} times")

    def _make_folders(self, folder: Path) -> None:
        self._check_folder()
        levels = [folder, *folder.parents]
        for level in reversed(levels[: levels.index(self._folder)]):
            with suppress(FileExistsError, FileNotFoundError):  # who deletes keys may have taken it again: one more try
                level.mkdir()

    def _check_folder(self) -> None:
        if not self._folder.is_dir():
            raise StoreError(
                f"the plan store {self.address} cannot be reached: there is no folder {self._folder} here; mount the "
                "shared file system, or make the folder on it"
            )

    def _remove_empty(self, folder: Path) -> None:
        """Remove a folder and those around it, up to the first with something in it."""
        with suppress(OSError):  # it has something in it, or another process was first
            while folder != self._folder:
                folder.rmdir()
                folder = folder.parent

    def _sweep_now_and_then(self) -> None:
        with self._sweeping:
            if time.monotonic() < self._next_sweep_s:
                return
            self._next_sweep_s = time.monotonic() + SWEEP_S
        with suppress(OSError):  # what cannot be swept now can wait for the next time
            self._sweep()

    def _sweep(self) -> None:
        """Remove drafts of writers that died. Only times of one file system are compared, never clocks of hosts."""
        probe = self._root / f"{DRAFT}{uuid.uuid4().hex}"
        probe.touch()
        oldest_s = probe.stat().st_mtime - STALE_S
        probe.unlink()
        for folder, _, names in os.walk(self._root, topdown=False):
            drafts = [Path(folder, name) for name in names if name.startswith(DRAFT)]
            for draft in drafts:
                with suppress(FileNotFoundError):  # finished just now
                    if draft.stat().st_mtime < oldest_s:
                        draft.unlink()
            self._remove_empty(Path(folder))

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Inside, what the file system raises becomes the StoreError that `PlanStore` promises."""
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            if error.errno in NO_ROOM:
                raise StoreError(
                    f"the plan store {self.address} has no room: {error.strerror}; free some in {self._folder}, or "
                    "raise its quota"
                ) from error
            raise StoreError(f"the plan store {self.address} cannot be reached: {error}") from error


def _replace(draft: Path, path: Path) -> bool:
    draft.replace(path)
    return True


def _link(draft: Path, path: Path) -> bool:
    """Give the draft a second name unless another file has it: fails where renaming would replace."""
    try:
        path.hardlink_to(draft)
    except FileExistsError:
        # A network file system that repeats a request whose answer was lost meets its own link.
        return draft.stat().st_nlink > 1
    return True


def _file_name(part: str) -> str:
    """A part of a key as the name of a file: not empty, no leading dot, nothing that file systems treat specially."""
    name = quote(part, safe="") or "%"
    return "%2E" + name[1:] if name.startswith(".") else name
