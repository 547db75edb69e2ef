"""A run that is broken off and resumed is the unbroken run: batches, plans and losses, bit for bit."""

import json

import numpy as np
import pytest
import torch
from lookahead.loading import Counting, in_turns, open_loaders
from torch import nn
from torch.nn.functional import cross_entropy

import dyncp
from dyncp.lookahead import Batching, DynamicLoader, LookAhead, Planning
from dyncp.strategies.api import Options

LENGTHS = [20 + 37 * index % 90 for index in range(40)]
LOOKAHEAD = LookAhead(2, 0, timeout_s=60)


def content(batch):
    fields = (batch.input_ids, batch.labels, batch.position_ids)
    where = batch.epoch, batch.iteration, batch.step, batch.ends_step, batch.samples, batch.num_label_tokens
    return *where, batch.plan.digest, *(field.tolist() for field in fields)


class Stream:
    def __iter__(self):
        yield from Counting(LENGTHS).samples


class Batches:
    """A batch sampler with another order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for first in range(0, 40, 4):
            yield [(first + place + self.epoch) % 40 for place in range(4)]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", ["map", "accumulate", "stream", "sampler"])
def test_every_place_can_be_resumed(kind, ranks):
    batching = Batching(256, 80, seed=4, accumulate=3 if kind == "accumulate" else 1)
    made = {"stream": Stream}.get(kind, lambda: Counting(LENGTHS))
    more = {"batch_sampler": Batches()} if kind == "sampler" else {}
    if kind == "sampler":
        batching = Batching()

    def whole(loaders, epochs):
        for epoch in epochs:
            for loader in loaders:
                loader.set_epoch(epoch)
            for batches in in_turns(loaders):
                yield [content(batch) for batch in batches], [json.dumps(loader.state_dict()) for loader in loaders]

    with open_loaders([made() for _ in range(ranks)], batching, LOOKAHEAD, **more) as loaders:
        unbroken = list(whole(loaders, range(2)))
    for place in {0, 1, len(unbroken) // 2 - 1, len(unbroken) // 2, len(unbroken) - 2}:
        states = unbroken[place][1]
        with open_loaders([made() for _ in range(ranks)], batching, LOOKAHEAD, **more) as loaders:
            for loader, state in zip(loaders, states, strict=True):
                loader.load_state_dict(json.loads(state))
            resumed = list(whole(loaders, range(loaders[0].epoch, 2)))
        assert [batch for batch, _ in resumed] == [batch for batch, _ in unbroken[place + 1 :]]
        assert [state for _, state in resumed] == [state for _, state in unbroken[place + 1 :]]


@pytest.mark.parametrize("inside", [True, False])
def test_a_state_after_the_last_batch_leads_to_the_next_epoch(inside):
    """Taken inside the loop, or behind it; epochs are numbered or all the same."""
    with open_loaders([Counting()]) as (loader,):
        for _ in loader:
            within = loader.state_dict()
        state = within if inside else loader.state_dict()
        again = [batch.samples for batch in loader]
    with open_loaders([Counting()]) as (loader,):
        loader.load_state_dict(state)
        assert loader.epoch == 0
        assert list(loader) == []
        assert [batch.samples for batch in loader] == again
        loader.set_epoch(1)
        assert next(iter(loader)).iteration == 0


def test_a_batch_that_could_not_be_read_is_not_counted_as_given():
    """As where the state is saved by whoever handles the error."""

    class Broken(Counting):
        fails = False

        def __getitem__(self, index):
            if self.fails:
                raise OSError("disk")
            return super().__getitem__(index)

    dataset = Broken(LENGTHS)
    with open_loaders([dataset], Batching(100, 80)) as (loader,):
        whole = [batch.samples for batch in loader]
        batches = iter(loader)
        first = [next(batches).samples for _ in range(3)]
        dataset.fails = True
        with pytest.raises(OSError, match="disk"):
            next(batches)
        state = loader.state_dict()
    dataset.fails = False
    with open_loaders([dataset], Batching(100, 80)) as (loader,):
        loader.load_state_dict(state)
        assert first + [batch.samples for batch in loader] == whole


def test_a_state_goes_through_torch_save_whatever_the_epoch_is_made_of(tmp_path):
    with open_loaders([Counting()]) as (loader,):
        loader.set_epoch(np.int64(3))
        next(iter(loader))
        torch.save(loader.state_dict(), tmp_path / "state")
        assert torch.load(tmp_path / "state", weights_only=True) == loader.state_dict()


def test_another_epoch_begins_at_its_beginning():
    with open_loaders([Counting()]) as (loader,):
        next(iter(loader))
        state = loader.state_dict()
        loader.load_state_dict(state)
        loader.set_epoch(1)
        assert next(iter(loader)).iteration == 0
        loader.load_state_dict(state)
        loader.set_epoch(0)
        assert next(iter(loader)).iteration == 1
        assert next(iter(loader)).iteration == 0  # a second pass


def test_resuming_on_other_data_is_refused():
    with open_loaders([Counting()]) as (loader,):
        next(iter(loader))
        state = loader.state_dict()
    with open_loaders([Counting()], Batching(128, 50, seed=9)) as (loader,):
        loader.load_state_dict(state)
        with pytest.raises(ValueError, match="iteration 0 of epoch 0 has other samples than when the state was saved"):
            next(iter(loader))


@pytest.mark.parametrize(
    "state", [{}, {"version": 2, "epoch": 0, "iteration": 0, "after": ""}, {"epoch": 1, "iteration": 2, "after": ""}]
)
def test_what_is_no_state_is_refused(state):
    with open_loaders([Counting()]) as (loader,), pytest.raises(ValueError, match="got a state of"):
        loader.load_state_dict(state)


class Tiny(nn.Module):
    """One layer of attention, which is all that knows of plans."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 16)
        self.qkv = nn.Linear(16, (4 + 2 + 2) * 8)
        self.head = nn.Linear(32, 1000)

    def forward(self, batch):
        heads = self.qkv(self.embedding(batch.input_ids)).unflatten(-1, (-1, 8))
        q, k, v = heads.split([4, 2, 2], dim=1)
        return self.head(dyncp.attention(q, k, v, batch.plan).flatten(1))


def train(steps, checkpoint=None):
    """The losses of some steps, and a checkpoint after them; everything is made anew."""
    torch.manual_seed(1)
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shape = dyncp.AttentionShape(4, 2, 8, dtype="float32")
    planning = Planning(shape, dyncp.Cluster(1, 1), options=Options(block_tokens=16))
    losses = []
    with DynamicLoader(Counting(LENGTHS), planning, Batching(256, 80, accumulate=2), LookAhead(3, 1)) as loader:
        if checkpoint:
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            loader.load_state_dict(checkpoint["loader"])
        for epoch in range(loader.epoch, 99):
            loader.set_epoch(epoch)
            for batch in loader:
                logits = model(batch)
                loss = cross_entropy(logits, batch.labels, reduction="sum") / batch.num_label_tokens
                loss.backward()
                losses.append(loss.item())
                if batch.ends_step:
                    optimizer.step()
                    optimizer.zero_grad()
                    steps -= 1
                if not steps:
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    return losses, state | {"loader": loader.state_dict()}
    raise AssertionError


def test_training_that_is_resumed_has_the_same_losses_bit_for_bit(tmp_path):
    unbroken, _ = train(13)
    for steps in (1, 5, 8):
        first, checkpoint = train(steps)
        torch.save(checkpoint, tmp_path / "checkpoint.pt")
        rest, _ = train(13 - steps, torch.load(tmp_path / "checkpoint.pt", weights_only=True))
        assert first + rest == unbroken
    assert unbroken[-1] < unbroken[0]
