"""Dataflow around a softmax: the product that its input derives from, the product that its output goes into.

"Derives" is meant for any operators in between, those of other domains included, with one bound: what a product with
weights makes is something new (a projection of the next layer, a classifier's head), unless it sums over another axis
than those of queries and keys, as talking heads do. That takes following the softmax's axis, and the axes summed over,
through Transpose, Reshape and their like. What only tells of shapes, positions or conditions does not derive.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator

import onnx_ir as ir
from flashonnx.export.values.dims import product
from flashonnx.export.values.facts import Facts

Axis = int | None  # counted from the last, -1; None when it cannot be followed

# Which inputs a product multiplies, by domain and name.
_PRODUCTS = {
    ("", "MatMul"): (0, 1),
    ("", "Gemm"): (0, 1),
    ("", "Einsum"): (0, 1),
    ("", "MatMulInteger"): (0, 1),
    ("", "QLinearMatMul"): (0, 3),
    ("com.microsoft", "FusedMatMul"): (0, 1),
    ("com.microsoft", "FusedMatMulActivation"): (0, 1),
    ("com.microsoft", "TransposeMatMul"): (0, 1),
    ("com.microsoft", "DynamicQuantizeMatMul"): (0, 1),
    ("com.microsoft", "MatMulIntegerToFloat"): (0, 1),
}
# What always multiplies by weights, or looks back over a sequence: its output is something new.
_WEIGHTED = ["FusedGemm", "GemmFastGelu", "GemmFloat8", "MatMulBnb4", "MatMulFpQ4", "MatMulNBits", "MoE", "QMoE"]
_RECURRENT = ["GRU", "LSTM", "RNN"]
_PROJECTIONS = frozenset([*_WEIGHTED, *_RECURRENT, "ConvTranspose", "DeformConv", "FusedConv", "NhwcConv"])
_CONVOLUTIONS = {"Conv": (0, 1), "ConvInteger": (0, 1), "QLinearConv": (0, 3)}
# Operators that pass on the contents of some inputs only; none: what they make is no data.
_COUNTS = ["Shape", "Size", "NonZero", "ArgMax", "ArgMin", "Range", "ConstantOfShape", "OneHot"]
_TESTS = ["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN", "IsInf"]
_RESHAPES = ["Reshape", "Expand", "Unsqueeze", "Squeeze", "Tile", "Pad", "Slice", "Split", "Trilu", "Resize", "TopK"]
_GATHERS = ["Gather", "GatherElements", "GatherND"]
_REDUCES = ["CumSum", *(f"Reduce{name}" for name in ("Sum", "Max", "Min", "Mean", "Prod", "L2", "LogSumExp"))]
_OF_ONE = [*_RESHAPES, *_GATHERS, *_REDUCES, "QuantizeLinear", "DequantizeLinear", "Dropout"]
_DATA = {
    "Where": (1, 2),
    "ScatterElements": (0, 2),
    "ScatterND": (0, 2),
    **dict.fromkeys([*_COUNTS, *_TESTS, "Loop", "Scan"], ()),
    **dict.fromkeys(_OF_ONE, (0,)),
}
_RESHAPING = frozenset(["Reshape", "Unsqueeze", "Squeeze", "Flatten"])
_VISITS = 512  # values seen from one softmax


@dataclasses.dataclass(frozen=True)
class _Trail:
    """A value on the way.

    Attributes:
        value: where the way has come to.
        axis: the softmax's axis in it.
        spent: axes that products with weights have summed over; None when they sum over an axis that is not followed.
    """

    value: ir.Value
    axis: Axis
    spent: frozenset[Axis] = frozenset()

    def mapped(self, value: ir.Value, through: Callable[[int], Axis]) -> _Trail:
        """The trail at `value`, whose axes are those of here after `through`."""
        axis = through(self.axis) if self.axis is not None else None
        return _Trail(value, axis, frozenset(through(a) if a is not None else None for a in self.spent))


@dataclasses.dataclass(frozen=True)
class _Mixing:
    """A product with weights: the input that is no weight, its axis that is summed over, the one that is new."""

    index: int
    gone: int
    made: int
    labels: tuple[str, str] | None = None  # of Einsum: the input's and the output's


class Flow:
    """Walks upstream and downstream in one model."""

    def __init__(self, facts: Facts, parents: dict[ir.Graph, ir.Node]) -> None:
        """Takes the facts and, for each subgraph, the node that has it."""
        self._facts = facts
        self._parents = parents
        self._learnt: ir.Node | None = None
        self.visits = 0

    def source(self, value: ir.Value | None, axis: Axis) -> ir.Node | None:
        """The product that `value`, normalised over `axis`, derives from; the nearest one of two activations.

        Failing that, one of keys with constant queries: its constant stands on the left, where no projection has it.
        """
        self._learnt = None
        found = self._walk(value, axis, self._before)
        return found if found is not None else self._learnt

    def target(self, value: ir.Value, axis: Axis) -> ir.Node | None:
        """The product with another activation that `value` goes into."""
        return self._walk(value, axis, self._after)

    def derives(self, value: ir.Value | None, origin: ir.Node) -> bool:
        """Whether `value` is made of what `origin` makes, products included."""
        pending, seen = deque([value]), set[ir.Node]()
        while pending and len(seen) < _VISITS:
            value = pending.popleft()
            node = value.producer() if value is not None else None
            if node is origin:
                return True
            if node is not None and node not in seen:
                seen.add(node)
                pending += (node.inputs[index] for index in _data_inputs(node))
        return False

    def _walk(
        self, value: ir.Value | None, axis: Axis, step: Callable[[_Trail], Iterator[_Trail | ir.Node]]
    ) -> ir.Node | None:
        """Breadth first, so that the nearest product is found before the model's other end."""
        if value is None:
            return None
        pending, seen = deque([_Trail(value, axis)]), {value}
        while pending and len(seen) < _VISITS:
            self.visits += 1
            for following in step(pending.popleft()):
                if isinstance(following, ir.Node):
                    return following
                if following.value not in seen:
                    seen.add(following.value)
                    pending.append(following)
        return None

    # -- upstream

    def _before(self, trail: _Trail) -> Iterator[_Trail | ir.Node]:
        node = trail.value.producer()
        if node is None:
            return
        kind = self._kind(node)
        if kind is True:
            if self._may_end(node, trail):
                yield node
            return
        if kind is False:
            return
        if kind is not None:
            if kind.index and kind.gone == -2 and trail.axis == -1 and not trail.spent and self._learnt is None:
                self._learnt = node
            mixed = self._through_weights(
                node, kind, trail, node.inputs[kind.index], kind.made, kind.gone, upstream=True
            )
            if mixed is not None:
                yield mixed
            return
        if node.op_type in ("If", "Loop", "Scan") and not node.domain:
            for graph, _ in subgraphs(node):  # outputs stand at the end; what a loop carries comes first
                index = node.outputs.index(trail.value) - len(node.outputs)
                yield _Trail(graph.outputs[index], None)
        for index in _data_inputs(node):
            value = node.inputs[index]
            if value is not None and not self._facts.is_fixed(value):
                yield self._carried(trail, node, value, upstream=True)

    # -- downstream

    def _after(self, trail: _Trail) -> Iterator[_Trail | ir.Node]:
        for use in trail.value.uses():
            node, index = use.node, use.idx
            kind = self._kind(node)
            if kind is True:
                if index in _PRODUCTS[node.domain, node.op_type] and self._may_end(node, trail, index):
                    yield node
            elif isinstance(kind, _Mixing):
                if index == kind.index:
                    mixed = self._through_weights(
                        node, kind, trail, node.outputs[0], kind.gone, kind.made, upstream=False
                    )
                    if mixed is not None:
                        yield mixed
            elif kind is None and index in _data_inputs(node) and not self._reduces(node, trail.axis):
                for value in node.outputs:
                    yield self._carried(trail, node, value, upstream=False)
        graph = trail.value.graph
        if trail.value.is_graph_output() and isinstance(graph, ir.Graph) and graph in self._parents:
            parent = self._parents[graph]
            index = graph.outputs.index(trail.value) - len(graph.outputs)
            if -index <= len(parent.outputs):
                yield _Trail(parent.outputs[index], None)

    # -- operators

    def _kind(self, node: ir.Node) -> bool | _Mixing | None:
        """True for a product of two activations, False for an end of the way, None for all that passes data on."""
        operands = _PRODUCTS.get((node.domain, node.op_type))
        if operands is None and node.op_type in _CONVOLUTIONS:
            operands = _CONVOLUTIONS[node.op_type]
        if operands is None:
            return False if node.op_type in _PROJECTIONS else None
        if len(node.inputs) <= operands[1]:
            return False
        fixed = [self._facts.is_fixed(node.inputs[index]) for index in operands]
        if not any(fixed):
            return node.op_type not in _CONVOLUTIONS
        if all(fixed):
            return False
        mixing = self._mixing(node, operands[fixed.index(False)], fixed.index(False))
        return mixing if mixing is not None else False

    def _mixing(self, node: ir.Node, index: int, side: int) -> _Mixing | None:
        """How a product with weights treats the axes of its activation, which stands on `side` 0 or 1."""
        if node.op_type in _CONVOLUTIONS:
            rank = self._facts.rank(node.inputs[index])
            return _Mixing(index, 1 - rank, 1 - rank) if rank is not None and side == 0 else None
        if node.op_type == "Einsum":
            equation = node.attributes["equation"].as_string().replace(" ", "").replace("...", "")
            terms, _, output = equation.partition("->")
            labels = terms.split(",")
            if len(labels) != 2 or not output:
                return None
            own = labels[side]
            gone, made = ([x for x in a if x not in b] for a, b in ((own, output), (output, own)))
            if len(gone) != 1 or len(made) != 1:
                return None
            return _Mixing(index, own.index(gone[0]) - len(own), output.index(made[0]) - len(output), (own, output))
        if self._facts.rank(node.inputs[index]) in (None, 1, 2) or node.op_type == "Gemm":
            return None
        flags = [node.attributes[name].as_int() for name in ("transA", "transB") if name in node.attributes]
        return _Mixing(index, -1 - side, -1 - side) if not any(flags) else None

    def _through_weights(
        self,
        node: ir.Node,
        mixing: _Mixing,
        trail: _Trail,
        value: ir.Value | None,
        here: int,
        there: int,
        *,
        upstream: bool,
    ) -> _Trail | None:
        """Past a product with weights: `here` is the axis it changes on the side we come from, `there` beyond it."""
        if value is None or trail.axis in (None, here):
            return None

        def through(axis: int) -> Axis:
            if mixing.labels is None:
                return axis
            own, output = mixing.labels
            a, b = (output, own) if upstream else (own, output)
            if -axis > len(a) or a[axis] not in b:
                return None
            return b.index(a[axis]) - len(b)

        mapped = dataclasses.replace(trail, spent=trail.spent - {here}).mapped(value, through)
        return dataclasses.replace(mapped, spent=mapped.spent | {there}) if mapped.axis is not None else None

    def _may_end(self, node: ir.Node, trail: _Trail, index: int | None = None) -> bool:
        """Whether queries and keys are both whole at the product: no weights have summed over either."""
        if not trail.spent:
            return True
        if node.op_type != "Einsum":
            return trail.axis in (-1, -2) and not trail.spent & {-1, -2, None}
        equation = node.attributes["equation"].as_string().replace(" ", "").replace("...", "")
        terms, _, output = equation.partition("->")
        labels = terms.split(",")
        if len(labels) != 2 or None in trail.spent:
            return False
        own, others = (output, labels) if index is None else (labels[index], [labels[1 - index], output])
        batch = {label for label in own if all(label in other for other in others)}
        return all(-axis <= len(own) and own[axis] in batch for axis in trail.spent if axis is not None)

    def _carried(self, trail: _Trail, node: ir.Node, value: ir.Value, *, upstream: bool) -> _Trail:
        """The trail at `value`, on the other side of `node`."""
        return trail.mapped(value, lambda axis: self._axis(node, trail.value, value, axis, upstream=upstream))

    def _axis(self, node: ir.Node, here: ir.Value, there: ir.Value, axis: int, *, upstream: bool) -> Axis:
        """Where `axis` of `here` is in `there`, on the other side of `node`."""
        a, b = self._facts.dims(here), self._facts.dims(there)
        if node.op_type == "Transpose" and not node.domain:
            rank = len(a) if a is not None else None
            attribute = node.attributes.get("perm")
            if rank is None or -axis > rank:
                return None
            perm = list(attribute.as_ints()) if attribute is not None else list(range(rank))[::-1]
            if sorted(perm) != list(range(rank)):
                return None
            return (perm[axis] if upstream else perm.index(axis + rank)) - rank
        if a is None or b is None:
            return axis if node.op_type not in _RESHAPING else None
        if node.op_type in _RESHAPING:
            if -axis > len(a) or a[axis] == 1:
                return None
            inner = product(a[axis + len(a) + 1 :])
            for index in range(-1, -len(b) - 1, -1):
                if b[index] == a[axis] and product(b[index + len(b) + 1 :]) == inner:
                    return index
            return None
        return axis if -axis <= len(b) and (len(a) == len(b) or node.op_type not in _DATA) else None

    def _reduces(self, node: ir.Node, axis: Axis) -> bool:
        """Whether nothing of `axis` is left behind a reduction."""
        if not node.op_type.startswith("Reduce") or axis is None:
            return False
        attribute = node.attributes.get("axes")
        second = node.inputs[1] if len(node.inputs) > 1 else None
        array = self._facts.constant(second)
        axes = attribute.as_ints() if attribute is not None else array.reshape(-1) if array is not None else None
        rank = self._facts.rank(node.inputs[0])
        if axes is None or rank is None:
            return second is None and attribute is None
        return axis in [int(a) - rank if a >= 0 else int(a) for a in axes]


def _data_inputs(node: ir.Node) -> tuple[int, ...]:
    known = _DATA.get(node.op_type) if not node.domain else None
    if known is None:
        return tuple(range(len(node.inputs)))
    return tuple(index for index in known if index < len(node.inputs))


def subgraphs(node: ir.Node) -> Iterator[tuple[ir.Graph, str]]:
    """The graphs of If, Loop and Scan, each with the name of its attribute."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph(), attribute.name
        elif attribute.type == ir.AttributeType.GRAPHS:
            for graph in attribute.as_graphs():
                yield graph, attribute.name
