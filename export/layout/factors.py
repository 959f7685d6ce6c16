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
from collections.abc import Sequence

import onnx_ir as ir
from flashonnx.export.values.dims import Dim, product
from flashonnx.export.values.facts import Dims, Facts

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


def divided_by_reshape(view: View, dims: Dims) -> View | None:
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
