"""Attention time from a table of measured times."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dyncp.cost.model import FORMS, MASKED, Work
from dyncp.ir.arguments import positive_number, whole_numbers
from dyncp.ir.arrays import Ints
from dyncp.ir.plan import PASSES, Pass
from dyncp.ir.shape import AttentionShape

MOST_S = 1e6  # of one block: what is above is no time


@dataclass(frozen=True, slots=True)
class Profiled:
    """Seconds of one item (a computation block of one head group), measured over a grid of sizes, by pass and form.

    Between the sizes of the grid times are interpolated in the logarithm of both sizes and of the time. Beyond the
    largest they grow with the number of (query, key) positions, and nothing takes less than the smallest. Masked blocks
    with other than half of their pairs take more or less time, see `masked_seconds`. A table holds for the shape that
    it was measured with.

    Args:
        q_tokens, kv_tokens: the grid, ascending, at least one size each.
        seconds: `seconds[pass][form][i][j]` for `q_tokens[i]` by `kv_tokens[j]`; passes `forward` and `backward`, forms
            `full`, `causal` and `masked` (mean of masks with about half of the pairs).
        bytes_per_s: of copies and reductions, bytes read and written.
        launch_s: fixed cost of an attention instruction.
        instruction_s: fixed cost of every other instruction.
        cores: how many ranks of the whole cluster compute at once at full speed, see `CostModel`.

    Raises:
        ValueError: a table of another form, or a number that is not positive.
    """

    q_tokens: tuple[int, ...]
    kv_tokens: tuple[int, ...]
    seconds: Mapping[str, Mapping[str, Any]]
    bytes_per_s: float
    launch_s: float = 0.0
    instruction_s: float = 0.0
    cores: float = math.inf

    def __post_init__(self) -> None:
        for name in ("q_tokens", "kv_tokens"):
            sizes = tuple(whole_numbers(name, getattr(self, name), 1))
            if not sizes or any(a >= b for a, b in pairwise(sizes)):
                raise ValueError(f"{name} of a table of times is {list(sizes)}; expected ascending sizes from 1 on")
            object.__setattr__(self, name, sizes)
        for name in ("bytes_per_s", "cores"):
            positive_number(name, getattr(self, name), finite=False)
        for name in ("launch_s", "instruction_s"):
            if getattr(self, name) != 0:
                positive_number(name, getattr(self, name))
        table = {pass_.name: {form: self._grid(pass_.name, form).tolist() for form in FORMS} for pass_ in PASSES}
        object.__setattr__(self, "seconds", table)

    def _grid(self, pass_: str, form: str) -> Ints:
        try:
            grid = np.asarray(self.seconds[pass_][form], "float64")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"a table of times has no grid of seconds of the {pass_} pass, form {form!r}") from error
        if grid.shape != (len(self.q_tokens), len(self.kv_tokens)) or not ((grid > 0) & (grid < MOST_S)).all():
            raise ValueError(
                f"seconds of the {pass_} pass, form {form!r}, are {list(grid.shape)}; expected positive numbers, "
                f"{[len(self.q_tokens), len(self.kv_tokens)]} of them"
            )
        return grid

    @classmethod
    def read(cls, path: str | Path) -> Profiled:
        """A table from a JSON file, an object with the fields above (further ones are ignored).

        Raises:
            ValueError: no JSON object, or a table of another form.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"the table of times {path} is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise ValueError(f"{path} is no table of times: expected an object, got {type(data).__name__}")
        names = cls.__dataclass_fields__
        missing = [name for name in ("q_tokens", "kv_tokens", "seconds", "bytes_per_s") if name not in data]
        if missing:
            raise ValueError(f"{path} is no table of times: it lacks {', '.join(missing)}")
        if data.get("cores") is None:  # JSON has no infinity
            data["cores"] = math.inf
        return cls(**{name: value for name, value in data.items() if name in names})

    def write(self, path: str | Path) -> None:
        """Write the table as `read` takes it."""
        data = asdict(self) | {"cores": self.cores if math.isfinite(self.cores) else None}
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    def attention_s(self, pass_: Pass, shape: AttentionShape, work: Work, launches: int) -> Ints:
        """See `CostModel`."""
        table = self.seconds[pass_.name]
        seconds = np.empty(len(work.launch))
        form = work.form
        for number, name in enumerate(FORMS):
            mine = np.flatnonzero(form == number)
            sizes = work.q_tokens[mine], work.kv_tokens[mine]
            grid = np.asarray(table[name])
            seconds[mine] = interpolate(self.q_tokens, self.kv_tokens, grid, *sizes)
            if number == MASKED:
                whole = interpolate(self.q_tokens, self.kv_tokens, np.asarray(table["full"]), *sizes)
                part = work.pairs[mine] / (sizes[0] * sizes[1])
                seconds[mine] = masked_seconds(seconds[mine], whole, grid[0, 0], part)
        used = np.bincount(work.launch, minlength=launches) > 0
        total: Ints = np.bincount(work.launch, seconds, launches) + used * self.launch_s
        return total

    def move_s(self, size_bytes: Ints) -> Ints:
        """See `CostModel`."""
        seconds: Ints = size_bytes / self.bytes_per_s
        return seconds


def masked_seconds(half: Ints, whole: Ints, least: float, part: Ints) -> Ints:
    """float64[n]: seconds of blocks of which a mask leaves a part of the pairs.

    Kernels skip rows and keys that a mask hides altogether, and compute what lies between. Of a corner of a block that
    is twice its pairs; of a thin band or of columns beside a diagonal it is as much as of a block with half of its
    pairs. Pairs alone do not tell which it is, so blocks take the mean of both. With more than half of the pairs they
    come near to a whole block.

    Args:
        half: of such blocks with half of their pairs.
        whole: of such blocks without a mask.
        least: what the smallest block takes.
        part: of the pairs, that a block has.
    """
    below = np.minimum(least, half) + np.maximum(half - least, 0.0) * (0.5 + part)
    above = half + np.maximum(whole - half, 0.0) * (2 * part - 1)
    seconds: Ints = np.where(part < 0.5, below, above)
    return seconds


def interpolate(rows: tuple[int, ...], columns: tuple[int, ...], grid: Ints, row: Ints, column: Ints) -> Ints:
    """float64[n]: values of a grid between its points, bilinear in logarithms; beyond its last points in proportion to
    size, and before its first ones as there."""
    logs = np.log(grid)
    (i, u, beyond_i), (j, v, beyond_j) = _locate(rows, row), _locate(columns, column)
    i1, j1 = np.minimum(i + 1, len(rows) - 1), np.minimum(j + 1, len(columns) - 1)
    value = (1 - u) * ((1 - v) * logs[i, j] + v * logs[i, j1]) + u * ((1 - v) * logs[i1, j] + v * logs[i1, j1])
    scaled: Ints = np.exp(value) * beyond_i * beyond_j
    return scaled


def _locate(sizes: tuple[int, ...], asked: Ints) -> tuple[Ints, Ints, Ints]:
    """The interval of each size asked for, how far into it in logarithms, and how many times beyond the last one."""
    known = np.asarray(sizes, "float64")
    inside = np.clip(asked, known[0], known[-1])
    at = np.clip(np.searchsorted(known, inside, "right") - 1, 0, max(len(known) - 2, 0))
    after = np.minimum(at + 1, len(known) - 1)
    width = np.log(known[after] / known[at])
    into = np.where(width > 0, np.log(inside / known[at]) / np.where(width > 0, width, 1.0), 0.0)
    beyond = np.maximum(asked / known[-1], 1.0)  # a small block takes a fixed time: no less than the smallest measured
    return at, into, beyond
