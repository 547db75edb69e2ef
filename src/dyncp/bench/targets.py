"""Cases with targets: what a plan of them may take and move."""

from __future__ import annotations

from random import Random

from dyncp.bench.corpus import LARGE_RUNS, MOST_RUNS, RANKS_PER_NODE, Case, K, lengths_of

# 40 sequences of together 131,072 tokens, long-tailed; docs/longtail-batch.json has the same lengths
# fmt: off
LONGTAIL = (
    2473, 1680, 5352, 2397, 917, 3523, 14481, 8478, 713, 307, 804, 2179, 63, 1475, 316, 683, 905, 1274, 3797, 9783,
    1689, 15904, 755, 3470, 7941, 2358, 671, 514, 1031, 2850, 450, 1496, 1613, 4610, 2826, 3490, 768, 1686, 6638, 8712,
)
# fmt: on
BATCHES = {
    "single": (128 * K,),
    "longtail": LONGTAIL,
    "single-1M": (1024 * K,),
    "longtail-1M": lengths_of("longtail", 1024 * K, Random("longtail-1M")),
}

MB, GB = 1e6, 1e9
# (batch, mask, nodes, query heads, KV heads, objective, epsilon) -> its limits; forward bytes
SMALL, MEDIUM, LARGE = (4, 8, 2), (32, 32, 8), (128, 32, 8)
SINGLE = {"compute": 1.05, "tokens": 1.02}
LONG = {"compute": 1.10, "tokens": 1.02}
# One token more than the mean is 1.0002 here: no rank may have a whole block more.
ONE_CAUSAL = {"planning_s": 0.25, "compute": 1.05, "tokens": 1.005}
TARGETS = {
    ("single", "causal", *SMALL, "total", 0.05): ONE_CAUSAL | {"total_bytes": 1450 * MB},
    ("single", "causal", *SMALL, "time", 0.05): ONE_CAUSAL | {"inter_node_bytes": 300 * MB},
    ("single", "lambda", *SMALL, "total", 0.05): SINGLE | {"planning_s": 0.15, "total_bytes": 133 * MB},
    ("single", "causal_blockwise", *SMALL, "total", 0.05): SINGLE | {"planning_s": 0.15, "total_bytes": 80 * MB},
    ("single", "shared_question", *SMALL, "total", 0.05): SINGLE | {"planning_s": 0.15, "total_bytes": 850 * MB},
    ("single", "lambda", *SMALL, "time", 0.05): SINGLE | {"planning_s": 0.15},
    ("single", "causal_blockwise", *SMALL, "time", 0.05): SINGLE | {"planning_s": 0.15},
    ("single", "shared_question", *SMALL, "time", 0.05): SINGLE | {"planning_s": 0.15},
    ("longtail", "causal", *SMALL, "total", 0.10): LONG | {"planning_s": 0.10, "total_bytes": 250 * MB},
    ("longtail", "causal", *SMALL, "time", 0.10): LONG
    | {"planning_s": 0.10, "total_bytes": 250 * MB, "inter_node_bytes": 60 * MB},
    ("longtail", "lambda", *SMALL, "total", 0.10): LONG | {"planning_s": 0.15, "total_bytes": 160 * MB},
    ("longtail", "causal_blockwise", *SMALL, "total", 0.10): LONG | {"planning_s": 0.15, "total_bytes": 110 * MB},
    ("longtail", "shared_question", *SMALL, "total", 0.10): LONG | {"planning_s": 0.15, "total_bytes": 170 * MB},
    ("longtail", "lambda", *SMALL, "time", 0.10): LONG | {"planning_s": 0.15},
    ("longtail", "causal_blockwise", *SMALL, "time", 0.10): LONG | {"planning_s": 0.15},
    ("longtail", "shared_question", *SMALL, "time", 0.10): LONG | {"planning_s": 0.15},
    ("longtail-1M", "causal", *MEDIUM, "time", 0.10): LONG | {"planning_s": 2.0},
    ("single-1M", "causal", *LARGE, "total", 0.05): SINGLE
    | {"planning_s": 10.0, "peak_bytes": 8 * GB, "bound_ratio": 1.35},
    ("single-1M", "causal", *LARGE, "time", 0.05): SINGLE | {"planning_s": 10.0, "peak_bytes": 8 * GB},
}


def targets() -> list[Case]:
    """The cases with targets."""
    cases = []
    for (batch, mask, nodes, q_heads, kv_heads, objective, epsilon), limits in TARGETS.items():
        large = nodes == LARGE[0]
        cases.append(
            Case(
                name=f"target/{batch}/{mask}/{nodes}x{RANKS_PER_NODE}/{q_heads}-{kv_heads}/{objective}",
                lengths=BATCHES[batch],
                mask=mask,
                nodes=nodes,
                heads=(q_heads, kv_heads),
                objective=objective,
                epsilon=epsilon,
                forward_only=True,
                limits=limits,
                most_runs=LARGE_RUNS if large else MOST_RUNS,
                quick=nodes == SMALL[0],
            )
        )
    return cases
