"""Rotary embeddings written out before attention: which tensor is turned, and by which cosines and sines."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir
from flashonnx.export.values.dims import Dim
from flashonnx.export.values.facts import Facts

# What keeps two equal halves equal, along the last axis.
_KEEPS_HALVES = frozenset(["Cos", "Sin", "Cast", "Identity", "Unsqueeze"])
_LONGEST = 12


@dataclasses.dataclass(frozen=True)
class Rotation:
    """x turned: (a, b) of its first `dim` elements become (a cos - b sin, b cos + a sin).

    Attributes:
        source: x, (batch, heads, queries, size).
        cos: (batch or 1, 1, queries, dim), or with dim / 2 if that `is_once`.
        sin: likewise.
        dim: elements that are turned.
        interleaved: a and b are neighbours, as are equal cosines, else they are the halves.
        is_once: each cosine is there for a and b together.
    """

    source: ir.Value
    cos: ir.Value
    sin: ir.Value
    dim: int
    interleaved: bool = False
    is_once: bool = False

    @property
    def angles(self) -> tuple[object, ...]:
        """Equal for tensors that are turned alike."""
        return self.cos, self.sin, self.dim, self.interleaved, self.is_once


def rotation(facts: Facts, value: ir.Value) -> Rotation | None:
    """The rotation that makes `value`, where every part of it is proved."""
    whole, node = _whole(facts, value), _made(value, "Concat")
    if whole is not None or node is None:
        return whole
    if len(node.inputs) != 2 or not _is_last(facts, value, node.attributes["axis"].as_int()):
        return None
    turned, rest = node.inputs
    found = _whole(facts, turned) if turned is not None else None
    if found is None or rest is None:
        return None
    source = _part(facts, found.source, 0, found.dim)
    dims = facts.dims(source) if source is not None else None
    if source is None or dims is None or _part(facts, rest, found.dim, dims[-1].value) is not source:
        return None
    return dataclasses.replace(found, source=source)


def _whole(facts: Facts, value: ir.Value) -> Rotation | None:
    found = _sum(facts, value) or _of_halves(facts, value)
    if found is None:
        return None
    # Both tables are read at the same places.
    batches = [(facts.dims(table) or (None,))[0] for table in (found.cos, found.sin)]
    return found if batches[0] == batches[1] else None


def _of_halves(facts: Facts, value: ir.Value) -> Rotation | None:
    """Concat(a cos - b sin, b cos + a sin) of the halves a and b, the sum in any order."""
    node = _made(value, "Concat")
    if node is None or len(node.inputs) != 2 or not _is_last(facts, value, node.attributes["axis"].as_int()):
        return None
    less, more = _made(node.inputs[0], "Sub"), _made(node.inputs[1], "Add")
    products = [_made(item, "Mul") for made in (less, more) if made is not None for item in made.inputs]
    if len(products) != 4 or None in products:
        return None
    a_cos, b_sin, *others = ([*product.inputs] for product in products if product is not None)
    for b_cos, a_sin in (others, others[::-1]):
        for a, cos in (a_cos, a_cos[::-1]):
            for b, sin in (b_sin, b_sin[::-1]):
                dims = facts.dims(value)
                if {*b_cos} != {b, cos} or {*a_sin} != {a, sin} or None in (a, b, cos, sin) or dims is None:
                    continue
                dim = dims[-1].value
                source = _part(facts, a, 0, dim // 2) if dim is not None and a is not None and len(dims) == 4 else None
                if dim is None or dim % 2 or source is None or b is None or facts.dims(source) != dims:
                    continue
                fits = all(_fits(facts, table, dims[2], dim // 2) for table in (cos, sin))
                if _part(facts, b, dim // 2, dim) is source and fits and cos is not None and sin is not None:
                    return Rotation(source, cos, sin, dim, is_once=True)
    return None


def _sum(facts: Facts, value: ir.Value) -> Rotation | None:
    """X cos + y sin, in any order, where y is (-b, a) for each (a, b) of x."""
    node = _made(value, "Add")
    if node is None:
        return None
    products = [_made(item, "Mul") for item in node.inputs if item is not None]
    for straight, crossed in (products, products[::-1]):
        if straight is None or crossed is None:
            return None
        for half_turned, sin in (crossed.inputs, crossed.inputs[::-1]):
            source = _half_turned(facts, half_turned)
            interleaved = source is None
            source = _pairs_turned(facts, half_turned) if source is None else source
            if source is None or source not in straight.inputs:
                continue
            cos = straight.inputs[1 - straight.inputs.index(source)]
            dims = facts.dims(source)
            assert dims is not None
            dim = dims[-1].value
            if (
                dim is None
                or facts.dims(value) != dims
                or not all(_is_table(facts, table, dims[2], dim, interleaved) for table in (cos, sin))
            ):
                continue
            assert cos is not None and sin is not None
            return Rotation(source, cos, sin, dim, interleaved)
    return None


def _half_turned(facts: Facts, value: ir.Value | None) -> ir.Value | None:
    """x, of which `value` is the second half, negated, and then the first."""
    node = _made(value, "Concat")
    if node is None or value is None or len(node.inputs) != 2:
        return None
    if not _is_last(facts, value, node.attributes["axis"].as_int()):
        return None
    negated, first = _made(node.inputs[0], "Neg"), node.inputs[1]
    dims = facts.dims(value)
    size = dims[-1].value if dims is not None and len(dims) == 4 else None
    if negated is None or first is None or size is None or size % 2:
        return None
    second = negated.inputs[0]
    a = _part(facts, first, 0, size // 2)
    b = _part(facts, second, size // 2, size) if second is not None else None
    known = facts.dims(a) if a is not None else None
    return a if a is b and known is not None and known == dims else None


def _pairs_turned(facts: Facts, value: ir.Value | None) -> ir.Value | None:
    """x, of which `value` is the second element, negated, and then the first of each two neighbours."""
    node, dims = _made(value, "Reshape"), facts.dims(value)
    stacked = _made(node.inputs[0], "Concat") if node is not None else None
    size = dims[-1].value if dims is not None and len(dims) == 4 else None
    if stacked is None or dims is None or size is None or size % 2 or len(stacked.inputs) != 2:
        return None
    if facts.dims(stacked.outputs[0]) != (*dims[:3], Dim.of(size // 2), Dim.of(2)):
        return None
    if not _is_last(facts, stacked.outputs[0], stacked.attributes["axis"].as_int()):
        return None
    second, first = (_made(item, "Unsqueeze") for item in stacked.inputs)
    negated = _made(second.inputs[0], "Neg") if second is not None else None
    if first is None or negated is None:
        return None
    sources = (_every_second(facts, first.inputs[0], 0), _every_second(facts, negated.inputs[0], 1))
    return sources[0] if sources[0] is sources[1] and facts.dims(sources[0]) == dims else None


def _every_second(facts: Facts, value: ir.Value | None, start: int) -> ir.Value | None:
    """What `value` is elements start, start + 2, ... of the last axis of, which are whole pairs."""
    node = _made(value, "Slice")
    if node is None or len(node.inputs) != 5 or node.inputs[0] is None:
        return None
    dims = facts.dims(node.inputs[0])
    numbers = [bound[0].value if (bound := facts.ints(item)) and len(bound) == 1 else None for item in node.inputs[1:]]
    size = dims[-1].value if dims is not None and dims else None
    low, high, axis, step = numbers
    if low is None or high is None or axis is None or size is None or step != 2:
        return None
    places = range(size)[low:high:2]
    return node.inputs[0] if _is_last(facts, node.inputs[0], axis) and places == range(start, size, 2) else None


def _part(facts: Facts, value: ir.Value, start: int, end: int | None) -> ir.Value | None:
    """What `value` is elements [start, end) of the last axis of."""
    if end is None:
        return None
    node = value.producer()
    if node is None or node.domain or node.inputs[0] is None:
        return None
    source, dims = node.inputs[0], facts.dims(node.inputs[0])
    size = dims[-1].value if dims is not None and dims else None
    if size is None:
        return None
    if node.op_type == "Slice" and len(node.inputs) >= 4:
        bounds = [facts.ints(item) for item in node.inputs[1:4]]
        step = facts.ints(node.inputs[4]) if len(node.inputs) > 4 and node.inputs[4] is not None else None
        numbers = [bound[0].value if bound is not None and len(bound) == 1 else None for bound in bounds]
        if None in numbers or (step is not None and [x.value for x in step] != [1]):
            return None
        low, high, axis = (int(number) for number in numbers if number is not None)
        if _is_last(facts, source, axis) and slice(low, high).indices(size)[:2] == (start, end):
            return source
    if node.op_type == "Split":
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
        sizes = facts.ints(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else None
        counts = (
            [item.value for item in sizes] if sizes is not None else [size // len(node.outputs)] * len(node.outputs)
        )
        if not _is_last(facts, source, axis) or None in counts or sum(x for x in counts if x is not None) != size:
            return None
        index = list(node.outputs).index(value)
        before = sum(x for x in counts[:index] if x is not None)
        return source if (before, before + (counts[index] or 0)) == (start, end) else None
    return None


def _fits(facts: Facts, value: ir.Value | None, queries: object, dim: int) -> bool:
    """Whether `value` is (batch or 1, 1, queries, dim)."""
    dims = facts.dims(value)
    return dims is not None and len(dims) == 4 and dims[1] == 1 and dims[2] == queries and dims[3] == dim


def _is_table(facts: Facts, value: ir.Value | None, queries: object, dim: int, interleaved: bool) -> bool:
    """Whether `value` is (batch or 1, 1, queries, dim) and its halves, or neighbours, are equal."""
    if value is None or not _fits(facts, value, queries, dim):
        return False
    for _ in range(_LONGEST):
        node = value.producer()
        if node is None or node.domain:
            return False
        if node.op_type == "Concat":
            last = _is_last(facts, value, node.attributes["axis"].as_int())
            return not interleaved and last and len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
        if node.op_type == "Reshape":
            return interleaved and _is_doubled(facts, node)
        if node.op_type == "Unsqueeze":
            rank, axes = facts.rank(value), facts.ints(node.inputs[1])
            if rank is None or axes is None or any(axis.value in (None, -1, rank - 1) for axis in axes):
                return False
        elif node.op_type == "Mul":
            numbers = [facts.uniform(item) for item in node.inputs]
            if numbers[0] is None and numbers[1] is None:
                return False
            value = node.inputs[0] if numbers[1] is not None else node.inputs[1]
            if value is None:
                return False
            continue
        elif node.op_type not in _KEEPS_HALVES:
            return False
        value = node.inputs[0]
        if value is None:
            return False
    return False


def _is_doubled(facts: Facts, node: ir.Node) -> bool:
    """Whether a Reshape puts every element of the last axis beside itself: (..., n, 1) expanded to (..., n, 2)."""
    expand, dims = _made(node.inputs[0], "Expand"), facts.dims(node.outputs[0])
    before = facts.dims(expand.inputs[0]) if expand is not None else None
    if expand is None or dims is None or before is None or len(before) < 2 or before[-1] != 1:
        return False
    wide = (*before[:-1], Dim.of(2))
    return facts.dims(expand.outputs[0]) == wide and dims == (*before[:-2], before[-2] * 2)


def _made(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """What makes `value`, if it is such an operator."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and not node.domain else None


def _is_last(facts: Facts, value: ir.Value, axis: int) -> bool:
    rank = facts.rank(value)
    return axis == -1 or (rank is not None and axis == rank - 1)
