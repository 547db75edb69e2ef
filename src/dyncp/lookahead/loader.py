"""The data loader: token-budget batches, planned ahead, and a rank's share of them as tensors (paper, section 6.1)."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, finalize

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.batch import DEFAULT_MASK, Batch, Sequence
from dyncp.ir.codec import decode_rank
from dyncp.ir.mask import Mask
from dyncp.ir.plan import RankPlan
from dyncp.lookahead.config import Batching, LookAhead, Planning, check_whole
from dyncp.lookahead.producer import PlanningError, PlanProducer, Run, open_part
from dyncp.lookahead.sampler import TokenBudgetSampler
from dyncp.lookahead.stores.api import PlanStore
from dyncp.lookahead.stores.memory import MemoryStore

if TYPE_CHECKING:
    from torch import Tensor

IGNORE_LABEL = -100  # what torch's cross_entropy ignores by default
LOOK_UP_S = 0.5  # how often a wait for a plan looks whether it is in vain
# How many loaders each rank made on a store, so that each has keys of its own; ranks may be threads of one process.
_loaders: WeakKeyDictionary[PlanStore, Counter[int]] = WeakKeyDictionary()
_counting = threading.Lock()


class MapDataset(Protocol):
    """A map-style dataset, as PyTorch has it. A sample is a 1-D array, tensor or list of token numbers, or a mapping
    with `input_ids`. With an attribute or method `lengths`, the tokens of every sample, none is read to measure it.
    Every rank needs the same samples.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class LocalBatch:
    """What one rank trains on in one step: the T tokens it owns, in the order of its attention tensors. T differs from
    rank to rank and from step to step, and may be 0. Tensors are on the CPU.

    Args:
        epoch: of the pass, see `DynamicLoader.set_epoch`.
        iteration: number of the batch within the epoch, from 0.
        samples: dataset indices of the global batch's sequences.
        lengths: tokens of the global batch's sequences, after the cut.
        sequence_ids: int64[T], index into `samples` of each token.
        input_ids: int64[T], the tokens.
        position_ids: int64[T], position of each token within its sequence, for learned or rotary positions.
        labels: int64[T], the next token of the same sequence, so they are shifted already; -100 (`IGNORE_LABEL`, which
            `cross_entropy` leaves out) for a sequence's last token.
        plan: this rank's part of the plan, for `attention`.
        num_label_tokens: labels of the global batch, over all ranks. `cross_entropy(logits, labels, reduction="sum") /
            num_label_tokens` is this rank's share of the mean loss: sum it, and the gradients, over the ranks. It is 0
            where every sequence has a single token; divide by `max(1, num_label_tokens)` if the dataset has such.
    """

    epoch: int
    iteration: int
    samples: tuple[int, ...]
    lengths: tuple[int, ...]
    sequence_ids: Tensor
    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    plan: RankPlan
    num_label_tokens: int


@dataclass(frozen=True, slots=True)
class LoaderReport:
    """What one rank's loader did so far.

    Args:
        steps: batches given to the trainer.
        plans_made: plans made by this rank, for all ranks.
        planning_s: the planner's seconds for these, summed over its workers.
        waited_s: seconds that the trainer waited for plans.
        first_wait_s: those of the first step of each epoch, when nothing can be ready yet.
    """

    steps: int
    plans_made: int
    planning_s: float
    waited_s: float
    first_wait_s: float


class DynamicLoader:
    """Local batches of one rank, with plans that are made while earlier batches train.

    All ranks need the same arguments (but for `rank`), and a store that they share; rank i plans every batch whose
    iteration is i modulo the number of ranks. A sample is read only where the rank owns some of its tokens. Close the
    loader, or use it in a `with`, to end its planner processes. docs/training.md has complete training scripts.

    `Planning`, `Batching`, `LookAhead` and `TcpStore` can be imported from `dyncp`; they live, with `LocalBatch`,
    `MapDataset`, `MaskFunction` and `MemoryStore`, in `dyncp.lookahead`.

    Args:
        dataset: samples, see `MapDataset`.
        planning: shape, cluster, strategy and its options, see `Planning`.
        batching: token budget, cut, shuffle, masks and lengths, see `Batching`.
        lookahead: how far ahead, with how many processes, see `LookAhead`.
        rank: of this process, in `[0, planning.cluster.ranks)`.
        store: how ranks hand each other plans: `TcpStore.of_default_group("a name")`, with another name for every
            loader of a job; `MemoryStore` for ranks that are threads of one process. Loaders that share a store are
            numbered, and all ranks must make theirs in the same order. May be left out for a single rank.

    Raises:
        ValueError: a rank outside the cluster, several ranks without a store, or lengths that do not fit the dataset.
    """

    def __init__(
        self,
        dataset: MapDataset,
        planning: Planning,
        batching: Batching,
        lookahead: LookAhead | None = None,
        *,
        rank: int = 0,
        store: PlanStore | None = None,
    ) -> None:
        ranks = planning.cluster.ranks
        check_whole("rank", rank)
        if not 0 <= rank < ranks:
            raise ValueError(f"rank is {rank}; the cluster has {ranks} ranks, so it must lie in [0, {ranks})")
        if store is None and ranks > 1:
            raise ValueError(f"{ranks} ranks need a store that they share; under torchrun: TcpStore.of_default_group()")
        self.dataset = dataset
        self.planning = planning
        self.batching = batching
        self.lookahead = lookahead or LookAhead()
        self.rank = rank
        self.sampler = TokenBudgetSampler(
            sample_lengths(dataset, batching), batching.tokens, batching.longest, batching.seed
        )
        self._store = store if store is not None else MemoryStore()
        self._number = _loader_number(self._store, rank)
        self._producer: PlanProducer | None = None
        self._stop_producer: finalize[Any, DynamicLoader] | None = None
        self._closed = False
        self._epoch = 0
        self._runs = 0
        self._steps, self._waited_s, self._first_wait_s = 0, 0.0, 0.0

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the passes that start from now on; a pass starts with `iter(loader)`.

        Raises:
            ValueError: a negative number.
        """
        check_whole("epoch", epoch, 0)
        self._epoch = epoch

    def __len__(self) -> int:
        """Batches of the current epoch."""
        return len(self.sampler.batches(self._epoch))

    def __iter__(self) -> Iterator[LocalBatch]:
        """One pass over the batches of the epoch, each a `LocalBatch`. All ranks must make the same passes, and leave
        one at the same batch when they do not take it to its end.

        Raises:
            PlanningError: a batch could not be planned, here or on another rank, or the store is lost.
            TimeoutError: a plan did not come.
            RuntimeError: the loader is closed.
            ValueError: a sample is not as long as its length says.
        """
        self._check_open()
        if self._producer is None:
            self._producer = PlanProducer(self.planning, self.rank, self.lookahead.workers, self._store)
            # For a loader that nobody closes: when it is dropped, or the interpreter exits.
            self._stop_producer = finalize(self, self._producer.stop)
        run = self._producer.begin(f"{self._number}/{self._runs}")
        self._runs += 1
        # Not a generator itself, which would choose epoch and run only at the first batch.
        return self._pass(self._producer, run, self._epoch)

    def _pass(self, producer: PlanProducer, run: Run, epoch: int) -> Iterator[LocalBatch]:
        batches, requested = self.sampler.batches(epoch), 0
        try:
            for iteration, samples in enumerate(batches):
                self._check_open()
                for ahead in range(requested, min(iteration + self.lookahead.kappa + 1, len(batches))):
                    if self._planner_of(ahead) == self.rank:
                        # Nothing that the planner holds may refer to the loader, or it is never dropped.
                        make_batch = partial(global_batch, batches[ahead], self.sampler.lengths, self.batching)
                        producer.request(run, ahead, make_batch)
                    requested = ahead + 1
                run.reached = iteration + 1
                plan = self._receive(producer, run, iteration)
                yield self._local_batch(epoch, iteration, samples, plan)
        finally:
            producer.end(run)

    def report(self) -> LoaderReport:
        """What this rank's planner and trainer did so far."""
        plans_made, planning_s = (self._producer.plans_made, self._producer.planning_s) if self._producer else (0, 0.0)
        return LoaderReport(self._steps, plans_made, planning_s, self._waited_s, self._first_wait_s)

    def close(self) -> None:
        """End the planner processes and all passes. The loader cannot be iterated afterwards."""
        self._closed = True
        if self._producer and self._stop_producer:
            self._producer.close()
            self._stop_producer.detach()

    def __enter__(self) -> DynamicLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _planner_of(self, iteration: int) -> int:
        return iteration % self.planning.cluster.ranks

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the loader is closed; make a new one")

    def _receive(self, producer: PlanProducer, run: Run, iteration: int) -> RankPlan:
        started = time.perf_counter()
        key = run.key(iteration, self.rank)
        try:
            plan = decode_rank(open_part(self._await(producer, key, iteration)))
            self._store.delete(key)
        except ConnectionError as error:
            producer.broken = error
            raise PlanningError(
                f"rank {self.rank} lost the plan store at the plan of iteration {iteration}: {error}; see why the "
                "process that holds the store ended (rank 0, or torchrun), and start all ranks again"
            ) from error
        waited_s = time.perf_counter() - started
        self._waited_s += waited_s
        if iteration == 0:
            self._first_wait_s += waited_s
        self._steps += 1
        return plan

    def _await(self, producer: PlanProducer, key: str, iteration: int) -> bytes:
        """The value of a key, looking up now and then whether it can still come."""
        deadline = time.monotonic() + self.lookahead.timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                return self._store.get(key, min(LOOK_UP_S, left_s))
            except TimeoutError as error:
                self._check_open()
                if producer.broken:
                    raise PlanningError(
                        f"rank {self.rank} has no plan for iteration {iteration}, and its planner can store no more "
                        f"plans: {type(producer.broken).__name__}: {producer.broken}"
                    ) from producer.broken
                if left_s <= LOOK_UP_S:
                    raise TimeoutError(
                        f"no plan for iteration {iteration} within {self.lookahead.timeout_s:g} s; it was to come from "
                        f"the planner of rank {self._planner_of(iteration)}: see whether that rank is alive, or raise "
                        "timeout_s"
                    ) from error

    def _local_batch(self, epoch: int, iteration: int, samples: Ints, plan: RankPlan) -> LocalBatch:
        import torch  # late, so that planners can import this module without it

        lengths = self.sampler.lengths[samples]
        _check_lengths(plan, lengths, iteration)
        sequence, position = plan.header.local_tokens(self.rank)
        input_ids = np.empty(len(sequence), np.int64)
        labels = np.empty(len(sequence), np.int64)
        for number in np.unique(sequence):
            tokens = self._read(int(samples[number]))
            here = sequence == number
            input_ids[here] = tokens[position[here]]
            labels[here] = np.append(tokens[1:], IGNORE_LABEL)[position[here]]
        return LocalBatch(
            epoch,
            iteration,
            tuple(samples.tolist()),
            tuple(lengths.tolist()),
            torch.from_numpy(sequence.astype(np.int64)),
            torch.from_numpy(input_ids),
            torch.from_numpy(position.astype(np.int64)),
            torch.from_numpy(labels),
            plan,
            int((lengths - 1).sum()),
        )

    def _read(self, sample: int) -> Ints:
        tokens = sample_tokens(self.dataset[sample], sample)[: self.batching.longest]
        if len(tokens) != self.sampler.lengths[sample]:
            raise ValueError(
                f"sample {sample} has {len(tokens)} tokens, but its length was given as "
                f"{self.sampler.lengths[sample]} (after the cut): give the lengths that the dataset returns"
            )
        return tokens


def _loader_number(store: PlanStore, rank: int) -> int:
    """How many loaders this rank made on the store before: the same on all ranks that make theirs in the same order."""
    with _counting:
        made = _loaders.setdefault(store, Counter())
        made[rank] += 1
        return made[rank] - 1


def global_batch(samples: Ints, lengths: Ints, batching: Batching) -> Batch:
    """A global batch as planners see it.

    Args:
        samples: int64[n], of the dataset.
        lengths: int64[len(dataset)], after the cut.
        batching: its masks and weights.
    """
    sequences = []
    for sample in samples.tolist():
        length = int(lengths[sample])
        masks = batching.mask(sample, length)
        sequences.append(Sequence(length, {DEFAULT_MASK: masks} if isinstance(masks, Mask) else masks))
    return Batch(tuple(sequences), batching.weights)


def _check_lengths(plan: RankPlan, lengths: Ints, iteration: int) -> None:
    """Tokens must never be sharded by a plan that was made for others."""
    tokens = plan.header.tokens
    planned = np.zeros(int(tokens.sequence.max(initial=-1)) + 1, np.int64)
    np.maximum.at(planned, tokens.sequence, tokens.stop)
    if not np.array_equal(planned, lengths):
        raise PlanningError(
            f"the plan that came for iteration {iteration} is for {len(planned)} sequences of {planned.sum()} tokens, "
            f"but this batch has {len(lengths)} of {lengths.sum()}: give all ranks the same arguments, and every "
            "loader a store with a job name of its own"
        )


def sample_tokens(sample: Any, index: int) -> Ints:
    """The token numbers of a sample of a `MapDataset`, int64[length].

    Raises:
        ValueError: not a flat list of integers, or an empty one.
    """
    if isinstance(sample, Mapping):
        if "input_ids" not in sample:
            raise ValueError(f"sample {index} is a mapping of {', '.join(map(str, sample))}; it needs 'input_ids'")
        sample = sample["input_ids"]
    try:
        tokens = np.asarray(sample)
    except ValueError:  # parts of different lengths, such as (tokens, target)
        tokens = np.asarray(None)
    if not tokens.size:
        raise ValueError(f"sample {index} is empty; leave empty samples out of the dataset")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        kind = type(sample).__name__ if tokens.dtype == object else f"{tokens.dtype}{list(tokens.shape)}"
        raise ValueError(
            f"sample {index} is {kind}; expected its tokens alone, integers [length], or a mapping with input_ids"
        )
    return tokens.astype(np.int64)


def sample_lengths(dataset: MapDataset, batching: Batching) -> Any:
    """The length of every sample: given, told by the dataset, or measured.

    Raises:
        ValueError: another number of lengths than of samples.
    """
    lengths = batching.lengths if batching.lengths is not None else getattr(dataset, "lengths", None)
    if callable(lengths):
        lengths = lengths()
    if lengths is None:
        return np.array([len(sample_tokens(dataset[i], i)) for i in range(len(dataset))], np.int64)
    if len(lengths) != len(dataset):
        raise ValueError(f"{len(lengths)} lengths for a dataset of {len(dataset)} samples; give one for each")
    return lengths
