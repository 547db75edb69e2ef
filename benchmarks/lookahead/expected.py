"""The data of a soak, and what each of its batches must be."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.cluster import Cluster
from dyncp.ir.codec import encode_rank
from dyncp.ir.plan import Plan
from dyncp.ir.shape import AttentionShape
from dyncp.lookahead import Batching, LocalBatch, Planning
from dyncp.lookahead.ladder import RUNGS, on_rung
from dyncp.lookahead.local_batch import IGNORE_LABEL
from dyncp.strategies import make_plan
from dyncp.strategies.api import Options

SHAPE = AttentionShape(2, 1, 8, dtype="float32")
LENGTHS = (16, 32, 48)  # few, so that batches have few shapes, each of which is planned here once
BATCH_TOKENS = 96
BLOCK_TOKENS = 16
SAMPLES_PER_BATCH = 2.6  # about
SEED = 5
COMPARE_EVERY = 16  # batches of which every byte of the plan is compared, and not only its digest

Ints = NDArray[np.int64]


class WrongBatch(AssertionError):
    """A batch is not what it must be."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank must get of a batch of some lengths, by the plan of one rung.

    Args:
        part: its part of the plan, encoded.
        sequences: int64[T], the sequence of each of its tokens.
        positions: int64[T], their positions in it.
    """

    part: bytes
    sequences: Ints
    positions: Ints


class SoakData:
    """A dataset of made-up tokens, in which every token says where it stands.

    Args:
        batches: of an epoch, about.
        ranks: that share each.
        strategy: how they are planned.
    """

    def __init__(self, batches: int, ranks: int, strategy: str) -> None:
        dice = np.random.default_rng(SEED)
        self.lengths = [int(length) for length in dice.choice(LENGTHS, max(8, round(batches * SAMPLES_PER_BATCH)))]
        self.planning = Planning(SHAPE, Cluster(1, ranks), strategy, Options(block_tokens=BLOCK_TOKENS))
        self.batching = Batching(BATCH_TOKENS, seed=SEED, lengths=self.lengths)
        self._shares: dict[tuple[int, ...], dict[str, tuple[str, list[Share]]]] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Ints:
        return tokens_of(index, self.lengths[index])

    @property
    def shapes(self) -> int:
        """How many different lengths batches had so far."""
        return len(self._shares)

    def batches(self, epoch: int) -> list[tuple[int, ...]]:
        """Samples of the batches of an epoch: the shuffle that is documented, filled up in its order."""
        order = np.random.default_rng((SEED, epoch)).permutation(len(self)).tolist()
        batches, tokens = [[order[0]]], self.lengths[order[0]]
        for sample in order[1:]:
            if tokens + self.lengths[sample] > BATCH_TOKENS:
                batches.append([])
                tokens = 0
            batches[-1].append(sample)
            tokens += self.lengths[sample]
        if sorted(reduce(operator.iadd, batches, [])) != list(range(len(self))):
            raise AssertionError("every sample is in one batch")
        return [tuple(batch) for batch in batches]

    def check(self, batch: LocalBatch, epoch: int, iteration: int, samples: tuple[int, ...], rank: int) -> str:
        """Compare a rank's batch with what it must be; returns the rung of the ladder that its plan comes from.

        Raises:
            WrongBatch: they differ.
        """
        lengths = tuple(self.lengths[sample] for sample in samples)
        same("epoch and iteration", (batch.epoch, batch.iteration), (epoch, iteration))
        same("samples", batch.samples, samples)
        same("lengths", batch.lengths, lengths)
        rung, share = self._share(lengths, batch, rank)
        if iteration % COMPARE_EVERY == 0:
            same("plan", encode_rank(batch.plan), share.part)
        same_array("sequence_ids", batch.sequence_ids, share.sequences)
        same_array("position_ids", batch.position_ids, share.positions)
        index = np.asarray(samples)[share.sequences]
        same_array("input_ids", batch.input_ids, token_at(index, share.positions))
        last = share.positions + 1 == np.asarray(lengths)[share.sequences]
        same_array("labels", batch.labels, np.where(last, IGNORE_LABEL, token_at(index, share.positions + 1)))
        same("num_label_tokens", batch.num_label_tokens, sum(lengths) - len(lengths))
        return rung

    def _share(self, lengths: tuple[int, ...], batch: LocalBatch, rank: int) -> tuple[str, Share]:
        """The rung whose plan a batch has, and what that gives to a rank."""
        plans = self._shares.get(lengths)
        if plans is None:
            plans = self._shares[lengths] = {"asked": shares_of(lengths, self.planning)}
        for rung in RUNGS:
            if rung not in plans:  # seldom: where planners were killed again and again in the middle of this very batch
                plans[rung] = shares_of(lengths, on_rung(self.planning, RUNGS.index(rung)))
            digest, shares = plans[rung]
            if batch.plan.digest == digest:
                return rung, shares[rank]
        raise WrongBatch(f"lengths {lengths}: got the plan {batch.plan.digest}, which is of no rung")


def shares_of(lengths: tuple[int, ...], planning: Planning) -> tuple[str, list[Share]]:
    """The digest of a plan that is made here, and the shares of all ranks, which together have every token once."""
    batch = Batch([Sequence(length, masks.causal(length)) for length in lengths])
    plan: Plan = make_plan(batch, planning.shape, planning.cluster, planning.strategy, planning.options)
    shares = []
    for rank in range(planning.cluster.ranks):
        sequences, positions = (np.asarray(each, np.int64) for each in plan.header.local_tokens(rank))
        shares.append(Share(encode_rank(plan.rank(rank)), sequences, positions))
    held = sorted(pair for share in shares for pair in zip(share.sequences, share.positions, strict=True))
    if held != [(number, at) for number, length in enumerate(lengths) for at in range(length)]:
        raise AssertionError(f"ranks do not share the tokens of {lengths}")
    return plan.digest, shares


def token_at(index: Any, position: Any) -> Any:
    """The token of a sample at a position."""
    return (index * 64 + position) % 50_021


@cache
def positions_of(length: int) -> Ints:
    return np.arange(length)


def tokens_of(index: int, length: int) -> Ints:
    """The tokens of a sample."""
    return token_at(index, positions_of(length))


def same(what: str, got: Any, expected: Any, equal: Callable[[Any, Any], bool] | None = None) -> None:
    """WrongBatch unless two things are equal."""
    if not (equal(got, expected) if equal else got == expected):
        raise WrongBatch(f"{what}: got {got!r:.300}, expected {expected!r:.300}")


def same_array(what: str, got: Any, expected: Ints) -> None:
    """WrongBatch unless a tensor has these numbers."""
    same(what, got.numpy(), expected, np.array_equal)
