"""The elements of a tensor as functions of their indices: numbers, tests of numbers, and choices by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from flashonnx.export.values.dims import Dim, is_positive_or_zero
from flashonnx.export.values.facts import Dims


@dataclasses.dataclass(frozen=True)
class Affine:
    """offset + steps[0] * i + steps[1] * j + ... at index (i, j, ...); one step for each axis."""

    offset: Dim
    steps: tuple[int, ...]

    def __add__(self, other: Affine) -> Affine:
        steps = tuple(a + b for a, b in zip(self.steps, other.steps, strict=True))
        return Affine(self.offset + other.offset, steps)

    def __neg__(self) -> Affine:
        return Affine(-self.offset, tuple(-step for step in self.steps))

    def __sub__(self, other: Affine) -> Affine:
        return self + -other

    def shifted(self, count: int) -> Affine:
        return Affine(self.offset + count, self.steps)

    def lowest(self, dims: Dims) -> Dim:
        """The smallest element of a tensor of these dimensions that is not empty."""
        ends = zip(self.steps, dims, strict=True)
        return sum((size * step - step for step, size in ends if step < 0), self.offset)


@dataclasses.dataclass(frozen=True)
class Formula:
    """A boolean tensor.

    Exactly one of `always` (the same for every element), `test` (true where that number is not
    negative) and `parts` (all, or any of them, are true) says which; none of them: it is opaque.
    `origin` is the value that holds it and whether that is inverted, if there is one.
    """

    always: bool | None = None
    test: Affine | None = None
    parts: tuple[Formula, ...] = ()
    is_all: bool = True
    origin: tuple[ir.Value, bool] | None = None

    @property
    def is_opaque(self) -> bool:
        return self.always is None and self.test is None and not self.parts

    def __invert__(self) -> Formula:
        return Formula(
            None if self.always is None else not self.always,
            None if self.test is None else (-self.test).shifted(-1),
            tuple(~part for part in self.parts),
            not self.is_all,
            None if self.origin is None else (self.origin[0], not self.origin[1]),
        )


@dataclasses.dataclass(frozen=True)
class Choice:
    """A tensor of two numbers: `inside` where `where` is true, `outside` elsewhere."""

    where: Formula
    inside: float
    outside: float

    def map(self, function: Callable[[Any], Any]) -> Form:
        """The same function of both numbers."""
        return choice(self.where, float(function(self.inside)), float(function(self.outside)))


Form = Affine | Formula | Choice


def choice(where: Formula, inside: float, outside: float) -> Form:
    """The simplest form of that choice between two numbers."""
    if where.always is not None or inside == outside:
        return Choice(Formula(always=True), *(2 * [outside if where.always is False else inside]))
    return Choice(where, inside, outside)


def join(parts: Sequence[Formula], *, is_all: bool = True) -> Formula:
    """All of `parts`, or any of them."""
    kept = [part for part in parts if part.always is not is_all]
    if any(part.always is (not is_all) for part in kept):
        return Formula(always=not is_all)
    kept = [part for index, part in enumerate(kept) if not _follows(part, kept, index, is_all)]
    if not kept:
        return Formula(always=is_all)
    return kept[0] if len(kept) == 1 else Formula(parts=tuple(kept), is_all=is_all)


def _follows(part: Formula, parts: Sequence[Formula], index: int, is_all: bool) -> bool:
    """Whether a test says nothing beside another one: it follows from that (all), or implies it (any)."""
    for other, formula in enumerate(parts):
        if other == index or part.test is None or formula.test is None or part.test.steps != formula.test.steps:
            continue
        more = part.test.offset - formula.test.offset
        if is_positive_or_zero(more if is_all else -more) and (more != 0 or other < index):
            return True
    return False


def moved(form: Form, of: Callable[[Affine], Affine | None], *, keeps: bool = False) -> Form | None:
    """`form` with every number in it rewritten by `of`.

    Where that gives None, the whole is None; or, where what is opaque `keeps` its place (in a
    broadcast), that part becomes opaque.
    """
    if isinstance(form, Affine):
        return of(form)
    if isinstance(form, Choice):
        where = moved(form.where, of, keeps=keeps)
        return Choice(where, form.inside, form.outside) if isinstance(where, Formula) else None
    origin = form.origin if keeps else None
    if form.always is not None:
        return Formula(always=form.always)
    if form.is_opaque:
        return form if keeps else None
    if form.test is not None:
        test = of(form.test)
        if test is None:
            return Formula(origin=origin) if origin is not None else None
        return Formula(test=test, origin=origin)
    parts = [moved(part, of, keeps=keeps) for part in form.parts]
    if all(isinstance(part, Formula) for part in parts):
        return Formula(parts=tuple(p for p in parts if isinstance(p, Formula)), is_all=form.is_all, origin=origin)
    return Formula(origin=origin) if origin is not None else None


def number_of(form: Form | None) -> float | None:
    """The number that every element is."""
    if isinstance(form, Choice):
        return form.inside if form.where.always else None
    if isinstance(form, Affine) and not any(form.steps) and form.offset.value is not None:
        return float(form.offset.value)
    return None


def as_affine(form: Form | None, rank: int) -> Form | None:
    number = number_of(form)
    return form if number is None or number % 1 else Affine(Dim.of(int(number)), (0,) * rank)


def of_numbers(a: Form | None, b: Form | None, function: Callable[[Any, Any], Any]) -> Form | None:
    """A function of a choice and a number."""
    x, y = number_of(a), number_of(b)
    if y is not None and isinstance(a, Choice):
        return a.map(lambda number: function(number, y))
    if x is not None and isinstance(b, Choice):
        return b.map(lambda number: function(x, number))
    return None


def by_number(form: Choice, test: Callable[[float], Any]) -> Formula:
    inside, outside = bool(test(form.inside)), bool(test(form.outside))
    if inside == outside:
        return Formula(always=inside)
    return form.where if inside else ~form.where


def compared(a: Form | None, b: Form | None, test: Callable[[Any, Any], Any]) -> Formula | None:
    x, y = number_of(a), number_of(b)
    if y is not None and isinstance(a, Choice):
        return by_number(a, lambda number: test(number, y))
    if x is not None and isinstance(b, Choice):
        return by_number(b, lambda number: test(x, number))
    return None


def chosen(condition: Formula, a: Formula, b: Formula) -> Formula | None:
    """Where(condition, a, b) of booleans, one of which is constant."""
    if a.always is not None:
        return join([condition, b], is_all=False) if a.always else join([~condition, b])
    if b.always is not None:
        return join([~condition, a], is_all=False) if b.always else join([condition, a])
    return None


def nested(condition: Formula, form: Choice, other: float) -> Form | None:
    """`form` where `condition`, elsewhere one of its two numbers."""
    if other == form.outside:
        return choice(join([condition, form.where]), form.inside, other)
    if other == form.inside:
        return choice(join([condition, ~form.where]), form.outside, other)
    return None


def of_array(array: np.ndarray) -> Form | None:
    """A constant of two or more elements: an arithmetic progression, or two numbers with a band between them."""
    if array.size == 0 or array.ndim == 0 or array.dtype.kind not in "iufb":
        return None
    if array.dtype.kind in "iu":
        progression = _progression(array)
        if progression is not None:
            return progression
    low, high = float(array.min()), float(array.max())
    is_high = array == array.max()
    if not (is_high | (array == array.min())).all():
        return None
    if low == high:
        where: Formula | None = Formula(always=True)
    else:
        where = _band(is_high)
        if where is None and (outside := _band(~is_high)) is not None:
            where = ~outside
    if where is None:
        return None
    return where if array.dtype.kind == "b" and low != high else choice(where, high, low)


def _progression(array: np.ndarray) -> Affine | None:
    steps = []
    for axis, size in enumerate(array.shape):
        at = [0] * array.ndim
        at[axis] = min(1, size - 1)
        steps.append(int(array[tuple(at)]) - int(array[(0,) * array.ndim]))
    offset = int(array[(0,) * array.ndim])
    whole = np.full((), offset, np.int64)
    for axis, step in enumerate(steps):
        shape = [-1 if at == axis else 1 for at in range(array.ndim)]
        whole = whole + step * np.arange(array.shape[axis]).reshape(shape)
    return Affine(Dim.of(offset), tuple(steps)) if (whole == array).all() else None


def _band(mask: np.ndarray) -> Formula | None:
    """Where low <= j - i <= high in the last two axes, for the same numbers throughout."""
    if mask.ndim < 2 or min(mask.shape[-2:]) < 2:
        return None
    planes = mask.reshape(-1, *mask.shape[-2:])
    plane = planes[0]
    if not (planes == plane).all() or not (plane[1:, 1:] == plane[:-1, :-1]).all():
        return None
    rows, columns = plane.shape
    diagonals = np.flatnonzero(np.concatenate([plane[:0:-1, 0], plane[0]])) - (rows - 1)
    if not diagonals.size or (np.diff(diagonals) != 1).any():
        return None
    above = Affine(Dim.of(0), (*[0] * (mask.ndim - 2), -1, 1))
    low, high = int(diagonals[0]), int(diagonals[-1])
    tests = [Formula(test=above.shifted(-low))] if low > 1 - rows else []
    tests += [Formula(test=(-above).shifted(high))] if high < columns - 1 else []
    return join(tests)
