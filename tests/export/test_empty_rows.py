"""Queries from which masks hide every key together: as they were, or the attention is left alone."""

from __future__ import annotations

import numpy as np
import pytest
from flashonnx.export import fuse
from models import attributes, fuse_and_check, nodes, parse
from test_masks import POSITIONS, SELF, Y, masked


@pytest.mark.parametrize(
    ("combine", "is_causal"),
    [
        ("one_mask = Add(raw, causal) scores = Add(one_mask, pad)", False),
        ("one_mask = Where(future, low, raw) scores = Add(one_mask, pad)", False),
        ("one_mask = Add(raw, pad) scores = Where(future, low, one_mask)", True),
        ("one_mask = Where(padded, low, raw) scores = Where(future, ninf, one_mask)", True),
        ("under = Where(padded, low, small) hidden = Where(future, low, raw) scores = Add(hidden, under)", False),
        (
            "first = Less(j, i1) low_first = Where(first, low, zero) twice = Add(raw, low_first) "
            "under = Where(padded, low, small) two = Add(twice, under) scores = Where(future, ninf, two)",
            False,
        ),
        ("one_mask = Where(padded, ninf, raw) scores = Where(future, low, one_mask)", False),
        ("one_mask = Where(future, ninf, raw) scores = Where(padded, low, one_mask)", False),
        ("one_mask = Where(padded, low, raw) scores = Where(future, low, one_mask)", True),
        ("one_mask = Add(raw, pad) scores = Where(future, ninf, one_mask)", True),
    ],
)
def test_rows_that_two_masks_hide_together(combine: str, is_causal: bool) -> None:
    """Left padding under a triangle: a structure only where such rows stay as they were, else a sum of both masks."""
    making = f"""
        {POSITIONS} future = Greater(j, i) causal = Where(future, low, zero)
        kept = Unsqueeze(padding, a12) bool = Cast<to=9>(kept) padded = Not(bool) pad = Where(padded, low, zero)
        small = Cast<to=1>(j)
    """
    model = parse(masked(making, combine=combine), f"{SELF}, int64[b,s] padding", Y)
    for rows in ([[1, 1, 1, 0], [1, 1, 0, 0]], [[0, 0, 1, 1], [0, 1, 1, 1]], [[0, 1, 0, 1], [0, 0, 0, 0]]):
        fused, report = fuse_and_check(model, {"b": 2, "s": 4}, padding=np.array(rows))
        assert ("is_causal" in attributes(nodes(fused)[0])) == is_causal
        assert ("a triangle is left in the mask" in report.sites[0].reason) != is_causal


def test_rows_that_no_mask_keeps() -> None:
    """-1e4 in the place of some scores and beside others: no mask has what a row without keys becomes."""
    making = f"""
        {POSITIONS} future = Greater(j, i) f = Cast<to=1>(padding) off = Sub(one, f) pads = Mul(off, ten)
        pad = Unsqueeze(pads, a12)
    """
    combine = "one_mask = Where(future, ten, raw) scores = Add(one_mask, pad)"
    model = parse(masked(making, combine=combine), f"{SELF}, int64[b,s] padding", Y)
    after, report = fuse(model)
    assert after is model
    assert "would give another value" in report.sites[0].reason


def test_numbers_that_do_not_hide() -> None:
    """-100 is a bias like any other."""
    making = f"{POSITIONS} c = LessOrEqual(j, i) hundred = Constant<value_float=-100.0>() m = Where(c, zero, hundred)"
    fused, _ = fuse_and_check(parse(masked(making), SELF, Y), {"b": 2, "s": 5})
    assert attributes(nodes(fused)[0]) == {"scale": 1.0}
