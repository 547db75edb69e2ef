"""A plan against what it was made from: the part of the checker that looks at no program."""

from __future__ import annotations

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.batch import Batch
from dyncp.ir.blocks import HAS_KV, HAS_Q, Blocks
from dyncp.ir.mask import Mask
from dyncp.ir.plan import Plan, PlanError


def check_sequences(plan: Plan, batch: Batch) -> None:
    """The plan's token blocks, which tile sequences, tile those of the batch, and it has the batch's masks."""
    tokens = plan.header.tokens
    for what, role in (("queries", HAS_Q), ("keys", HAS_KV)):
        blocks = np.flatnonzero(tokens.role & role)
        planned = np.zeros(int(tokens.sequence.max(initial=-1)) + 1, np.int64)
        np.maximum.at(planned, tokens.sequence[blocks], tokens.stop[blocks])
        wanted = [sequence.length if role == HAS_Q else sequence.keys for sequence in batch.sequences]
        if planned.tolist() != wanted:
            raise PlanError(f"the plan is for sequences of {planned[:8].tolist()}... {what}, not {wanted[:8]}...")
    if plan.header.mask_names != batch.mask_names:
        raise PlanError(f"the plan has masks {plan.header.mask_names}, not {batch.mask_names}")


def check_blocks(plan: Plan, blocks: Blocks) -> None:
    """The plan is about the blocks that it was made from."""
    header = plan.header
    for name in ("sequence", "start", "stop", "role"):
        got, want = getattr(header.tokens, name), getattr(blocks.tokens, name)
        if not np.array_equal(got, want):
            raise PlanError(
                f"the {name} of token blocks is {got.tolist()[:8]}... in the plan, not {want.tolist()[:8]}..."
            )
    masks, wanted = (header.mask_names, header.mask_weights), (blocks.mask_names, blocks.mask_weights)
    if masks != wanted:
        raise PlanError(f"the plan has masks {masks}, not {wanted}")


def check_masks(plan: Plan, mask: int, batch: Batch) -> None:
    """The part of the mask in every computation block is the batch's."""
    tokens, name = plan.header.tokens, plan.header.mask_names[mask]
    for rank, programs in enumerate(plan.programs):
        comps = programs[mask].comps
        for comp in range(len(comps)):
            q, kv = int(comps.q_block[comp]), int(comps.kv_block[comp])
            whole = batch.sequences[int(tokens.sequence[q])].masks[name]
            edges = (tokens.start[q], tokens.stop[q], tokens.start[kv], tokens.stop[kv])
            wanted, got = whole.crop(*(int(edge) for edge in edges)), comps.mask(comp, tokens)
            if got != wanted and canonical(got) != canonical(wanted):  # slices may be cut in several ways
                raise PlanError(
                    f"rank {rank}: the mask inside computation block {comps.index[comp]} (blocks {q} x {kv}) is not "
                    f"that of sequence {tokens.sequence[q]}"
                )


def canonical(mask: Mask) -> Mask:
    """The same pairs, in the slices that equal pairs always have."""
    return Mask.from_row_intervals(mask.q_length, mask.k_length, *mask.row_intervals(0, mask.q_length))


def expected_comps(plan: Plan, mask: int, blocks: Blocks | None) -> Ints:
    """int64[n, 3]: (index, q_block, kv_block) of the computation blocks that must be computed in every head group."""
    tables = [programs[mask].comps for programs in plan.programs]
    rows = np.concatenate([np.stack([t.index, t.q_block, t.kv_block], axis=1) for t in tables]).astype(np.int64)
    rows = np.unique(rows, axis=0)
    if len(np.unique(rows[:, 0])) != len(rows):
        raise PlanError("two ranks disagree about the blocks of a computation block")
    if blocks is None:
        return rows
    part = blocks.of_mask(mask)
    index = np.arange(part.start, part.stop)
    expected = np.stack([index, blocks.q_block[part], blocks.kv_block[part]], axis=1).astype(np.int64)
    known = {tuple(row) for row in expected.tolist()}
    for row in rows.tolist():
        if tuple(row) not in known:
            raise PlanError(f"computation block {row[0]} (blocks {row[1]} x {row[2]}) is not in the batch")
    for rank, table in enumerate(tables):
        for comp in range(len(table)):
            got, want = table.mask(comp, plan.header.tokens).pairs(), int(blocks.pairs[table.index[comp]])
            if got != want:
                raise PlanError(f"rank {rank}: computation block {table.index[comp]} has {got} pairs, not {want}")
    return expected
