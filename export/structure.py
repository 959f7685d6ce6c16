"""Masks that are really structure: causal triangles and windows, proved from how they are made.

A boolean mask over (queries i, keys j) is read as a conjunction. What compares positions becomes
bounds on j - i; what does not stays a mask. Positions are ranges (Range, through any layout),
triangles are Trilu of a filled tensor or a constant one.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir
from flashonnx.export.dims import Dim, is_clipped
from flashonnx.export.facts import Facts
from flashonnx.export.views import peel

_LARGEST_CONSTANT = 1 << 24
# Types that hold every position of a sequence as it is.
_COUNTING = {int(kind) for kind in (ir.DataType.INT32, ir.DataType.INT64, ir.DataType.FLOAT, ir.DataType.DOUBLE)}
_FLIPPED = {"LessOrEqual": "Greater", "Greater": "LessOrEqual", "Less": "GreaterOrEqual", "GreaterOrEqual": "Less"}


@dataclasses.dataclass(frozen=True)
class Structure:
    """Keys j that query i may see: i - left <= j <= i + right, and where every one of `rest` is.

    None is no bound. `rest` holds (value, inverted): what must be true, or false if inverted.
    """

    left: int | None = None
    right: int | None = None
    rest: tuple[tuple[ir.Value, bool], ...] = ()

    @property
    def is_bounded(self) -> bool:
        return self.left is not None or self.right is not None

    def __and__(self, other: Structure) -> Structure:
        def smaller(a: int | None, b: int | None) -> int | None:
            return b if a is None else a if b is None else min(a, b)

        return Structure(smaller(self.left, other.left), smaller(self.right, other.right), self.rest + other.rest)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The scores that a mask covers: so many queries and keys, query i at position i + offset."""

    queries: Dim
    keys: Dim
    offset: Dim

    def is_covered(self, facts: Facts, value: ir.Value) -> bool:
        """Whether no axis of `value`, which broadcasts to the scores, may be one that is repeated.

        A triangle of a single row or column says the same of every query or key: no bound on j - i.
        """
        dims = facts.dims(value)
        if dims is None or len(dims) < 2:
            return False
        return all(
            size == whole or is_clipped(size, whole) or (size.value or 0) > 1
            for size, whole in zip(dims[-2:], (self.queries, self.keys), strict=True)
        )


def read(facts: Facts, value: ir.Value, grid: Grid, *, inverted: bool = False) -> Structure:
    """`value` (or its negation) as a structure; everything in `rest` if it is none.

    The bounds are relative to the queries' positions.
    """
    node = value.producer()
    if node is not None and not node.domain:
        first = node.inputs[0] if node.inputs else None
        if node.op_type == "Not" and first is not None:
            return read(facts, first, grid, inverted=not inverted)
        if node.op_type in ("Cast", "Identity") and first is not None and facts.dtype(first) == ir.DataType.BOOL:
            return read(facts, first, grid, inverted=inverted)
        joins = "Or" if inverted else "And"
        if node.op_type == joins and None not in node.inputs:
            a, b = node.inputs
            assert a is not None and b is not None
            return read(facts, a, grid, inverted=inverted) & read(facts, b, grid, inverted=inverted)
        if node.op_type in _FLIPPED:
            bounds = _comparison(facts, node, grid, inverted)
            if bounds is not None:
                return bounds
        if node.op_type == "Equal":
            a, b = node.inputs
            for data, number in ((a, b), (b, a)):
                if data is not None and facts.uniform(number) == 0.0:
                    bounds = _triangle(facts, data, grid, inverted=not inverted)
                    if bounds is not None:
                        return bounds
    bounds = _triangle(facts, value, grid, inverted=inverted)
    return bounds if bounds is not None else Structure(rest=((value, inverted),))


def read_bias(facts: Facts, value: ir.Value, grid: Grid) -> tuple[Structure, float] | None:
    """An additive mask as (structure, fill): 0 where the structure allows, `fill` elsewhere."""
    for _ in range(8):
        array = facts.constant(value, limit=_LARGEST_CONSTANT)
        if array is not None:
            return _constant_bias(array)
        node = value.producer()
        if node is None or node.domain:
            return None
        if node.op_type in ("Cast", "Identity") and node.inputs[0] is not None:
            value = node.inputs[0]
            continue
        break
    else:
        return None
    if node.op_type == "Where":
        condition = node.inputs[0]
        a, b = (facts.uniform(item) for item in node.inputs[1:])
        if condition is None or a is None or b is None or 0.0 not in (a, b):
            return None
        return (read(facts, condition, grid), b) if a == 0.0 else (read(facts, condition, grid, inverted=True), a)
    if node.op_type == "Trilu":
        fill = facts.uniform(node.inputs[0])
        bounds = _triangle(facts, value, grid, inverted=True)
        if fill is not None and bounds is not None:
            return bounds, fill
    return None


def _comparison(facts: Facts, node: ir.Node, grid: Grid, inverted: bool) -> Structure | None:
    """Bounds from a comparison of a query position with a key position."""
    operator = _FLIPPED[node.op_type] if inverted else node.op_type
    left, right = (_position(facts, item) for item in node.inputs)
    if left is None or right is None or {left[0], right[0]} != {-1, -2} or not grid.is_covered(facts, node.outputs[0]):
        return None
    if operator.startswith("Greater"):
        left, right = right, left
    # left + offset <= right + offset, or < for the strict ones
    distance = (right[1] - left[1] + (-grid.offset if left[0] == -1 else grid.offset)).value
    if distance is None:
        return None
    if "OrEqual" not in operator:
        distance -= 1
    if left[0] == -1:  # j <= i + distance
        return Structure(right=distance) if distance >= 0 else None
    return Structure(left=distance) if distance >= 0 else None  # i <= j + distance


def _position(facts: Facts, value: ir.Value | None, depth: int = 0) -> tuple[int, Dim] | None:
    """(axis from the end, offset) of a tensor whose elements are offset + index along the axis."""
    if value is None or depth > 8:
        return None
    for peeled in peel(facts, value, scales=False):
        view, node = peeled.view, peeled.view.source.producer()
        axis = 0
        if len(view.layout) == 1 and view.layout[0]:
            places = [i - len(view.axes) for i, factors in enumerate(view.axes) if factors == view.layout[0]]
            axis = places[0] if len(places) == 1 else 0
        if axis and (start := _range_start(facts, view.source)) is not None:
            return axis, start
        if node is None or node.domain:
            continue
        if node.op_type == "Cast" and node.attributes["to"].as_int() not in _COUNTING:
            continue
        if view.source is value and node.op_type in ("Add", "Sub", "Cast"):
            inner = _position(facts, node.inputs[0], depth + 1)
            if node.op_type == "Cast":
                return inner
            shift = facts.ints(node.inputs[1])
            if inner is None and node.op_type == "Add":
                inner, shift = _position(facts, node.inputs[1], depth + 1), facts.ints(node.inputs[0])
            if inner is not None and shift is not None and len(shift) == 1:
                return inner[0], inner[1] + (shift[0] if node.op_type == "Add" else -shift[0])
        elif view.source is not value and node.op_type in ("Add", "Sub", "Cast"):
            inner = _position(facts, view.source, depth + 1)
            if inner is None:
                continue
            factors = view.layout[inner[0]]
            places = [i - len(view.axes) for i, axis_factors in enumerate(view.axes) if axis_factors == factors]
            if factors and len(places) == 1:
                return places[0], inner[1]
    return None


def _range_start(facts: Facts, value: ir.Value) -> Dim | None:
    """S when `value` is s, s + 1, s + 2, ..."""
    node = value.producer()
    if node is not None and not node.domain and node.op_type == "Range":
        start, step = facts.ints(node.inputs[0]), facts.ints(node.inputs[2])
        return start[0] if start and step and step[0] == 1 else None
    array = facts.constant(value, limit=_LARGEST_CONSTANT)
    if array is None or array.ndim != 1 or array.size < 2 or array.dtype.kind not in "iu":
        return None
    return Dim.of(int(array[0])) if (np.diff(array) == 1).all() else None


def _triangle(facts: Facts, value: ir.Value, grid: Grid, *, inverted: bool) -> Structure | None:
    """Bounds from a tensor that is nonzero (zero, if inverted) exactly in a band of i - j."""
    if grid.offset != 0 or not grid.is_covered(facts, value):
        return None
    for _ in range(16):
        array = facts.constant(value, limit=_LARGEST_CONSTANT)
        if array is not None:
            return _constant_band(array, inverted)
        node = value.producer()
        if node is None or node.domain or not node.inputs or node.inputs[0] is None:
            return None
        if node.op_type == "Trilu":
            return _trilu(facts, node, inverted)
        if node.op_type == "Slice":
            if not _keeps_origin(facts, node):
                return None
        elif node.op_type == "Unsqueeze":
            array = facts.constant(node.inputs[1]) if len(node.inputs) > 1 else None
            rank = facts.rank(node.outputs[0])
            if array is None or rank is None or any(axis % rank >= rank - 2 for axis in array.reshape(-1)):
                return None
        elif node.op_type not in ("Cast", "Identity", "Expand"):
            return None
        elif node.op_type == "Expand":
            shapes = facts.dims(node.inputs[0]), facts.dims(node.outputs[0])
            if None in shapes or shapes[0][-2:] != shapes[1][-2:]:  # type: ignore[index]
                return None
        value = node.inputs[0]
    return None


def _trilu(facts: Facts, node: ir.Node, inverted: bool) -> Structure | None:
    fill = facts.uniform(node.inputs[0])
    upper = node.attributes["upper"].as_int() if "upper" in node.attributes else 1
    shift = facts.scalar(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] is not None else 0.0
    if not fill or shift is None:
        return None
    k = int(shift)
    if upper == inverted:  # nonzero in j >= i + k, taken inverted: j <= i + k - 1; or j <= i + k
        right = k - 1 if upper else k
        return Structure(right=right) if right >= 0 else None
    left = -k if upper else -k - 1
    return Structure(left=left) if left >= 0 else None


def _constant_band(array: np.ndarray, inverted: bool) -> Structure | None:
    """A constant square mask, the same for every batch and head, that is a full triangle."""
    if array.ndim < 2 or array.size == 0 or array.shape[-1] != array.shape[-2] or array.shape[-1] < 2:
        return None
    if any(size != 1 for size in array.shape[:-2]):
        return None
    allowed = (array.reshape(array.shape[-2:]) != 0) != inverted
    return Structure(right=0) if (allowed == np.tri(*allowed.shape)).all() else None


def _constant_bias(array: np.ndarray) -> tuple[Structure, float] | None:
    """A constant additive mask of zeros and one other number."""
    fills = np.unique(array[array != 0])
    bounds = _constant_band(array, inverted=True)
    return (bounds, float(fills[0])) if bounds is not None and fills.size == 1 else None


def _keeps_origin(facts: Facts, node: ir.Node) -> bool:
    """Whether a Slice keeps element (0, 0) first and every step 1."""
    starts = facts.ints(node.inputs[1]) if len(node.inputs) > 1 else None
    steps = facts.ints(node.inputs[4]) if len(node.inputs) > 4 else ()
    if starts is None or steps is None:
        return False
    return all(start == 0 for start in starts) and all(step == 1 for step in steps)
