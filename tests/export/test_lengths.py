"""Positions compared with one number a sentence: lengths of keys, where that is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flashonnx.export import fuse
from models import attributes, fuse_and_check, nodes, op_types, parse
from test_masks import QKV, SELF, Y, masked

SIZES = {"b": 3, "s": 4, "t": 6}
# As numbers of the keys that a sentence has: none, all, more than all, less than none.
LENGTHS = ([3, 6, 1], [0, 6, 2], [6, 9, 5], [-4, 1, 0])
COLUMN = """
    t1 = Shape<start=2,end=3>(k) t = Squeeze(t1) j = Range(i0, t, i1)
    n2 = Constant<value_ints=[1]>() column = Unsqueeze(n, n2)
"""
# Rows that lose every key gave NaN; SDPA's guard turns them into zeros.
HIDE = "m = Where(c, zero, ninf) scores = Add(raw, m)"


def lengths_of(model: Any, expected: bool) -> str:
    (node,) = nodes(model)
    inputs = [*node.input, *[""] * 8]
    assert bool(inputs[6]) is expected, list(node.input)
    return inputs[6]


@pytest.mark.parametrize(
    ("making", "hide"),
    [
        ("seen = Less(j, column) c = Unsqueeze(seen, a12)", HIDE),
        ("seen = Greater(column, j) c = Unsqueeze(seen, a12)", HIDE),
        ("behind = GreaterOrEqual(j, column) seen = Not(behind) c = Unsqueeze(seen, a12)", HIDE),
        ("behind = GreaterOrEqual(j, column) d = Unsqueeze(behind, a12)", "scores = Where(d, ninf, raw)"),
        ("behind = LessOrEqual(column, j) d = Unsqueeze(behind, a12)", "m = Where(d, ninf, zero) scores = Add(raw, m)"),
        ("up = Add(j, i1) seen = LessOrEqual(up, column) c = Unsqueeze(seen, a12)", HIDE),
        ("less = Sub(column, n2) seen = LessOrEqual(j, less) c = Unsqueeze(seen, a12)", HIDE),
        ("w = Unsqueeze(column, a12) c = Less(j, w)", HIDE),
        ("seen = Less(j, column) c4 = Unsqueeze(seen, a12) sh = Shape(raw) c = Expand(c4, sh)", HIDE),
        ("n32 = Cast<to=6>(column) j32 = Cast<to=6>(j) seen = Less(j32, n32) c = Unsqueeze(seen, a12)", HIDE),
    ],
)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_ways_to_say_it(making: str, hide: str, lengths: list[int]) -> None:
    model = parse(masked(COLUMN + making, combine=hide), f"{QKV}, int64[b] n", Y)
    fused, _ = fuse_and_check(model, SIZES, n=np.array(lengths))
    (node,) = nodes(fused)
    lengths_of(fused, True)
    assert not node.input[3]
    assert "Range" not in op_types(fused)


def test_far_numbers() -> None:
    """One more than the largest number is still all keys."""
    model = parse(
        masked(COLUMN + "seen = LessOrEqual(j, column) c = Unsqueeze(seen, a12)", combine=HIDE),
        f"{QKV}, int64[b] n",
        Y,
    )
    far = np.iinfo(np.int64)
    fused, _ = fuse_and_check(model, SIZES, n=np.array([far.max, 2, far.min]))
    lengths_of(fused, True)


def test_a_bias_stays_beside_lengths() -> None:
    making = COLUMN + "seen = Less(j, column) c = Unsqueeze(seen, a12)"
    model = parse(
        masked(making, combine="biased = Add(raw, bias) m = Where(c, zero, ninf) scores = Add(biased, m)"),
        f"{QKV}, int64[b] n, float[1,2,s,t] bias",
        Y,
    )
    fused, _ = fuse_and_check(model, SIZES, n=np.array([3, 6, 1]))
    lengths_of(fused, True)
    assert nodes(fused)[0].input[3]


def test_two_masks_in_one() -> None:
    """Padding in between stays a mask, beside the lengths."""
    making = (
        COLUMN
        + """
        seen = Less(j, column) flags = Cast<to=9>(padding) w = Unsqueeze(seen, a12) wide = Unsqueeze(flags, a12)
        c = And(w, wide)
    """
    )
    model = parse(masked(making, combine=HIDE), f"{QKV}, int64[b] n, int64[b,t] padding", Y)
    fused, _ = fuse_and_check(model, SIZES, {"b": 3, "s": 2, "t": 7}, n=np.array([3, 6, 1]))
    lengths_of(fused, True)
    assert nodes(fused)[0].input[3]


@pytest.mark.parametrize(
    ("making", "hide", "inputs"),
    [
        # the mean over all keys is not that over none
        ("seen = Less(j, column) c = Unsqueeze(seen, a12)", "m = Where(c, zero, low) scores = Add(raw, m)", QKV),
        # a triangle would be counted from the length
        (
            """seen = Less(j, column) s1 = Shape<start=2,end=3>(q) s = Squeeze(s1) r = Range(i0, s, i1)
            i = Unsqueeze(r, n2) low_left = LessOrEqual(j, i) w = Unsqueeze(seen, a12) c = And(w, low_left)""",
            HIDE,
            SELF,
        ),
        # one number a query
        (
            "s1 = Shape<start=2,end=3>(q) s = Squeeze(s1) r = Range(i0, s, i1) i = Unsqueeze(r, n2) "
            "up = Mul(i, i) seen = Less(j, up) a0 = Constant<value_ints=[0,1]>() c = Unsqueeze(seen, a0)",
            HIDE,
            QKV,
        ),
        # from a length on, not up to it
        ("seen = GreaterOrEqual(j, column) c = Unsqueeze(seen, a12)", HIDE, QKV),
        ("twice = Add(j, j) seen = Less(twice, column) c = Unsqueeze(seen, a12)", HIDE, QKV),
        ("f = Cast<to=1>(column) fj = Cast<to=1>(j) seen = Less(fj, f) c = Unsqueeze(seen, a12)", HIDE, QKV),
        ("one1 = Slice(n, o0, n2) seen = Less(j, one1) c = Unsqueeze(seen, a012)", HIDE, QKV),
    ],
)  # fmt: skip
def test_not_lengths(making: str, hide: str, inputs: str) -> None:
    made = "o0 = Constant<value_ints=[0]>() a012 = Constant<value_ints=[0,1,2]>()" + COLUMN + making
    model = parse(masked(made, combine=hide), f"{inputs}, int64[b] n", Y)
    sizes = SIZES | ({"t": SIZES["s"]} if inputs == SELF else {})
    fused, _ = fuse_and_check(model, sizes, n=np.array([3, 4, 1]))
    lengths_of(fused, False)


def test_attention_operator() -> None:
    """A mask of a standard Attention likewise; not if that is causal, or has a past."""
    body = COLUMN + "seen = Less(j, column) c = Unsqueeze(seen, a12) y = Attention{}(q, k, v, c)"
    constants = "i0 = Constant<value_int=0>() i1 = Constant<value_int=1>() a12 = Constant<value_ints=[1,2]>()"
    for attribute, expected in (("", True), ("<is_causal=1>", False)):
        model = parse(constants + body.format(attribute), f"{QKV}, int64[b] n", Y, 24)
        fused, report = fuse(model)
        assert report.fused == 1
        lengths_of(fused, expected)
        assert ("is_causal" in attributes(nodes(fused)[0])) is not expected
