import gc
import os
import threading
import time
import weakref
from collections import UserDict

import numpy as np
import pytest
import torch
from lookahead.loading import IN_PROCESS, LENGTHS, LONG_TAIL_CUT, Counting, in_turns, open_loaders, planning

from dyncp import masks
from dyncp.lookahead import Batching, DynamicLoader, LookAhead, PlanningError
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
    assert [report.plans_made + report.cached for report in reports] == [(steps + 1) // 2, steps // 2]
    assert all(report.plans_made > 0 for report in reports)
    assert all(report.planning_s > 0 and report.waited_s >= report.first_wait_s > 0 for report in reports)
    assert len(store) == 0


@pytest.mark.parametrize("kappa", [0, 1, 2])
def test_plans_are_made_up_to_kappa_ahead(kappa):
    asked = []

    def mask(index, length):
        asked.append(index)
        return masks.causal(length)

    batching = Batching(50, 50, mask=mask)
    with open_loaders([Counting()], batching, LookAhead(kappa, workers=0, timeout_s=20)) as (loader,):
        batches = [set(draw.samples.tolist()) for draw in loader.source.draws(0)]
        iterator = iter(loader)
        for iteration in range(3):
            next(iterator)
            time.sleep(0.3)
            assert set(asked) == set().union(*batches[: iteration + kappa + 1])


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
        culprit = int(list(loaders[0].source.draws(0))[1].samples[0])  # iteration 1, planned by rank 1
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


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_mask_function_that_wants_to_end_the_thread_tells_every_rank(error):
    def mask(index, length):
        raise error("enough")

    with open_loaders([Counting(), Counting()], Batching(50, 50, mask=mask)) as loaders:
        for loader in loaders:
            with pytest.raises(PlanningError, match=f"iteration 0 .* by rank 0: {error.__name__}: enough"):
                next(iter(loader))


def test_an_error_inside_a_worker_reaches_the_trainer():
    message = r"iteration 0 .* by rank 0: ValueError: weight for unknown mask 'no_such'"
    batching = Batching(128, 50, mask=lambda index, length: masks.causal(length), weights={"no_such": 1})
    with (
        DynamicLoader(Counting(), planning(1), batching) as loader,
        pytest.raises(PlanningError, match=message),
    ):
        next(iter(loader))


FOR_EVER = LookAhead(kappa=0, workers=0, timeout_s=3600, patience_s=0.3)  # a test that waits for it fails by not ending


def test_a_store_that_refuses_plans_ends_the_wait():
    class Full(MemoryStore):
        def put(self, key, value):
            raise OSError("no space left")

    message = "rank 0 .* iteration 0.*: OSError: no space left"
    with (
        open_loaders([Counting()], lookahead=FOR_EVER, store=Full()) as (loader,),
        pytest.raises(PlanningError, match=message),
    ):
        next(iter(loader))


@pytest.mark.parametrize("kappa", [0, 9])
def test_a_loader_that_is_closed_inside_the_loop_says_so(kappa):
    lookahead = LookAhead(kappa, workers=0, timeout_s=3600)
    with open_loaders([Counting()], Batching(50, 50), lookahead) as (loader,):
        iterator = iter(loader)
        next(iterator)
        loader.close()
        with pytest.raises(RuntimeError, match="the loader is closed"):
            next(iterator)


def test_a_loader_that_another_thread_closes_ends_its_wait():
    with open_loaders([Counting(), Counting()], Batching(50, 50), FOR_EVER) as (loader, _):
        iterator = iter(loader)
        next(iterator)  # planned here; the next one is rank 1's, which does nothing
        closer = threading.Timer(0.1, loader.close)
        closer.start()
        with pytest.raises(RuntimeError, match="the loader is closed"):
            next(iterator)
        closer.join()


def pairs(batch):
    """Of the whole batch, from a single rank's plan."""
    comps = batch.plan.programs[0].comps
    return sum(comps.mask(number, batch.plan.header.tokens).pairs() for number in range(len(comps)))


def on_one_store(store, mask, kappa=3):
    lookahead = LookAhead(kappa, workers=0, timeout_s=20)
    batching = Batching(64, 32, mask=lambda index, length: mask(length))
    return DynamicLoader(Counting([32] * 8), planning(1), batching, lookahead, store=store)


def test_a_closed_loader_leaves_no_plans_to_another_with_equal_lengths():
    """Its iterator is still referenced, as where a trainer keeps it in an attribute."""
    store = MemoryStore()
    first = on_one_store(store, masks.causal)
    iterator = iter(first)
    next(iterator)
    deadline = time.monotonic() + 20
    while first.report().plans_ready < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    first.close()
    assert len(store) == 0
    with on_one_store(store, masks.full, kappa=0) as second:
        assert [pairs(batch) for batch in second] == [2 * 32 * 32] * 4
    del iterator


def test_loaders_that_share_a_store_do_not_take_each_others_plans():
    store = MemoryStore()
    with on_one_store(store, masks.causal) as one, on_one_store(store, masks.full) as two:
        for ours, theirs in zip(one, two, strict=True):
            assert (pairs(ours), pairs(theirs)) == (2 * 32 * 33 // 2, 2 * 32 * 32)


def test_ranks_agree_on_whose_plans_are_whose():
    """Two loaders on each of two ranks, made in the same order there but at other times."""
    store = MemoryStore()

    def make(rank, mask):
        batching = Batching(64, 32, mask=lambda index, length: mask(length))
        return DynamicLoader(Counting([32] * 8), planning(2), batching, IN_PROCESS, rank=rank, store=store)

    loaders = [[make(rank, mask) for mask in (masks.causal, masks.full)] for rank in (0, 1)]
    for of_ranks in zip(*loaders, strict=True):
        digests = [{part.plan.digest for part in step} for step in zip(*of_ranks, strict=True)]
        assert len(digests) == 4 and all(len(digest) == 1 for digest in digests)
    for loader in (*loaders[0], *loaders[1]):
        loader.close()
    assert len(store) == 0


def test_a_pass_belongs_to_the_epoch_and_place_at_which_it_was_begun():
    with open_loaders([Counting(), Counting()], Batching(50, 50)) as loaders:
        early, late = [[iter(loader) for loader in loaders] for _ in range(2)]
        for loader in loaders:
            loader.set_epoch(5)
        # rank 1 starts the later pass first
        steps = [next(iterator) for iterator in (early[0], late[0], late[1], early[1])]
        assert {step.epoch for step in steps} == {0}
        loaders[0].set_epoch(0)
        assert next(iter(loaders[0])).epoch == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_is_dropped_ends_its_planner(workers):
    loader = DynamicLoader(Counting(), planning(1), Batching(50, 50), LookAhead(2, workers, 60))
    list(loader)
    threads = loader._producer._threads
    numbers = loader._producer.pids
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None
    assert not any(thread.is_alive() for thread in threads)
    for number in numbers:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


@pytest.mark.parametrize("form", ["list", "tensor", "dict", "mapping", "uint8"])
def test_samples_may_be_lists_tensors_or_mappings_and_are_measured_if_nobody_tells(form):
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
                case "mapping":
                    return UserDict({"input_ids": tokens})  # what tokenizers return is one
            return {"input_ids": tokens, "title": "x"}

    with open_loaders([Bare()], Batching(100)) as (loader,):
        assert loader.source.lengths.tolist() == [2, 3, 4]
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
        assert loader.source.lengths.tolist() == [4, 6]
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
        (lambda: DynamicLoader([[1], []], planning(1), Batching(128)), "sample 1 is empty"),
        (lambda: DynamicLoader([], planning(1), Batching(128)), "the dataset has no samples"),
        (lambda: DynamicLoader([([1, 2], 1)], planning(1), Batching(128)), "sample 0 is tuple; expected its tokens"),
        (lambda: DynamicLoader([([1, 2], [2, 3])], planning(1), Batching(128)), r"sample 0 is int64\[2, 2\]"),
        (lambda: DynamicLoader([{"text": "a"}], planning(1), Batching(128)), "a mapping of text; it needs 'input_ids'"),
        (lambda: DynamicLoader(["a b"], planning(1), Batching(128)), "sample 0 is <U3"),
        (lambda: DynamicLoader([[1]], planning(1), Batching(128), rank="0"), "rank is '0'; it must be a whole number"),
        (lambda: DynamicLoader([[1]], planning(2), Batching(128), store=MemoryStore()), "say which one with rank="),
        (lambda: DynamicLoader([[1]], None, Batching(128)), "planning is of type NoneType; expected a Planning"),
        (lambda: DynamicLoader([[1]], planning(1), Batching(128), {}), "lookahead is of type dict; expected a LookAh"),
        (lambda: DynamicLoader([[1]], planning(1), Batching(128), store="memory:"), "store is 'memory:'; expected a"),
        (lambda: DynamicLoader([[1]], planning(1), Batching(128), run="a/b"), "run is 'a/b'; it needs 1 to 100"),
        (lambda: DynamicLoader([[1]], planning(1), Batching(128)).set_epoch(-1), "epoch is -1"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_hugging_face_datasets_are_trained_on_by_index_and_as_streams(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    import datasets  # late, as it looks at the variable then

    rows = {"input_ids": [list(range(n, 2 * n)) for n in LENGTHS], "name": [str(n) for n in LENGTHS]}
    table = datasets.Dataset.from_dict(rows).select(range(len(LENGTHS))).with_format("torch")
    streams = [table.to_iterable_dataset().shuffle(seed=1, buffer_size=4) for _ in range(2)]
    for pair in ([table, table], streams):
        with open_loaders(pair, Batching(128, 50)) as loaders:
            seen = []
            for parts in in_turns(loaders):
                held = [[] for _ in parts[0].samples]
                for part in parts:
                    for number, token in zip(part.sequence_ids.tolist(), part.input_ids.tolist(), strict=True):
                        held[number].append(token)
                seen += [(min(tokens), len(tokens)) for tokens in held]
        assert sorted(seen) == sorted((n, min(n, 50)) for n in LENGTHS)


def test_masks_may_depend_on_what_is_in_a_sample():
    class Packed(Counting):
        def __getitem__(self, index):
            return {"input_ids": super().__getitem__(index), "parts": [self.lengths[index] // 2, self.lengths[index]]}

    def mask(sample, length):
        first = min(sample["parts"][0], length)
        return masks.document([first, length - first] if 0 < first < length else [length])

    with open_loaders([Packed([8, 20, 10])], Batching(64, 64, sample_mask=mask)) as (loader,):
        (batch,) = loader
    assert pairs(batch) == sum(2 * (n // 2) * (n // 2 + 1) // 2 for n in (8, 20, 10))
    assert sorted(loader.dataset.read)[:3] == [0, 0, 1]  # once for its mask, once for its tokens


@pytest.mark.parametrize(("batching", "said"), [(Batching(50), True), (Batching(50, 40), False), (Batching(99), False)])
def test_samples_that_are_cut_for_want_of_room_are_said(caplog, batching, said):
    with open_loaders([Counting()], batching):
        pass
    assert ("2 of 12 samples are longer than the 50 tokens of a batch and are cut" in caplog.text) == said


def test_plans_are_prepared_before_they_are_due():
    """Each once, in another thread than training's, and the same that training gets."""
    prepared = []

    def prepare(plan):
        prepared.append((plan, threading.current_thread()))

    with DynamicLoader(
        Counting(), planning(1), Batching(100), LookAhead(kappa=2, workers=0, timeout_s=20), prepare=prepare
    ) as loader:
        for number, batch in enumerate(loader):
            assert prepared[number][0] is batch.plan
    assert threading.current_thread() not in {thread for _, thread in prepared}
    assert len(prepared) == number + 1 > 2


def test_what_preparing_raises_reaches_training():
    def prepare(plan):
        raise ValueError("head dims are 512 and 512")

    with (
        DynamicLoader(
            Counting(), planning(1), Batching(100), LookAhead(kappa=2, workers=0, timeout_s=20), prepare=prepare
        ) as loader,
        pytest.raises(ValueError, match="head dims are 512 and 512"),
    ):
        next(iter(loader))
