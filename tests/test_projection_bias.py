"""Biases of the projections that made Q, K and V: added by the kernel itself, or to rows before it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import cases
import numpy as np
import pytest
from cases import Case
from flashonnx._capi import Library
from seam import Problem
from test_kernels import on_devices


def biased(id: str, length: int = 9, **kwargs: Any) -> Case:
    """Self-attention of biased projections."""
    return cases.square(id, length, **{"bias": 1.0, "head_dim": 20, **kwargs})


SMALL = [
    *cases.typed(*(biased(f"layout-{n}", layout=n) for n in cases.LAYOUTS)),
    *cases.typed(
        *(biased(f"past-{n}", layout=n, past=6, is_causal=1, present=True) for n in ("bhsd", "bshd", "3hd", "gqa"))
    ),
    biased("groups-bshd", layout="bshd", heads=(4, 2)),
    biased("groups-gqa", layout="gqa", heads=(6, 2)),
    biased("values-narrower", layout="bhsd", value_dim=12),
    Case("cross", bias=1.0, q_length=5, kv_length=11, heads=(4, 2), head_dim=20, value_dim=24),
    biased("present-without-past", layout="3hd", present=True),
    biased("empty-rows", layout="3hd", is_causal=1, left=2, lengths=(0, 5), lse=True),
    biased("empty-rows-mean", layout="3hd", mask="b1qk", mask_fill="first row", empty_row="mean"),
    biased("sinks", layout="3hd", sinks=True),
    biased("softcap", layout="3hd", softcap=2.0),
    biased("no-keys", layout="bshd", lse=False, empty_row="mean"),
    replace(biased("no-new-keys", layout="bshd"), kv_length=0),
    biased("no-tokens", 0, layout="3hd_flat"),
]


@on_devices(*SMALL)
def test_small(library: Library, device: str, case: Case) -> None:
    """Every layout, and everything that the bias of K counts for: present keys, lse, sinks, a soft cap."""
    Problem(library, case, device).check()


# Of Hopper's kernels: head sizes of each tiling and between them, over several tiles of queries and keys.
DIMS = ((64, 64), (40, 40), (96, 96), (128, 128), (72, 104), (192, 192), (192, 128), (256, 256), (224, 224))
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": 1},
    "window": {"left": 100, "right": 30},
    "lengths": {"lengths": (0, 210)},
    "lengths-mean": {"lengths": (70, 5), "is_causal": 1, "empty_row": "mean"},
    "empty-rows-mean": {"is_causal": 1, "lengths": (310, 130), "left": 20, "empty_row": "mean"},
    "many-heads": {"heads": (12, 4)},
    "lse": {"lse": True},
    "sinks": {"sinks": True},
    "mask": {"mask": "b11k", "mask_fill": "padding"},
    "biased-scores": {"mask": "b1qk", "mask_dtype": "T"},
}


def _tiled(form: str, dims: tuple[int, int], dtype: str, layout: str, **more: Any) -> Case:
    given = {"heads": (4, 2), **FORMS[form], **more}
    if layout == "3hd":
        given["heads"] = (given["heads"][0],) * 2
    value_dim = dims[1] if layout in ("bshd", "bhsd") else None
    sizes = {"q_length": 310, "kv_length": 310, "head_dim": dims[0], "value_dim": value_dim}
    id = f"{form}-{dims[0]}x{dims[1]}-{dtype}-{layout}"
    return Case(id, dtype=dtype, layout=layout, **{"bias": 1.0, "lse": False, "gpu": True, **sizes, **given})


TILED = [
    *(_tiled(f, d, t, "bshd") for f, d, t in itertools.product(FORMS, DIMS, ("float16", "bfloat16"))),
    *(_tiled(f, (d, d), "float16", lay) for f, d, lay in itertools.product(FORMS, (64, 128), ("3hd", "h3d", "gqa"))
      if not (lay == "h3d" and "heads" in FORMS[f])),
]  # fmt: skip


@on_devices(*(replace(c, heads=(c.heads[0],) * 2) if c.layout == "h3d" else c for c in TILED))
def test_tiles(library: Library, device: str, case: Case) -> None:
    """Over several tiles, also where rows see no key."""
    Problem(library, case, device).check()


@pytest.mark.gpu
@pytest.mark.parametrize("multiprocessors", [1, 7])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_many_tiles(library: Library, dim: int, multiprocessors: int) -> None:
    """More than the multiprocessors take at once: each tile of queries gets its own head's bias, once."""
    case = _tiled("many-heads", (dim, dim), "float16", "3hd", q_length=500, kv_length=500)
    problem = Problem(library, case, "cuda")
    problem.params.device.sm_count = multiprocessors
    problem.check()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_that_are_computed_once_more(library: Library, dtype: str) -> None:
    """What causal masking hides is NaN; and scores beyond what the fast way holds."""
    case = _tiled("causal", (64, 64), dtype, "3hd", is_causal=0, left=0, right=40, poison=None)
    inputs = case.inputs()
    inputs["Q"][:, 200:, 1:] = np.nan  # keys that the first 160 queries do not see
    problem = Problem(library, case, "cuda", inputs=inputs)
    y, expected = problem.run()["Y"], case.reference(inputs)["Y"]
    assert np.isfinite(expected[:, :160]).all()
    np.testing.assert_allclose(y[:, :160].astype(np.float64), expected[:, :160], atol=0.1, rtol=0.02)


@pytest.mark.gpu
def test_who_adds(library: Library) -> None:
    """Hopper's dense kernels add biases themselves; what the bias of K counts for has sums in workspace."""
    case = _tiled("plain", (64, 64), "float16", "3hd")
    plain = Problem(library, replace(case, bias=None), "cuda")
    sums = case.batch * case.q_length * 3 * case.heads[0] * case.head_dim * 2
    own = library.supported(plain.params) == "sm90"
    for form, added_before in (("plain", not own), ("lse", True), ("mask", True)):
        problem = Problem(library, replace(case, **FORMS[form]), "cuda")
        alone = Problem(library, replace(case, bias=None, **FORMS[form]), "cuda")
        more = library.workspace(problem.params) - library.workspace(alone.params)
        assert (more >= sums) if added_before else (more == 0), form
        assert library.workspace_bound(problem.params) >= library.workspace(problem.params)


def test_refusals(library: Library) -> None:
    """A bias of another type, and one beside a cache."""
    problem = Problem(library, biased("types", layout="3hd"), "cpu")
    problem.params.v_bias.dtype = 2
    with pytest.raises(ValueError, match="'v_bias' is expected to have dtype float32, got float16"):
        library.supported(problem.params)
    problem.params.v_bias.dtype = 1
    problem.params.q_bias.data = 0
    with pytest.raises(ValueError, match="'q_bias' is expected to have data"):
        library.run(problem.params, 0)
