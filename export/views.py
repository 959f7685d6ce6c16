"""Layout as algebra: a tensor written as a permuted, regrouped, broadcast view of another one.

Every axis of a view is a sequence of factors; Transpose permutes axes, Reshape regroups factors
(splitting them where sizes divide), Expand adds factors that repeat, Split, Slice and Gather take a
part of one. One algebra replaces a list of patterns: torch's K^T through three dimensions, merged
transposes, time-major projections, merged batch and heads, repeat_kv, packed projections are all
sequences of these steps, and two views are compared factor by factor, with proofs about sizes from
dims.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import onnx_ir as ir
from flashonnx.export.dims import Dim, product
from flashonnx.export.facts import Dims, Facts
from flashonnx.export.shape_rules import axes_of, normal

_ZERO = Dim.of(0)


class Factor:
    """One indivisible run of a tensor's elements, `stride` apart in it; compared by identity."""

    __slots__ = ("repeats", "size", "stride")

    def __init__(self, size: Dim, stride: Dim = _ZERO, repeats: bool = False) -> None:
        self.size = size
        self.stride = stride
        self.repeats = repeats

    def __repr__(self) -> str:
        return f"{self.size}{'~' if self.repeats else ''}"


Axis = tuple[Factor, ...]


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor with `axes`, made of the elements of `source` whose own axes are `layout`.

    An axis of size one is an empty sequence of factors. Factors that repeat occur in `axes` only. A
    part of the source starts `start` elements into it and has no layout.
    """

    source: ir.Value
    layout: tuple[Axis, ...]
    axes: tuple[Axis, ...]
    start: Dim = _ZERO

    @staticmethod
    def identity(facts: Facts, value: ir.Value) -> View | None:
        dims = facts.dims(value)
        if dims is None:
            return None
        strides = [product(dims[index + 1 :]) for index in range(len(dims))]
        layout = tuple(() if size == 1 else (Factor(size, stride),) for size, stride in zip(dims, strides, strict=True))
        return View(value, layout, layout)

    @property
    def dims(self) -> Dims:
        return tuple(product(factor.size for factor in axis) for axis in self.axes)

    def after(self, facts: Facts, value: ir.Value) -> View | None:
        """The view that `value` is, made of this one by one layout operator; None where nothing is proved."""
        node = value.producer()
        if node is None or node.domain:
            return None
        if node.op_type in _PARTS:
            return _PARTS[node.op_type](self, facts, value)
        step = _STEPS.get(node.op_type)
        return step(self, facts, node) if step is not None else None

    def with_axes(self, axes: Sequence[Axis]) -> View:
        return dataclasses.replace(self, axes=tuple(axes))

    def split(self, factor: Factor, outer: Factor, inner: Factor) -> View:
        """The same view with `factor` written as `outer` times `inner`."""

        def rewrite(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
            return tuple(
                tuple(new for old in axis for new in ((outer, inner) if old is factor else (old,))) for axis in axes
            )

        return View(self.source, rewrite(self.layout), rewrite(self.axes), self.start)

    def part(self, axis: int, numbers: range) -> View | None:
        """The view of the elements of `axis` that `numbers` count; None where factors do not divide so."""
        if not numbers or numbers.step < 1:
            return None
        outer, *inner = merged(self.axes[axis]) or (Factor(Dim.of(1)),)
        size = product(factor.size for factor in inner).value
        if size is None or outer.size.value is None or any(factor.repeats for factor in (outer, *inner)):
            return None
        if size > 1 and (numbers.step != 1 or numbers.start % size or len(numbers) % size):
            return None
        count, start = len(numbers) // size, outer.stride * (numbers.start // size)
        runs = (Factor(Dim.of(count), outer.stride * numbers.step), *inner) if count > 1 else tuple(inner)
        axes = (*self.axes[:axis], runs, *self.axes[axis + 1 :])
        return View(self.source, (), axes, self.start + start)


def merged(axis: Axis) -> Axis:
    """`axis` with as few factors as say the same."""
    result: list[Factor] = []
    for factor in axis:
        last = result[-1] if result else None
        if last is not None and not last.repeats and not factor.repeats and last.stride == factor.stride * factor.size:
            result[-1] = Factor(last.size * factor.size, factor.stride)
        else:
            result.append(factor)
    return tuple(result)


def _transpose(view: View, facts: Facts, node: ir.Node) -> View | None:
    perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else None
    order = perm or range(len(view.axes))[::-1]
    return view.with_axes([view.axes[index] for index in order])


def _unsqueeze(view: View, facts: Facts, node: ir.Node) -> View | None:
    axes = axes_of(facts, node)
    if axes is None:
        return None
    rank = len(view.axes) + len(axes)
    new = {normal(axis, rank) for axis in axes}
    rest = iter(view.axes)
    return view.with_axes([() if i in new else next(rest) for i in range(rank)])


def _squeeze(view: View, facts: Facts, node: ir.Node) -> View | None:
    axes = axes_of(facts, node)
    if not axes:
        return None
    gone = {normal(axis, len(view.axes)) for axis in axes}
    if any(view.axes[axis] for axis in gone):
        return None
    return view.with_axes([axis for i, axis in enumerate(view.axes) if i not in gone])


def _reshape(view: View, facts: Facts, node: ir.Node) -> View | None:
    dims = facts.dims(node.outputs[0])
    if dims is None:
        return None
    result = regroup(view, dims)
    return result if result is not None else _implied(view, dims)


def _implied(view: View, dims: Dims) -> View | None:
    """`view` reshaped to `dims`, one of which is what is left: the Reshape would fail if the rest did not divide."""
    before, after = [factor for axis in view.axes for factor in axis], [size for size in dims if size != 1]
    while len(before) > 1 and after and before[-1].size == after[-1]:
        before.pop()
        after.pop()
    while len(before) > 1 and after and before[0].size == after[0]:
        del before[0], after[0]
    if len(before) != 1 or len(after) < 2 or sum(size.value is None for size in after) != 1:
        return None
    (factor,) = before
    while len(after) > 1:
        inner = product(after[1:])
        first = Factor(after.pop(0), factor.stride * inner, factor.repeats)
        second = Factor(inner, factor.stride, factor.repeats)
        view, factor = view.split(factor, first, second), second
    return regroup(view, dims)


def regroup(view: View, dims: Dims) -> View | None:
    """`view` reshaped to `dims`, proved by matching products of factors."""
    axes: list[Axis] = []
    pending = [factor for axis in view.axes for factor in axis]
    for size in dims:
        axis: list[Factor] = []
        rest = size
        while rest != 1:
            if not pending:
                return None
            factor = pending.pop(0)
            remaining = rest.divided_by(factor.size)
            if remaining is None:
                inner = factor.size.divided_by(rest)
                if inner is None:
                    return None
                first = Factor(rest, factor.stride * inner, factor.repeats)
                second = Factor(inner, factor.stride, factor.repeats)
                view = view.split(factor, first, second)
                axes = [tuple(x for f in a for x in ((first, second) if f is factor else (f,))) for a in axes]
                pending.insert(0, second)
                factor, remaining = first, Dim.of(1)
            axis.append(factor)
            rest = remaining
        axes.append(tuple(axis))
    return view.with_axes(axes) if not pending else None


def _expand(view: View, facts: Facts, node: ir.Node) -> View | None:
    target = facts.ints(node.inputs[1])
    if target is None:
        return None
    axes = [()] * (len(target) - len(view.axes)) + list(view.axes)
    for index in range(-1, -len(target) - 1, -1):
        size = product(factor.size for factor in axes[index])
        if target[index] == size or target[index] == 1:
            continue
        if axes[index]:
            return None
        axes[index] = (Factor(target[index], repeats=True),)
    return view.with_axes(axes)


def _identity(view: View, facts: Facts, node: ir.Node) -> View | None:
    return view


_STEPS = {
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Expand": _expand,
    "Identity": _identity,
    "Flatten": _reshape,
}

LAYOUT_OPERATORS = frozenset(_STEPS)
_LONGEST_CHAIN = 24


def _split(view: View, facts: Facts, value: ir.Value) -> View | None:
    node = value.producer()
    assert node is not None
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    axis = normal(axis, len(view.axes))
    start = 0
    for output in node.outputs:
        dims = facts.dims(output)
        size = dims[axis].value if dims is not None else None
        if size is None:
            return None
        if output is value:
            return view.part(axis, range(start, start + size))
        start += size
    return None


def _slice(view: View, facts: Facts, value: ir.Value) -> View | None:
    node = value.producer()
    assert node is not None
    arrays = [facts.constant(item) for item in node.inputs[1:]]
    given = [item is not None for item in node.inputs[1:]]
    if len(arrays) < 2 or given != [array is not None for array in arrays]:
        return None
    starts, ends, axes, steps = ([] if a is None else a.reshape(-1).tolist() for a in (*arrays, None, None)[:4])
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = normal(axes[index], len(view.axes)) if axes else index
        size, step = view.dims[axis].value, steps[index] if steps else 1
        whole = start == 0 and step == 1 and end >= 2**31 - 1
        if whole:
            continue
        part = view.part(axis, range(size)[start:end:step]) if size is not None else None
        if part is None:
            return None
        view = part
    return view


def _gather(view: View, facts: Facts, value: ir.Value) -> View | None:
    """One index: the part is one wide, or the axis goes."""
    node = value.producer()
    assert node is not None
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    axis, index = normal(axis, len(view.axes)), facts.constant(node.inputs[1])
    size = view.dims[axis].value
    if index is None or index.size != 1 or index.ndim > 1 or size is None or not -size <= int(index.item()) < size:
        return None
    number = int(index.item()) % size
    part = view.part(axis, range(number, number + 1))
    if part is None or index.ndim:
        return part
    return part.with_axes([*part.axes[:axis], *part.axes[axis + 1 :]])


_PARTS = {"Split": _split, "Slice": _slice, "Gather": _gather}


@dataclasses.dataclass(frozen=True)
class Peeled:
    """A view of an operand, the number that multiplies it, and the layout operators before its source."""

    view: View
    factor: float
    before: tuple[ir.Node, ...]


def peel(facts: Facts, value: ir.Value, *, scales: bool, parts: bool = False) -> Iterator[Peeled]:
    """The ways to write `value` as a scaled view of something upstream, deepest first.

    Walks through layout operators and, where `scales`, through products with a constant number
    (which commute with layout), where `parts`, through operators that take a part. The last one is
    `value` itself.
    """
    chain: list[ir.Value] = []
    while len(chain) < _LONGEST_CHAIN:
        node = value.producer()
        if node is None:
            break
        passes = not node.domain and (node.op_type in LAYOUT_OPERATORS or (parts and node.op_type in _PARTS))
        scaled = scaling(facts, node) if scales else None
        source = node.inputs[0] if passes else scaled[0] if scaled is not None else None
        if source is None:
            break
        chain.append(value)
        value = source
    for depth in range(len(chain), -1, -1):
        view = View.identity(facts, value if depth == len(chain) else chain[depth])
        factor = 1.0
        for made in reversed(chain[:depth]):
            node = made.producer()
            assert node is not None
            scaled = scaling(facts, node)
            if scaled is not None:
                factor *= scaled[1]
            elif view is not None:
                view = view.after(facts, made)
        if view is not None:
            before = [made.producer() for made in chain[depth:]]
            yield Peeled(view, factor, tuple(node for node in before if node is not None))


def scaling(facts: Facts, node: ir.Node) -> tuple[ir.Value, float] | None:
    """(x, c) when `node` computes x * c for a number c, without changing x's shape."""
    if node.domain or node.op_type not in ("Mul", "Div"):
        return None
    a, b = node.inputs
    for data, number, swapped in ((a, b, False), (b, a, True)):
        if data is None or number is None or (swapped and node.op_type == "Div"):
            continue
        factor = facts.uniform(number)
        if factor is None or facts.is_fixed(data):
            continue
        rank, other = facts.rank(data), facts.dims(number)
        if other is None or rank is None or len(other) > rank or any(d != 1 for d in other):
            continue
        if node.op_type == "Div":
            return (data, 1.0 / factor) if factor else None
        return data, factor
    return None
