"""Plans as text: they come back as they were, read well, and a bad line is named by its number."""

from __future__ import annotations

import random

import numpy as np
import pytest
from builders import causal_batch, planned, random_batch
from hypothesis import given
from hypothesis import strategies as st
from ir.handmade import assert_same, handmade

from dyncp.ir.codec import from_text, to_text

TEXT = to_text(handmade())


@given(
    st.integers(0, 10**6),
    st.sampled_from(["dynamic", "ring", "zigzag", "data_parallel"]),
    st.sampled_from(["none", "kv", "all"]),
)
def test_round_trip(seed, strategy, keep):
    rng = np.random.default_rng(seed)
    batch = random_batch(rng, names=("a", "b")[: 1 + seed % 2], cross=seed % 3 == 0)
    plan = planned(batch, int(rng.integers(1, 4)), strategy, keep=keep).plan
    assert_same(plan, from_text(to_text(plan)))


def test_round_trip_by_hand():
    assert_same(handmade(), from_text(TEXT))


@pytest.mark.parametrize(
    "line",
    [
        "dyncp plan version 1",
        'strategy "by hand"',
        "shape 4 query heads, 2 kv heads, head_dim 8, v_head_dim 4, float32",
        "ranks 1 nodes x 2",
        "keep kv, wire model",
        'mask "near" weight 2.0',
        r'mask "odd \"n\u00e4me\"\n" weight 0.3333333333333333',
        "block 1: seq 0 [4, 7) qkv rank 1",
        "block 3: seq 1 [0, 5) kv rank 1",
        'rank 0 mask "near"',
        "comp 1: index 5 q b2 kv b3",
        "  rows [0, 4) keys [0, 1 + r)",
        "  rows [0, 2) keys [0 + r, 2)",
        "forward: arena 768 bytes, kept 384 bytes",
        "slot 3: KV b3 g1 arena@0",
        "slot 5: OUT b2 g1 local@4",
        "slot 7: OUT b1 g0 arena@240 wire",
        "  fresh [5]",
        "  comp 1 reads 1 6 writes 5",
        "  comp 1 reads 0 1 2 3 writes 4 5",
        "  7 -> 9",
        "launch step 1",
        "  receive from 1 [3 7]",
        "  send to 1 [8]",
        "  send to 1 [5]",
        "wait step 1",
    ],
)
def test_lines(line):
    assert line in TEXT.split("\n")


def test_digest_line_and_comments():
    plan = handmade()
    assert TEXT.split("\n")[1] == f"digest {plan.digest}"
    without = TEXT.replace(f"digest {plan.digest}\n", "\n# no digest here\n\n")
    assert from_text(without) == plan
    other = without.replace('mask "near" weight 2.0', 'mask "near" weight 2.5')
    assert from_text(other) != plan
    with pytest.raises(ValueError, match=rf"text says digest {plan.digest}, but its content has .*: correct or remove"):
        from_text(other.replace("# no digest here", f"digest {plan.digest}"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (TEXT, "", "line 1 .*the text ends, expected 'dyncp plan version"),
        ("version 1", "version 2", "line 1 .*version 2, expected 1: plan again"),
        ("2 kv heads", "3 kv heads", "line 4 .*4 query heads cannot be shared by 3 KV heads"),
        ("float32", "float8", "line 4 .*got 'shape 4 .*, expected 'shape {q_heads} query heads"),
        ("keep kv", "keep some", "line 6 .*got 'keep some, wire model', expected 'keep {keep:keep}, wire"),
        ('mask "near" weight 2.0', 'mask "near" weight 2.0.0', "line 7 .*could not convert string to float"),
        ('mask "near" weight', r'mask "\x" weight', "line 7 .*Invalid .escape"),
        ("block 1:", "block 2:", "line 10 .*number 2, expected 1: these lines are counted from 0"),
        ("rank 0 mask", "rank 1 mask", r"line 14 .*got 'rank 1 mask \"near\"', expected 'rank 0 mask \"near\"'"),
        ("index 5", "index 2147483648", r"line 17 .*2147483648 is too large, expected less than 2\*\*31"),
        ("keys [0 + r, 2)", "keys [0 + 2r, 2)", r"line 18 .*got '  rows \[0, 2\) keys .*expected '  rows \[{q_start}"),
        ("slot 3: KV b3 g1 arena@0", "slot 3: KV b3 g1 arena0", "line 24 .*expected 'slot {number}: {kind:kind} b"),
        ("slot 3: KV", "slot 3: Kv", "line 24 .*expected 'slot {number}: {kind:kind} b"),
        ("arena@240", "arena@9999999999999999999", r"line 28 .*9999999999999999999 is too large.*2\*\*63"),
        ("reads 1 6 writes 5", "reads 1 6 7 writes 5", "line 47 .*got '  comp 1 reads .*expected '  comp {comp}"),
        ("  7 -> 9", "  7 => 9", "line 44 .*got '  7 => 9', expected .* or '  {src} -> {dst}' or"),
        ("receive from 1 [3 7]", "receive from 1 3 7", r"line 34 .* or '  {way:way} {peer} \[{slots:list}\]'"),
        ('\nrank 1 mask "near"', "", "line 67 .*got 'forward: arena 0 bytes, .*, expected 'rank {rank} mask"),
        ("\nmask", "\nmasks", r"line 7 .*got 'masks \"near\" weight 2.0', expected 'mask {name:text}"),
    ],
)
def test_malformed(old, new, message):
    assert old in TEXT
    with pytest.raises(ValueError, match=message):
        from_text(TEXT.replace(old, new, 1))


def test_text_that_ends_early_or_late():
    lines = TEXT.rstrip("\n").split("\n")
    for stop in range(len(lines)):
        with pytest.raises(ValueError, match=r"the text ends, expected|the plan's text says digest"):
            from_text("\n".join(lines[:stop]))
    with pytest.raises(ValueError, match=r"got 'wait', expected 'wait step {step}'"):
        from_text(TEXT + "wait")
    with pytest.raises(ValueError, match=r"got 'rank 2 mask \"near\"', expected .*"):
        from_text(TEXT + 'rank 2 mask "near"')


def test_numbers_out_of_range():
    with pytest.raises(
        ValueError, match=r"rank 0, mask 'near', forward, instruction 6: src\[0\] is 70, expected 0 to 9"
    ):
        from_text(TEXT.replace("  7 -> 9", "  70 -> 9"))


def test_changed_text():
    """Whatever comes out is either a ValueError or a plan that is written as it was read."""
    rng = random.Random(0)
    for plan in (handmade(), planned(causal_batch(9, 5), ranks=2, keep="kv").plan):
        lines = to_text(plan).split("\n")
        del lines[1]  # the digest would catch everything
        for _ in range(200):
            changed = list(lines)
            at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
            match rng.randrange(4):
                case 0:
                    del changed[at]
                case 1:
                    changed[at], changed[other] = changed[other], changed[at]
                case 2:
                    changed.insert(at, changed[other])
                case 3:
                    line = changed[at] or " "
                    place = rng.randrange(len(line))
                    changed[at] = line[:place] + rng.choice("0123456789 []bgKVQ@,>\u0663") + line[place + 1 :]
            try:
                read = from_text("\n".join(changed))
            except ValueError:
                continue
            assert from_text(to_text(read)) == read
