"""The data loader: batches that are planned ahead, and a rank's share of them as tensors (paper, section 6.1)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import finalize

from dyncp.ir.plan import RankPlan
from dyncp.lookahead.config import Batching, LookAhead, Planning, check_whole
from dyncp.lookahead.exchange import LEAST_DRIFT, Exchange
from dyncp.lookahead.health import COUNTED, Health, LoaderReport, Pace
from dyncp.lookahead.local_batch import LocalBatch, local_batch
from dyncp.lookahead.meeting import agreed_run, default_rank, loader_number
from dyncp.lookahead.messages import Hello, planning_digest
from dyncp.lookahead.producer import PlanProducer, cores
from dyncp.lookahead.remote import RemotePlanners
from dyncp.lookahead.scout import Due, Scout
from dyncp.lookahead.seal import Seal
from dyncp.lookahead.source import Draw, MapDataset, Source, make_source
from dyncp.lookahead.stores.api import PlanStore, check_name
from dyncp.lookahead.stores.memory import MemoryStore
from dyncp.lookahead.stores.patient import Patient
from dyncp.lookahead.workers import PLANNER

STATE_VERSION = 1
MOST_EPOCHS = 1 << 40
LINGER_S = 1.0  # that a rank which closes its loader waits for the others to take their last plans


@dataclass(frozen=True, slots=True)
class Position:
    """Where a pass begins, or goes on: the batch before it has the digest `after`, where there is one."""

    epoch: int = 0
    iteration: int = 0
    after: str = ""


class DynamicLoader:
    """Local batches of one rank, with plans that are made while earlier batches train.

    All ranks need the same arguments (but for `rank`), and a store that they share; rank i is responsible for the plan
    of every batch whose iteration is i modulo the number of ranks. Samples of a map-style dataset are read only where
    the rank owns some of their tokens, and when these are due. Close the loader, or use it in a `with`, to end its
    planner processes. docs/training.md has complete training scripts.

    `Planning`, `Batching`, `LookAhead` and `TcpStore` can be imported from `dyncp`; they live, with the other stores,
    `open_store`, `LocalBatch`, `MapDataset` and `MaskFunction`, in `dyncp.lookahead`.

    Args:
        dataset: samples by index, see `MapDataset`, or a stream of them, as Hugging Face and PyTorch have both. A
            sample is a 1-D array, tensor or list of token numbers, or a mapping with `input_ids`.
        planning: shape, cluster, strategy and its options, see `Planning`.
        batching: token budget, cut, shuffle, masks and lengths, steps of several batches, see `Batching`.
        lookahead: how far ahead, with how many processes, and limits, see `LookAhead`.
        rank: of this process, in `[0, planning.cluster.ranks)`; when left out, that of `torch.distributed` where it is
            initialised with as many ranks, and 0 for a single rank.
        store: how ranks hand each other plans: `TcpStore.of_default_group("a name")`, or another (docs/stores.md), with
            another job name for every loader; `MemoryStore` for ranks that are threads of one process. Loaders that
            share a store are numbered, and all ranks must make theirs in the same order. May be left out for a single
            rank.
        batch_sampler: an iterable of lists of sample indices, as PyTorch has them, in place of the token budget.
        key: what all ranks and planners of the job know, at least 16 bytes: plans that were not made with it are
            refused.
        run: what tells this start of the job from others that used the same job name on the same store; agreed upon
            where `torch.distributed` is initialised. Needed only without that, for a store that outlives the job.
        planner: what planner processes run, `module:function` from a `dyncp.lookahead.messages.Task` to an `Answer`,
            for planners of your own.
        prepare: called with each plan before its batch is due, by the thread that fetches plans: `dyncp.prepare` for a
            GPU, see there. What it raises, training gets at that batch.

    Raises:
        ValueError: a rank outside the cluster, several ranks without a store, a bad key, or what cannot be a dataset.
    """

    def __init__(
        self,
        dataset: MapDataset | Iterable[Any],
        planning: Planning,
        batching: Batching,
        lookahead: LookAhead | None = None,
        *,
        rank: int | None = None,
        store: PlanStore | None = None,
        batch_sampler: Iterable[Any] | None = None,
        key: bytes | None = None,
        run: str | None = None,
        planner: str = PLANNER,
        prepare: Callable[[RankPlan], object] | None = None,
    ) -> None:
        for name, value, kind, expected in (
            ("planning", planning, Planning, "Planning"),
            ("batching", batching, Batching, "Batching"),
            ("lookahead", lookahead, LookAhead | None, "LookAhead"),
        ):
            if not isinstance(value, kind):
                raise ValueError(f"{name} is of type {type(value).__name__}; expected a {expected}")
        if store is not None and not all(hasattr(store, name) for name in ("address", "job", "lasting", "add")):
            raise ValueError(f"store is {store!r:.80}; expected a plan store: dyncp.lookahead.open_store(address, job)")
        if run is not None:
            check_name("run", run)
        ranks = planning.cluster.ranks
        if store is None and ranks > 1:
            raise ValueError(f"{ranks} ranks need a store that they share; under torchrun: TcpStore.of_default_group()")
        if rank is None:
            rank = default_rank(ranks)
        check_whole("rank", rank)
        if not 0 <= rank < ranks:
            raise ValueError(f"rank is {rank}; the cluster has {ranks} ranks, so it must lie in [0, {ranks})")
        self.dataset = dataset
        self.planning = planning
        self.batching = batching
        self.lookahead = lookahead or LookAhead()
        self.rank = rank
        self.source: Source = make_source(dataset, batching, batch_sampler)
        store = store if store is not None else MemoryStore()
        self._number = loader_number(store, rank)
        self._store = Patient(store, self.lookahead.patience_s)
        # A rank that is further ahead waits for plans of one that has not come to them.
        drift = max(LEAST_DRIFT, self.lookahead.kappa + 2)
        self._exchange = Exchange(self._store, Seal(store.job, key), ranks, drift)
        self._run = run
        self._planner = planner
        self._prepare = prepare
        self._planned = planning_digest(planning, batching.weights or {})
        self._health, self._pace = Health(), Pace()
        self._producer: PlanProducer | None = None
        self._stop_producer: finalize[Any, DynamicLoader] | None = None
        self._scouts: list[Scout] = []  # of passes that have not ended
        self._closed = False
        self._next = Position()  # where the next pass begins
        self._now = self._next  # how far the trainer is
        self._pass_number = 0

    @property
    def epoch(self) -> int:
        """Of the next pass."""
        return self._next.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of the passes that start from now on; a pass starts with `iter(loader)`. Where
        `load_state_dict` has set the same epoch, its pass goes on where it was.

        Raises:
            ValueError: a negative number.
        """
        check_whole("epoch", epoch, 0)
        if epoch > MOST_EPOCHS:
            raise ValueError(f"epoch is {epoch}; it must be at most {MOST_EPOCHS}")
        if epoch != self._next.epoch:
            self._next = self._now = Position(int(epoch))

    def __len__(self) -> int:
        """Batches of the current epoch, from its beginning.

        Raises:
            TypeError: nobody knows, as the dataset is a stream.
        """
        batches = self.source.batches(self._next.epoch)
        if batches is None:
            raise TypeError("a stream has no length, nor has a loader of one")
        return batches

    def __iter__(self) -> Pass:
        """One pass over the batches of the epoch, each a `LocalBatch`. All ranks must make the same passes, and leave
        one at the same batch when they do not take it to its end.

        Raises:
            PlanningError: a batch could not be planned, here or on another rank, or the store is lost.
            TimeoutError: a plan did not come.
            RuntimeError: the loader is closed.
            ValueError: a sample is not as long as its length says; the ranks have different samples; or the samples are
                not those that a resumed state was saved with.
        """
        self._check_open()
        begin = self._next
        draws = _from_position(self.source, begin)
        if self._producer is None:
            self._start()
        assert self._producer
        name = f"L{self._number}"
        run = self._exchange.begin(f"{self._run}/{name}/{self._pass_number}")
        hello = None
        if self.lookahead.remote and self.rank == 0:
            kappa = self.lookahead.kappa
            hello = f"{name}/hello", -1, Hello(self._run or "", self._pass_number, kappa, self._planned, self.planning)
        self._next, self._now = Position(begin.epoch), begin
        self._pass_number += 1
        scout = Scout(
            self.source,
            draws,
            begin.iteration,
            run,
            self._producer,
            self._exchange,
            self.rank,
            self.lookahead.kappa,
            hello,
            self._prepare,
        )
        self._scouts = [one for one in self._scouts if not one.run.ended] + [scout]
        return Pass(self, scout, begin)

    def state_dict(self) -> dict[str, Any]:
        """Where training is: after the last batch that the loader gave. Take it at the end of a step
        (`LocalBatch.ends_step`), with the model's and the optimiser's. It holds numbers and a string."""
        return {
            "version": STATE_VERSION,
            "epoch": self._now.epoch,
            "iteration": self._now.iteration,
            "after": self._now.after,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken: the next pass begins with the batch after, with the same plans, and
        `epoch` is that pass's.

        Raises:
            ValueError: not such a state.
        """
        expected = set(self.state_dict())
        if not isinstance(state, Mapping) or set(state) != expected or state["version"] != STATE_VERSION:
            raise ValueError(
                f"got a state of {', '.join(map(str, state or ()))}; expected {', '.join(sorted(expected))} of version "
                f"{STATE_VERSION}, as DynamicLoader.state_dict returns it"
            )
        for name in ("epoch", "iteration"):
            check_whole(name, state[name], 0)
        self._next = self._now = Position(int(state["epoch"]), int(state["iteration"]), str(state["after"]))

    def report(self) -> LoaderReport:
        """What this rank's planner and trainer did so far, and how far ahead they are; as text, one line."""
        health, pace = self._health, self._pace
        ready = max((scout.ready() for scout in self._scouts if not scout.run.ended), default=0)
        return LoaderReport(
            pace.steps,
            health.made,
            health.planning_s,
            pace.waited_s,
            pace.first_wait_s,
            ready,
            ready * pace.step_s,
            outages=self._store.outages,
            **{name: health.counts[name] for name in COUNTED},
        )

    def close(self) -> None:
        """End the planner processes and all passes. The loader cannot be iterated afterwards."""
        if self._closed:
            return
        self._closed = True
        for scout in self._scouts:
            scout.end()
        for scout in self._scouts:
            scout.join()
        with suppress(ConnectionError):  # then there is nothing to tidy up
            self._leave()
        if self._store.away:
            self._store.stop()  # whoever still waits for it ends now
        if self._producer and self._stop_producer:
            self._producer.stop()  # before the store: who is in the middle of publishing takes it away again
            self._stop_producer.detach()
        self._store.stop()

    def __enter__(self) -> DynamicLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        """Start the planner, and agree with the other ranks on what tells this start of the job from others."""
        if self._run is None:
            timeout_s = self.lookahead.timeout_s
            self._run = agreed_run(self._store, self.planning.cluster.ranks, self._number, self.rank, timeout_s)
        here, ranks = self.planning.cluster.ranks_per_node, self.planning.cluster.ranks
        workers = self.lookahead.worker_count(ranks, here, cores())
        elsewhere = None
        if self.lookahead.remote:
            elsewhere = RemotePlanners(self._exchange, self._health)
            workers = -(-(self.lookahead.kappa + 1) // ranks)  # each waits for a plan
        self._producer = PlanProducer(
            self.planning,
            self.lookahead,
            self._exchange,
            f"rank {self.rank}",
            workers,
            self._health,
            elsewhere,
            self._planner,
            planned=self._planned,
        )
        # For a loader that nobody closes: when it is dropped, or the interpreter exits.
        self._stop_producer = finalize(self, _stop, self._producer, self._store)

    def _leave(self) -> None:
        """Take away what this rank put into the store, when the others have done with it."""
        if self._store.away:
            return
        if self.lookahead.remote and self.rank == 0 and self._producer:
            self._store.delete(f"L{self._number}/hello")
        deadline = time.monotonic() + LINGER_S
        while not (self._store.away or self._exchange.tidy()) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the loader is closed; make a new one")

    def _take(self, scout: Scout, position: Position) -> Due | None:
        """The next batch of a pass with its plan, and how long that took."""
        self._check_open()
        asked_s = time.perf_counter()
        self._pace.ask(asked_s)
        due = scout.take(position.iteration, self.lookahead.timeout_s)
        if due is None:
            self._pace.pause()
            return None
        self._pace.got(asked_s, time.perf_counter(), first=scout.first == position.iteration)
        return due


class Pass:
    """The batches of one pass; see `DynamicLoader.__iter__`."""

    def __init__(self, loader: DynamicLoader, scout: Scout, begin: Position) -> None:
        self.scout = scout
        self._loader = loader
        self._at = begin
        self._exhausted = False

    def __iter__(self) -> Iterator[LocalBatch]:
        return self

    def __next__(self) -> LocalBatch:
        if self._exhausted:
            self._loader._check_open()
            raise StopIteration
        try:
            due = self._loader._take(self.scout, self._at)
            batch = (
                None
                if due is None
                else local_batch(self._loader.source, self._loader.rank, self._at.epoch, due.draw, due.plan)
            )
        except StopIteration as error:  # of the data set: it would pass for the end of the batches
            self.close()
            raise RuntimeError("the data set raised StopIteration where a sample was asked for") from error
        except BaseException:  # ctrl-C too: there will be no next batch
            self.close()
            raise
        if due is None or batch is None:
            self.close()
            self.scout.join()  # so that whoever looks finds the store as it is between passes
            raise StopIteration
        self._at = self._loader._now = Position(self._at.epoch, self._at.iteration + 1, due.draw.digest)
        return batch

    def close(self) -> None:
        """Leave the pass before its end. What was planned for it and is not needed goes away."""
        self._exhausted = True
        self.scout.end()

    def __del__(self) -> None:
        self.scout.end()


def _from_position(source: Source, position: Position) -> Iterator[Draw]:
    """The draws from a position on, if the one before is what it was."""
    if not position.after:
        return source.draws(position.epoch, position.iteration)
    return _after(source, source.draws(position.epoch, position.iteration - 1), position)


def _after(source: Source, draws: Iterator[Draw], position: Position) -> Iterator[Draw]:
    before = next(draws, None)
    if before is None or before.digest != position.after:
        raise ValueError(
            f"iteration {position.iteration - 1} of epoch {position.epoch} has other samples than when the state was "
            "saved: resume with the dataset, sampler and Batching that it was saved with"
        )
    source.release(before)
    yield from draws


def _stop(producer: PlanProducer, store: Patient) -> None:
    store.stop()
    producer.stop()
