"""What is compared: the paper's baselines, its own method, ours, and every strategy there is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Literal

from dyncp.strategies import STRATEGIES
from dyncp.strategies.api import Options

BLOCK_TOKENS = (512, 1024, 2048, 4096)  # the paper's, of which it takes the best
INNER_RINGS = (1, 2, 4, 8)  # LoongTrain's, of which the paper takes the best


@dataclass(frozen=True, slots=True)
class Method:
    """A way to compute the attention of a batch.

    Args:
        name: for people.
        strategy: a key of `STRATEGIES`.
        variants: the fastest of them counts.
        padded: whether it runs the batch that `strategies.padding.as_run` makes.
        blockwise: whether its plans are made of blocks for a blockwise kernel.
        lanes: ranks that exchange heads: a pair of runs is `lanes` squared computation blocks of the plan.
    """

    name: str
    strategy: str
    variants: tuple[Options, ...] = (Options(),)
    padded: bool = False
    blockwise: bool = False
    lanes: int = 1

    def kernel(self, mask: str) -> str:
        """Which of the kernels of `Costs` it runs."""
        if self.blockwise:
            return "blockwise"
        return "library" if mask == "causal" else "extended"

    @property
    def timed(self) -> bool:
        """Whether it plans with a clock: others make the same plan whatever launches take."""
        return self.strategy == "dynamic" and any(options.schedule != "greedy" for options in self.variants)

    @property
    def split(self) -> int:
        """See `Costs.cluster`."""
        return 0 if self.padded else 1 if self.blockwise else self.lanes**2


RING = Method("RFA ring", "ring", (Options(wire="float32"),))
ZIGZAG = Method("RFA zigzag", "zigzag", (Options(wire="float32"),))
LOONGTRAIN = Method(
    "LoongTrain", "double_ring", tuple(Options(inner_ring=ranks) for ranks in INNER_RINGS), padded=True, lanes=2
)
TE = Method("TE", "head_ring", lanes=2)
BASELINES = (RING, ZIGZAG, LOONGTRAIN, TE)
# The names that the published bars have.
PAPER_NAMES = {"RFA ring": "RFA_ring", "RFA zigzag": "RFA_zigzag", "DCP as published": "DCP", "dyncp": "DCP"}
GREEDY = "greedy"  # the paper's schedule
DYNCP = Method("dyncp", "dynamic", blockwise=True)
LANES = {"double_ring": 2, "head_ring": 2, "usp": 2, "ulysses": 2}  # of 2 head groups


def dcp(*block_tokens: int, epsilon: float = 0.1) -> Method:
    """The published method with blocks of one size, or the best of several.

    Raises:
        ValueError: Mt-KaHyPar is missing.
    """
    if find_spec("mtkahypar") is None:
        raise ValueError("DCP as published needs Mt-KaHyPar; install it with: pip install 'dyncp[hypergraph]'")
    variants = tuple(
        Options(
            block_tokens=size,
            partitioner="hypergraph",
            portfolio=False,
            schedule=GREEDY,
            divisions=4,
            epsilon=epsilon,
            balance="pairs",
        )
        for size in block_tokens
    )
    return Method("DCP as published", "dynamic", variants, blockwise=True)


def at_block(block_tokens: int | Literal["auto"], epsilon: float | None = None, portfolio: bool = False) -> Method:
    """Ours with blocks of one size, and a tolerance; without a portfolio its own placement, whatever its time."""
    options = Options(block_tokens=block_tokens, portfolio=portfolio)
    return replace(DYNCP, variants=(options if epsilon is None else replace(options, epsilon=epsilon),))


def greedy() -> Method:
    """Ours with the paper's schedule."""
    return Method("dyncp, greedy", "dynamic", (Options(schedule=GREEDY),), blockwise=True)


def rivals() -> list[Method]:
    """Every other strategy; double rings with and without the original's padding."""
    found = []
    for name in STRATEGIES:
        if name == "double_ring":
            variants = tuple(Options(inner_ring=ranks) for ranks in INNER_RINGS)
            found.append(Method("double_ring, padded", name, variants, padded=True, lanes=2))
            found.append(Method(name, name, variants, lanes=2))
        elif name != "dynamic":
            found.append(Method(name, name, lanes=LANES.get(name, 1), blockwise=name == "balanced_qo_home"))
    return found
