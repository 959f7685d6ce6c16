"""What rules for com.microsoft's attention operators share: their inputs by name, and their integer masks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from flashonnx.export.rules.base import Fusion, Rewrite
from flashonnx.export.rules.operator_site import FLOATS, Site, is_used, name_of, rewrite_site
from flashonnx.export.rules.scores import RefusalError
from flashonnx.export.values.dims import Dim

DOMAIN = "com.microsoft"
Count = Callable[[], ir.Value]


class Contributed:
    """One operator being rewritten; new nodes go to `builder` and are known to the facts at once.

    Attributes:
        remark: what the user should know of the replacement.
    """

    remark = ""

    def __init__(self, fusion: Fusion, node: ir.Node, names: Sequence[str]) -> None:
        self.fusion = fusion
        self.facts = fusion.facts
        self.node = node
        self.builder = fusion.builder(node)
        self._inputs = dict(zip(names, node.inputs, strict=False))
        self._made: dict[Hashable, ir.Value] = {}

    def input(self, name: str) -> ir.Value | None:
        return self._inputs.get(name)

    def required(self, name: str) -> ir.Value:
        value = self.input(name)
        if value is None:
            raise RefusalError(f"the input '{name}' is absent")
        return value

    def attribute(self, name: str, default: Any = 0) -> Any:
        attribute = self.node.attributes.get(name)
        return attribute.value if attribute is not None else default

    def refuse(self, **reasons: str) -> None:
        """Refuses inputs and attributes that are given: name = why."""
        for name, reason in reasons.items():
            if self.input(name) is not None or self.attribute(name):
                raise RefusalError(f"'{name}' is given: {reason}")

    def outputs(self, count: int, **unsupported: str) -> list[ir.Value]:
        """The first `count` outputs without unused ones at the end; refuses the rest, in order, if used."""
        for value, (name, reason) in zip(self.node.outputs[count:], unsupported.items(), strict=False):
            if is_used(value):
                raise RefusalError(f"the output '{name}' is used: {reason}")
        found = list(self.node.outputs[:count])
        while len(found) > 1 and not is_used(found[-1]):
            found.pop()
        return found

    def dims(self, name: str, *ranks: int) -> tuple[Dim, ...]:
        """The dimensions of an input, which must be as many as one of `ranks`."""
        return self.dims_of(self.required(name), name, *ranks)

    def dims_of(self, value: ir.Value, name: str, *ranks: int) -> tuple[Dim, ...]:
        dims = self.facts.dims(value)
        if dims is None or len(dims) not in ranks:
            found = "an unknown rank" if dims is None else f"{len(dims)} dimensions"
            raise RefusalError(f"'{name}' has {found}, {' or '.join(map(str, ranks))} are expected")
        return dims

    def kind(self, name: str) -> ir.DataType:
        """The type of an input; one that there are kernels for."""
        kind = self.facts.dtype(self.required(name))
        if kind not in FLOATS:
            raise RefusalError(f"'{name}' is {name_of(kind)}; there are kernels for float32, float16 and bfloat16")
        return kind

    def op(self, op_type: str, *inputs: ir.Value | None, dtype: ir.DataType | None = None, **given: Any) -> ir.Value:
        """Adds a node; its first output."""
        start = len(self.builder.nodes)
        result = self.builder.op(op_type, *inputs, dtype=dtype, **given)
        self.facts.learn(self.builder.nodes[start:])
        return result

    def shared(self, key: Hashable, make: Callable[[], ir.Value]) -> ir.Value:
        """What `make` makes of inputs named by `key`, once for all operators of a graph that have the same."""
        key = (type(self), self.node.graph, key)
        if key not in self.fusion.masks:
            self._made[key] = make()
        return self._made.get(key) or self.fusion.masks[key]

    def rewrite(self, site: Site) -> Rewrite:
        """The replacement of the operator; only then do others share what was made for it."""
        site.remark = site.remark or self.remark
        result = rewrite_site(self.fusion, site, self.builder)
        self.fusion.masks.update(self._made)
        return result

    def replaced(self, replaced: Mapping[ir.Value, ir.Value], made: ir.Value, remark: str) -> Rewrite:
        """The replacement of the operator by nodes that are made already, `made` first among their outputs."""
        self.fusion.masks.update(self._made)
        return Rewrite(self.builder, replaced, (self.node,), remark, made)

    def split(self, value: ir.Value, axis: int, sizes: Sequence[int]) -> list[ir.Value]:
        """`value` cut along `axis`."""
        first = self.op("Split", value, self.builder.ints(sizes), outputs=len(sizes), axis=axis)
        node = first.producer()
        assert node is not None
        return list(node.outputs)

    def count(self, value: ir.Value, axis: int) -> ir.Value:
        """The size of one axis, a one-dimensional int64 tensor."""
        shape = self.op("Shape", value, dtype=ir.DataType.INT64)
        return self.op("Gather", shape, self.builder.ints([axis]), axis=0)

    def positions(self, count: ir.Value) -> ir.Value:
        """0, 1, ... below `count`, in int32."""
        number = self.op("Cast", self.op("Squeeze", count), dtype=ir.DataType.INT32, to=ir.DataType.INT32)
        zero, one = (self.builder.constant(np.array(n, np.int32)) for n in (0, 1))
        return self.op("Range", zero, number, one, dtype=ir.DataType.INT32)

    def column(self, value: ir.Value) -> ir.Value:
        """One number a sentence, as (batch, 1, 1, 1)."""
        return self.op("Reshape", value, self.builder.ints([-1, 1, 1, 1]))

    def test(self, op_type: str, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.op(op_type, a, b, dtype=ir.DataType.BOOL)


def attended(op: Contributed, name: str, batch: Dim, queries: Dim, keys: Dim, count: Count) -> ir.Value:
    """Which keys an integer mask leaves, as (batch, 1, 1 or queries, keys).

    Args:
        op: the operator.
        name: its mask, of shape (batch,): lengths; (2 * batch,): ends and starts; (3 * batch + 2,): lengths and more;
            (batch, keys), (batch, queries, keys) or (batch, 1, queries, keys): above 0 attends.
        batch: the sizes.
        queries: see there.
        keys: with those of the past.
        count: makes the number of keys at run time, one-dimensional.
    """
    mask = op.required(name)
    dims = op.dims(name, 1, 2, 3, 4)
    if len(dims) == 1:
        return _by_index(op, name, batch, count)
    if dims[-1] != keys or (len(dims) == 4 and dims[1:3] != (1, queries)):
        raise RefusalError(
            f"'{name}' has shape ({', '.join(map(str, dims))}), and nothing shows that it covers the {keys} keys"
        )
    allowed = op.test("Greater", mask, op.builder.constant(np.array(0, np.int32)))
    missing = {2: [1, 2], 3: [1]}.get(len(dims))
    return op.op("Unsqueeze", allowed, op.builder.ints(missing)) if missing else allowed


def is_lengths(op: Contributed, name: str, batch: Dim) -> bool:
    """Whether an integer mask says no more than a length for each sentence."""
    return op.dims(name, 1, 2, 3, 4) in ((batch,), (batch * 3 + 2,))


def sentence_lengths(op: Contributed, name: str, batch: Dim) -> ir.Value:
    """The lengths of a mask that `is_lengths`, (batch,) int32."""
    mask, (size,) = op.required(name), op.dims(name, 1)
    if size == batch:
        return mask
    zero = op.builder.ints([0])  # lengths come first, then the places of sentences among all tokens
    total = op.op("Sub", op.count(mask, 0), op.builder.ints([2]))
    return op.op("Slice", mask, zero, op.op("Div", total, op.builder.ints([3])), zero)


def _by_index(op: Contributed, name: str, batch: Dim, count: Count) -> ir.Value:
    mask, (size,) = op.required(name), op.dims(name, 1)
    place = op.positions(count())
    if is_lengths(op, name, batch):
        return op.test("Less", place, op.column(sentence_lengths(op, name, batch)))
    if size == batch * 2:
        halves: dict[str, Any] = {"num_outputs": 2} if op.fusion.opset >= 18 else {}
        first = op.op("Split", mask, outputs=2, axis=0, **halves)
        node = first.producer()
        assert node is not None
        ends, starts = (op.column(part) for part in node.outputs)
        return op.test("And", op.test("Less", place, ends), op.test("GreaterOrEqual", place, starts))
    raise RefusalError(f"'{name}' has {size} elements for a batch of {batch}; nothing shows which kind of index it is")


def biased(op: Contributed, allowed: ir.Value, fill: float, bias: ir.Value | None) -> ir.Value:
    """An additive mask: `bias`, and `fill` where `allowed` is false."""
    kind = op.facts.dtype(bias) if bias is not None else ir.DataType.FLOAT
    assert kind is not None
    zero, number = (op.builder.constant(np.array(n, kind.numpy())) for n in (0.0, fill))
    mask = op.op("Where", allowed, zero, number, dtype=kind)
    return mask if bias is None else op.op("Add", bias, mask, dtype=kind)
