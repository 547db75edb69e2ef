"""The data loader: token-budget batches, planned ahead, and a rank's share of them as tensors (paper, section 6.1)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dyncp.ir.arrays import Ints
from dyncp.ir.batch import DEFAULT_MASK, Batch, Sequence
from dyncp.ir.codec import decode_rank
from dyncp.ir.mask import Mask
from dyncp.ir.plan import RankPlan
from dyncp.lookahead.config import Batching, LookAhead, Planning
from dyncp.lookahead.producer import PlanProducer, Run, open_part, part_key
from dyncp.lookahead.sampler import TokenBudgetSampler
from dyncp.lookahead.stores.api import PlanStore
from dyncp.lookahead.stores.memory import MemoryStore

if TYPE_CHECKING:
    from torch import Tensor

IGNORE_LABEL = -100  # what torch's cross_entropy ignores by default


class MapDataset(Protocol):
    """A map-style dataset. A sample is a 1-D array, tensor or list of token numbers, or a dict with `input_ids`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, slots=True, eq=False)
class LocalBatch:
    """What one rank trains on in one step: the tokens it owns, in the order of its attention tensors."""

    epoch: int
    iteration: int  # within the epoch
    samples: tuple[int, ...]  # dataset indices of the global batch's sequences
    lengths: tuple[int, ...]  # of the global batch's sequences
    sequence_ids: Tensor  # int64[T], index into `samples` of each local token
    input_ids: Tensor  # int64[T]
    position_ids: Tensor  # int64[T], position within the sequence
    labels: Tensor  # int64[T], the next token of the same sequence; IGNORE_LABEL for the last one
    plan: RankPlan
    num_label_tokens: int  # labels of the global batch: divide the sum of local losses by it, and sum over ranks


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
    loader, or use it in a `with`, to end its planner processes.

    Args:
        dataset: samples, see `MapDataset`.
        planning: shape, cluster, strategy and its options.
        batching: token budget, cut, shuffle, masks and lengths.
        lookahead: how far ahead, with how many processes.
        rank: of this process, in `[0, planning.cluster.ranks)`.
        store: how ranks hand each other plans; may be left out for a single rank.

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
        self._producer: PlanProducer | None = None
        self._closed = False
        self._epoch = 0
        self._runs = 0
        self._steps, self._waited_s, self._first_wait_s = 0, 0.0, 0.0

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the passes that start from now on."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Batches of the current epoch."""
        return len(self.sampler.batches(self._epoch))

    def __iter__(self) -> Iterator[LocalBatch]:
        """One pass over the batches of the epoch.

        Raises:
            PlanningError: a batch could not be planned, here or on another rank.
            TimeoutError: a plan did not come.
            RuntimeError: the loader is closed.
            ValueError: a sample is not as long as its length says.
        """
        if self._closed:
            raise RuntimeError("the loader is closed; make a new one")
        epoch, batches = self._epoch, self.sampler.batches(self._epoch)
        producer = self._producer = self._producer or PlanProducer(
            self.planning, self.rank, self.lookahead.workers, self._store
        )
        run = Run(self._runs)
        self._runs += 1
        requested = reached = 0
        try:
            for iteration, samples in enumerate(batches):
                for ahead in range(requested, min(iteration + self.lookahead.kappa + 1, len(batches))):
                    if self._planner_of(ahead) == self.rank:
                        producer.request(run, ahead, partial(self._batch, batches[ahead]))
                    requested = ahead + 1
                reached = iteration + 1
                plan = self._receive(producer, run, iteration)
                yield self._local_batch(epoch, iteration, samples, plan)
        finally:
            producer.end(run, reached)

    def report(self) -> LoaderReport:
        """What this rank's planner and trainer did so far."""
        plans_made, planning_s = (self._producer.plans_made, self._producer.planning_s) if self._producer else (0, 0.0)
        return LoaderReport(self._steps, plans_made, planning_s, self._waited_s, self._first_wait_s)

    def close(self) -> None:
        """End the planner processes. The loader cannot be iterated afterwards."""
        self._closed = True
        if self._producer:
            self._producer.close()

    def __enter__(self) -> DynamicLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _planner_of(self, iteration: int) -> int:
        return iteration % self.planning.cluster.ranks

    def _batch(self, samples: Ints) -> Batch:
        """The global batch as planners see it."""
        sequences = []
        for sample in samples.tolist():
            length = int(self.sampler.lengths[sample])
            masks = self.batching.mask(sample, length)
            sequences.append(Sequence(length, {DEFAULT_MASK: masks} if isinstance(masks, Mask) else masks))
        return Batch(tuple(sequences), self.batching.weights)

    def _receive(self, producer: PlanProducer, run: Run, iteration: int) -> RankPlan:
        started = time.perf_counter()
        key = part_key(run.number, iteration, self.rank)
        try:
            value = self._store.get(key, self.lookahead.timeout_s)
        except TimeoutError as error:
            message = (
                f"no plan for iteration {iteration} within {self.lookahead.timeout_s:g} s; it was to come from the "
                f"planner of rank {self._planner_of(iteration)}: see whether that rank is alive, or raise timeout_s"
            )
            raise TimeoutError(message) from (producer.broken or error)
        plan = decode_rank(open_part(value))
        self._store.delete(key)
        waited_s = time.perf_counter() - started
        self._waited_s += waited_s
        if iteration == 0:
            self._first_wait_s += waited_s
        self._steps += 1
        return plan

    def _local_batch(self, epoch: int, iteration: int, samples: Ints, plan: RankPlan) -> LocalBatch:
        import torch  # late, so that planners can import this module without it

        lengths = self.sampler.lengths[samples]
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


def sample_tokens(sample: Any, index: int) -> Ints:
    """The token numbers of a sample of a `MapDataset`, int64[length].

    Raises:
        ValueError: not a flat list of integers.
    """
    tokens = np.asarray(sample["input_ids"] if isinstance(sample, dict) else sample)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(f"sample {index} is {tokens.dtype}{list(tokens.shape)}; expected integers [length]")
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
