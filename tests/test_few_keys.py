"""Few keys, or few tiles of queries: kernels of their own on Hopper, whose blocks hold all keys at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Case
from flashonnx._capi import Library
from seam import Problem

pytestmark = pytest.mark.gpu
_CHANGES: tuple[dict[str, Any], ...] = (
    {"lse": False},
    {},
    {"is_causal": 1, "lse": False},
    {"left": 20, "right": 30},
    {"sinks": True},
    {"mask": "b11k", "mask_fill": "padding", "lse": False},
    {"mask": "1h1k", "mask_dtype": "T", "is_causal": 1},
    {"mask": "b11k", "mask_dtype": "int32", "empty_row": "mean"},
    {"bias": 1.0, "lse": False, "layout": "3hd"},
    {"value_dim": 40, "head_dim": 24, "lse": False},
    {"heads": (6, 2), "lse": False},
)  # fmt: skip


def few(name: str, **changes: Any) -> Case:
    """A problem of the kind, a few tiles of queries."""
    form = {"batch": 2, "heads": (3, 3), "q_length": 150, "head_dim": 64, "layout": "bhsd", "gpu": True} | changes
    if form["layout"] == "3hd":
        form["q_length"] = form["kv_length"]
    return Case(f"few-keys-{name}", **form)


@pytest.mark.parametrize("changes", _CHANGES, ids=lambda x: "-".join(x) or "lse")
@pytest.mark.parametrize("keys", (1, 16, 64, 65, 77, 128, 129, 300, 512))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_few_keys(library: Library, dtype: str, keys: int, changes: dict[str, Any]) -> None:
    """Every part of a tile of keys, every kind of problem."""
    Problem(library, few(f"{keys}", dtype=dtype, kv_length=keys, **changes), "cuda").check()


@pytest.mark.parametrize("q_length", (1, 63, 64, 65, 1000))
@pytest.mark.parametrize("keys", (77, 128, 200))
def test_queries(library: Library, keys: int, q_length: int) -> None:
    """Tiles of queries that are not whole, in layouts whose next rows are another head's."""
    for layout in ("bshd", "bhsd"):
        case = few("queries", dtype="float16", kv_length=keys, q_length=q_length, layout=layout, lse=False)
        Problem(library, case, "cuda").check()


@pytest.mark.parametrize("lengths", ((0, 5), (64, 65), (100, 128)))
@pytest.mark.parametrize("keys", (128, 300))
def test_lengths(library: Library, keys: int, lengths: tuple[int, int]) -> None:
    """NaN behind a batch entry's length, in each tile of keys."""
    case = few("lengths", dtype="float16", kv_length=keys, lengths=lengths, poison=np.nan)
    for more in ({}, {"is_causal": 1}, {"empty_row": "mean"}, {"mask": "b11k"}):
        Problem(library, replace(case, **more), "cuda").check()


@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
@pytest.mark.parametrize("keys", (100, 128, 250))
def test_rising_scores(library: Library, dtype: str, keys: int) -> None:
    """The half of the keys that is met first counts for nothing, for little, or for all, by rows."""
    case = few("rising", dtype=dtype, kv_length=keys, lse=False)
    for half in (slice(None, 64), slice(64, None)):
        inputs = case.inputs()
        inputs["K"][:, :, half] *= inputs["K"].dtype.type(30)
        Problem(library, case, "cuda", inputs=inputs).check()


@pytest.mark.parametrize("keys", (128, 200))
def test_masked_nan(library: Library, keys: int) -> None:
    """Keys that a mask or a window hides are NaN."""
    for changes in ({"mask": "b11k", "mask_fill": "padding"}, {"is_causal": 1, "kv_length": keys + 40}):
        case = few("masked-nan", **({"dtype": "float16", "kv_length": keys, "q_length": 150} | changes), poison=np.nan)
        Problem(library, case, "cuda").check()
