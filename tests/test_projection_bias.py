"""Biases of the projections that made Q, K and V: added by the kernel itself, or to rows before it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cases import Case
from cases_bias import BEFORE, FORMS, SMALL, TILED, biased, tiled
from flashonnx._capi import Library
from seam import Buffer, Problem, address
from test_kernels import on_devices
from test_seam import HOPPER


@on_devices(*SMALL)
def test_small(library: Library, device: str, case: Case) -> None:
    """Every layout, and everything that the bias of K counts for: present keys, lse, sinks, a soft cap."""
    Problem(library, case, device).check()


@on_devices(*TILED)
def test_tiles(library: Library, device: str, case: Case) -> None:
    """Over several tiles, also where rows see no key."""
    Problem(library, case, device).check()


@pytest.mark.gpu
@pytest.mark.parametrize("multiprocessors", [1, 7])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_many_tiles(library: Library, dim: int, multiprocessors: int) -> None:
    """More than the multiprocessors take at once: each tile of queries gets its own head's bias, once."""
    case = tiled("many-heads", (dim, dim), "float16", "3hd", q_length=500, kv_length=500)
    problem = Problem(library, case, "cuda")
    problem.params.device.sm_count = multiprocessors
    problem.check()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_that_are_computed_once_more(library: Library, dtype: str) -> None:
    """What a window hides is NaN; and scores beyond what the fast way holds."""
    Problem(library, tiled("plain", (64, 64), dtype, "3hd", fill=40.0, scale=1.0), "cuda").check()
    case = tiled("plain", (64, 64), dtype, "3hd", left=0, right=40)
    inputs = case.inputs()
    inputs["Q"][:, 200:, 1:] = np.nan  # keys that the first 160 queries do not see
    problem = Problem(library, case, "cuda", inputs=inputs)
    y, expected = problem.run()["Y"], case.reference(inputs)["Y"]
    assert np.isfinite(expected[:, :160]).all()
    np.testing.assert_allclose(y[:, :160].astype(np.float64), expected[:, :160], atol=0.1, rtol=0.02)


@pytest.mark.gpu
def test_who_adds(library: Library) -> None:
    """Hopper's dense kernels add biases themselves; what the bias of K counts for has sums in workspace."""
    for form in FORMS:
        case = tiled(form, (64, 64), "float16", "3hd")
        problem, alone = Problem(library, case, "cuda"), Problem(library, replace(case, bias=None), "cuda")
        added_before = form in BEFORE or library.supported(problem.params) != "sm90"
        sums = case.batch * case.q_length * 3 * case.heads[0] * case.head_dim * 2
        more = library.workspace(problem.params) - library.workspace(alone.params)
        assert (more >= sums) if added_before else (more == 0), form
        assert library.workspace_bound(problem.params) >= library.workspace(problem.params)


@pytest.mark.parametrize("field", ["q", "k", "v", "q_bias", "v_bias"])
def test_workspace_by_alignment(library: Library, field: str) -> None:
    """Hopper's kernel that adds biases reads 16 bytes at a time: sums are planned where an address may not allow it."""
    case = tiled("plain", (64, 64), "float16", "bshd")
    params = Problem(library, case, "cpu").params
    params.device = HOPPER
    try:
        if library.supported(params) != "sm90":
            pytest.skip("built without sm90")
    except NotImplementedError:
        pytest.skip("built without CUDA kernels")
    for name in ("q", "k", "v", "q_bias", "k_bias", "v_bias"):
        getattr(params, name).data = 1 << 20
    assert library.workspace(params) == 0
    sums = case.batch * case.q_length * sum(case.heads[i] for i in (0, 1, 1)) * case.head_dim * 2
    for data in (None, (1 << 20) + 2):
        getattr(params, field).data = data
        assert sums <= library.workspace(params) <= library.workspace_bound(params)


@pytest.mark.gpu
@pytest.mark.parametrize("field", ["all", "q", "k", "v", "q_bias", "v_bias"])
@pytest.mark.parametrize("layout", ["bshd", "3hd"])
def test_unaligned(library: Library, field: str, layout: str) -> None:
    """Off by one element from a multiple of 16 bytes, as slices of a larger tensor can be."""
    case = tiled("plain", (64, 64), "float16", layout)
    if field == "all":
        Problem(library, case, "cuda", shift=1).check()
        return
    problem = Problem(library, case, "cuda")
    of_bias, packed = field.endswith("bias"), layout == "3hd"
    name = "bias" if of_bias else "Q" if packed else field.upper()
    array = problem.given[name]
    shifted = Buffer(array.shape, array.dtype, "cuda", array=array, shift=1)
    tensor, base = getattr(problem.params, field), address(problem.inputs[name].view)
    tensor.data += address(shifted.view) - base
    problem.check()


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
