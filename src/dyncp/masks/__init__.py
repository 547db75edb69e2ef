"""Constructors of masks: named patterns, masks from what a user has, and masks written as data."""

from __future__ import annotations

from dyncp.masks.build import from_dense, from_mask_mod, from_slices, to_slices
from dyncp.masks.patterns import (
    causal,
    causal_blockwise,
    document,
    full,
    lambda_,
    prefix_lm,
    shared_question,
    shared_question_split,
    sliding_window,
    tree,
)
from dyncp.masks.spec import from_spec, parse_spec, to_spec

__all__ = [
    "causal",
    "causal_blockwise",
    "document",
    "from_dense",
    "from_mask_mod",
    "from_slices",
    "from_spec",
    "full",
    "lambda_",
    "parse_spec",
    "prefix_lm",
    "shared_question",
    "shared_question_split",
    "sliding_window",
    "to_slices",
    "to_spec",
    "tree",
]
