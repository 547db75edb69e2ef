from collections import Counter
from dataclasses import replace

import pytest
import torch

from dyncp import verify as module
from dyncp.ir.plan import KEEP
from dyncp.strategies import STRATEGIES
from dyncp.verify import RANDOM_MASKS, random_case, verify, worse

CORPUS, PARTS = 300, 10


@pytest.mark.parametrize("part", range(PARTS))
def test_corpus(part):
    """Plans of random batches are correct, and exact to within the tolerance, forward and backward."""
    for number in range(part, CORPUS, PARTS):
        case = random_case(0, number)
        errors = verify(case)
        assert max(errors.values()) <= case.tolerance, f"case {number}: {errors}, {case}"


def test_corpus_has_everything(monkeypatch):
    kinds = Counter()

    def counted(kind, make):
        def count(rng, length):
            kinds[kind] += 1
            mask = make(rng, length)
            assert (mask.q_length, mask.k_length) == (length, length)
            return mask

        return count

    monkeypatch.setattr(module, "RANDOM_MASKS", {kind: counted(kind, make) for kind, make in RANDOM_MASKS.items()})
    cases = [random_case(0, number) for number in range(CORPUS)]
    assert {(case.strategy, case.options.keep) for case in cases} == {(s, k) for s in STRATEGIES for k in KEEP}
    assert {case.cluster.ranks for case in cases} == set(range(1, 9))
    assert {case.shape.dtype for case in cases} == {"float32", "bfloat16"}
    assert min(kinds[kind] for kind in RANDOM_MASKS) >= 10
    sequences = [sequence for case in cases for sequence in case.batch.sequences]
    assert min(sequence.length for sequence in sequences) == 1
    assert max(sequence.length for sequence in sequences) > 500
    assert sum(sequence.kv_length is not None for sequence in sequences) > 50
    assert {len(case.batch.mask_names) for case in cases} == {1, 2}
    assert any(case.softcap for case in cases) and any(case.sinks for case in cases)


def test_cases_are_the_same_every_time():
    first, again = random_case(5, 17), random_case(5, 17)
    assert first == again
    assert first != random_case(6, 17)


@pytest.mark.parametrize("place", ["out", "gradient"])
def test_sees_a_wrong_result(monkeypatch, place):
    """One rank's output that is a little off, or a gradient that is, is seen."""
    real = module.attention

    def wrong(q, k, v, plan, transport, **options):
        if place == "gradient":
            q = _Twice.apply(q, transport.rank == 1)
        out = real(q, k, v, plan, transport, **options)
        if place == "out" and transport.rank == 1:
            out = out * 1.001
        return out

    cases = (random_case(0, number) for number in range(1, 99, len(STRATEGIES)))
    case = next(case for case in cases if case.cluster.ranks > 3 and case.shape.dtype == "float32")
    assert case.strategy == "ring" and max(verify(case).values()) <= case.tolerance
    monkeypatch.setattr(module, "attention", wrong)
    errors = verify(case)
    assert errors["out" if place == "out" else "dq"] > case.tolerance


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("field", ["out", "q", "k", "v", "sinks"])
@pytest.mark.parametrize("whole", [False, True])
def test_sees_what_is_not_a_number(monkeypatch, field, bad, whole):
    """One such value is enough, in the first mask of several, and whatever the errors of the others are."""
    real = module.run_plan

    def broken(plan, case, inputs, mask):
        result = real(plan, case, inputs, mask)
        if mask == case.batch.mask_names[0]:
            getattr(result, field).view(-1)[: None if whole else 1] = bad
        return result

    cases = (random_case(0, number) for number in range(CORPUS))
    case = replace(next(case for case in cases if len(case.batch.mask_names) > 1), sinks=True)
    monkeypatch.setattr(module, "run_plan", broken)
    errors = verify(case)
    label = field if field == "out" else f"d{field}"
    assert errors.pop(label) == float("inf")
    assert max(errors.values()) <= case.tolerance


def test_worse():
    nan, inf = float("nan"), float("inf")
    assert worse(1.0, 2.0) == worse(2.0, 1.0) == 2.0
    for one, other in ((nan, 1.0), (1.0, nan), (nan, nan), (inf, nan), (1.0, inf), (-inf, 1.0)):
        assert worse(one, other) == inf


class _Twice(torch.autograd.Function):
    """The gradient is twice what it should be."""

    @staticmethod
    def forward(ctx, x, twice):
        ctx.twice = twice
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + ctx.twice), None
