"""What operators make of small constants, of which exporters make shapes, paddings and scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

Arrays = Sequence[np.ndarray]


def _transpose(node: ir.Node, arrays: Arrays) -> Any:
    perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else None
    return np.transpose(arrays[0], perm)


def _reshape(node: ir.Node, arrays: Arrays) -> Any:
    if "allowzero" in node.attributes and node.attributes["allowzero"].as_int():
        return arrays[0].reshape(arrays[1])
    own = arrays[0].shape
    return arrays[0].reshape([own[i] if size == 0 else size for i, size in enumerate(arrays[1].tolist())])


def _slice(node: ir.Node, arrays: Arrays) -> Any:
    starts, ends, *rest = (array.reshape(-1).tolist() for array in arrays[1:])
    axes = rest[0] if rest else range(len(starts))
    steps = rest[1] if len(rest) > 1 else [1] * len(starts)
    index = [slice(None)] * arrays[0].ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        index[axis] = slice(start, None if step < 0 and end < -(2**31) else end, step)
    return arrays[0][tuple(index)]


def _concat(node: ir.Node, arrays: Arrays) -> Any:
    return np.concatenate(arrays, node.attributes["axis"].as_int())


def _filled(node: ir.Node, arrays: Arrays) -> Any:
    value = node.attributes["value"].as_tensor().numpy().reshape(-1) if "value" in node.attributes else np.zeros(1, "f")
    return np.full(arrays[0].tolist(), value[0], value.dtype)


def _cast(node: ir.Node, arrays: Arrays) -> Any:
    return arrays[0].astype(ir.DataType(node.attributes["to"].as_int()).numpy())


def _truncated_division(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.trunc(a / b) if a.dtype.kind == "i" else a / b


_MADE: dict[str, Callable[[ir.Node, Arrays], Any]] = {
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Slice": _slice,
    "Concat": _concat,
    "ConstantOfShape": _filled,
    "Cast": _cast,
}
_NUMERIC: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": _truncated_division,
    "Pow": np.power,
    "Sqrt": np.sqrt,
    "Reciprocal": np.reciprocal,
    "Neg": np.negative,
    "Mod": np.mod,
}
FOLDED = frozenset([*_MADE, *_NUMERIC])


def folded(node: ir.Node, arrays: Arrays) -> np.ndarray | None:
    """What `node`, one of FOLDED, makes of constants; None where it is not a tensor of numbers.

    Raises:
        ValueError, IndexError, KeyError, TypeError: the node is not valid.
    """
    if node.op_type == "Cast" and ir.DataType(node.attributes["to"].as_int()) == ir.DataType.STRING:
        return None
    if node.op_type in _MADE:
        return np.asarray(_MADE[node.op_type](node, arrays))
    with np.errstate(all="ignore"):
        result = np.asarray(_NUMERIC[node.op_type](*arrays))
    if arrays[0].dtype.kind != "i" or node.op_type == "Div":
        result = result.astype(arrays[0].dtype)
    return result
