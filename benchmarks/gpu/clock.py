"""The device and the time: all that knows whether there is a GPU, how long things took, and how long there is left."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

T = TypeVar("T")
Call = Callable[[], object]
CYCLES_PER_S = 2e9  # of an H200 at work, about
HEAD_START = 1.5  # times what the host needs
LONGEST_HEAD_START_S = 0.05


class Laps(NamedTuple):
    """One run of some steps."""

    device_s: tuple[float, ...]  # of each step
    host_s: float  # until the host had launched all of them


class Clock:
    """Times work on one device: by events on a GPU, by the host's clock elsewhere. The GPU's clocks are left alone."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def laps(self, steps: Sequence[Call], head_start_s: float = 0.0) -> Laps:
        """Run steps one after the other.

        Args:
            steps: what is timed, each from the end of the one before.
            head_start_s: how long a GPU is kept asleep before the first step, so that the host is ahead of it and its
                time is that of the work alone, without gaps between launches.
        """
        if not self.on_gpu:
            marks = [time.perf_counter()]
            for step in steps:
                step()
                marks.append(time.perf_counter())
            return Laps(tuple(np.diff(marks).tolist()), marks[-1] - marks[0])
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        torch.cuda._sleep(int(head_start_s * CYCLES_PER_S))
        events[0].record()
        started = time.perf_counter()
        for step, event in zip(steps, events[1:], strict=True):
            step()
            event.record()
        host_s = time.perf_counter() - started
        events[-1].synchronize()
        times = (before.elapsed_time(after) * 1e-3 for before, after in pairwise(events))
        return Laps(tuple(times), host_s)

    def warm_up(self, steps: Sequence[Call], runs: int = 2) -> float:
        """Run steps a few times, untimed; returns the head start that the host needs for them."""
        host_s = [self.laps(steps).host_s for _ in range(runs)]
        return min(HEAD_START * host_s[-1] + 1e-4, LONGEST_HEAD_START_S)

    def times(self, call: Call, repeats: int) -> list[float]:
        """Device seconds of a call, warmed up, with the host ahead."""
        head_start_s = self.warm_up([call])
        return [self.laps([call], head_start_s).device_s[0] for _ in range(repeats)]

    def wall_s(self, call: Call) -> float:
        """Seconds from an idle device until it is idle again, with all that the host does in between."""
        self.synchronize()
        started = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - started

    def host_s(self, call: Call) -> float:
        """Seconds until the host has launched a call, on an idle device that it does not wait for."""
        self.synchronize()
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    def host_syncs(self, call: Call) -> int | None:
        """How often the host waits for the device during a call; None without a GPU."""
        if not self.on_gpu:
            call()
            return None
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("called a synchronizing" in str(warning.message) for warning in seen)


def spread(times: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of some seconds, for JSON."""
    q1, median, q3 = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
    return {"median_s": median, "q1_s": q1, "q3_s": q3, "runs": len(times)}


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a section has to end."""

    at_s: float  # of the host's clock

    @property
    def over(self) -> bool:
        """Whether it has."""
        return time.perf_counter() >= self.at_s

    def in_time(self, items: Iterable[T], name: Callable[[T], str], left_out: list[str]) -> Iterator[T]:
        """The items, until the time is over; the names of those that are left go into `left_out`."""
        for item in items:
            if self.over:
                left_out.append(name(item))
            else:
                yield item


class Budget:
    """The time of all sections together, dealt out by their weights; what one leaves, those after it have.

    Args:
        minutes: of all.
        weights: by section, in their order.
        started_s: of the host's clock, when the time began.
    """

    def __init__(self, minutes: float, weights: Mapping[str, float], started_s: float) -> None:
        self.ends_s = started_s + 60 * minutes
        self.weights = dict(weights)

    def deadline(self, section: str) -> Deadline:
        """The end of a section that begins now."""
        names = list(self.weights)
        weights = [self.weights[name] for name in names[names.index(section) :]]
        now = time.perf_counter()
        return Deadline(now + (self.ends_s - now) * weights[0] / sum(weights))
