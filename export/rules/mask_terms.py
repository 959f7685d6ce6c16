"""Which masks become windows, and what that does to a query whose keys are all hidden.

Exported models hide keys with -inf, with the most negative number, or with something like -1e4, by
addition or in the score's place. Where a query keeps a key these are all the same. Where it does
not, -inf gives NaN (or 0 behind a guard), one number in every place the mean of V, and a mixture
whatever softmax makes of it; so a mask becomes structure only where the operator gives such rows
what they had.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import onnx_ir as ir
from flashonnx.export.masks.forms import Choice, Form, Formula
from flashonnx.export.masks.positions import form_of, spread
from flashonnx.export.masks.reducer import MaskReducer, largest
from flashonnx.export.masks.structure import NO_WINDOW, Grid, Origin, Structure, Window, read, within
from flashonnx.export.rules.scores import RefusalError, Term, is_minus_infinity
from flashonnx.export.values.dims import Dim
from flashonnx.export.values.facts import Facts

# A finite fill below this cannot reach a probability beside a score of sane size.
NEGLIGIBLE = -1e4
# A fill below this swallows any score that is added to it, in float32 and bfloat16.
_SWALLOWS = -1e30
_ZERO = Dim.of(0)

_MIXED = (
    "the masks hide keys by finite numbers that the operator cannot keep apart: a query from which they hide every key "
    "together would give another value; fill with -inf or the type's lowest number"
)
_KEPT = (
    "a {shape} is left in the mask, as a query from which the masks hide every key would give another value without "
    "it; masks of -inf, or one Where(mask, 0, finfo.min) in float32, do not have that"
)
_NOT_SWALLOWED = (
    "a {shape} is left in the mask, as a query from which the masks hide every key would give another value without "
    "it: {fill:g} is added to its scores, and that leaves differences between them, as the lowest number of float32 "
    "and bfloat16 does not; export with export_onnx or with masks of -inf"
)


@dataclasses.dataclass(frozen=True)
class Step:
    """A term and, where it hides keys outside a structure, that and the number there.

    The structure is `window` and `rest`, once it is known where the queries stand. The number is
    `is_added` to what the scores are, or takes their place.
    """

    term: Term
    is_added: bool
    hides: Structure | None = None
    fill: float = 0.0
    window: Window = NO_WINDOW
    rest: tuple[Origin, ...] = ()

    @property
    def is_finite(self) -> bool:
        return self.hides is not None and not is_minus_infinity(self.fill)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the operator does by itself, and the terms that remain.

    `is_sum`: these must be added up in their order, as no boolean mask keeps the rows that lose every
    key; `is_mean`: rows that do are the mean of V.
    """

    terms: tuple[Term, ...]
    window: Window = NO_WINDOW
    base: Dim = _ZERO
    is_sum: bool = False
    is_mean: bool = False
    remark: str = ""


class Planner:
    """Finds the structure in one site's masks."""

    def __init__(self, facts: Facts, reducer: MaskReducer, grid: Grid) -> None:
        self.facts = facts
        self.reducer = reducer
        self.grid = grid

    def plan(self, terms: Sequence[Term]) -> Plan:
        """The structure of `terms`, where that is proved to change no row.

        Raises:
            RefusalError: neither a structure nor the masks as they are keep every row.
        """
        steps = [step for term in terms for step in self._steps(term)]
        base = self.grid.best_base([step.hides for step in steps if step.hides is not None])
        steps = [self._beside(step, base) for step in steps]
        window = functools.reduce(Window.__and__, (step.window for step in steps), NO_WINDOW)
        whole = self._whole(terms)
        finite = [step for step in steps if step.is_finite]
        planned = None
        if window != NO_WINDOW and not finite:
            planned = Plan(_kept(steps), window, base)
        elif window != NO_WINDOW and all(step.window == NO_WINDOW for step in finite):
            planned = self._above_finite(steps, window, base)
        elif window != NO_WINDOW:
            planned = self._with_finite(steps, window, base)
        if planned is not None:
            return planned
        if whole is None:
            raise RefusalError(_MIXED)
        return whole if window == NO_WINDOW else dataclasses.replace(whole, remark=_why_kept(window, finite))

    def _beside(self, step: Step, base: Dim) -> Step:
        if step.hides is None:
            return step
        found = within(step.hides, base)
        if found is not None:
            return dataclasses.replace(step, window=found[0], rest=found[1])
        if step.term.is_bias:
            return Step(step.term, is_added=True)
        return dataclasses.replace(step, rest=((step.term.value, not step.term.inverted),))

    def _above_finite(self, steps: list[Step], window: Window, base: Dim) -> Plan | None:
        """Windows of -inf, with finite masks beside them.

        Those stay numbers, by which a query weighs the keys in its window if all are hidden. In the
        place of scores they must come first, or they would bring back what is outside.
        """
        settled = False
        for step in steps:
            settled |= step.hides is not None and not step.is_finite
            if step.is_finite and not step.term.is_bias and (settled or step.is_added or step.fill > _SWALLOWS):
                return None
        terms = [term for step in steps for term in ((step.term,) if step.is_finite else _kept([step]))]
        return Plan(tuple(terms), window, base, is_sum=True)

    def _with_finite(self, steps: list[Step], window: Window, base: Dim) -> Plan | None:
        """Windows of finite masks: exact where every hidden key of a query gets one and the same number."""
        hiding = [step for step in steps if step.hides is not None]
        fill = min(step.fill for step in hiding)
        may_lose_all = any(step.rest for step in hiding) or not self.grid.always_sees(window, base)
        others = all(self._is_small(step.term, fill) for step in steps if step.hides is None)
        added = [index for index, step in enumerate(hiding) if step.is_added]
        is_even = others and added in ([], [0]) and all(step.fill == fill for step in hiding)
        if is_even and (not added or fill <= _SWALLOWS or not may_lose_all):
            return Plan(_kept(steps), window, base, is_mean=may_lose_all)
        return None

    def _whole(self, terms: Sequence[Term]) -> Plan | None:
        """Without a window: the masks as they are, or their sum if only that keeps the rows; None if nothing does."""
        fills = {term.number for term in terms if not term.is_bias}
        finite = {fill for fill in fills if not is_minus_infinity(fill)}
        if not finite:
            return Plan(tuple(terms))
        are_small = all(self._is_small(term, min(finite)) for term in terms if term.is_bias)
        if max(finite) <= _SWALLOWS:
            return Plan(tuple(terms), is_sum=len(fills) > 1 or terms[-1].is_bias or not are_small)
        return Plan(tuple(terms)) if are_small else None

    def _is_small(self, bias: Term, fill: float) -> bool:
        """Whether a bias is proved to be far from hiding a key as `fill` does."""
        limit = largest(self.facts, bias.value)
        return limit is not None and limit * abs(bias.number) <= (-_SWALLOWS if fill <= _SWALLOWS else -fill / 4)

    def hides_wholly(self, term: Term) -> bool:
        """Whether a term is known to set scores to -inf."""
        step = self._read(term)
        return step.hides is not None and not step.is_finite

    # -- reading

    def _steps(self, term: Term) -> list[Step]:
        """What a term does; a bias that is a sum, or a bias under a mask, in its parts."""
        value = self.reducer.reduce(term.value)
        node = value.producer()
        is_known = not term.is_bias or form_of(self.facts, value) is not None
        if is_known or node is None or node.domain or term.number <= 0:
            return [self._read(term)]
        if node.op_type == "Add":
            return [step for item in node.inputs if item is not None for step in self._steps(_with(term, item))]
        if node.op_type == "Where" and (condition := node.inputs[0]) is not None:
            _, a, b = node.inputs
            for bias, fill, inverted in ((a, b, True), (b, a, False)):
                number = self.facts.uniform(fill)
                if number is not None and number <= _SWALLOWS and bias is not None:
                    hidden = self._read(Term(condition, number * term.number, is_bias=False, inverted=inverted))
                    return [*self._steps(_with(term, bias)), dataclasses.replace(hidden, is_added=True)]
        return [self._read(term)]

    def _read(self, term: Term) -> Step:
        value = self.reducer.reduce(term.value)
        form = self._form(value)
        if not term.is_bias:
            allowed = form if isinstance(form, Formula) else Formula(origin=(value, False))
            structure = read(allowed if term.inverted else ~allowed, self.grid)
            return Step(term, False, structure or Structure(rest=((value, not term.inverted),)), term.number)
        if isinstance(form, Choice) and 0.0 in (form.inside, form.outside):
            is_inside = form.inside == 0.0
            fill = (form.outside if is_inside else form.inside) * term.number
            structure = read(form.where if is_inside else ~form.where, self.grid)
            if fill <= NEGLIGIBLE and structure is not None:
                return Step(term, True, structure, fill)
        return Step(term, True)

    def _form(self, value: ir.Value) -> Form | None:
        """The form of a mask, as it is broadcast to queries and keys."""
        form, dims = form_of(self.facts, value), self.facts.dims(value)
        if form is None or dims is None:
            return None
        sizes = {self.grid.query_axis: self.grid.queries, self.grid.key_axis: self.grid.keys}
        return spread(form, dims, tuple(sizes.get(axis, dims[axis]) for axis in range(-len(dims), 0)))


def _why_kept(window: Window, finite: Sequence[Step]) -> str:
    """Why a window could not leave the mask. One number that is added once is enough only if it swallows scores."""
    fills = {step.fill for step in finite}
    if len(finite) == 1 and finite[0].is_added and min(fills) > _SWALLOWS:
        return _NOT_SWALLOWED.format(shape=window.shape, fill=min(fills))
    return _KEPT.format(shape=window.shape)


def _kept(steps: Sequence[Step]) -> tuple[Term, ...]:
    """What remains of the terms beside their windows: biases, then masks."""
    biases = [step.term for step in steps if step.hides is None]
    masks = [
        Term(value, step.fill, is_bias=False, inverted=not negated) for step in steps for value, negated in step.rest
    ]
    return (*biases, *masks)


def _with(term: Term, value: ir.Value) -> Term:
    return dataclasses.replace(term, value=value)
