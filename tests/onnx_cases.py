"""ONNX's own backend tests of `Attention`: models, inputs and expected outputs, made by the onnx package."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

import numpy as np
import onnx
from flashonnx.reference import Array

# The inputs' last bits, where the expected outputs were computed in the input's dtype.
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}
# Ours has no such output: an attention that never forms the N^2 scores cannot return them.
UNSUPPORTED_OUTPUT = "qk_matmul_output"


@functools.cache
def attention_cases() -> dict[str, Any]:
    """Every unexpanded case by name; each has `.model` and `.data_sets`, a list of (inputs, outputs)."""
    # What `collect_testcases("Attention")` gathers, without the 10 s it spends in the modules of all other operators.
    from onnx.backend.test.case import node

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(f"{node.__name__}.attention")
    cases = node._NodeTestCases
    return {case.name: case for case in cases if [node.op_type for node in case.model.graph.node] == ["Attention"]}


def asks_for_scores(model: onnx.ModelProto) -> bool:
    """Whether the case wants the N^2 scores."""
    outputs = model.graph.node[0].output
    return len(outputs) > 3 and bool(outputs[3])


def assert_expected(outputs: list[Array], expected: list[Array]) -> None:
    """Same dtypes and shapes, and values within TOLERANCE."""
    assert len(outputs) == len(expected)
    for out, right in zip(outputs, expected, strict=True):
        assert (out.dtype, out.shape) == (right.dtype, right.shape)
        tolerance = TOLERANCE[out.dtype.name]
        np.testing.assert_allclose(out.astype(np.float64), right.astype(np.float64), tolerance, tolerance)


def names() -> tuple[list[str], list[str]]:
    """The cases that flashonnx does, and those that ask for the scores."""
    cases = attention_cases()
    scores = [name for name, case in cases.items() if asks_for_scores(case.model)]
    return [name for name in cases if name not in scores], scores
