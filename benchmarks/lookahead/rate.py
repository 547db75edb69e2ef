"""How many plans one planner process makes, encoded, and how large they are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.lookahead.data import RANKS, TOKENS, batch_of, long_tailed, planning
from dyncp.ir.batch import Batch
from dyncp.ir.codec import encode_batch
from dyncp.lookahead.messages import Answer, Task
from dyncp.lookahead.workers import Worker
from dyncp.strategies.api import Options

TARGET_BYTES = 100_000  # of one rank's part: 131,072 tokens, 32 ranks
LIMIT_S = 300.0
TOKENS_PER_RANK = 4096
RANK_COUNTS = (8, 16, 32, 64, 128, 256, 512, 1024)
MASKS = ("causal", "lambda", "causal_blockwise", "shared_question")
BLOCKS = ("auto", 512)
Row = dict[str, Any]


def measure(quick: bool) -> dict[str, list[Row]]:
    """Over the number of ranks, and over masks."""
    worker = Worker()
    try:
        rate(worker, [batch_of((64,))], 8)  # until it is ready
        if quick:
            return {"ranks": [ranks_row(worker, 8, 1)], "masks": [mask_row(worker, 4096, 8, "causal", "auto", True, 1)]}
        ranks = [ranks_row(worker, count, 8 if count <= 64 else 2) for count in RANK_COUNTS]
        masks = [
            mask_row(worker, TOKENS, RANKS, mask, block_tokens, single, 1 if single else 4)
            for mask in MASKS
            for single in (False, True)
            for block_tokens in BLOCKS
        ]
    finally:
        worker.close()
    return {"ranks": ranks, "masks": masks}


def ranks_row(worker: Worker, ranks: int, batches: int) -> Row:
    """Long-tailed causal batches of 4,096 tokens a rank."""
    tokens = TOKENS_PER_RANK * ranks
    row = {"ranks": ranks, "tokens": tokens}
    return row | rate(worker, [batch_of(long_tailed(tokens, number)) for number in range(batches)], ranks)


def mask_row(worker: Worker, tokens: int, ranks: int, mask: str, block_tokens: Any, single: bool, batches: int) -> Row:
    """Batches under a mask: one sequence, or long-tailed ones."""
    lengths = [(tokens,) if single else long_tailed(tokens, number) for number in range(batches)]
    row = {
        "mask": mask,
        "lengths": "single" if single else "longtail",
        "block_tokens": block_tokens,
        "target": TARGET_BYTES,
    }
    options = Options(block_tokens=block_tokens)
    return row | rate(worker, [batch_of(each, mask) for each in lengths], ranks, options)


def rate(worker: Worker, batches: Sequence[Batch], ranks: int, options: Options | None = None) -> Row:
    """Plan some batches, one after the other, as a rank has them planned."""
    tasks = [Task(planning(ranks, options), encode_batch(batch), 0) for batch in batches]
    began_s = time.monotonic()
    answers = [worker.plan(task, LIMIT_S) for task in tasks]
    took_s = time.monotonic() - began_s
    return {"batches": len(batches), "plans_per_s": len(batches) / took_s} | sizes(answers)


def sizes(answers: Sequence[Answer]) -> Row:
    """Bytes of the parts of plans."""
    for answer in answers:
        if answer.error:
            raise RuntimeError(answer.error)
    parts = [len(part) for answer in answers for part in answer.parts]
    return {"largest_bytes": max(parts), "mean_bytes": sum(parts) / len(parts)}
