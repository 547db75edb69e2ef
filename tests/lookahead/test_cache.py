from dataclasses import replace

from builders import causal_batch
from lookahead.loading import planning

from dyncp import masks
from dyncp.ir.batch import Batch, Sequence
from dyncp.ir.codec import encode_batch
from dyncp.lookahead.cache import PlanCache, cache_key
from dyncp.lookahead.messages import Answer
from dyncp.strategies.api import Options


def test_the_least_recently_used_plans_go_first():
    cache = PlanCache(25)
    for name in "abc":
        if name == "c":
            assert cache.get("a").parts == [b"a" * 10]
        cache.put(name, Answer([name.encode() * 10]))
    assert cache.get("b") is None
    assert cache.get("a") and cache.get("c")
    cache.put("d", Answer([b"d" * 30]))  # larger than everything
    assert cache.get("d") is None and cache.get("a")


def test_nothing_is_kept_where_nothing_may_be():
    cache = PlanCache(0)
    cache.put("a", Answer([b"a"]))
    assert cache.get("a") is None


def test_a_plan_is_known_by_lengths_masks_and_settings():
    def key(batch, settings=planning(2)):  # noqa: B008
        return cache_key(settings, encode_batch(batch))

    batch = causal_batch(40, 9)
    assert key(batch) == key(causal_batch(40, 9))
    others = [
        key(causal_batch(9, 40)),
        key(Batch([Sequence(40, masks.full(40)), Sequence(9, masks.causal(9))])),
        key(batch, planning(3)),
        key(batch, replace(planning(2), options=Options(block_tokens=16, seed=1))),
    ]
    assert len({key(batch), *others}) == 5
