"""What blocks with masks take on the CPU, from the strips that its kernel cuts them into.

A cost model learns of a block its size and its pairs, and pairs do not tell how much of a block a kernel can skip: a
band, a corner and columns beside a diagonal differ by a factor of ten. Here it is the plan that is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dyncp.cost.model import CAUSAL, FORMS, FULL, MASKED, Work
from dyncp.cost.profiled import Profiled, interpolate
from dyncp.ir.arrays import Ints
from dyncp.ir.plan import PASSES, Pass, Plan
from dyncp.ir.shape import AttentionShape
from dyncp.runtime.kernels.api import mask_patterns
from dyncp.runtime.kernels.torch_cpu import Strip, cut_into_strips
from dyncp.simulator.program import pairs_of

Key = tuple[int, int, int]  # query tokens, KV tokens, pairs


@dataclass(frozen=True, slots=True)
class Strips:
    """A cost model for one plan: a table of times, whose entries are taken for each strip of a block with a mask.

    Args:
        table: of times.
        seconds: by pass, of one head group of the blocks with masks; where blocks of one size and as many pairs are cut
            into different strips, their mean.
    """

    table: Profiled
    seconds: dict[str, dict[Key, float]]

    @classmethod
    def of(cls, plan: Plan, table: Profiled) -> Strips:
        """Of the blocks of a plan."""
        tokens = plan.header.tokens
        found: dict[Key, list[list[tuple[int, int, int]]]] = {}
        for comps in (program.comps for programs in plan.programs for program in programs):
            pattern, patterns = mask_patterns(comps, tokens)
            cut = [[described(strip) for strip in cut_into_strips(rows)] for rows, _ in patterns]
            q, kv = tokens.tokens[comps.q_block], tokens.tokens[comps.kv_block]
            work = Work(q, q, q, kv, pairs_of(comps))
            for comp in np.flatnonzero(work.form == MASKED):
                key = int(q[comp]), int(kv[comp]), int(work.pairs[comp])
                if cut[pattern[comp]] not in found.setdefault(key, []):
                    found[key].append(cut[pattern[comp]])
        seconds = {
            pass_.name: {key: mean_seconds(cuts, pass_, table) for key, cuts in found.items()} for pass_ in PASSES
        }
        return cls(table, seconds)

    @property
    def cores(self) -> float:
        """See `CostModel`."""
        return self.table.cores

    @property
    def launch_s(self) -> float:
        """See `CostModel`."""
        return self.table.launch_s

    @property
    def instruction_s(self) -> float:
        """See `CostModel`."""
        return self.table.instruction_s

    def attention_s(self, pass_: Pass, shape: AttentionShape, work: Work, launches: int) -> Ints:
        """See `CostModel`."""
        total = self.table.attention_s(pass_, shape, work, launches)
        masked = np.flatnonzero(work.form == MASKED)
        if len(masked):
            mine = Work(*(column[masked] for column in work))
            keys = zip(mine.q_tokens.tolist(), mine.kv_tokens.tolist(), mine.pairs.tolist(), strict=True)
            by_strips = np.array([self.seconds[pass_.name][key] for key in keys])
            alone = Work(np.arange(len(masked)), *mine[1:])
            by_pairs = self.table.attention_s(pass_, shape, alone, len(masked)) - self.table.launch_s
            total = total + np.bincount(mine.launch, by_strips - by_pairs, launches)
        return total

    def move_s(self, size_bytes: Ints) -> Ints:
        """See `CostModel`."""
        return self.table.move_s(size_bytes)


def described(strip: Strip) -> tuple[int, int, int]:
    """Form, rows and keys of a strip."""
    form = CAUSAL if strip.causal else FULL if strip.intervals is None else MASKED
    return form, strip.rows.stop - strip.rows.start, strip.keys.stop - strip.keys.start


def mean_seconds(cuts: list[list[tuple[int, int, int]]], pass_: Pass, table: Profiled) -> float:
    """Seconds of a block of one head group, the mean of the ways in which it is cut."""
    strips = [strip for cut in cuts for strip in cut]
    total = 0.0
    for form in range(len(FORMS)):
        rows, keys = (np.array([strip[i] for strip in strips if strip[0] == form], "int64") for i in (1, 2))
        grid = np.asarray(table.seconds[pass_.name][FORMS[form]])
        total += float(interpolate(table.q_tokens, table.kv_tokens, grid, rows, keys).sum())
    return total / len(cuts)
