"""The batches that run on the measured network: those of the planner's corpus, made smaller.

Lengths are drawn as the corpus draws them, for `SCALE` times as many tokens, and divided by that; masks with a window
have it divided too, so that they hide as large a part of the pairs as there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from dyncp import masks
from dyncp.bench.corpus import MASKS, lengths_of
from dyncp.ir.batch import DEFAULT_MASK, Batch, Sequence
from dyncp.ir.mask import Mask
from dyncp.ir.shape import AttentionShape

SCALE = 16
SHAPE = AttentionShape(8, 2, 64, dtype="float32")


def of_corpus(kind: str) -> Callable[[int, Random], Mask]:
    """A mask of the corpus that needs no smaller window."""
    return MASKS[kind][DEFAULT_MASK]


MASK_MAKERS: dict[str, Callable[[int, Random], Mask]] = {
    "causal": of_corpus("causal"),
    "lambda": lambda n, random: masks.lambda_(n, 64 // SCALE, 4096 // SCALE),
    "shared_question": of_corpus("shared_question"),
    "causal_blockwise": lambda n, random: masks.causal_blockwise(n, 256 // SCALE, 1, 2),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One batch: how its lengths are drawn, how many tokens it has, and its mask, a key of `MASK_MAKERS`."""

    lengths: str
    tokens: int
    mask: str

    @property
    def name(self) -> str:
        """Says all of it."""
        return f"{self.lengths}-{self.tokens}/{self.mask}"

    def batch(self) -> Batch:
        """Sequences and masks; the same in every process."""
        random = Random(f"{self.lengths}-{self.tokens}")  # the same lengths under all masks
        lengths = scaled(lengths_of(self.lengths, self.tokens * SCALE, random), self.tokens)
        maker = MASK_MAKERS[self.mask]
        return Batch([Sequence(length, maker(length, random)) for length in lengths])


def scaled(lengths: tuple[int, ...], tokens: int) -> list[int]:
    """Lengths in the same proportions, at least 1 each, that add up to `tokens`."""
    total, taken, result = sum(lengths), 0, []
    reached = 0
    for length in lengths:
        reached += length
        stop = round(reached * tokens / total)
        if stop > taken:
            result.append(stop - taken)
            taken = stop
    return result


LONG_TAIL = Case("longtail", 6144, "causal")  # the batch that the rate is chosen by
CASES = (
    LONG_TAIL,
    Case("single", 4096, "causal"),
    Case("longtail", 6144, "lambda"),
    Case("longtail", 6144, "shared_question"),
    Case("longtail", 6144, "causal_blockwise"),
)
QUICK_CASES = (Case("longtail", 2048, "causal"), Case("longtail", 2048, "lambda"))
