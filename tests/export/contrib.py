"""Models of one com.microsoft operator, and what is fed to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from models import random_inputs
from onnx import TensorProto, helper

SIZES = ({"b": 2, "s": 5, "t": 7, "p": 3}, {"b": 1, "s": 9, "t": 3, "p": 1}, {"b": 3, "s": 1, "t": 4, "p": 2})
SQUARE = tuple({**size, "t": size["s"]} for size in SIZES)
Shape = list[int | str]
Inputs = dict[str, Shape | None]
INT = {"mask", "lengths", "total"}


def model(op_type: str, inputs: Inputs, outputs: dict[str, Shape], opset: int = 18, **given: Any) -> onnx.ModelProto:
    """One operator; an input without a shape is left out. Integer inputs are those in INT."""
    names = [name if shape is not None else "" for name, shape in inputs.items()]
    node = helper.make_node(op_type, names, list(outputs), name="attention", domain="com.microsoft", **given)
    values = [
        helper.make_tensor_value_info(name, TensorProto.INT32 if name in INT else TensorProto.FLOAT, shape)
        for name, shape in inputs.items()
        if shape is not None
    ]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "g", values, results), opset_imports=opsets, ir_version=10)


def fed(before: onnx.ModelProto, sizes: dict[str, int], seed: int = 0, **inputs: Any) -> dict[str, np.ndarray]:
    return random_inputs(before, sizes, seed) | {name: np.asarray(value) for name, value in inputs.items()}
