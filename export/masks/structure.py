"""Masks that are really structure: causal triangles and windows, proved from what their elements mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import onnx_ir as ir
from flashonnx.export.masks.forms import Formula
from flashonnx.export.values.dims import Dim, is_positive_or_zero

Origin = tuple[ir.Value, bool]
_ZERO = Dim.of(0)


@dataclasses.dataclass(frozen=True)
class Bound:
    """j - i <= distance (`is_right`) or i - j <= distance, for query i and key j; and the boolean that says so."""

    is_right: bool
    distance: Dim
    origin: Origin | None

    def beside(self, base: Dim) -> int | None:
        """The window's size on that side of key i + base; None if that is not a number from zero on."""
        size = (self.distance - base if self.is_right else self.distance + base).value
        return size if size is not None and size >= 0 else None


@dataclasses.dataclass(frozen=True)
class Structure:
    """What must hold for a query to see a key: every bound, and all of `rest`.

    `rest` holds (value, inverted): what must be true, or false if inverted.
    """

    bounds: tuple[Bound, ...] = ()
    rest: tuple[Origin, ...] = ()


@dataclasses.dataclass(frozen=True)
class Window:
    """Keys that query i may see: i + base - left <= j <= i + base + right. None is no bound."""

    left: int | None = None
    right: int | None = None

    def __and__(self, other: Window) -> Window:
        def smaller(a: int | None, b: int | None) -> int | None:
            return b if a is None else a if b is None else min(a, b)

        return Window(smaller(self.left, other.left), smaller(self.right, other.right))

    @property
    def shape(self) -> str:
        """What the keys that may be seen are called, queries by keys: bounded on one side or on both."""
        return "window" if self.left is not None and self.right is not None else "triangle"

    def attributes(self) -> dict[str, int]:
        """is_causal and the window sizes."""
        result = {"is_causal": int(self.right == 0)}
        if self.right:
            result["right_window_size"] = self.right
        if self.left is not None:
            result["left_window_size"] = self.left
        return result


NO_WINDOW = Window()


@dataclasses.dataclass(frozen=True)
class Grid:
    """The scores that a mask covers, and where their queries may stand.

    `bases` are the numbers b for which the operator can count query i as position i + b: what it
    does by itself, and keys - queries (the last query beside the last key), if that can be asked for.
    """

    queries: Dim
    keys: Dim
    bases: tuple[Dim, ...] = (_ZERO,)
    query_axis: int = -2
    key_axis: int = -1

    def best_base(self, structures: Sequence[Structure]) -> Dim:
        """The base beside which the most bounds are windows."""
        bounds = [bound for structure in structures for bound in structure.bounds]
        return max(self.bases, key=lambda base: sum(bound.beside(base) is not None for bound in bounds))

    def always_sees(self, window: Window, base: Dim) -> bool:
        """Whether every query is proved to see a key, where windows alone decide."""
        if not is_positive_or_zero(base):
            return False
        return window.left is None or is_positive_or_zero(self.keys - self.queries - base)


def read(formula: Formula, grid: Grid) -> Structure | None:
    """`formula` as a structure; in `rest` as a whole if it is none. None if nothing in the model stands for it."""
    bounds, rest = [], []
    for part in _conjuncts(formula):
        bound = _bound(part, grid)
        if bound is not None:
            bounds.append(bound)
        elif part.origin is not None:
            rest.append(part.origin)
        else:
            return Structure(rest=(formula.origin,)) if formula.origin is not None else None
    return Structure(tuple(bounds), tuple(rest))


def within(structure: Structure, base: Dim) -> tuple[Window, tuple[Origin, ...]] | None:
    """The window that a structure is beside `base`, and what remains; None if that is not in the model."""
    window, rest = Window(), list(structure.rest)
    for bound in structure.bounds:
        size = bound.beside(base)
        if size is not None:
            window &= Window(right=size) if bound.is_right else Window(left=size)
        elif bound.origin is not None:
            rest.append(bound.origin)
        else:
            return None
    return window, tuple(rest)


def _conjuncts(formula: Formula) -> Iterator[Formula]:
    if formula.parts and formula.is_all:
        for part in formula.parts:
            yield from _conjuncts(part)
    elif formula.always is not True:
        yield formula


def _bound(part: Formula, grid: Grid) -> Bound | None:
    """A test of i - j + distance, or of j - i + distance, and of nothing else."""
    if part.test is None or len(part.test.steps) < -min(grid.query_axis, grid.key_axis):
        return None
    steps = list(part.test.steps)
    query, key = steps[grid.query_axis], steps[grid.key_axis]
    steps[grid.query_axis] = steps[grid.key_axis] = 0
    if any(steps) or {query, key} != {1, -1}:
        return None
    return Bound(query == 1, part.test.offset, part.origin)
