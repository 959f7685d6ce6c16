"""Lengths of batch entries over many tiles of keys: what stands behind them is never seen, wherever a tile is cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import Case
from flashonnx._capi import Library
from seam import Problem

pytestmark = pytest.mark.gpu
_BASE = Case("key-lengths", q_length=70, kv_length=700, heads=(2, 1), layout="bhsd", poison=np.nan)


@pytest.mark.parametrize("lengths", ((1, 130), (128, 129), (0, 511)))
@pytest.mark.parametrize("head_dim", (64, 96, 128, 192, 256))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_what_stands_behind(library: Library, dtype: str, head_dim: int, lengths: tuple[int, int]) -> None:
    """NaN behind the length, in the only tile of keys, in the last one, and in one that causal rows hardly reach."""
    case = replace(_BASE, id=f"key-lengths-{lengths[0]}-{head_dim}", dtype=dtype, head_dim=head_dim, lengths=lengths)
    for more in ({}, {"is_causal": 1}, {"left": 90, "right": 20}, {"q_length": 200}):
        Problem(library, replace(case, **more), "cuda").check()
