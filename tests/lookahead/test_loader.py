import threading

import numpy as np
import pytest
import torch
from lookahead.loading import IN_PROCESS, LENGTHS, LONG_TAIL_CUT, SHAPE, Counting, open_loaders, planning

from dyncp import masks
from dyncp.ir.cluster import Cluster
from dyncp.lookahead import Batching, DynamicLoader, LookAhead, Planning, PlanningError
from dyncp.lookahead.stores.memory import MemoryStore


@pytest.mark.parametrize("strategy", ["zigzag", "data_parallel"])
def test_the_ranks_hold_every_token_once_with_its_position_and_next_token(strategy):
    datasets = [Counting() for _ in range(3)]
    seen = []
    with open_loaders(datasets, strategy=strategy) as loaders:
        for step in zip(*loaders, strict=True):
            first = step[0]
            assert all(part.samples == first.samples and part.iteration == first.iteration for part in step)
            assert len({part.plan.digest for part in step}) == 1
            assert [part.plan.rank for part in step] == [0, 1, 2]
            samples = [datasets[0].samples[i][:LONG_TAIL_CUT] for i in first.samples]
            assert first.lengths == tuple(len(tokens) for tokens in samples)
            whole = [np.full((3, len(tokens)), -1) for tokens in samples]
            for part in step:
                sequence, position = part.plan.header.local_tokens(part.plan.rank)
                assert part.sequence_ids.tolist() == sequence.tolist()
                assert part.position_ids.tolist() == position.tolist()
                fields = (part.sequence_ids, part.position_ids, part.input_ids, part.labels)
                assert all(field.dtype == torch.int64 for field in fields)
                for number, place, token, label in zip(*(field.tolist() for field in fields), strict=True):
                    assert whole[number][2, place] == -1
                    whole[number][:, place] = token, label, 0
            for tokens, (input_ids, labels, held) in zip(samples, whole, strict=True):
                assert not held.any()
                assert input_ids.tolist() == tokens.tolist()
                assert labels.tolist() == [*tokens[1:].tolist(), -100]
            assert {part.num_label_tokens for part in step} == {sum(len(tokens) - 1 for tokens in samples)}
            seen += first.samples
    assert sorted(seen) == list(range(len(LENGTHS)))


def test_only_samples_that_a_rank_owns_tokens_of_are_read():
    datasets = [Counting() for _ in range(3)]
    expected = [[] for _ in datasets]
    with open_loaders(datasets, strategy="data_parallel") as loaders:
        for step in zip(*loaders, strict=True):
            for part, mine in zip(step, expected, strict=True):
                mine += [part.samples[number] for number in part.sequence_ids.unique().tolist()]
    assert [dataset.read for dataset in datasets] == expected
    assert sum(len(dataset.read) for dataset in datasets) == len(LENGTHS)  # whole sequences: one reader each


def test_epochs_differ_and_a_repeated_epoch_does_not():
    with open_loaders([Counting()]) as (loader,):
        epochs = []
        for epoch in (0, 1, 0):
            loader.set_epoch(epoch)
            batches = list(loader)
            assert len(batches) == len(loader)
            assert {batch.epoch for batch in batches} == {epoch}
            assert [batch.iteration for batch in batches] == list(range(len(batches)))
            epochs.append([batch.samples for batch in batches])
    assert epochs[0] == epochs[2] != epochs[1]


@pytest.mark.parametrize("kappa", [0, 1, 9])
def test_each_rank_plans_its_share_and_used_plans_leave_the_store(kappa):
    store = MemoryStore()
    lookahead = LookAhead(kappa, workers=0, timeout_s=20)
    with open_loaders([Counting(), Counting()], Batching(50, 50), lookahead, store=store) as loaders:
        threads = [threading.Thread(target=list, args=(loader,)) for loader in loaders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        steps = len(loaders[0])
        reports = [loader.report() for loader in loaders]
    assert steps >= 3
    assert [report.steps for report in reports] == [steps, steps]
    assert [report.plans_made for report in reports] == [(steps + 1) // 2, steps // 2]
    assert all(report.planning_s > 0 and report.waited_s >= report.first_wait_s > 0 for report in reports)
    assert len(store) == 0


def test_plans_are_made_up_to_kappa_ahead():
    asked = []

    def mask(index, length):
        asked.append(index)
        return masks.causal(length)

    batching = Batching(50, 50, mask=mask)
    with open_loaders([Counting()], batching, LookAhead(kappa=2, workers=0, timeout_s=20)) as (loader,):
        batches = loader.sampler.batches(0)
        iterator = iter(loader)
        next(iterator)
        next(iterator)
        iterator.close()
    ahead = set(asked)
    assert set(np.concatenate(batches[:2]).tolist()) <= ahead <= set(np.concatenate(batches[:4]).tolist())


def test_a_pass_that_is_left_early_leaves_nothing_behind():
    store = MemoryStore()
    lookahead = LookAhead(kappa=9, workers=0, timeout_s=20)
    with open_loaders([Counting()], Batching(50, 50), lookahead, store=store) as (loader,):
        for _ in range(3):
            for batch in loader:
                if batch.iteration == 1:
                    break
            assert batch.iteration == 1
        assert [batch.iteration for batch in loader] == list(range(len(loader)))
    assert len(store) == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "dyncp-planner"]


def test_a_closed_loader_says_so():
    with open_loaders([Counting()]) as (loader,):
        next(iter(loader))
    with pytest.raises(RuntimeError, match="closed"):
        next(iter(loader))


def test_workers_make_the_same_batches_as_this_process():
    def content(lookahead):
        with open_loaders([Counting()], lookahead=lookahead) as (loader,):
            return [(batch.samples, batch.plan.digest, batch.labels.tolist()) for batch in loader]

    assert content(IN_PROCESS) == content(LookAhead(kappa=3, workers=2, timeout_s=60))


def test_masks_by_name_and_weights_reach_the_plan():
    def mask(index, length):
        return {"all": masks.full(length), "window": masks.sliding_window(length, 1 + index)}

    batching = Batching(128, 50, mask=mask, weights={"window": 5.0})
    with open_loaders([Counting()], batching) as (loader,):
        header = next(iter(loader)).plan.header
    assert header.mask_names == ("all", "window")
    assert header.mask_weights == (1.0, 5.0)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_planner_that_fails_tells_every_rank_which_batch_and_why(workers):
    datasets = [Counting(), Counting()]
    bad = datasets[0]

    def mask(index, length):
        if index == culprit:
            raise KeyError(f"no mask for {index}")
        return masks.causal(length)

    lookahead = LookAhead(kappa=2, workers=workers, timeout_s=30)
    with open_loaders(datasets, Batching(50, 50, mask=mask), lookahead) as loaders:
        culprit = int(loaders[0].sampler.batches(0)[1][0])  # iteration 1, planned by rank 1
        iterators = [iter(loader) for loader in loaders]
        for iterator in iterators:
            next(iterator)
        for iterator in iterators:
            with pytest.raises(PlanningError) as caught:
                next(iterator)
            message = "iteration 1 could not be planned by rank 1: KeyError: 'no mask for"
            assert str(caught.value) == f"{message} {culprit}'"
            assert "raise KeyError" in caught.value.__notes__[0]  # the traceback of where it happened
    assert bad.read


def test_an_error_inside_a_worker_reaches_the_trainer():
    message = r"iteration 0 .* by rank 0: ValueError: unknown strategy 'no_such'"
    with (
        DynamicLoader(Counting(), Planning(SHAPE, Cluster(1, 1), "no_such"), Batching(128, 50)) as loader,
        pytest.raises(PlanningError, match=message),
    ):
        next(iter(loader))


def test_a_plan_that_never_comes_names_iteration_and_planner():
    lookahead = LookAhead(kappa=2, workers=0, timeout_s=0.2)
    with open_loaders([Counting(), Counting()], Batching(50, 50), lookahead) as (loader, _):
        iterator = iter(loader)
        next(iterator)  # planned here; the next one is rank 1's, which does nothing
        with pytest.raises(TimeoutError, match=r"iteration 1 within 0.2 s.* planner of rank 1"):
            next(iterator)


def test_a_store_that_refuses_plans_is_the_cause_of_the_time_out():
    class Full(MemoryStore):
        def put(self, key, value):
            raise OSError("no space left")

    lookahead = LookAhead(kappa=0, workers=0, timeout_s=0.2)
    with (
        open_loaders([Counting()], lookahead=lookahead, store=Full()) as (loader,),
        pytest.raises(TimeoutError) as caught,
    ):
        next(iter(loader))
    assert "no space left" in str(caught.value.__cause__)


@pytest.mark.parametrize("form", ["list", "tensor", "dict", "uint8"])
def test_samples_may_be_lists_tensors_or_dicts_and_are_measured_if_nobody_tells(form):
    class Bare:
        def __len__(self):
            return 3

        def __getitem__(self, index):
            tokens = [10 * index + i for i in range(index + 2)]
            match form:
                case "list":
                    return tokens
                case "tensor":
                    return torch.tensor(tokens)
                case "uint8":
                    return np.array(tokens, np.uint8)
            return {"input_ids": tokens, "title": "x"}

    with open_loaders([Bare()], Batching(100)) as (loader,):
        assert loader.sampler.lengths.tolist() == [2, 3, 4]
        batch = next(iter(loader))
    assert sorted(batch.input_ids.tolist()) == [0, 1, 10, 11, 12, 20, 21, 22, 23]
    assert batch.labels.tolist().count(-100) == 3


def test_lengths_may_be_given_or_a_method():
    class Method(Counting):
        def lengths(self):
            return self.told

    dataset = Counting.__new__(Method)
    dataset.samples, dataset.read, dataset.told = [np.arange(4), np.arange(6)], [], [4, 6]
    with open_loaders([dataset], Batching(100)) as (loader,):
        assert loader.sampler.lengths.tolist() == [4, 6]
    with (
        open_loaders([dataset], Batching(100, lengths=[4, 5])) as (loader,),
        pytest.raises(ValueError, match="sample 1 has 6 tokens, but its length was given as 5"),
    ):
        next(iter(loader))
    assert set(dataset.read) <= {0, 1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DynamicLoader(Counting(), planning(2), Batching(128, 50)), "2 ranks need a store"),
        (lambda: DynamicLoader(Counting(), planning(2), Batching(128, 50), rank=2, store=MemoryStore()), "rank is 2"),
        (lambda: DynamicLoader(Counting(), planning(1), Batching(128, lengths=[1])), "1 lengths for a dataset of 12"),
        (lambda: DynamicLoader([[1.5, 2]], planning(1), Batching(128)), "sample 0 is float64"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
