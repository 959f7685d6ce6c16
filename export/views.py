"""Layout as algebra: a tensor written as a permuted, regrouped, broadcast view of another one.

Every axis of a view is a sequence of factors; Transpose permutes axes, Reshape regroups factors
(splitting them where sizes divide), Expand adds factors that repeat. One algebra replaces a list of
patterns: torch's K^T through three dimensions, merged transposes, time-major projections, merged
batch and heads, repeat_kv are all sequences of these steps, and two views are compared factor by
factor, with proofs about sizes from dims.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import onnx_ir as ir
from flashonnx.export.dims import Dim, product
from flashonnx.export.facts import Dims, Facts
from flashonnx.export.shape_rules import axes_of, normal


class Factor:
    """One indivisible run of a tensor's elements; compared by identity."""

    __slots__ = ("repeats", "size")

    def __init__(self, size: Dim, repeats: bool = False) -> None:
        self.size = size
        self.repeats = repeats

    def __repr__(self) -> str:
        return f"{self.size}{'~' if self.repeats else ''}"


Axis = tuple[Factor, ...]


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor with `axes`, made of the elements of `source` whose own axes are `layout`.

    An axis of size one is an empty sequence of factors. Factors that repeat occur in `axes` only.
    """

    source: ir.Value
    layout: tuple[Axis, ...]
    axes: tuple[Axis, ...]

    @staticmethod
    def identity(facts: Facts, value: ir.Value) -> View | None:
        dims = facts.dims(value)
        if dims is None:
            return None
        layout = tuple(() if size == 1 else (Factor(size),) for size in dims)
        return View(value, layout, layout)

    @property
    def dims(self) -> Dims:
        return tuple(product(factor.size for factor in axis) for axis in self.axes)

    def after(self, facts: Facts, node: ir.Node) -> View | None:
        """The view after one layout operator; None when it is not one or nothing is proved."""
        step = _STEPS.get(node.op_type) if not node.domain else None
        return step(self, facts, node) if step is not None else None

    def with_axes(self, axes: Sequence[Axis]) -> View:
        return dataclasses.replace(self, axes=tuple(axes))

    def split(self, factor: Factor, outer: Factor, inner: Factor) -> View:
        """The same view with `factor` written as `outer` times `inner`."""

        def rewrite(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
            return tuple(
                tuple(new for old in axis for new in ((outer, inner) if old is factor else (old,))) for axis in axes
            )

        return View(self.source, rewrite(self.layout), rewrite(self.axes))


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
    return regroup(view, dims) if dims is not None else None


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
                first, second = Factor(rest, factor.repeats), Factor(inner, factor.repeats)
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


@dataclasses.dataclass(frozen=True)
class Peeled:
    """A view of an operand, the number that multiplies it, and the layout operators before its source."""

    view: View
    factor: float
    before: tuple[ir.Node, ...]


def peel(facts: Facts, value: ir.Value, *, scales: bool) -> Iterator[Peeled]:
    """The ways to write `value` as a scaled view of something upstream, deepest first.

    Walks through layout operators and, where `scales`, through products with a constant number
    (which commute with layout). The last one is `value` itself.
    """
    chain: list[ir.Node] = []
    points: list[tuple[ir.Value, int]] = [(value, 0)]
    while len(chain) < 24:
        node = value.producer()
        if node is None:
            break
        if not node.domain and node.op_type in LAYOUT_OPERATORS and node.inputs[0] is not None:
            value = node.inputs[0]
        elif scales and (scaled := scaling(facts, node)) is not None:
            value = scaled[0]
        else:
            break
        chain.append(node)
        points.append((value, len(chain)))
    for source, depth in reversed(points):
        view = View.identity(facts, source)
        factor = 1.0
        for node in reversed(chain[:depth]):
            scaled = scaling(facts, node)
            if scaled is not None:
                factor *= scaled[1]
            elif view is not None:
                view = view.after(facts, node)
        if view is not None:
            yield Peeled(view, factor, tuple(chain[depth:]))


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
