"""Key padding that is a length: positions compared with one number a sentence."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import onnx_ir as ir
from flashonnx.export.layout.factors import View
from flashonnx.export.layout.views import peel
from flashonnx.export.masks.forms import Affine
from flashonnx.export.masks.positions import WHOLE, form_of
from flashonnx.export.masks.reducer import MaskReducer
from flashonnx.export.model.build import Builder
from flashonnx.export.rules.scores import Term, is_minus_infinity
from flashonnx.export.values.dims import Dim
from flashonnx.export.values.facts import Facts

# position OP length, and what that is the other way round and negated.
_FLIPPED = {"Less": "Greater", "LessOrEqual": "GreaterOrEqual", "Greater": "Less", "GreaterOrEqual": "LessOrEqual"}
_NEGATED = {"Less": "GreaterOrEqual", "LessOrEqual": "Greater", "Greater": "LessOrEqual", "GreaterOrEqual": "Less"}
_FAR = 1 << 62


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Key j is seen if j < number + shift.

    Attributes:
        mask: the boolean that says so, or the opposite of it.
        view: how the scores have it.
        number: an integer tensor with one number a sentence.
        shift: what is added to it.
    """

    mask: ir.Value
    view: View
    number: ir.Value
    shift: int


def parted(facts: Facts, reducer: MaskReducer, terms: Sequence[Term]) -> Iterator[Term]:
    """The terms, with masks of -inf that are added, or that are two masks in one, as masks by themselves."""
    for term in terms:
        value = reducer.reduce(term.value)
        node = value.producer()
        if node is None or node.domain:
            yield term
        elif term.is_bias and node.op_type == "Where" and term.number > 0:
            numbers = [facts.uniform(item) for item in node.inputs[1:]]
            condition = node.inputs[0]
            if condition is not None and sorted(map(str, numbers)) == ["-inf", "0.0"]:
                mask = Term(condition, -math.inf, is_bias=False, inverted=numbers[0] == 0.0)
                yield from parted(facts, reducer, [mask])
            else:
                yield term
        elif not term.is_bias and node.op_type == ("And" if term.inverted else "Or") and is_minus_infinity(term.number):
            sides = [dataclasses.replace(term, value=item) for item in node.inputs if item is not None]
            yield from parted(facts, reducer, sides)
        else:
            yield term


def comparison(facts: Facts, reducer: MaskReducer, term: Term) -> Iterator[Comparison]:
    """The ways to see a mask as a comparison of positions in its last axis with numbers that are the same along it."""
    if term.is_bias or not is_minus_infinity(term.number):
        return
    for peeled in peel(facts, reducer.reduce(term.value), scales=False):
        value, seen = peeled.view.source, term.inverted
        node = value.producer()
        while node is not None and node.op_type == "Not" and not node.domain and node.inputs[0] is not None:
            seen, value = not seen, node.inputs[0]
            node = value.producer()
        if node is None or node.domain or node.op_type not in _FLIPPED or None in node.inputs:
            continue
        a, b = node.inputs
        for position, number, op in ((a, b, node.op_type), (b, a, _FLIPPED[node.op_type])):
            assert position is not None and number is not None
            first = _first(facts, position)
            relation = op if seen else _NEGATED[op]
            if first is not None and relation.startswith("Less") and _is_whole(facts, position, number):
                yield Comparison(value, peeled.view, number, int(relation == "LessOrEqual") - first)


def _is_whole(facts: Facts, *values: ir.Value) -> bool:
    return all(facts.dtype(value) in WHOLE - {ir.DataType.UINT64} for value in values)


def _first(facts: Facts, value: ir.Value) -> int | None:
    """n, if `value` counts n, n + 1, ... along its last axis and nothing else."""
    form = form_of(facts, value)
    if not isinstance(form, Affine) or not form.steps or form.steps[-1] != 1 or any(form.steps[:-1]):
        return None
    first = form.offset.value
    return first if first is not None and abs(first) < _FAR >> 1 else None


def per_sentence(facts: Facts, builder: Builder, found: Comparison, batch: Dim) -> ir.Value | None:
    """The lengths, (batch,) int64; None where the numbers are not one a sentence."""
    dims = facts.dims(found.number)
    if dims is None or len(dims) < 2 or dims[-1] != 1 or [size for size in dims if size != 1] != [batch]:
        return None
    lengths = builder.op("Reshape", found.number, builder.ints([-1]), dtype=facts.dtype(found.number))
    lengths = builder.op("Cast", lengths, dtype=ir.DataType.INT64, to=ir.DataType.INT64)
    if not found.shift:
        return lengths
    low, high = builder.ints([-_FAR]), builder.ints([_FAR])  # so that the sum is in range
    near = builder.op("Max", builder.op("Min", lengths, high, dtype=ir.DataType.INT64), low, dtype=ir.DataType.INT64)
    return builder.op("Add", near, builder.ints([found.shift]), dtype=ir.DataType.INT64)
