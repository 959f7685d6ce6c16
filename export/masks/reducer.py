"""Masks made as small as their broadcast allows, without changing what they mean.

Exporters expand a (batch, keys) padding mask to (batch, 1, queries, keys) through Expand, And with
masks that are true everywhere, and elementwise operators over the expanded tensor. Elementwise
operators commute with broadcasting, so the same values can be computed on the small tensors; what
is true (or zero) everywhere drops out.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from flashonnx.export.layout.views import peel
from flashonnx.export.masks.forms import Choice, number_of
from flashonnx.export.masks.positions import WHOLE, form_of, is_always
from flashonnx.export.model.build import Builder, Names
from flashonnx.export.values.facts import Facts

ELEMENTWISE = frozenset(
    [
        "Where",
        "Not",
        "Cast",
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Neg",
        "And",
        "Or",
        "Xor",
        "Equal",
        "Less",
        "LessOrEqual",
        "Greater",
        "GreaterOrEqual",
        "Max",
        "Min",
        "Abs",
        "BitwiseNot",
        "BitwiseAnd",
        "BitwiseOr",
        "CastLike",
    ]
)
_SHAPING = frozenset(
    ["Expand", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Slice", "Gather", "Tile", "Concat"]
)


class MaskReducer:
    """Rewrites masks on their smallest tensors; the same mask is rewritten once per model."""

    def __init__(self, facts: Facts, names: Names) -> None:
        self._facts = facts
        self._names = names
        self._reduced: dict[ir.Value, ir.Value] = {}
        self.made: list[ir.Node] = []

    def reduce(self, value: ir.Value) -> ir.Value:
        """A value that broadcasts to the same tensor as `value`, the smallest that is found.

        New nodes are put right behind the ones they stand for.
        """
        if value not in self._reduced:
            self._reduced[value] = self._reduce(value)
        return self._reduced[value]

    def _reduce(self, value: ir.Value) -> ir.Value:
        node = value.producer()
        if node is None or node.domain:
            return value
        smaller = self._without_repeats(value)
        if smaller is not value:
            return self.reduce(smaller)
        if node.op_type == "And":
            a, b = node.inputs
            for one, other in ((a, b), (b, a)):
                if one is not None and other is not None and is_true(self._facts, one):
                    return self.reduce(other)
        if node.op_type not in ELEMENTWISE or node.graph is None:  # a rule makes it, as small as it gets
            return value
        inputs = [self.reduce(item) if item is not None else None for item in node.inputs]
        if all(a is b for a, b in zip(inputs, node.inputs, strict=True)):
            return value
        builder = Builder(self._names, f"{node.name}_small")
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        result = builder.op(node.op_type, *inputs, dtype=self._facts.dtype(value), **attributes)
        self._facts.learn(builder.nodes)
        node.graph.insert_after(node, builder.nodes)
        self.made += builder.nodes
        return result

    def _without_repeats(self, value: ir.Value) -> ir.Value:
        """The value upstream that `value` repeats, if it has the same axes."""
        for peeled in peel(self._facts, value, scales=False):
            view = peeled.view
            if any(0 < sum(f.repeats for f in axis) < len(axis) for axis in view.axes):
                continue  # an axis that repeats another one (batch merged into heads) does not broadcast
            kept = tuple(tuple(f for f in axis if not f.repeats) for axis in view.axes)
            while kept and not kept[0] and len(kept) > len(view.layout):
                kept = kept[1:]
            if kept == view.layout and view.source is not value:
                return view.source
        return value


def is_true(facts: Facts, value: ir.Value | None) -> bool:
    """Whether every element of a boolean tensor is proved to be true."""
    return is_always(facts, value, True)


def is_false(facts: Facts, value: ir.Value | None) -> bool:
    """Whether every element of a boolean tensor is proved to be false."""
    return is_always(facts, value, False)


def is_zero(facts: Facts, value: ir.Value | None, depth: int = 0) -> bool:
    """Whether every element of an additive mask is proved to be zero."""
    if value is None or depth > 24:
        return False
    if number_of(form_of(facts, value)) == 0.0:
        return True
    node = value.producer()
    if node is None or node.domain:
        return False
    if node.op_type == "Where":
        condition, a, b = node.inputs
        if is_true(facts, condition):
            return is_zero(facts, a, depth + 1)
        if is_false(facts, condition):
            return is_zero(facts, b, depth + 1)
        return is_zero(facts, a, depth + 1) and is_zero(facts, b, depth + 1)
    if node.op_type == "Mul":
        numbers = [facts.uniform(item) for item in node.inputs]
        return 0.0 in numbers and None not in numbers
    if node.op_type == "Add" or node.op_type == "Concat":
        return all(is_zero(facts, item, depth + 1) for item in node.inputs)
    if node.op_type in _SHAPING or node.op_type == "Cast":
        return is_zero(facts, node.inputs[0], depth + 1)
    return False


def largest(facts: Facts, value: ir.Value | None, depth: int = 0) -> float | None:
    """A number that the magnitude of no element exceeds; None where none is known."""
    if value is None or depth > 32:
        return None
    constant = facts.constant(value, limit=1 << 22)
    if constant is not None:
        is_number = constant.dtype.kind in "iufbV"  # V: bfloat16
        return float(np.abs(constant.astype(np.float64)).max(initial=0)) if is_number else None
    form = form_of(facts, value)
    if isinstance(form, Choice):
        return max(abs(form.inside), abs(form.outside))
    if facts.dtype(value) in WHOLE:
        return 2.0**64
    node = value.producer()
    if node is None or node.domain:
        return None

    def of(*items: ir.Value | None) -> list[float | None]:
        return [largest(facts, item, depth + 1) for item in items]

    if node.op_type == "Cast" and facts.dtype(node.inputs[0]) == ir.DataType.BOOL:
        return 1.0
    if node.op_type in _SHAPING - {"Concat"} or node.op_type in ("Cast", "Neg", "Abs", "Relu", "Slice"):
        return of(node.inputs[0])[0]
    if node.op_type == "Div" and (divisor := facts.uniform(node.inputs[1])):
        number = of(node.inputs[0])[0]
        return number / abs(divisor) if number is not None else None
    operands = of(*node.inputs[node.op_type == "Where" :]) if node.op_type in _BOUNDED else [None]
    known = [number for number in operands if number is not None]
    if len(known) < len(operands):
        return None
    return _BOUNDED[node.op_type](known)


_BOUNDED: dict[str, Callable[[list[float]], float]] = {
    "Add": sum,
    "Sub": sum,
    "Mul": math.prod,
    "Where": max,
    "Concat": max,
    "Max": max,
    "Min": max,
}
