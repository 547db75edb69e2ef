"""What is planned: seeded batches of several kinds under all masks, on clusters of several sizes.

The same case has the same lengths and masks in every process: they come from generators seeded with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random

from dyncp import masks
from dyncp.ir.batch import DEFAULT_MASK, Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.ir.mask import Mask
from dyncp.ir.shape import AttentionShape
from dyncp.strategies.api import Options

K = 1024
HEAD_DIM = 128
RANKS_PER_NODE = 8
MOST_RUNS = 100  # of a case, as many as anybody asks for

MaskMaker = Callable[[int, Random], Mask]  # length, what random choices come from


def log_normal(random: Random, median: float, sigma: float, least: int, most: int) -> int:
    """A length whose logarithm is normally distributed, within limits."""
    return min(most, max(least, round(median * random.lognormvariate(0.0, sigma))))


# kind of batch -> its sequences' lengths, one after another; the last is cut to the batch's number of tokens
LENGTHS: dict[str, Callable[[int, Random, int], int]] = {
    "single": lambda tokens, random, drawn: tokens,
    "longtail": lambda tokens, random, drawn: log_normal(random, 2000, 1.5, 1, 131_072),
    "longalign": lambda tokens, random, drawn: log_normal(random, 13_000, 0.8, 1000, 65_536),
    "short": lambda tokens, random, drawn: log_normal(random, 300, 0.7, 1, 8192),
    "bimodal": lambda tokens, random, drawn: (
        log_normal(random, 500, 0.5, 1, 8192) if random.random() < 0.9 else log_normal(random, 24_000, 0.4, 1, 131_072)
    ),
    "one_long": lambda tokens, random, drawn: log_normal(random, 1000, 0.8, 1, 8192) if drawn else tokens // 2,
}


def lengths_of(kind: str, tokens: int, random: Random) -> tuple[int, ...]:
    """The lengths of a batch of exactly `tokens` tokens."""
    lengths: list[int] = []
    left = tokens
    while left:
        lengths.append(min(left, LENGTHS[kind](tokens, random, len(lengths))))
        left -= lengths[-1]
    return tuple(lengths)


def parts_of(length: int, random: Random, median: float, sigma: float) -> list[int]:
    """A length as a sum of log-normal parts."""
    parts: list[int] = []
    while sum(parts) < length:
        parts.append(min(length - sum(parts), log_normal(random, median, sigma, 16, length)))
    return parts


def documents(length: int, random: Random) -> Mask:
    """Packed documents, of a few hundred to several thousand tokens."""
    return masks.document(parts_of(length, random, 1500, 1.0))


def branches(length: int, random: Random) -> Mask:
    """A prefix tree in depth-first order: each node continues the one before it, or one of that node's ancestors."""
    lengths = parts_of(length, random, max(64, length / 16), 0.7)
    parents, path = [-1], [0]
    for node in range(1, len(lengths)):
        path = path[: random.randint(1, len(path))]
        parents.append(path[-1])
        path.append(node)
    return masks.tree(parents, lengths)


# kind -> masks by name; the last kind has one full and five window layers
MASKS: dict[str, Mapping[str, MaskMaker]] = {
    "causal": {DEFAULT_MASK: lambda n, random: masks.causal(n)},
    "full": {DEFAULT_MASK: lambda n, random: masks.full(n)},
    "sliding_window": {DEFAULT_MASK: lambda n, random: masks.sliding_window(n, 4096)},
    "lambda": {DEFAULT_MASK: lambda n, random: masks.lambda_(n, 64, 4096)},
    "causal_blockwise": {DEFAULT_MASK: lambda n, random: masks.causal_blockwise(n, 256, 1, 2)},
    "shared_question": {DEFAULT_MASK: lambda n, random: masks.shared_question(*masks.shared_question_split(n))},
    "document": {DEFAULT_MASK: documents},
    "prefix_lm": {DEFAULT_MASK: lambda n, random: masks.prefix_lm(n, int(n * random.uniform(0.1, 0.5)))},
    "tree": {DEFAULT_MASK: branches},
    "causal+window": {
        "causal": lambda n, random: masks.causal(n),
        "window": lambda n, random: masks.sliding_window(n, 1024),
    },
}
WEIGHTS = {"causal+window": {"causal": 1.0, "window": 5.0}}


@dataclass(frozen=True, slots=True)
class Case:
    """One batch to plan, where, and how.

    Args:
        name: says everything below, but for the target's limits.
        lengths: of the sequences.
        mask: a key of `MASKS`.
        nodes: of 8 ranks each, as `p4de`.
        heads: query and KV heads.
        objective: what placement makes small, see `Options`.
        epsilon: the limit on computation, see `Options`.
        forward_only: whether the bytes of the forward pass alone count, as in published figures.
        limits: of a case with targets: the most that a figure should be, by name, see `results.FIGURES`.
        most_runs: fewer runs than asked for, where one takes long.
        quick: whether it is part of a quick look.
        effort: of the local search, see `Options`.
    """

    name: str
    lengths: tuple[int, ...]
    mask: str
    nodes: int
    heads: tuple[int, int]
    objective: str
    epsilon: float
    forward_only: bool = False
    limits: Mapping[str, float] = field(default_factory=dict)
    most_runs: int = MOST_RUNS
    quick: bool = False
    effort: float = 1.0

    def batch(self) -> Batch:
        """Sequences and masks."""
        random = Random(self.name)
        makers = MASKS[self.mask]
        sequences = (
            Sequence(length, {name: maker(length, random) for name, maker in makers.items()}) for length in self.lengths
        )
        return Batch(sequences, WEIGHTS.get(self.mask))

    @property
    def shape(self) -> AttentionShape:
        """The attention layer, in bfloat16."""
        return AttentionShape(*self.heads, HEAD_DIM)

    @property
    def cluster(self) -> Cluster:
        """The ranks."""
        return Cluster.preset("p4de", self.nodes, RANKS_PER_NODE)

    def options(self, seed: int = 0) -> Options:
        """How to plan."""
        return Options(
            epsilon=self.epsilon,
            objective=self.objective,
            backward_weight=0.0 if self.forward_only else 1.0,
            balance="pairs",  # as the partitioner does, and published figures
            portfolio=False,  # what is measured is the planner; the fixed schemes have their own columns
            effort=self.effort,
            seed=seed,
        )


# kind of batch, tokens / 1024, mask, nodes, query heads, KV heads, objective, epsilon
CORPUS = (
    ("single", 128, "causal", 1, 8, 2, "total", 0.05),
    ("single", 128, "full", 4, 8, 2, "total", 0.05),
    ("single", 128, "sliding_window", 4, 8, 2, "total", 0.05),
    ("single", 128, "lambda", 8, 32, 8, "time", 0.05),
    ("single", 128, "causal_blockwise", 2, 8, 2, "total", 0.10),
    ("single", 128, "shared_question", 2, 8, 2, "time", 0.05),
    ("single", 128, "document", 4, 8, 2, "total", 0.05),
    ("single", 128, "prefix_lm", 4, 8, 2, "time", 0.05),
    ("single", 128, "tree", 4, 8, 2, "total", 0.10),
    ("single", 128, "causal+window", 4, 8, 2, "total", 0.05),
    ("single", 256, "causal", 8, 8, 2, "total", 0.05),
    ("single", 512, "sliding_window", 16, 32, 8, "time", 0.05),
    ("single", 1024, "causal", 32, 32, 8, "time", 0.05),
    ("single", 2048, "causal", 128, 8, 2, "total", 0.05),
    ("single", 2048, "lambda", 32, 8, 2, "time", 0.05),
    ("longtail", 128, "causal", 1, 8, 2, "total", 0.05),
    ("longtail", 128, "causal", 4, 8, 2, "total", 0.05),
    ("longtail", 128, "causal", 4, 32, 8, "time", 0.10),
    ("longtail", 128, "causal", 4, 32, 32, "total", 0.05),
    ("longtail", 128, "full", 4, 8, 2, "total", 0.10),
    ("longtail", 128, "sliding_window", 8, 8, 2, "total", 0.05),
    ("longtail", 128, "lambda", 8, 8, 2, "time", 0.10),
    ("longtail", 128, "causal_blockwise", 4, 32, 8, "total", 0.10),
    ("longtail", 128, "shared_question", 2, 8, 2, "total", 0.05),
    ("longtail", 128, "document", 4, 8, 2, "total", 0.10),
    ("longtail", 128, "prefix_lm", 4, 8, 2, "time", 0.05),
    ("longtail", 128, "tree", 4, 8, 2, "total", 0.05),
    ("longtail", 128, "causal+window", 4, 8, 2, "total", 0.05),
    ("longtail", 512, "causal", 16, 8, 2, "time", 0.10),
    ("longtail", 1024, "causal", 128, 8, 2, "total", 0.10),
    ("longtail", 1024, "causal+window", 8, 8, 2, "time", 0.10),
    ("longtail", 2048, "causal", 32, 32, 8, "total", 0.05),
    ("longalign", 256, "causal", 4, 8, 2, "total", 0.05),
    ("longalign", 256, "tree", 8, 8, 2, "time", 0.10),
    ("longalign", 256, "shared_question", 4, 32, 8, "total", 0.05),
    ("longalign", 1024, "causal", 16, 8, 2, "total", 0.05),
    ("short", 128, "causal", 4, 8, 2, "total", 0.05),
    ("short", 256, "full", 8, 32, 32, "time", 0.10),
    ("bimodal", 128, "causal", 4, 8, 2, "total", 0.05),
    ("bimodal", 256, "sliding_window", 4, 8, 2, "time", 0.05),
    ("bimodal", 512, "prefix_lm", 16, 8, 2, "total", 0.10),
    ("one_long", 128, "causal", 4, 8, 2, "total", 0.05),
    ("one_long", 256, "document", 4, 8, 2, "time", 0.05),
    ("one_long", 512, "causal", 8, 32, 8, "time", 0.10),
)
QUICK = ("short", "bimodal", "one_long")  # kinds of which a quick look has the small batches
LARGE_TOKENS = 1024 * K
LARGE_RUNS = 2  # of large batches, which take long


def corpus() -> list[Case]:
    """The cases without targets."""
    cases = []
    for kind, kilo_tokens, mask, nodes, q_heads, kv_heads, objective, epsilon in CORPUS:
        size = f"{kilo_tokens // K}M" if kilo_tokens % K == 0 else f"{kilo_tokens}K"
        ranks = f"{nodes}x{RANKS_PER_NODE}"
        name = f"{kind}-{size}/{mask}/{ranks}/{q_heads}-{kv_heads}/{objective}"
        cases.append(
            Case(
                name=name,
                lengths=lengths_of(kind, kilo_tokens * K, Random(name)),
                mask=mask,
                nodes=nodes,
                heads=(q_heads, kv_heads),
                objective=objective,
                epsilon=epsilon,
                most_runs=LARGE_RUNS if kilo_tokens * K >= LARGE_TOKENS else MOST_RUNS,
                quick=kind in QUICK and kilo_tokens <= 256,
            )
        )
    return cases
