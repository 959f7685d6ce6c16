"""The terms between product and softmax, turned into the operator's mask input."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from flashonnx.export.build import Builder
from flashonnx.export.dims import Dim, is_clipped, product
from flashonnx.export.facts import Dims, Facts, is_unknown
from flashonnx.export.masks import MaskReducer, is_false, is_true, is_zero
from flashonnx.export.products import Labels, Roles
from flashonnx.export.rules.layouts import Heads, Operand
from flashonnx.export.rules.scores import RefusalError, Term, is_minus_infinity
from flashonnx.export.structure import Grid, Structure, read, read_bias
from flashonnx.export.views import Axis, View, peel, regroup

# A finite fill below this cannot reach a probability beside a score of sane size.
NEGLIGIBLE = -1e4
# A fill below this swallows any score that is added to it, in float32 and bfloat16.
_SWALLOWS = -1e30
_ZERO = Dim.of(0)


@dataclasses.dataclass(frozen=True)
class MaskInput:
    """The mask input (None: none is needed), the structure beside it and what becomes of rows that see no key."""

    value: ir.Value | None
    bounds: Structure
    empty_row: str = "zero"
    remark: str = ""


@dataclasses.dataclass(frozen=True)
class ScoreAxes:
    """The axes of the scores, in their order, and how they divide."""

    labels: Labels
    dims: Dims
    roles: Roles
    heads: Heads
    keys_agree: bool  # K and V have as many keys, by proof


class MaskBuilder:
    """Builds the mask input of one site."""

    def __init__(
        self,
        facts: Facts,
        reducer: MaskReducer,
        builder: Builder,
        axes: ScoreAxes,
        key: Operand,
        dtype: ir.DataType,
        offset: Dim = _ZERO,
    ) -> None:
        self.facts = facts
        self.reducer = reducer
        self.builder = builder
        self.axes = axes
        self.key = key
        self.dtype = dtype
        sizes = dict(zip(axes.labels, axes.dims, strict=True))
        self.grid = Grid(sizes[axes.roles.query], sizes[axes.roles.key], offset)

    def build(self, terms: Sequence[Term], guarded: bool) -> MaskInput:
        """One mask input and structural bounds for all `terms`.

        Raises:
            RefusalError: they do not add up to a mask that the operator has.
        """
        for term in terms:
            self._check(term.value)  # those that do nothing too: they may widen the scores
        terms = [term for term in terms if not self._does_nothing(term)]
        bounds, bounded, terms = self._structure(terms)
        fills = {term.number for term in terms if not term.is_bias}
        finite = {number for number in fills if not is_minus_infinity(number)}
        if finite and (len(fills) > 1 or max(finite) > NEGLIGIBLE):
            raise RefusalError(f"masked scores are filled with {sorted(fills)}; use -inf or finfo.min")
        if finite and terms[-1].is_bias:
            raise RefusalError("a bias is added after masked scores were filled with a finite number")
        bias = self._sum([self._bias(term) for term in terms if term.is_bias])
        allowed = self._all([self._allowed(term) for term in terms if not term.is_bias])
        hides = any(self._hides(term) for term in terms)
        remark = "a query that sees no key gives 0; it gave NaN before" if hides and not guarded else ""
        if _mixes(bounded, terms):
            remark = "a query from which the masks hide every key together gives another value than before"
        if allowed is None:
            return MaskInput(self._expanded(bias), bounds, "zero", remark)
        empty_row = "mean" if finite else "zero"
        if bias is None:
            return MaskInput(self._expanded(allowed), bounds, empty_row, remark)
        kind = self.facts.dtype(bias)
        assert kind is not None
        masked = self.builder.constant(np.array(-np.inf, kind.numpy()))
        joint = self._op("Where", allowed, bias, masked, dtype=kind)
        return MaskInput(self._expanded(joint), bounds, empty_row, remark)

    def _hides(self, term: Term) -> bool:
        """Whether a term is known to set scores to -inf."""
        if not term.is_bias:
            return is_minus_infinity(term.number)
        found = read_bias(self.facts, term.value, self.grid)
        return found is not None and is_minus_infinity(found[1])

    def _does_nothing(self, term: Term) -> bool:
        if term.is_bias:
            return is_zero(self.facts, term.value)
        return (is_true if term.inverted else is_false)(self.facts, term.value)

    def _structure(self, terms: Sequence[Term]) -> tuple[Structure, set[float], list[Term]]:
        """The bounds on j - i that are proved, what filled the scores outside them, and the terms that remain."""
        bounds, bounded, kept = Structure(), set(), []
        for term in terms:
            value = self.reducer.reduce(term.value)
            if term.is_bias:
                found = read_bias(self.facts, value, self.grid)
                fill = found[1] * term.number if found is not None else 0.0
                structure = found[0] if found is not None else Structure()
            else:
                structure, fill = read(self.facts, value, self.grid, inverted=not term.inverted), term.number
            if not structure.is_bounded or not self._can_bound(structure, term, fill):
                kept.append(term)
                continue
            bounds &= Structure(structure.left, structure.right)
            bounded.add(fill)
            kept += [Term(rest, fill, is_bias=False, inverted=not negated) for rest, negated in structure.rest]
        return bounds, bounded, kept

    def _can_bound(self, structure: Structure, term: Term, fill: float) -> bool:
        """Whether masking with -inf where `fill` stood gives the same rows.

        It does where a row always keeps a key (i itself, with no left bound or as many keys as
        queries), and where all else is a mask whose rows without keys are uniform: the fill swallows
        any score (float32, bfloat16: score + finfo.min is finfo.min).
        """
        if is_minus_infinity(fill):
            return True
        if fill > NEGLIGIBLE:
            return False
        square = self.grid.queries == self.grid.keys
        if not structure.rest:
            return structure.left is None or square
        swallows = fill <= _SWALLOWS and self.facts.dtype(term.value) != ir.DataType.FLOAT16
        return swallows or not term.is_bias

    def _check(self, value: ir.Value) -> None:
        """Requires that `value` broadcasts to the scores, not the scores to it."""
        dims, scores = self.facts.dims(value), self.axes.dims
        if dims is None:
            raise RefusalError(f"the rank of the mask '{value.name}' is not known; run onnx.shape_inference first")
        if len(dims) > len(scores):
            raise RefusalError(f"the mask '{value.name}' has {len(dims)} dimensions")
        labels = self.axes.labels[len(scores) - len(dims) :]
        sizes = dict(zip(labels, dims, strict=True))
        key, query = self.axes.roles.key, self.axes.roles.query
        for label, size, of_scores in zip(labels, dims, scores[len(scores) - len(dims) :], strict=True):
            if _fits(size, of_scores) or (label == key and self.axes.keys_agree):
                continue  # the original's product with V fails for any other number of keys in the mask
            square = self.axes.keys_agree and size == sizes[key]
            if label == query and square and of_scores == scores[self.axes.labels.index(key)]:
                continue  # likewise for queries, where they are as many as the keys
            size_text = "an unknown size" if is_unknown(size) else f"size {size}"
            raise RefusalError(
                f"the mask '{value.name}' has {size_text} where the scores have {of_scores}; "
                "nothing shows that they agree (were its dynamic axes exported?)"
            )

    def _bias(self, term: Term) -> ir.Value:
        bias = self._placed(self.reducer.reduce(term.value))
        kind = self.facts.dtype(bias)
        if kind not in (self.dtype, ir.DataType.FLOAT):
            raise RefusalError(f"the mask '{term.value.name}' is {_name(kind)}, Q is {_name(self.dtype)}")
        if term.number != 1.0:
            number = self.builder.constant(np.array(term.number, kind.numpy()))
            bias = self._op("Mul", bias, number, dtype=kind)
        return bias

    def _allowed(self, term: Term) -> ir.Value:
        condition = self.reducer.reduce(term.value)
        if term.inverted:
            return self._placed(condition)
        node = condition.producer()
        if node is not None and node.op_type == "Not" and not node.domain:
            assert node.inputs[0] is not None
            return self._placed(self.reducer.reduce(node.inputs[0]))
        return self._op("Not", self._placed(condition), dtype=ir.DataType.BOOL)

    def _sum(self, values: Sequence[ir.Value]) -> ir.Value | None:
        return self._fold("Add", values)

    def _all(self, values: Sequence[ir.Value]) -> ir.Value | None:
        return self._fold("And", values)

    def _fold(self, op_type: str, values: Sequence[ir.Value]) -> ir.Value | None:
        if not values:
            return None
        total = values[0]
        for value in values[1:]:
            if self.facts.dtype(value) != self.facts.dtype(total):
                raise RefusalError("two masks of different types are added")
            total = self._op(op_type, total, value, dtype=self.facts.dtype(total))
        return total

    def _op(self, op_type: str, *inputs: ir.Value, dtype: ir.DataType | None, **attributes: Any) -> ir.Value:
        start = len(self.builder.nodes)
        result = self.builder.op(op_type, *inputs, dtype=dtype, **attributes)
        self.facts.learn(self.builder.nodes[start:])
        return result

    # -- four dimensions (batch, heads, queries, keys)

    def _placed(self, value: ir.Value) -> ir.Value:
        rank = self.facts.rank(value)
        if rank == 0:
            raise RefusalError(f"the mask '{value.name}' is a single number")
        for peeled in peel(self.facts, value, scales=False):
            result = self._arranged(peeled.view)
            if result is not None:
                return result
        raise RefusalError(f"the mask '{value.name}' has no layout (batch, heads, queries, keys)")

    def _arranged(self, view: View) -> ir.Value | None:
        labels, roles = self.axes.labels, self.axes.roles
        axes = [()] * (len(labels) - len(view.axes)) + list(view.axes)
        named = dict(zip(labels, axes, strict=True))
        divided = self._batch_and_heads(view, [named[label] for label in roles.batch])
        if divided is None:
            return None
        wanted = []
        for axis in (*divided, named[roles.query], named[roles.key]):
            kept = tuple(factor for factor in axis if not factor.repeats)
            if kept and kept != axis:
                return None  # repeated in part: that is not a broadcast
            wanted.append(kept)
        source, layout = view.source, list(view.layout)
        if len(layout) >= 2 and layout == wanted[4 - len(layout) :] and not any(wanted[: 4 - len(layout)]):
            return source
        present = [axis for axis in wanted if axis]
        occupied = [axis for axis in layout if axis]
        if sorted(map(id, _flat(occupied))) != sorted(map(id, _flat(present))):
            return None
        if any(axis not in occupied for axis in present):
            return None
        ones = [index for index, axis in enumerate(layout) if not axis]
        dtype = self.facts.dtype(source)
        result = source
        if ones:
            result = self._op("Squeeze", result, self.builder.ints(ones), dtype=dtype)
        if occupied != present:
            perm = [occupied.index(axis) for axis in present]
            result = self._op("Transpose", result, perm=perm, dtype=dtype)
        missing = [index for index, axis in enumerate(wanted) if not axis]
        if missing:
            result = self._op("Unsqueeze", result, self.builder.ints(missing), dtype=dtype)
        return result

    def _batch_and_heads(self, view: View, axes: list[Axis]) -> tuple[Axis, Axis] | None:
        if len(axes) == 2:
            return axes[0], axes[1]
        if not axes or not axes[0]:
            return (), ()
        if len(axes) > 2:
            return None
        sizes = (self.axes.heads.batch, self.axes.heads.heads)
        if product(sizes) != product(factor.size for factor in axes[0]):
            return None
        # With what is repeated: a (heads,) bias over merged batch and heads must not be taken for a (batch,) one.
        parts = regroup(View(view.source, view.layout, (axes[0],)), sizes)
        if parts is None or parts.layout != view.layout:
            return None
        return parts.axes[0], parts.axes[1]

    def _expanded(self, mask: ir.Value | None) -> ir.Value | None:
        """`mask` with as many columns as there are keys: a single column would mean one key."""
        if mask is None:
            return None
        dims = self.facts.dims(mask)
        keys = self.axes.dims[self.axes.labels.index(self.axes.roles.key)]
        if dims is not None and (dims[-1] == keys or (_fits(dims[-1], keys) and dims[-1] != 1)):
            return mask
        shape = self.builder.op("Shape", self.key.value, dtype=ir.DataType.INT64)
        count = self.builder.op("Gather", shape, self.builder.ints([self.key.labels.index(self.axes.roles.key)]))
        target = self.builder.op("Concat", self.builder.ints([1, 1, 1]), count, axis=0)
        return self.builder.op("Expand", mask, target, dtype=self.facts.dtype(mask))


def _mixes(bounded: set[float], terms: Sequence[Term]) -> bool:
    """Whether a row that bounds and `terms` hide together may be other than one that either hides.

    Fills of different sizes, or a finite one under a bias, leave such a row a softmax over some of
    its hidden keys; the operator leaves it none, or all.
    """
    fills = {term.number for term in terms if not term.is_bias}
    is_biased = any(term.is_bias for term in terms) and not all(map(is_minus_infinity, bounded))
    return bool(bounded) and (is_biased or len(fills | bounded) > 1)


def _fits(size: Dim, of_scores: Dim) -> bool:
    """Whether a mask's dimension is proved to be 1 or the scores'."""
    return size == 1 or size == of_scores or is_clipped(size, of_scores)


def _flat(axes: Sequence[Axis]) -> list[object]:
    return [factor for axis in axes for factor in axis]


def _name(dtype: ir.DataType | None) -> str:
    return dtype.name.lower() if dtype is not None else "of unknown type"


def combined_bounds(bounds: Structure) -> dict[str, int]:
    """The attributes is_causal and window sizes."""
    attributes: dict[str, int] = {"is_causal": int(bounds.right == 0)}
    if bounds.right:
        attributes["right_window_size"] = bounds.right
    if bounds.left is not None:
        attributes["left_window_size"] = bounds.left
    return attributes
