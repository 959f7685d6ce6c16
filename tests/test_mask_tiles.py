"""Masks that hide whole tiles of keys, which kernels skip: at the ends, inside, everywhere, and all but one key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cases import Case, numpy_dtype
from flashonnx._capi import Library
from flashonnx.reference import Array
from seam import Problem

# Keys of a tile of Hopper's kernel, by head size.
TILES = {64: 128, 96: 128, 128: 128, 192: 96, 256: 64}
COUNT = 7  # tiles of keys, the last one not full

# Whether the keys of a tile are seen, given its number.
STRUCTURES = {
    "first": lambda tile: tile > 0,
    "last": lambda tile: tile < COUNT - 1,
    "ends": lambda tile: 2 <= tile < 4,
    "even": lambda tile: tile % 2 == 0,
    "odd": lambda tile: tile % 2 == 1,
    "hole": lambda tile: tile in (0, 1, 5, 6),
    "none": lambda tile: True,
}


def hidden_tiles(structure: str, case: Case, scattered: bool = False) -> dict[str, Array]:
    """The case's inputs with another mask: of the last batch entry it hides everything. Hidden K and V are NaN."""
    inputs = case.inputs()
    random = np.random.default_rng(5)
    tile = np.arange(case.kv_length) // TILES[case.head_dim]
    seen = np.tile(np.vectorize(STRUCTURES[structure])(tile), (case.batch, 1))
    seen[-1] = False
    if scattered:  # all but one key of each tile that is seen
        seen &= np.arange(case.kv_length) % TILES[case.head_dim] == 77
    for name in "KV":
        inputs[name][~seen] = np.nan
    if case.mask_dtype == "bool":
        mask: Array = seen
    else:
        dtype = numpy_dtype(case.dtype if case.mask_dtype == "T" else case.mask_dtype)
        mask = np.where(seen, random.standard_normal(seen.shape), -np.inf).astype(dtype)
    inputs["attn_mask"] = mask[:, None, None]
    return inputs


def check(library: Library, device: str, structure: str, case: Case, **how: Any) -> None:
    Problem(library, case, device, inputs=hidden_tiles(structure, case, **how)).check()


def case_of(head_dim: int, dtype: str, **changes: Any) -> Case:
    length = TILES[head_dim] * (COUNT - 1) + 30
    base = Case(f"tiles-{head_dim}-{dtype}", dtype=dtype, batch=2, heads=(2, 1), q_length=70, kv_length=length,
                head_dim=head_dim, mask="b11k")  # fmt: skip
    return replace(base, **changes)


@pytest.mark.gpu
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("mask", ["bool", "T", "float32"])
@pytest.mark.parametrize("head_dim", TILES)
def test_structure(library: Library, structure: str, mask: str, head_dim: int) -> None:
    for dtype in ("float16", "bfloat16"):
        check(library, "cuda", structure, case_of(head_dim, dtype, mask_dtype=mask))


@pytest.mark.gpu
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("head_dim", TILES)
def test_with_bounds(library: Library, structure: str, head_dim: int) -> None:
    """Beside causal masks, windows, lengths, soft caps and what rows without keys become."""
    for changes in (
        {"is_causal": 1, "q_length": 420},
        {"is_causal": 1, "left": 150, "q_length": 420, "sinks": True},
        {"lengths": (300, 129), "empty_row": "mean"},
        {"softcap": 4.0, "empty_row": "mean"},
    ):
        check(library, "cuda", structure, case_of(head_dim, "bfloat16", **changes))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["bool", "T"])
@pytest.mark.parametrize("head_dim", TILES)
def test_one_key_a_tile(library: Library, mask: str, head_dim: int) -> None:
    for structure in ("none", "odd"):
        check(library, "cuda", structure, case_of(head_dim, "float16", mask_dtype=mask), scattered=True)


@pytest.mark.gpu
@pytest.mark.parametrize("sentinel", [-np.inf, -1e4, -6e4, -5e5, -2e38])
def test_more_tiles_than_marks(library: Library, sentinel: float) -> None:
    """Tiles that kernels keep no record of are walked over, whatever the mask says; finite biases hide nothing."""
    # Of biases beyond a million the kernel for Hopper keeps a few bits, which lse would show (docs/numerics.md).
    case = Case("tiles-many", dtype="bfloat16", batch=1, heads=(1, 1), q_length=3, kv_length=128 * 518 + 5,
                head_dim=64, mask="b11k", mask_dtype="float32", lse=sentinel > -1e6 or sentinel == -np.inf)  # fmt: skip
    inputs = case.inputs()
    mask = np.full(case.kv_length, sentinel, np.float32)
    mask[[5, 128 * 300, 128 * 511 + 127, 128 * 512, 128 * 517, -1]] = 0
    inputs["attn_mask"] = mask[None, None, None]
    Problem(library, case, "cuda", inputs=inputs).check()
    inputs["attn_mask"][...] = sentinel
    Problem(library, case, "cuda", inputs=inputs).check()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_definition(library: Library, structure: str) -> None:
    """The same on the CPU, which skips nothing."""
    check(library, "cpu", structure, case_of(64, "float32", q_length=3, mask_dtype="T"))
