"""Random problems: whatever combination of shapes, masks and features, on kernels and through ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import DTYPES, Case
from flashonnx._capi import Library
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from nodes import one_node, open_session, run
from seam import Problem, check_outputs

# The same examples every time, no clock; a failure prints the case, and pytest's command repeats it.
settings.register_profile(
    "everyday",
    deadline=None,
    derandomize=True,
    max_examples=150,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
EVERYDAY = settings.get_profile("everyday")
LENGTHS = st.one_of(st.integers(1, 40), st.sampled_from([63, 64, 65, 127, 129, 200]))
DIMS = st.one_of(st.integers(1, 24), st.sampled_from([32, 40, 64, 72, 80, 96, 128, 160, 256]))
MASKS = st.sampled_from(["", "", "bhqk", "b1qk", "b11k", "11qk", "hqk", "h1k", "qk", "1k", "k", "bh1k"])
FILLS = st.sampled_from(["random", "bias", "first row", "all", "last batch", "padding", "finfo.min", "-1e4"])


@st.composite
def problems(draw: st.DrawFn) -> Case:
    """A valid problem."""

    def sometimes(strategy: st.SearchStrategy[Any], otherwise: Any) -> Any:
        return draw(strategy) if draw(st.integers(0, 3)) == 0 else otherwise

    layout = draw(st.sampled_from(["bhsd", "bshd", "bshd", "3hd", "3hd_flat", "h3d", "h3d_flat", "gqa", "time_major"]))
    packed, square = layout not in ("bhsd", "bshd"), layout not in ("bhsd", "bshd", "gqa")
    kv_heads = draw(st.integers(1, 3))
    batch, q_length, head_dim = draw(st.integers(1, 3)), draw(LENGTHS), draw(DIMS)
    kv_length = q_length if packed else draw(LENGTHS)
    past = sometimes(st.integers(0, 70), None)
    lengths = None if past is not None else sometimes(st.tuples(*[st.integers(-1, kv_length + 1)] * batch), None)
    mask, mask_dtype = draw(MASKS), draw(st.sampled_from(["bool", "T", "float32"]))
    keys = kv_length + (past or 0)
    sinks = sometimes(st.just(True), False)
    window = st.integers(0, 80)
    return Case(
        "random",
        dtype=draw(st.sampled_from(DTYPES)),
        batch=batch,
        heads=(kv_heads * (1 if square else draw(st.integers(1, 4))), kv_heads),
        q_length=q_length,
        kv_length=kv_length,
        past=past,
        head_dim=head_dim,
        value_dim=None if packed else sometimes(DIMS, None),
        layout=layout,
        mask=mask,
        mask_dtype=mask_dtype,
        mask_fill=draw(FILLS) if mask else "random",
        mask_keys=sometimes(st.integers(1, keys), None) if mask else None,
        is_causal=draw(st.integers(0, 1)),
        lengths=lengths,
        sinks=sinks,
        scale=sometimes(st.floats(0.015625, 2, width=32), None),
        softcap=sometimes(st.floats(0.5, 30, width=32), 0.0),
        left=sometimes(window, -1),
        right=sometimes(window, -1),
        empty_row="zero" if sinks else draw(st.sampled_from(["zero", "mean"])),
        present=draw(st.booleans()),
        lse=draw(st.booleans()),
        poison=sometimes(st.sampled_from([np.nan, np.inf]), None) if past is None and not packed else None,
    )


@given(case=problems(), shift=st.integers(0, 3))
@settings(EVERYDAY)
def test_kernel(library: Library, device: str, case: Case, shift: int) -> None:
    note(repr(case))
    Problem(library, case, device, shift=shift).check()


@given(case=problems())
@settings(EVERYDAY, max_examples=60)
def test_onnxruntime(device: str, case: Case) -> None:
    ort = pytest.importorskip("onnxruntime")
    if device == "cuda" and "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA")
    note(repr(case))
    inputs = case.inputs()
    check_outputs(case, inputs, run(open_session(one_node(case, inputs), device), case, inputs))
