"""The comparison can fail: each kind of fault, put into a right answer, is found."""

from __future__ import annotations

from collections.abc import Callable

import cases
import numpy as np
import pytest
from flashonnx.reference import Array
from seam import check_outputs

# The first query sees no key.
_CASE = cases.Case("faults", mask="b1qk", mask_fill="first row", present=True, past=3, q_length=17, kv_length=17)


def _one(y: Array) -> None:
    y[-1, -1, -1] += 0.05  # more than bfloat16's own error


def _mean(y: Array) -> None:
    y[0, 0] = 1e-6


def _neighbour(y: Array) -> None:
    y[:, 1:] = y[:, :-1].copy()


def _nan(y: Array) -> None:
    y[-1, -1, -1] = np.nan


def _infinite(y: Array) -> None:
    y[-1, -1, -1] = -np.inf


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("output", ["Y", "lse", "present_key", "present_value"])
@pytest.mark.parametrize("fault", [None, _one, _mean, _neighbour, _nan, _infinite])
def test_faults_are_found(dtype: str, output: str, fault: Callable[[Array], None] | None) -> None:
    case = cases.replace(_CASE, dtype=dtype)
    inputs = case.inputs()
    right = case.reference(inputs)
    kinds = {"lse": np.dtype(np.float32)}
    outputs = {name: x.astype(kinds.get(name, cases.numpy_dtype(dtype))) for name, x in right.items()}
    if fault is None:
        check_outputs(case, inputs, outputs)
        return
    fault(outputs[output])
    with pytest.raises(AssertionError, match=output):
        check_outputs(case, inputs, outputs)


def test_other_shapes_are_found() -> None:
    inputs = _CASE.inputs()
    y = _CASE.reference(inputs)["Y"].astype(np.float32)
    with pytest.raises(AssertionError, match="shape"):
        check_outputs(_CASE, inputs, {"Y": y[:, :-1]})
