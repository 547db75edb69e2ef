"""Tiles of the Triton kernels against each other: what `configs.py` has, and what else fits on the device.

Each candidate is compiled, then one rank's causal attention is timed with it, forward or backward. What does not
compile or does not fit says why. To be looked at before the tables in `configs.py` are changed.
"""

from __future__ import annotations

from dataclasses import astuple

from benchmarks.gpu.cases import mask_of, one_rank, useful_flops
from benchmarks.gpu.clock import Deadline, spread
from benchmarks.gpu.compare import reason
from benchmarks.gpu.pieces import piece_of
from benchmarks.gpu.session import Findings, Row, Session
from dyncp.ir.mask import Mask
from dyncp.ir.plan import BACKWARD, FORWARD, Pass, RankPlan
from dyncp.runtime.kernels.configs import Backward, Forward
from dyncp.runtime.prepare import Prepared, prepared_for

# in order of promise: time may not suffice for all
CANDIDATES: dict[str, tuple[Forward | Backward, ...]] = {
    "forward": (
        Forward(128, 64, 8, 3),
        Forward(128, 64, 8, 5),
        Forward(128, 128, 8, 3),
        Forward(128, 64, 4, 3),
        Forward(64, 64, 4, 3),
        Forward(128, 32, 8, 3),
    ),
    "backward": (
        Backward(64, 128, 128, 64, 8, 2),
        Backward(64, 128, 128, 64, 8, 3),
        Backward(64, 64, 64, 64, 8, 3),
        Backward(64, 64, 64, 64, 4, 3),
        Backward(32, 128, 128, 32, 8, 3),
        Backward(64, 128, 128, 64, 8, 5),
    ),
}
TOYS: dict[str, tuple[Forward | Backward, ...]] = {
    "forward": (Forward(32, 32, 4, 1),),
    "backward": (Backward(32, 32, 64, 32, 4, 1),),
}


def tiling(session: Session, deadline: Deadline, found: Findings) -> None:
    """Candidates of both passes, in turn, after what is used now."""
    if session.kernels[0] != "triton":
        found.left_out.append(f"tiles, which kernels {session.kernels[0]!r} do not have")
        return
    tokens, shape = session.scale.judged_tokens, session.scale.shape
    mask = mask_of("causal", tokens)
    part = one_rank(mask, shape, session.scale.block_tokens)
    used = prepared_for(part, part.header.mask_names[0], "triton", session.device)
    for pass_ in (FORWARD, BACKWARD):
        found.rows.append(measured(session, part, mask, pass_, used, "as used"))
    candidates = CANDIDATES if session.scale.judged else TOYS
    both = zip(candidates["forward"], candidates["backward"], strict=True)
    cases = [(pass_, one) for pair in both for pass_, one in zip((FORWARD, BACKWARD), pair, strict=True)]
    for pass_, one in deadline.in_time(cases, lambda case: f"{case[0].name} {astuple(case[1])}", found.left_out):
        found.rows.append(candidate(session, part, mask, pass_, used, one))


def candidate(
    session: Session, part: RankPlan, mask: Mask, pass_: Pass, used: Prepared, one: Forward | Backward
) -> Row:
    """One candidate, or why it does not run."""
    from dyncp.runtime.kernels.triton import Triton  # late: it needs Triton

    assert isinstance(used.kernels, Triton)
    other = used.kernels.tiles._replace(**{pass_.name: one})
    try:
        kernels = Triton(part.header, part.programs[0], session.device, other)
        return measured(session, part, mask, pass_, Prepared(kernels, used.layouts), str(astuple(one)))
    except Exception as error:  # noqa: BLE001 compiler and driver have their own
        return {"pass": pass_.name, "tiles": str(astuple(one)), "error": reason(error)}


def measured(session: Session, part: RankPlan, mask: Mask, pass_: Pass, prepared: Prepared, name: str) -> Row:
    """Times of one pass."""
    piece = piece_of(part, pass_, "triton", session.device, prepared)
    times = spread(session.clock.times(piece.run, session.scale.repeats))
    flops = useful_flops(mask, part.header.shape, pass_ is BACKWARD)
    return {"pass": pass_.name, "tiles": name, **times, "flops_per_s": flops / times["median_s"]}
