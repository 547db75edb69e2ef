import numpy as np
import torch
from torch.nn.functional import cross_entropy

from dyncp.demo.dense import DenseAttention
from dyncp.demo.model import GPT, ModelSize, Rotary, rotate
from dyncp.demo.train import LAST_RATE, WARM_UP_STEPS, Trainer, rate
from dyncp.masks import causal, lambda_

SMALL = ModelSize(vocabulary=11, layers=2, q_heads=4, kv_heads=2, head_dim=8)


def dense_of(*masks):
    return DenseAttention([torch.from_numpy(mask.dense()) for mask in masks])


def test_the_same_seed_gives_the_same_weights():
    one, two, other = (GPT(SMALL, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])


def test_rotary_depends_on_relative_positions_alone():
    rotary = Rotary(8)
    q, k = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def score(at, of):
        return (rotate(q, rotary(torch.tensor([at]))) * rotate(k, rotary(torch.tensor([of])))).sum()

    torch.testing.assert_close(score(9, 4), score(105, 100), rtol=1e-4, atol=1e-5)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


def test_dense_attention_is_softmax_over_the_mask():
    masks = [lambda_(12, 2, 3), causal(5)]
    q, k, v = (torch.randn(17, heads, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    out = dense_of(*masks)(q, k, v)
    for rows, mask in ((slice(0, 12), masks[0]), (slice(12, 17), masks[1])):
        for head in range(4):
            scores = q[rows, head] @ k[rows, head // 2].T / 8**0.5
            weights = scores.masked_fill(~torch.from_numpy(mask.dense()), -torch.inf).softmax(-1)
            torch.testing.assert_close(out[rows, head], weights @ v[rows, head // 2], rtol=1e-5, atol=1e-6)


def test_sequences_do_not_see_each_other():
    model = GPT(SMALL, 0)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 11, 14))
    positions = torch.cat([torch.arange(9), torch.arange(5)])
    both = model(ids, positions, dense_of(causal(9), causal(5)))
    alone = model(ids[9:], positions[9:], dense_of(causal(5)))
    torch.testing.assert_close(both[9:], alone, rtol=1e-4, atol=1e-5)


def test_training_on_parts_of_a_batch_is_training_on_the_batch():
    """Two sequences in one process, against one each in two whose sums are added up."""
    rng = np.random.default_rng(0)
    ids = [torch.from_numpy(rng.integers(0, 256, length)) for length in (9, 5)]
    labels = [torch.cat([tokens[1:], torch.tensor([-100])]) for tokens in ids]
    positions = [torch.arange(len(tokens)) for tokens in ids]
    whole = Trainer(3, 0, lambda tensor: None)
    expected = whole.step(torch.cat(ids), torch.cat(positions), torch.cat(labels), 12, dense_of(causal(9), causal(5)))
    sums = []
    for part in range(2):
        messages = []
        trainer = Trainer(3, 0, messages.append)
        trainer.step(ids[part], positions[part], labels[part], 12, dense_of(causal(len(ids[part]))))
        sums += messages
    total = sums[0] + sums[1]
    assert abs(float(total[-1]) - expected) < 1e-5
    summed = Trainer(3, 0, lambda tensor: tensor.copy_(total))
    summed.step(ids[0], positions[0], labels[0], 12, dense_of(causal(9)))
    for ours, theirs in zip(summed.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    unsummed = Trainer(3, 0, lambda tensor: None)
    unsummed.step(ids[0], positions[0], labels[0], 12, dense_of(causal(9)))
    moved = max(
        float((ours - theirs).abs().max().detach())
        for ours, theirs in zip(unsummed.model.parameters(), whole.model.parameters(), strict=True)
    )
    assert moved > 5e-4  # so the comparison above can fail


def test_a_rank_without_tokens_still_takes_part():
    trainer = Trainer(3, 0, lambda tensor: None)
    empty = torch.empty(0, dtype=torch.int64)
    assert trainer.step(empty, empty, empty, 12, lambda q, k, v: q) == 0.0


def test_a_batch_without_labels_is_a_step_like_any_other():
    trainer = Trainer(3, 0, lambda tensor: None)
    ids = torch.tensor([1, 2])
    loss = trainer.step(
        ids, torch.zeros(2, dtype=torch.int64), torch.full([2], -100), 0, dense_of(causal(1), causal(1))
    )
    assert loss == 0.0
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())


def test_a_step_returns_the_mean_loss():
    trainer = Trainer(3, 0, lambda tensor: None)
    ids, positions = torch.tensor([1, 2, 3]), torch.arange(3)
    with torch.no_grad():
        logits = trainer.model(ids, positions, dense_of(causal(3)))
    expected = cross_entropy(logits[:2], ids[1:]).item()
    labels = torch.tensor([2, 3, -100])
    assert abs(trainer.step(ids, positions, labels, 2, dense_of(causal(3))) - expected) < 1e-5


def test_the_learning_rate_rises_and_then_falls():
    rates = [rate(step, 40) for step in range(40)]
    top = int(np.argmax(rates))
    assert WARM_UP_STEPS - 2 <= top <= WARM_UP_STEPS
    assert rates[0] < 0.25
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert LAST_RATE <= rates[-1] < 2 * LAST_RATE
