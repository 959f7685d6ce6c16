"""Sizes and shapes at run time, worked out from tensors that stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from flashonnx.export.model.build import Builder, called
from flashonnx.export.rules.scores import RefusalError
from flashonnx.export.values.dims import Dim
from flashonnx.export.values.facts import Facts


class Sizes:
    """Makes nodes whose outputs are sizes that axes of `sources` have, a share of, or a number of times.

    `same` sizes are proved to be equal to others, which the facts do not know.
    """

    def __init__(
        self, facts: Facts, builder: Builder, sources: Sequence[ir.Value], same: Mapping[Dim, Dim] | None = None
    ) -> None:
        self.facts = facts
        self.builder = builder
        self.sources = tuple(sources)
        self.same = same or {}

    def op(self, op_type: str, *inputs: ir.Value, dtype: ir.DataType | None = None, **given: int) -> ir.Value:
        """Adds a node whose shape the facts know at once; its output."""
        start = len(self.builder.nodes)
        kind = dtype or self.facts.dtype(inputs[0])
        result = self.builder.op(op_type, *inputs, dtype=kind, outputs=1, shape=None, overload="", domain="", **given)
        self.facts.learn(self.builder.nodes[start:])
        return result

    def reshape(self, value: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        """`value` in the shape `dims`."""
        if self.facts.dims(value) == tuple(dims):
            return value
        own = self.facts.dims(value) or ()
        missing = [size for size in dims if size.value is None and size not in own]
        inferred = missing[0] if len(missing) == 1 else None
        result = self.op("Reshape", value, self.vector(dims, inferred, (value,)))
        self.facts.set_dims(result, tuple(dims))
        return result

    def expand(self, value: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        """`value` repeated along axes of size one where `dims` are more."""
        own = self.facts.dims(value)
        assert own is not None
        result = self.op("Expand", value, self.vector(dims))
        self.facts.set_dims(result, tuple(a if b == 1 else b for a, b in zip(own, dims, strict=True)))
        return result

    def vector(self, dims: Sequence[Dim], inferred: Dim | None = None, more: Sequence[ir.Value] = ()) -> ir.Value:
        """`dims` as a one-dimensional tensor, -1 for the size `inferred`; `more` tensors have sizes too.

        Raises:
            RefusalError: no tensor has such an axis.
        """
        if all(dim.value is not None for dim in dims):
            return self.builder.ints([dim.value for dim in dims if dim.value is not None])
        parts = [self._size(Dim.of(-1) if dim == inferred else dim, (*more, *self.sources)) for dim in dims]
        return self.op("Concat", *parts, dtype=ir.DataType.INT64, axis=0)

    def _size(self, size: Dim, sources: Sequence[ir.Value]) -> ir.Value:
        if size.value is not None:
            return self.builder.ints([size.value])
        for source in sources:
            for axis, known in enumerate(self.facts.dims(source) or ()):
                dim = self.same.get(known, known)
                share, times = dim.divided_by(size), size.divided_by(dim)
                if share is not None and share.value is not None:
                    return self._scaled("Div", source, axis, share.value)
                if times is not None and times.value is not None and dim.value is None:
                    return self._scaled("Mul", source, axis, times.value)
        raise RefusalError(f"nothing shows the size {size} of the scores at run time")

    def _scaled(self, op_type: str, source: ir.Value, axis: int, number: int) -> ir.Value:
        shape = self.op("Shape", source, dtype=ir.DataType.INT64)
        count = self.op("Gather", shape, self.builder.ints([axis]), dtype=ir.DataType.INT64, axis=0)
        if number == 1:
            return count
        return self.op(op_type, count, self.builder.constant(np.array([number], np.int64)), dtype=ir.DataType.INT64)


def shape_users(value: ir.Value) -> list[ir.Node]:
    """The nodes that only ask for the shape of `value`."""
    return [use.node for use in value.uses() if use.node.op_type == "Shape" and not use.node.domain]


def replaced_shapes(sizes: Sizes, nodes: Sequence[ir.Node]) -> dict[ir.Value, ir.Value]:
    """What Shape nodes of tensors that go give, worked out otherwise.

    Raises:
        RefusalError: it cannot be.
    """
    result = {}
    for node in dict.fromkeys(nodes):
        dims = sizes.facts.dims(node.inputs[0])
        if dims is None:
            raise RefusalError(f"'{called(node)}' asks for the shape of the scores, which the model does not tell")
        start, end = (node.attributes[name].as_int() if name in node.attributes else None for name in ("start", "end"))
        result[node.outputs[0]] = sizes.vector(dims[start:end])
    return result
