"""A plan at a glance: ranks by steps, for error messages."""

from __future__ import annotations

from collections import defaultdict
from typing import assert_never

from dyncp.ir.plan import Attention, CommLaunch, CommWait, Copy, Program, Reduction


def step_table(programs: list[Program], bad_rank: int, bad_instruction: int) -> str:
    """Ranks by steps, a cell per step with its instructions (w wait, c copy, r reduce, > launch, a attention; a number
    after it counts its parts), the bad one in brackets. Ranks far from the bad one are left out.
    """
    near = [rank for rank in range(len(programs)) if abs(rank - bad_rank) <= 4]
    rows = []
    for rank in near:
        cells: dict[int, list[str]] = defaultdict(list)
        step = 0
        for number, instruction in enumerate(programs[rank].instructions):
            match instruction:
                case Attention():
                    text = f"a{len(instruction.comp)}"
                case Reduction():
                    text = f"r{len(instruction.dst)}"
                case Copy():
                    text = f"c{len(instruction.dst)}"
                case CommLaunch():
                    step, text = max(step, instruction.step - 1), f">{len(instruction.peer)}"
                case CommWait():
                    step, text = max(step, instruction.step), "w"
                case _:
                    assert_never(instruction)
            bad = (rank, number) == (bad_rank, bad_instruction)
            cells[step].append(f"[{text}]" if bad else text)
        rows.append(cells)
    steps = range(max((max(cells, default=0) for cells in rows), default=0) + 1)
    grid = [["rank", *(f"step {step}" for step in steps)]]
    grid += [[str(rank), *(" ".join(cells[step]) for step in steps)] for rank, cells in zip(near, rows, strict=True)]
    widths = [max(len(row[column]) for row in grid) for column in range(len(grid[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in grid
    )
