"""Masks and positions read by meaning: what every element is, evaluated with symbolic indices.

Ranges, comparisons, triangles, and what exporters do to them: gathers by positions, cumulative
sums, differences, slices, casts and broadcasts. Three forms come out: a number linear in the
indices (Affine), a boolean made of inequalities between such numbers (Formula), and a tensor of two
numbers that a Formula chooses between (Choice). What is not understood is a Formula that stands for
itself, or nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from flashonnx.export.masks.forms import (
    Affine,
    Choice,
    Form,
    Formula,
    as_affine,
    by_number,
    choice,
    chosen,
    compared,
    join,
    moved,
    nested,
    number_of,
    of_array,
    of_numbers,
)
from flashonnx.export.masks.indexing import INDEXING, LARGEST_CONSTANT
from flashonnx.export.values.dims import Dim, is_clipped, is_positive_or_zero
from flashonnx.export.values.facts import Dims, Facts

_DEPTH = 96
WHOLE = frozenset(
    ir.DataType[name] for name in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
)
# Types that hold every position of a sequence as it is, and those that hold the numbers of a mask.
COUNTING = frozenset([ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.DOUBLE])
NUMBERS = WHOLE | COUNTING | {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_TESTS: dict[str, Callable[[Any, Any], Any]] = {
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
}


def form_of(facts: Facts, value: ir.Value | None) -> Form | None:
    """What the elements of `value` are; None where nothing is known. A boolean tensor always has a form."""
    return _Reader(facts).read(value)


def is_always(facts: Facts, value: ir.Value | None, truth: bool) -> bool:
    """Whether every element of a boolean tensor is proved to be `truth`."""
    form = form_of(facts, value)
    return isinstance(form, Formula) and form.always is truth


def spread(form: Form, own: Dims, dims: Dims) -> Form | None:
    """`form` of a tensor of dimensions `own` as it is broadcast to `dims`.

    None, or opaque in part, where an axis may be one element that is repeated.
    """
    missing = len(dims) - len(own)

    def of(affine: Affine) -> Affine | None:
        steps = [0] * missing
        for step, size, whole in zip(affine.steps, own, dims[missing:], strict=True):
            is_whole = size == whole or is_clipped(size, whole) or (size.value or 0) > 1
            if step and size != 1 and not is_whole:
                return None
            steps.append(0 if size == 1 else step)
        return Affine(affine.offset, tuple(steps))

    return moved(form, of, keeps=True)


class _Reader:
    """One walk upstream; what is found is kept in the facts."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.depth = 0

    def read(self, value: ir.Value | None) -> Form | None:
        if value is None:
            return None
        forms = self.facts.forms
        if value not in forms:
            if self.depth > _DEPTH:
                return None
            self.depth += 1
            forms[value] = self._named(value, self._form(value))
            self.depth -= 1
        return forms[value]

    def _named(self, value: ir.Value, form: Form | None) -> Form | None:
        """`form` with `value` as its origin; every boolean has one, what is opaque perhaps a smaller one."""
        if isinstance(form, Formula) and not (form.is_opaque and form.origin is not None):
            return dataclasses.replace(form, origin=(value, False))
        if form is None and self.facts.dtype(value) == ir.DataType.BOOL:
            return Formula(origin=(value, False))
        return form

    def _form(self, value: ir.Value) -> Form | None:
        facts = self.facts
        dims = facts.dims(value)
        if dims is None:
            return None
        known = self._known(value, dims)
        if known is not None:
            return known
        node = value.producer()
        rule = _RULES.get(node.op_type) if node is not None and not node.domain else None
        form = rule(self, node) if rule is not None and node is not None else None
        if form is None and facts.dtype(value) in WHOLE and all(size == 1 for size in dims):
            return Affine(Dim.atom(f"@{value.name}"), (0,) * len(dims))  # a number that is known when the model runs
        return form

    def _known(self, value: ir.Value, dims: Dims) -> Form | None:
        """Constants, and numbers that the facts hold."""
        facts = self.facts
        zeros = (0,) * len(dims)
        numbers = facts.ints(value)
        if numbers is not None and len(numbers) == 1:
            return Affine(numbers[0], zeros)
        number = facts.uniform(value)
        if number is not None:
            if facts.dtype(value) == ir.DataType.BOOL:
                return Formula(always=bool(number))
            is_whole = facts.dtype(value) in WHOLE
            return Affine(Dim.of(int(number)), zeros) if is_whole else Choice(Formula(always=True), number, number)
        array = facts.constant(value, limit=LARGEST_CONSTANT)
        return of_array(array) if array is not None else None

    # -- combining

    def operands(self, node: ir.Node, *indices: int) -> list[Form | None]:
        """The forms of inputs, broadcast to the output; opaque ones of booleans that are not understood."""
        dims = self.facts.dims(node.outputs[0])
        if dims is None:
            return [None] * (len(indices) or len(node.inputs))
        forms = [self._operand(node.inputs[index], dims) for index in indices or range(len(node.inputs))]
        if any(isinstance(form, Affine) and any(form.steps) for form in forms):
            forms = [as_affine(form, len(dims)) for form in forms]
        return forms

    def _operand(self, value: ir.Value | None, dims: Dims) -> Form | None:
        form = self.read(value)
        if form is None or value is None:
            return None
        own = self.facts.dims(value)
        assert own is not None
        wide = spread(form, own, dims)
        return Formula(origin=(value, False)) if wide is None and isinstance(form, Formula) else wide

    # -- arithmetic

    def _add(self, node: ir.Node) -> Form | None:
        return self._arithmetic(node, lambda a, b: a + b)

    def _sub(self, node: ir.Node) -> Form | None:
        return self._arithmetic(node, lambda a, b: a - b)

    def _arithmetic(self, node: ir.Node, function: Callable[[Any, Any], Any]) -> Form | None:
        a, b = self.operands(node)
        if isinstance(a, Affine) and isinstance(b, Affine):
            return function(a, b)
        return of_numbers(a, b, function)

    def _mul(self, node: ir.Node) -> Form | None:
        a, b = self.operands(node)
        if isinstance(a, Affine) and isinstance(b, Affine):
            for x, y in ((a, b), (b, a)):
                if not any(x.steps):
                    factor = x.offset.value
                    if factor is not None:
                        return Affine(y.offset * factor, tuple(step * factor for step in y.steps))
                    return Affine(x.offset * y.offset, y.steps) if not any(y.steps) else None
            return None
        if isinstance(a, Choice) and isinstance(b, Choice):
            both = join([a.where, b.where])
            for one, flag in ((a, b), (b, a)):  # a finite number here and there, of which the flag leaves a part
                is_flag = flag.inside == 1.0 and flag.outside == one.outside == 0.0 and math.isfinite(one.inside)
                if is_flag and None is number_of(a) is number_of(b):
                    return choice(both, one.inside, 0.0)
        return of_numbers(a, b, lambda x, y: x * y)

    def _div(self, node: ir.Node) -> Form | None:
        a, b = self.operands(node)
        if isinstance(a, Affine) or number_of(b) in (None, 0.0):
            return None
        return of_numbers(a, b, lambda x, y: x / y)

    def _neg(self, node: ir.Node) -> Form | None:
        form = self.read(node.inputs[0])
        return -form if isinstance(form, Affine) else form.map(lambda x: -x) if isinstance(form, Choice) else None

    def _cast(self, node: ir.Node) -> Form | None:
        form, kind = self.read(node.inputs[0]), ir.DataType(node.attributes["to"].as_int())
        if kind == ir.DataType.BOOL:
            return self.truth(form)
        if isinstance(form, Formula):
            return choice(form, 1.0, 0.0)
        if isinstance(form, Affine) and kind in COUNTING:
            return form
        if isinstance(form, Choice) and kind in NUMBERS:
            numbers = (form.inside, form.outside)
            if kind not in WHOLE or all(number in (0.0, 1.0) for number in numbers):
                with np.errstate(over="ignore"):
                    return form.map(lambda x: np.asarray(x, np.float64).astype(kind.numpy()))
        return None

    def _cumsum(self, node: ir.Node) -> Form | None:
        number = number_of(self.read(node.inputs[0]))
        dims, axis = self.facts.dims(node.outputs[0]), self.facts.scalar(node.inputs[1])
        flags = {name: attribute.as_int() for name, attribute in node.attributes.items()}
        if number is None or number != int(number) or dims is None or axis is None:
            return None
        if flags.get("reverse") and number:
            return None
        steps = [0] * len(dims)
        steps[int(axis)] = int(number)
        return Affine(Dim.of(0 if flags.get("exclusive") else int(number)), tuple(steps))

    def _range(self, node: ir.Node) -> Form | None:
        start, _, step = (self.facts.ints(item) for item in node.inputs)
        if not start or not step or step[0].value is None:
            return None
        return Affine(start[0], (step[0].value,))

    def _trilu(self, node: ir.Node) -> Form | None:
        form, dims = self.read(node.inputs[0]), self.facts.dims(node.outputs[0])
        upper = node.attributes["upper"].as_int() if "upper" in node.attributes else 1
        shift = self.facts.ints(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else (Dim.of(0),)
        if dims is None or len(dims) < 2 or shift is None or len(shift) != 1:
            return None
        above = Affine(-shift[0], (*[0] * (len(dims) - 2), -1, 1))  # j - i - k
        inside = Formula(test=above if upper else -above)
        if isinstance(form, Formula):
            return join([inside, form])
        number = number_of(form)
        if number is not None:
            return choice(inside, number, 0.0)
        if isinstance(form, Choice) and form.outside == 0.0:
            return choice(join([inside, form.where]), form.inside, 0.0)
        return None

    # -- tests

    def truth(self, form: Form | None) -> Formula | None:
        """Where a tensor is not zero."""
        if isinstance(form, Choice):
            return by_number(form, lambda x: x != 0)
        if isinstance(form, Affine):
            if form.offset.value is not None and not any(form.steps):
                return Formula(always=form.offset != 0)
            return join([Formula(test=form.shifted(-1)), Formula(test=(-form).shifted(-1))], is_all=False)
        return form

    def _not(self, node: ir.Node) -> Form | None:
        form = self.read(node.inputs[0])
        return ~form if isinstance(form, Formula) else None

    def _and(self, node: ir.Node) -> Form | None:
        return self._joined(node, is_all=True)

    def _or(self, node: ir.Node) -> Form | None:
        return self._joined(node, is_all=False)

    def _joined(self, node: ir.Node, *, is_all: bool) -> Form | None:
        parts = [form for form in self.operands(node) if isinstance(form, Formula)]
        return join(parts, is_all=is_all) if len(parts) == len(node.inputs) else None

    def _compare(self, node: ir.Node) -> Form | None:
        a, b = self.operands(node)
        strict, flipped = "OrEqual" not in node.op_type, node.op_type.startswith("Greater")
        if isinstance(a, Affine) and isinstance(b, Affine):
            difference = a - b if flipped else b - a
            return self._not_negative(difference.shifted(-int(strict)), node)
        distance = self._distance(node, strict, flipped)
        if distance is not None:
            return distance
        return compared(a, b, _TESTS[node.op_type])

    def _equal(self, node: ir.Node) -> Form | None:
        a, b = self.operands(node)
        if isinstance(a, Affine) and isinstance(b, Affine):
            sides = [self._not_negative(side, node) for side in (a - b, b - a)]
            return join(sides)
        if isinstance(a, Formula) or isinstance(b, Formula):
            return None
        return compared(a, b, np.equal)

    def _not_negative(self, number: Affine, node: ir.Node) -> Formula:
        dims = self.facts.dims(node.outputs[0])
        assert dims is not None
        if is_positive_or_zero(number.lowest(dims)):
            return Formula(always=True)
        if is_positive_or_zero((-number).shifted(-1).lowest(dims)):
            return Formula(always=False)
        return Formula(test=number)

    def _distance(self, node: ir.Node, strict: bool, flipped: bool) -> Formula | None:
        """A comparison with |x|: it is at most a limit where x and -x are."""
        dims = self.facts.dims(node.outputs[0])
        for index, item in enumerate(node.inputs):
            inner = item.producer() if item is not None else None
            if inner is None or inner.op_type != "Abs" or inner.domain or dims is None:
                continue
            limit, number = self._operand(node.inputs[1 - index], dims), self._operand(inner.inputs[0], dims)
            if not isinstance(limit, Affine) or not isinstance(number, Affine):
                return None
            is_within = (index == 0) is not flipped  # |x| <= limit, not limit <= |x|
            limit = limit.shifted(-int(strict is is_within))
            within = join([self._not_negative(limit - side, node) for side in (number, -number)])
            return within if is_within else ~within
        return None

    def _where(self, node: ir.Node) -> Form | None:
        condition, a, b = self.operands(node)
        if not isinstance(condition, Formula):
            return None
        if condition.always is not None:
            return a if condition.always else b
        if isinstance(a, Formula) and isinstance(b, Formula):
            return chosen(condition, a, b)
        if a == b and isinstance(a, Affine):
            return a
        x, y = number_of(a), number_of(b)
        if x is not None and y is not None:
            return choice(condition, x, y)
        if x is not None and isinstance(b, Choice):
            return nested(~condition, b, x)
        if y is not None and isinstance(a, Choice):
            return nested(condition, a, y)
        return None


_RULES: dict[str, Callable[[_Reader, ir.Node], Form | None]] = {
    **INDEXING,
    **dict.fromkeys(_TESTS, _Reader._compare),
    "Add": _Reader._add,
    "Sub": _Reader._sub,
    "Mul": _Reader._mul,
    "Div": _Reader._div,
    "Neg": _Reader._neg,
    "Cast": _Reader._cast,
    "CumSum": _Reader._cumsum,
    "Range": _Reader._range,
    "Trilu": _Reader._trilu,
    "Not": _Reader._not,
    "And": _Reader._and,
    "Or": _Reader._or,
    "Equal": _Reader._equal,
    "Where": _Reader._where,
}
