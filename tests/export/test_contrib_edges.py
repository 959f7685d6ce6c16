"""com.microsoft's Attention where its own kernels disagree, or where what it says means nothing."""

from __future__ import annotations

import numpy as np
import pytest
from contrib import SIZES, Inputs, Shape, fed
from flashonnx.export import fuse
from models import fuse_and_check, run
from test_contrib import naive, projecting


@pytest.mark.parametrize(("fill", "said"), [(-10000.0, False), (float(np.finfo(np.float32).min), True)])
def test_sentences_without_a_token(fill: float, said: bool) -> None:
    """All keys, as on CUDA; where the CPU's kernel gives something else by far, the report says so."""
    before = projecting({"mask": ["b"]}, mask_filter_value=fill)
    after, report = fuse_and_check(before)
    assert ("a sentence of length 0" in report.sites[0].reason) is said
    inputs = fed(before, SIZES[0], mask=np.array([0, 5], np.int32))
    (y,), (expected,) = run(after, inputs), run(before, inputs)
    packed = inputs["x"].astype(np.float64) @ inputs["w"] + inputs["bias"]
    q, k, v = (part.reshape(2, 5, 2, 8) for part in np.split(packed, 3, -1))
    np.testing.assert_allclose(y, naive(q, k, v), atol=1e-5)
    np.testing.assert_allclose(expected[1], y[1], atol=1e-5)
    mean = np.broadcast_to(v.mean(1).reshape(2, 1, 16), y.shape)
    np.testing.assert_allclose(expected[0], mean[0] if said else y[0], atol=2e-3)


@pytest.mark.parametrize("before", ["past", "present"])
def test_past_keys_as_wide_as_values(before: str) -> None:
    """One tensor of both says nothing of keys of one width and values of another."""
    uneven: Inputs = {"w": [12, 40], "bias": [40], "past": [2, "b", 2, "p", 8] if before == "past" else None}
    outputs: dict[str, Shape] = {"y": ["b", "s", 8]}
    outputs |= {"present": [2, "b", 2, "s", 8]} if before == "present" else {}
    original = projecting(uneven, outputs, qkv_hidden_sizes=[16, 16, 8])
    after, report = fuse(original)
    assert after is original
    assert "K and V of widths 16 and 8" in report.sites[0].reason
