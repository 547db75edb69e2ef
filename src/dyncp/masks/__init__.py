"""Constructors of masks: named patterns, masks from what a user has, and masks written as data.

Named patterns: `full`, `causal`, `sliding_window`, `lambda_`, `causal_blockwise`, `shared_question`, `document`,
`prefix_lm`, `tree`. From what a user has: `from_slices` (rectangles), `from_dense` (a boolean array), `from_mask_mod`
(a function of query and key). As data: `from_spec` (a dictionary, as in a batch file), `parse_spec` (a text, as on a
command line), `to_spec` and `to_slices` (the reverse). All make a `dyncp.Mask`; `mask.dense()` writes one out.
"""

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
