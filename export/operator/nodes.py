"""Writing the nodes of a function body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper


class NodeWriter:
    """Appends nodes with fresh value names."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def op(self, op_type: str, *inputs: str, to: str | None = None, **attributes: Any) -> str:
        """Adds a node with one output, named `to` or freshly, and returns that name."""
        return self.ops(op_type, *inputs, to=[to], **attributes)[0]

    def ops(self, op_type: str, *inputs: str, to: Sequence[str | None], **attributes: Any) -> list[str]:
        """Adds a node with several outputs; "" leaves one out, None names it freshly."""
        stem = f"{op_type.lower()}_{len(self.nodes)}"
        names = [name if name is not None else f"{stem}_{i}" for i, name in enumerate(to)]
        # Cast names its attribute like our own argument.
        attributes = {("to" if name == "to_type" else name): v for name, v in attributes.items()}
        protos = {
            name: numpy_helper.from_array(value) if isinstance(value, np.ndarray) else value
            for name, value in attributes.items()
        }
        self.nodes.append(helper.make_node(op_type, list(inputs), names, **protos))
        return names

    def constant(self, array: np.ndarray) -> str:
        """A constant; the same one is written once."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.op("Constant", value=array)
        return self._constants[key]

    def ints(self, *numbers: int) -> str:
        """A one-dimensional int64 constant."""
        return self.constant(np.array(numbers, np.int64))

    def number(self, value: float) -> str:
        """A float32 scalar."""
        return self.constant(np.array(value, np.float32))

    def size(self, value: str, axis: int) -> str:
        """The size of one axis as a one-dimensional int64 tensor."""
        return self.op("Gather", self.op("Shape", value), self.ints(axis))
