"""Making nodes: a small builder that gives every new value a name, a type and a place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir


def called(node: ir.Node) -> str:
    """What a node is called in words for people: many exporters name values alone."""
    return node.name or next((value.name for value in node.outputs if value.name), node.op_type)


class Names:
    """Value and node names that are not yet taken in a model."""

    def __init__(self, model: ir.Model) -> None:
        self._taken: set[str] = set()
        for graph in (model.graph, *(f.graph for f in model.functions.values())):
            for node in ir.traversal.RecursiveGraphIterator(graph):
                self._taken.add(node.name or "")
                self._taken.update(value.name or "" for value in node.outputs)
                self._taken.update(value.name or "" for value in node.inputs if value is not None)
            self._taken.update(value.name or "" for value in graph.inputs)
            self._taken.update(graph.initializers)

    def fresh(self, stem: str) -> str:
        name, count = stem, 1
        while name in self._taken:
            name, count = f"{stem}_{count}", count + 1
        self._taken.add(name)
        return name


class Builder:
    """Appends nodes to a list; the caller inserts them."""

    def __init__(self, names: Names, stem: str) -> None:
        self.nodes: list[ir.Node] = []
        self.stem = stem
        self._names = names
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        domain: str = "",
        outputs: int = 1,
        dtype: ir.DataType | None = None,
        shape: Sequence[int | str | None] | None = None,
        overload: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """Adds a node and returns its first output."""
        node = ir.node(op_type, list(inputs), attributes, domain=domain, num_outputs=outputs, overload=overload)
        node.name = self._names.fresh(f"{self.stem}_{op_type}")
        for value in node.outputs:
            value.name = self._names.fresh(f"{self.stem}_{op_type.lower()}")
            kind = dtype or (inputs[0].dtype if inputs and inputs[0] is not None else None)
            if kind is not None:
                value.type = ir.TensorType(kind)
        if shape is not None:
            node.outputs[0].shape = ir.Shape(shape)
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, array: np.ndarray) -> ir.Value:
        """A Constant node holding `array`; the same array is held once."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            tensor = ir.tensor(array)
            self._constants[key] = self.op("Constant", dtype=tensor.dtype, value=tensor)
        return self._constants[key]

    def ints(self, numbers: Sequence[int]) -> ir.Value:
        return self.constant(np.array(numbers, np.int64))
