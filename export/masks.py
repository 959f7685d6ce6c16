"""Masks made as small as their broadcast allows, without changing what they mean.

Exporters expand a (batch, keys) padding mask to (batch, 1, queries, keys) through Expand, And with
masks that are true everywhere, and elementwise operators over the expanded tensor. Elementwise
operators commute with broadcasting, so the same values can be computed on the small tensors; what
is true (or zero) everywhere drops out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from flashonnx.export.build import Builder, Names
from flashonnx.export.facts import Facts
from flashonnx.export.views import peel

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
        if node.op_type not in ELEMENTWISE:
            return value
        inputs = [self.reduce(item) if item is not None else None for item in node.inputs]
        if all(a is b for a, b in zip(inputs, node.inputs, strict=True)):
            return value
        builder = Builder(self._names, f"{node.name}_small")
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        result = builder.op(node.op_type, *inputs, dtype=self._facts.dtype(value), **attributes)
        self._facts.learn(builder.nodes)
        assert node.graph is not None
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


def is_true(facts: Facts, value: ir.Value | None, depth: int = 0) -> bool:
    """Whether every element of a boolean tensor is proved to be true."""
    if value is None or depth > 24:
        return False
    constant = facts.constant(value, limit=1 << 20)
    if constant is not None:
        return bool(constant.all())
    node = value.producer()
    if node is None or node.domain:
        return False

    def again(index: int) -> bool:
        return is_true(facts, node.inputs[index], depth + 1)

    if node.op_type in ("And", "Or"):
        return (again(0) and again(1)) if node.op_type == "And" else (again(0) or again(1))
    if node.op_type in ("Not",):
        return is_false(facts, node.inputs[0], depth + 1)
    if node.op_type == "ConstantOfShape":
        return facts.uniform(value) not in (None, 0.0)
    if node.op_type in ("GreaterOrEqual", "Greater", "LessOrEqual", "Less"):
        small, large = node.inputs if node.op_type.startswith("Less") else node.inputs[::-1]
        upper, lower = upper_bound(facts, small), lower_bound(facts, large)
        if upper is None or lower is None:
            return False
        return upper <= lower if node.op_type.endswith("OrEqual") else upper < lower
    if node.op_type in _SHAPING or node.op_type == "Cast":
        return all(is_true(facts, item, depth + 1) for item in _data(node))
    return False


def _data(node: ir.Node) -> list[ir.Value | None]:
    """The inputs whose elements an operator of _SHAPING passes on."""
    return list(node.inputs) if node.op_type == "Concat" else [node.inputs[0]]


def is_false(facts: Facts, value: ir.Value | None, depth: int = 0) -> bool:
    """Whether every element of a boolean tensor is proved to be false."""
    if value is None or depth > 24:
        return False
    if facts.uniform(value) == 0.0:
        return True
    node = value.producer()
    if node is None or node.domain:
        return False
    if node.op_type == "Not":
        return is_true(facts, node.inputs[0], depth + 1)
    if node.op_type in ("And", "Or"):
        tests = [is_false(facts, item, depth + 1) for item in node.inputs]
        return any(tests) if node.op_type == "And" else all(tests)
    if node.op_type in _SHAPING or node.op_type == "Cast":
        return all(is_false(facts, item, depth + 1) for item in _data(node))
    return False


def is_zero(facts: Facts, value: ir.Value | None, depth: int = 0) -> bool:
    """Whether every element of an additive mask is proved to be zero."""
    if value is None or depth > 24:
        return False
    if facts.uniform(value) == 0.0:
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
    if node.op_type == "Add":
        return all(is_zero(facts, item, depth + 1) for item in node.inputs)
    if node.op_type in _SHAPING or node.op_type == "Cast":
        return all(is_zero(facts, item, depth + 1) for item in _data(node))
    return False


def lower_bound(facts: Facts, value: ir.Value | None, depth: int = 0) -> float | None:
    """A number that no element is below."""
    return _bound(facts, value, min, depth)


def upper_bound(facts: Facts, value: ir.Value | None, depth: int = 0) -> float | None:
    """A number that no element is above."""
    return _bound(facts, value, max, depth)


def _bound(facts: Facts, value: ir.Value | None, pick: Callable[..., Any], depth: int) -> float | None:
    if value is None or depth > 24:
        return None
    constant = facts.constant(value)
    if constant is not None and constant.size and constant.dtype.kind in "iufb":
        return float(pick(constant.reshape(-1)))
    node = value.producer()
    if node is None or node.domain:
        return None
    if node.op_type == "Range" and pick is min:
        step = facts.scalar(node.inputs[2])
        return facts.scalar(node.inputs[0]) if step is not None and step > 0 else None
    if node.op_type == "Add":
        bounds = [_bound(facts, item, pick, depth + 1) for item in node.inputs]
        return None if None in bounds else sum(bound for bound in bounds if bound is not None)
    if node.op_type in _SHAPING and node.op_type != "Concat":
        return _bound(facts, node.inputs[0], pick, depth + 1)
    return None
