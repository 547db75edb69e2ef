"""Parts of plans whose numbers are in range and do not go together: they are refused before the executor sees them."""

from __future__ import annotations

import pytest
from builders import causal_batch, planned, random_batch
from ir.handmade import edited, handmade
from numpy.random import default_rng

from dyncp.ir import codec
from dyncp.ir.errors import DecodeError
from dyncp.ir.plan import CommLaunch, CommWait
from dyncp.ir.validate import validate_rank

FORWARD = "programs.0.forward"
COPY, LAUNCH, ATTENTION, WAIT, REDUCTION = (f"{FORWARD}.instructions.{at}" for at in (0, 1, 2, 3, 6))


def put(at, value):
    def change(array):
        array[at] = value
        return array

    return change


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (f"{ATTENTION}.reads", [[2, 0]], "instruction 2: it must use Q, KV, OUT"),
        (f"{ATTENTION}.writes", [[0]], "instruction 2: it must use Q, KV, OUT"),
        (f"{ATTENTION}.comp", [1], "instruction 2: slots must be of comp's blocks"),
        (f"{ATTENTION}.fresh", [0], "instruction 2: fresh slots must be partial results"),
        (f"{FORWARD}.slots.group", put(4, 1), "instruction 2: slots of a computation block must be of one head group"),
        (f"{COPY}.dst", [3], "instruction 0: src and dst must be of the same data"),
        (f"{COPY}.dst", [7], "instruction 0: src and dst must be of the same data"),
        (f"{REDUCTION}.dst", [4], "instruction 6: src and dst must be of the same data"),
        (f"{REDUCTION}.fresh", [3], "instruction 6: it must add to partial results"),
        (f"{LAUNCH}.ptr", [0, 0, 3], "instruction 1: a message has no slots"),
        (f"{LAUNCH}.slots", [3, 4, 8], "instruction 1: a message has local slots"),
        (f"{LAUNCH}.slots", [3, 8, 8], "instruction 1: the slots of a message do not lie one behind the other"),
        (f"{LAUNCH}.slots", [7, 3, 8], "instruction 1: the slots of a message do not lie one behind the other"),
        (f"{WAIT}.step", 2, "instruction 3: it waits for step 2, which has not been launched"),
        (WAIT, CommLaunch(1, [], [], [0], []), "instruction 3: step 1 is in flight already"),
        (WAIT, CommLaunch(2, [], [], [0], []), "its end: step 1 is never waited for"),
        (f"{FORWARD}.instructions", lambda all_: (*all_, CommWait(1)), "instruction 8: it waits for step 1"),
    ],
)
def test_faults(path, value, message):
    bad = edited(handmade().rank(0), path, value)
    validate_rank(bad)
    with pytest.raises(DecodeError, match=f"damaged: rank 0, mask 'near', forward, {message}"):
        codec.decode_rank(codec.encode_rank(bad))


@pytest.mark.parametrize("strategy", ["dynamic", "ring", "zigzag", "ulysses", "usp", "data_parallel"])
def test_plans_are_runnable(strategy, tmp_path):
    for batch in (causal_batch(70, 9, 3), random_batch(default_rng(0), names=("a", "b"))):
        codec.write_plan(planned(batch, 2, strategy, keep="all").plan, tmp_path / "plan.bin")
        codec.read_plan(tmp_path / "plan.bin")
