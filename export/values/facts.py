"""What is known about a model's values: symbolic shapes, integers in shape tensors, constants.

One forward pass over the model. Shapes that exporters leave open (torch's decomposed K^T has four
unknown dimensions) are worked out from the graph inputs; declared shapes fill what is then still
open. What is not known gets a name of its own, equal to nothing else, so that an equality of two
dimensions is always a proof.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from flashonnx.export.values import runtime_shapes
from flashonnx.export.values.constants import FOLDED, folded
from flashonnx.export.values.contrib_shapes import TYPED_BY
from flashonnx.export.values.dims import Dim, equal, maximum, minimum
from flashonnx.export.values.operator_shapes import integer, one_hot_row
from flashonnx.export.values.shape_rules import SHAPE_RULES

Dims = tuple[Dim, ...]

_FILLED = 1 << 16  # elements of a tensor that may be one number throughout
_SMALL = 64  # elements: shape tensors and scalars; larger constants are read only on demand


class Facts:
    """Symbolic shapes and small constants of every value of a model."""

    def __init__(self, model: ir.Model) -> None:
        self._dims: dict[ir.Value, Dims | None] = {}
        self._ints: dict[ir.Value, Dims] = {}
        self._constants: dict[ir.Value, np.ndarray] = {}
        self._fixed: dict[ir.Value, bool] = {}
        self._dtypes: dict[ir.Value, ir.DataType] = {}
        self.forms: dict[ir.Value, Any] = {}  # what positions.py finds out
        self._next_name = 0
        self._given: set[str] = set()  # names of sizes in use
        self._aliases: dict[str, Dim] = {}  # names of sizes that have another expression
        self.opset = opset_of(model.opset_imports)
        self._functions = set(model.functions)
        self._graph(model.graph)
        for function in model.functions.values():
            self._nodes(function)

    def dims(self, value: ir.Value | None) -> Dims | None:
        """The dimensions of `value`; None when not even its rank is known."""
        if value is None:
            return None
        if value not in self._dims:
            self._dims[value] = self._declared(value)
        return self._dims[value]

    def rank(self, value: ir.Value | None) -> int | None:
        dims = self.dims(value)
        return None if dims is None else len(dims)

    def ints(self, value: ir.Value | None) -> Dims | None:
        """The elements of a scalar or one-dimensional integer tensor, as far as they are known."""
        if value is None:
            return None
        if value in self._ints:
            return self._ints[value]
        array = self.constant(value)
        if array is None or array.ndim > 1 or array.dtype.kind not in "iu":
            return None
        return tuple(Dim.of(int(item)) for item in array.reshape(-1))

    def constant(self, value: ir.Value | None, limit: int = _SMALL) -> np.ndarray | None:
        """The contents of a constant of at most `limit` elements; None when it is not one."""
        if value is None:
            return None
        if value in self._constants:
            return self._constants[value]
        if value.is_graph_input():  # an initializer that the caller may override
            return None
        tensor = constant_tensor(value)
        if tensor is None or tensor.size > limit:
            return None
        array = tensor.numpy()
        if tensor.size <= _SMALL:
            self._constants[value] = array
        return array

    def scalar(self, value: ir.Value | None) -> float | None:
        """The number in a constant with one element."""
        array = self.constant(value)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None

    def uniform(self, value: ir.Value | None) -> float | None:
        """The number that fills `value`: a constant's only one, also through Expand and the like."""
        for _ in range(16):
            array = self.constant(value, limit=_FILLED)
            if array is not None:
                flat = array.reshape(-1)
                return float(flat[0]) if flat.size and (flat == flat[0]).all() else None
            node = value.producer() if value is not None else None
            if node is None:
                return None
            if node.op_type == "ConstantOfShape" and not node.domain:
                return float(fill.as_tensor().numpy().flat[0]) if (fill := node.attributes.get("value")) else 0.0
            if node.domain or node.op_type not in _REPEATING:
                return None
            value = node.inputs[0]
        return None

    def is_fixed(self, value: ir.Value | None) -> bool:
        """Whether `value` depends on constants alone, not on the model's inputs."""
        if value is None:
            return True
        if value not in self._fixed:
            return value.is_initializer() and not value.is_graph_input()
        return self._fixed[value]

    def dtype(self, value: ir.Value | None, depth: int = 0) -> ir.DataType | None:
        """The element type, followed upstream where the model does not state it."""
        if value is None or value.dtype is not None or depth > 64:
            return value.dtype if value is not None else None
        if value in self._dtypes:
            return self._dtypes[value]
        node, kind = value.producer(), None
        tensor = constant_tensor(value)
        if tensor is not None:
            kind = tensor.dtype
        elif node is not None and node.domain in _KNOWN_DOMAINS:
            if node.op_type == "Cast":
                kind = ir.DataType(node.attributes["to"].as_int())
            elif node.op_type in _TESTS:
                kind = ir.DataType.BOOL
            elif node.op_type in _COUNTS or (node.op_type == "TopK" and value is not node.outputs[0]):
                kind = ir.DataType.INT64
            elif node.op_type == "ConstantOfShape":
                fill = node.attributes.get("value")
                kind = fill.as_tensor().dtype if fill else ir.DataType.FLOAT
            elif node.op_type in SHAPE_RULES and node.inputs:
                kind = self.dtype(node.inputs[TYPED_BY.get(node.op_type, 0)], depth + 1)
        if kind is not None:
            self._dtypes[value] = kind
        return kind

    def set_dims(self, value: ir.Value, dims: Dims) -> None:
        """Makes the shape of a new value known."""
        self._dims[value] = dims

    def learn(self, nodes: Iterable[ir.Node]) -> None:
        """Works out what new nodes make, and writes it down in the model too."""
        for node in nodes:
            self._visit(node)
            for value in node.outputs:
                kind, dims = self.dtype(value), self._dims.get(value)
                if kind is not None:
                    value.type = ir.TensorType(kind)
                    value.shape = shape_of(dims) if dims is not None else value.shape

    def unknown(self) -> Dim:
        """A dimension equal to nothing but itself."""
        self._next_name += 1
        return Dim.atom(f"?{self._next_name - 1}")

    # -- the pass

    def _graph(self, graph: ir.Graph) -> None:
        for value in graph.inputs:
            self._dims[value] = self._declared(value)
            self._given.update(*(dim.atoms for dim in self._dims[value] or ()))
        self._nodes(graph)

    def _nodes(self, nodes: Iterable[ir.Node]) -> None:
        for node in nodes:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    self._graph(attribute.as_graph())
                elif attribute.type == ir.AttributeType.GRAPHS:
                    for graph in attribute.as_graphs():
                        self._graph(graph)
            self._visit(node)

    def _visit(self, node: ir.Node) -> None:
        fixed = all(self.is_fixed(value) for value in node.inputs) and node.op_type not in _RANDOM
        inferred: Sequence[Dims | None] | None = None
        first = self._next_name
        rule = SHAPE_RULES.get(node.op_type) if node.domain in _KNOWN_DOMAINS else None
        if rule is not None:
            with contextlib.suppress(*MALFORMED):
                inferred = rule(self, node)
        elif node.domain not in _OURS and node.op_identifier() not in self._functions:
            inferred = self._asked(node)
        for index, value in enumerate(node.outputs):
            self._fixed[value] = fixed
            known = inferred[index] if inferred and index < len(inferred) else None
            self._dims[value] = self._merge(known, self._declared(value), first)
        if not node.domain and node.outputs:
            with contextlib.suppress(*MALFORMED):
                self._fold(node)

    def _asked(self, node: ir.Node) -> list[Dims | None]:
        """What ONNX Runtime knows of an operator that we do not, if the model says nothing either."""
        if all(value.shape is not None and value.dtype is not None for value in node.outputs if value.name):
            return []
        known = runtime_shapes.inferred(self, node)
        self._dtypes |= {value: kind for value, (_, kind) in known.items() if kind is not None}
        return [known.get(value, (None, None))[0] for value in node.outputs]

    def _declared(self, value: ir.Value) -> Dims | None:
        if value.shape is None:
            tensor = constant_tensor(value)
            return tuple(Dim.of(int(size)) for size in tensor.shape.numpy()) if tensor is not None else None
        dims = []
        for dim in value.shape:
            text = dim if isinstance(dim, int) else dim.value
            if isinstance(text, int):  # some exporters write -1 for any size, and "?"
                dims.append(Dim.of(text) if text >= 0 else self.unknown())
            else:
                known = Dim.parse(str(text)) if text and not text.startswith("?") else self.unknown()
                dims.append(self._aliases.get(str(text), known))
        return tuple(dims)

    def _merge(self, inferred: Dims | None, declared: Dims | None, first: int) -> Dims | None:
        """What is inferred, or declared where that says more; names of unknown sizes from `first` on are new."""
        if inferred is None or declared is None or len(inferred) != len(declared):
            return inferred if inferred is not None else declared
        return tuple(self._same_size(a, b, first) for a, b in zip(inferred, declared, strict=True))

    def _same_size(self, inferred: Dim, declared: Dim, first: int) -> Dim:
        if declared.value is not None or not is_unknown(inferred):
            return declared if declared.value is not None else inferred
        name = str(declared)
        is_new = all(not atom.startswith("?") or int(atom[1:]) >= first for atom in inferred.atoms)
        if is_new or declared.atoms != {name} or name in self._given:
            self._given.update(declared.atoms)
            return declared
        # A name that exporters make up for an output is another word for what its inputs say.
        return self._aliases.setdefault(name, inferred)

    # -- integers and small constants

    def _fold(self, node: ir.Node) -> None:
        output, operator = node.outputs[0], node.op_type
        first = node.inputs[0] if node.inputs else None
        if operator == "Shape":
            dims = self.dims(first)
            if dims is not None:
                part = slice(integer(node, "start", 0), integer(node, "end", len(dims)))
                self._ints[output] = dims[slice(*part.indices(len(dims)))]
        elif operator in ("Squeeze", "Unsqueeze", "Reshape", "Identity", "Cast"):
            rank = self.rank(output)
            keeps = operator != "Cast" or node.attributes["to"].as_int() in _INTEGERS
            numbers = self.ints(first)
            numbers = one_hot_row(self, first) if numbers is None else numbers
            if keeps and rank is not None and rank <= 1 and numbers is not None:
                self._ints[output] = numbers
        elif operator == "Concat":
            parts = [self.ints(value) for value in node.inputs]
            if all(part is not None for part in parts) and self.rank(output) == 1:
                self._ints[output] = tuple(item for part in parts if part for item in part)
        elif operator in ("Gather", "Slice"):
            self._pick(node)
        elif operator in _ARITHMETIC and len(node.inputs) == 2:
            self._arithmetic(node)
        elif operator == "Split":
            self._cut(node)
        elif operator == "Neg" and (known := self.ints(first)) is not None:
            self._ints[output] = tuple(-number for number in known)
        elif operator in ("Equal", "Where", "ConstantOfShape"):
            self._choose(node)
        self._fold_numbers(node)

    def _pick(self, node: ir.Node) -> None:
        data = self.ints(node.inputs[0])
        if data is None or self.rank(node.inputs[0]) != 1:
            return
        if node.op_type == "Gather":
            index = self.constant(node.inputs[1])
            if index is not None and index.ndim <= 1 and (abs(index + 0.5) <= len(data)).all():
                self._ints[node.outputs[0]] = tuple(data[int(i)] for i in index.reshape(-1))
            return
        bounds = [self.ints(value) for value in node.inputs[1:3]]
        steps = self.constant(node.inputs[4]) if len(node.inputs) > 4 else None
        if any(bound is None or len(bound) != 1 or bound[0].value is None for bound in bounds):
            return
        if len(node.inputs) > 4 and node.inputs[4] is not None and (steps is None or steps[0] != 1):
            return
        start, end = (bound[0].value for bound in bounds if bound is not None)
        self._ints[node.outputs[0]] = data[slice(*slice(start, end).indices(len(data)))]

    def _cut(self, node: ir.Node) -> None:
        """What ONNX Runtime makes of several Gathers from one shape."""
        numbers = self.ints(node.inputs[0]) if self.rank(node.inputs[0]) == 1 else None
        for value in node.outputs:
            size = (self.dims(value) or (self.unknown(),))[0].value
            if numbers is None or size is None:
                return
            self._ints[value], numbers = numbers[:size], numbers[size:]

    def _choose(self, node: ir.Node) -> None:
        """TorchScript's Expand: the shape itself where it is not -1, else ones."""
        output = node.outputs[0]
        if node.op_type == "ConstantOfShape":
            dims, fill = self.dims(output), self.uniform(output)
            if dims is not None and len(dims) == 1 and dims[0].value is not None and dims[0].value <= _SMALL:
                self._ints[output] = (Dim.of(int(fill or 0)),) * dims[0].value
            return
        parts = [self.ints(value) for value in node.inputs]
        if node.op_type == "Equal":
            a, b = parts
            if a is None or b is None or len(a) != len(b):
                return
            tests = [equal(x, y) for x, y in zip(a, b, strict=True)]
            if all(test is not None for test in tests):
                self._constants[output] = np.array(tests, bool)
            return
        test = self.constant(node.inputs[0])
        a, b = parts[1:]
        if test is not None and a is not None and b is not None and test.size == len(a) == len(b):
            choices = zip(test.reshape(-1), a, b, strict=True)
            self._ints[output] = tuple(x if chosen else y for chosen, x, y in choices)

    def _arithmetic(self, node: ir.Node) -> None:
        a, b = (self.ints(value) for value in node.inputs[:2])
        if a is None or b is None or not (len(a) == len(b) or 1 in (len(a), len(b))):
            return
        size = max(len(a), len(b)) if a and b else 0
        results = [
            _ARITHMETIC[node.op_type](x, y)
            for x, y in zip(a * (size if len(a) == 1 else 1), b * (size if len(b) == 1 else 1), strict=True)
        ]
        if all(result is not None for result in results):
            self._ints[node.outputs[0]] = tuple(r for r in results if r is not None)

    def _fold_numbers(self, node: ir.Node) -> None:
        if node.op_type not in FOLDED or not node.inputs:
            return
        arrays = []
        for value in node.inputs:
            array = self.constant(value)
            if array is None and (ints := self.ints(value)) is not None:
                numbers = [item.value for item in ints]
                if None not in numbers:
                    array = np.array(numbers, np.int64).reshape(() if self.rank(value) == 0 else -1)
            if array is None:
                return
            arrays.append(array)
        result = folded(node, arrays)
        if result is not None and result.size <= _SMALL:
            self._constants[node.outputs[0]] = result


def constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer or a Constant node; None for any other value."""
    if value is None or value.const_value is not None:
        return value.const_value if value is not None else None
    node = value.producer()
    if node is None or node.op_type != "Constant" or node.domain:
        return None
    attribute = node.attributes.get("value")
    if attribute is not None:  # onnx-ir's own look-up would rename the caller's tensor
        return attribute.as_tensor()
    known = {"value_float", "value_floats", "value_int", "value_ints"} & set(node.attributes)
    return ir.convenience.get_const_tensor(value) if known else None


def opset_of(imports: dict[str, int]) -> int:
    """The version of the default domain."""
    return imports.get("", imports.get("ai.onnx", 0))


def shape_of(dims: Dims) -> ir.Shape:
    """An onnx-ir shape; made-up names are left open."""
    sizes = [dim.value if dim.value is not None else None if is_unknown(dim) else str(dim) for dim in dims]
    return ir.Shape(sizes)


def is_unknown(dim: Dim) -> bool:
    """Whether a dimension holds a made-up name."""
    return any(name.startswith("?") for name in dim.atoms)


# What an operator without the inputs or attributes that it must have raises here: nothing is known of its outputs then,
# and whoever runs the model says what is wrong with it.
MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)
_OURS = ("", "flashonnx")
_KNOWN_DOMAINS = ("", "com.microsoft", "flashonnx")
_TESTS = frozenset(
    ["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor", "Not", "IsNaN", "IsInf"]
)
_COUNTS = frozenset(["Shape", "Size", "NonZero", "ArgMax", "ArgMin"])
_REPEATING = {"Expand", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Tile", "Transpose", "Slice"}
_RANDOM = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli"}
_INTEGERS = {int(ir.DataType.INT64), int(ir.DataType.INT32)}
_ARITHMETIC = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: a.divided_by(b),
    "Min": minimum,
    "Max": maximum,
}
