"""Lengths kept on disk: measured by one process, for all processes and runs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dyncp.ir.arrays import Ints

if sys.platform != "win32":
    import fcntl

FORMAT = "dyncp lengths 1"
PROBES = 16  # samples that are read to see whether lengths are still those of the dataset
log = logging.getLogger("dyncp")


@dataclass(frozen=True, slots=True)
class LengthCache:
    """The file of one dataset: a line of JSON (format, fingerprint, CRC-32) and the lengths as int64, little
    end first.

    Args:
        path: of the file; folders above it are made. A second file beside it, ending in `.lock`, holds the lock.
        samples: of the dataset.
        fingerprint: of the dataset's contents; None where there is none, and some samples are read instead.
        measure_one: the length of one sample.
    """

    path: Path
    samples: int
    fingerprint: str | None
    measure_one: Callable[[int], int]

    def load_or_make(self, measure: Callable[[], Ints]) -> Ints:
        """The lengths, int64[samples]: those of the file if it fits the dataset, else measured and kept.

        Of several processes one measures, the others wait for it. The file is replaced as a whole, so that none sees
        half of it.
        """
        with contextlib.suppress(_UnusableError, FileNotFoundError):
            return self._load()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._only_one():
            try:
                return self._load()  # what another process made in the meantime
            except FileNotFoundError:
                log.info("measuring %d samples for %s", self.samples, self.path)
            except _UnusableError as error:
                log.warning("%s is made anew: %s", self.path, error)
            lengths = measure()
            try:
                self._store(lengths)
            except OSError as error:  # what took an hour to measure is good for this run
                log.warning("the lengths could not be kept in %s: %s", self.path, error)
            return lengths

    def _load(self) -> Ints:
        try:
            line, _, content = self.path.read_bytes().partition(b"\n")
            header = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _UnusableError("it does not begin with a line of JSON") from error
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise _UnusableError(f"it is not of the format {FORMAT!r}")
        if header.get("crc32") != zlib.crc32(content) or len(content) % 8:
            raise _UnusableError("it is damaged")
        lengths = np.frombuffer(content, "<i8").astype(np.int64)
        if len(lengths) != self.samples:
            raise _UnusableError(f"it has the lengths of {len(lengths)} samples, the dataset has {self.samples}")
        if header.get("fingerprint") != self.fingerprint:
            raise _UnusableError(
                f"it is of a dataset with fingerprint {header.get('fingerprint')}, this one has {self.fingerprint}"
            )
        if self.fingerprint is None:
            self._probe(lengths)
        return lengths

    def _probe(self, lengths: Ints) -> None:
        for index in np.unique(np.linspace(0, self.samples - 1, min(PROBES, self.samples)).astype(int)).tolist():
            found = self.measure_one(index)
            if found != lengths[index]:
                raise _UnusableError(f"sample {index} has {found} tokens, it says {lengths[index]}")

    def _store(self, lengths: Ints) -> None:
        content = np.ascontiguousarray(lengths, "<i8").tobytes()
        header = {"format": FORMAT, "fingerprint": self.fingerprint, "crc32": zlib.crc32(content)}
        number, name = tempfile.mkstemp(prefix=f"{self.path.name}.", dir=self.path.parent)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(json.dumps(header).encode() + b"\n" + content)
            Path(name).chmod(0o644)  # mkstemp leaves it to its owner alone, but others may train on the dataset too
            os.replace(name, self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def _only_one(self) -> Iterator[None]:
        """Held by one process, and thread, at a time; its end, however it comes, frees it."""
        with self.path.with_name(f"{self.path.name}.lock").open("ab") as file, contextlib.ExitStack() as stack:
            if sys.platform != "win32":
                try:
                    fcntl.flock(file, fcntl.LOCK_EX)
                except OSError as error:  # some network file systems have no locks
                    log.warning("%s cannot be locked (%s): several processes may measure the dataset", file.name, error)
                else:
                    # In words, as a process that was forked while measuring may have the file open too.
                    stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
            yield  # the lock's file stays: another process may be waiting for it


class _UnusableError(Exception):
    """The file does not hold the lengths of the dataset; the message says why."""
