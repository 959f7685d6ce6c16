"""The terms between product and softmax, turned into the operator's mask input."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from flashonnx.export.layout.factors import Axis, View, regroup
from flashonnx.export.layout.products import Labels, Roles
from flashonnx.export.layout.views import peel
from flashonnx.export.masks.reducer import MaskReducer, is_false, is_true, is_zero
from flashonnx.export.masks.structure import NO_WINDOW, Grid, Window
from flashonnx.export.model.build import Builder
from flashonnx.export.rules.layouts import Heads, Operand
from flashonnx.export.rules.lengths import Comparison, comparison, parted, per_sentence
from flashonnx.export.rules.mask_terms import NEGLIGIBLE, Planner
from flashonnx.export.rules.scores import RefusalError, Term, is_minus_infinity
from flashonnx.export.values.dims import Dim, is_clipped, is_positive_or_zero, minimum, product
from flashonnx.export.values.facts import Dims, Facts, is_unknown

_ZERO = Dim.of(0)


@dataclasses.dataclass(frozen=True)
class MaskInput:
    """The mask input (None: none is needed), the window beside it and what becomes of rows that see no key.

    `from_last`: the window counts from the last key, which is beside the last query; see full_lengths.
    `lengths`: nonpad_kv_seqlen, in the place of a mask that says no more; there is no window then.
    """

    value: ir.Value | None
    window: Window
    from_last: bool = False
    empty_row: str = "zero"
    remark: str = ""
    lengths: ir.Value | None = None


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
        offset: Dim | None = None,
    ) -> None:
        """`offset`: where the operator itself counts the first query; None: as full_lengths tells it."""
        self.facts = facts
        self.reducer = reducer
        self.builder = builder
        self.axes = axes
        self.key = key
        self.dtype = dtype
        self.offset = offset

    def build(self, terms: Sequence[Term], guarded: bool, even: bool = False) -> MaskInput:
        """One mask input and structural bounds for all `terms`.

        Rows of nothing but -inf are NaN, but for `guarded`, zeros, and `even`, the mean of V over all keys.

        Raises:
            RefusalError: they do not add up to a mask that the operator has.
        """
        for term in terms:
            self._check(term.value)  # those that do nothing too: they may widen the scores
        grid = self._grid(terms)
        planner = Planner(self.facts, self.reducer, grid)
        plan = planner.plan([term for term in terms if not self._does_nothing(term)])
        terms = plan.terms
        from_last = plan.window != NO_WINDOW and plan.base not in (grid.bases[0], 0)
        hides = any(planner.hides_wholly(term) for term in terms)
        remark = plan.remark or (
            "a query that sees no key gives 0; it gave NaN before" if hides and not (guarded or even) else ""
        )
        made = MaskInput(None, plan.window, from_last, "mean" if plan.is_mean or even else "zero", remark)
        if plan.is_sum:
            return dataclasses.replace(made, value=self._expanded(self._chain(terms)))
        if plan.window == NO_WINDOW and self.offset is None and not even:  # with lengths the mean is over fewer keys
            made, terms = self._with_lengths(made, terms)
        fills = {term.number for term in terms if not term.is_bias}
        finite = {number for number in fills if not is_minus_infinity(number)}
        if finite and (len(fills) > 1 or max(finite) > NEGLIGIBLE):
            raise RefusalError(f"masked scores are filled with {sorted(fills)}; use -inf or finfo.min")
        if finite and terms[-1].is_bias:
            raise RefusalError("a bias is added after masked scores were filled with a finite number")
        bias = self._sum([self._bias(term) for term in terms if term.is_bias])
        allowed = self._all([self._allowed(term) for term in terms if not term.is_bias])
        if allowed is None:
            return dataclasses.replace(made, value=self._expanded(bias))
        if finite:
            made = dataclasses.replace(made, empty_row="mean")
        mask = allowed if bias is None else self._filled(allowed, bias, -np.inf)
        return dataclasses.replace(made, value=self._expanded(mask))

    def _with_lengths(self, made: MaskInput, terms: Sequence[Term]) -> tuple[MaskInput, Sequence[Term]]:
        """Takes a mask that is a comparison with lengths from `terms`.

        Only where no row is the mean of V: that of a sentence without keys is over all keys, or over those below its
        length, which are none. Windows must not be there, as the operator would count from the length.
        """
        if any(not term.is_bias and not is_minus_infinity(term.number) for term in terms):
            return made, terms
        parts = list(parted(self.facts, self.reducer, terms))
        for index, term in enumerate(parts):
            for found in comparison(self.facts, self.reducer, term):
                lengths = self._lengths(found)
                if lengths is not None:
                    return dataclasses.replace(made, lengths=lengths), parts[:index] + parts[index + 1 :]
        return made, terms

    def _lengths(self, found: Comparison) -> ir.Value | None:
        keys = self.axes.dims[self.axes.labels.index(self.axes.roles.key)]
        dims = self.facts.dims(found.mask)
        if dims is None or dims[-1] != keys or keys == 1:
            return None
        labels, roles, view = self.axes.labels, self.axes.roles, found.view
        named = dict(zip(labels, [()] * (len(labels) - len(view.axes)) + list(view.axes), strict=True))
        divided = self._batch_and_heads(view, [named[label] for label in roles.batch])
        if divided is None:
            return None
        batch, heads, query, key = (_kept(axis) for axis in (*divided, named[roles.query], named[roles.key]))
        if heads or query or key != view.layout[-1] or (batch and batch not in view.layout[:-1]):
            return None
        return per_sentence(self.facts, self.builder, found, self.axes.heads.batch)

    def _chain(self, terms: Sequence[Term]) -> ir.Value | None:
        """The terms one after the other, as the scores had them, on a score of zero."""
        total: ir.Value | None = None
        for term in terms:
            if term.is_bias:
                bias = self._bias(term)
                total = self._sum([total, bias]) if total is not None else bias
            else:
                start = total if total is not None else self.builder.constant(np.zeros((), self.dtype.numpy()))
                total = self._filled(self._allowed(term), start, term.number)
        return total

    def _filled(self, allowed: ir.Value, bias: ir.Value, number: float) -> ir.Value:
        kind = self.facts.dtype(bias)
        assert kind is not None
        return self._op("Where", allowed, bias, self.builder.constant(np.array(number, kind.numpy())), dtype=kind)

    def _grid(self, terms: Sequence[Term]) -> Grid:
        """What the masks cover, with as many keys as they say, if more than one: others make the original fail."""
        axes = self.axes
        query, key = (axes.labels.index(role) - len(axes.labels) for role in (axes.roles.query, axes.roles.key))
        queries, keys = axes.dims[query], axes.dims[key]
        shapes = [self.facts.dims(term.value) for term in terms]
        others = {dims[key] for dims in shapes if dims is not None and len(dims) >= -key and not _fits(dims[key], keys)}
        if len(others) == 1 and all(is_positive_or_zero(size - 2) for size in others):
            (keys,) = others
        bases = (_ZERO, keys - queries) if self.offset is None else (self.offset,)
        return Grid(queries, keys, bases, query, key)

    def _does_nothing(self, term: Term) -> bool:
        if term.is_bias:
            return is_zero(self.facts, term.value)
        return (is_true if term.inverted else is_false)(self.facts, term.value)

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
            kept = _kept(axis)
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
        if dims is not None and (dims[-1] == keys or (_fits(dims[-1], keys) and not _is_one(dims[-1], keys))):
            return mask
        shape = self.builder.op("Shape", self.key.value, dtype=ir.DataType.INT64)
        count = self.builder.op("Gather", shape, self.builder.ints([self.key.labels.index(self.axes.roles.key)]))
        target = self.builder.op("Concat", self.builder.ints([1, 1, 1]), count, axis=0)
        return self.builder.op("Expand", mask, target, dtype=self.facts.dtype(mask))


def _fits(size: Dim, of_scores: Dim) -> bool:
    """Whether a mask's dimension is proved to be 1 or the scores'."""
    return size == 1 or size == of_scores or is_clipped(size, of_scores) or _is_one(size, of_scores)


def _is_one(size: Dim, of_scores: Dim) -> bool:
    """Whether a mask's dimension is 1, unless there are no scores at all."""
    return size in (1, minimum(Dim.of(1), of_scores))


def _kept(axis: Axis) -> Axis:
    return tuple(factor for factor in axis if not factor.repeats)


def _flat(axes: Sequence[Axis]) -> list[object]:
    return [factor for axis in axes for factor in axis]


def _name(dtype: ir.DataType | None) -> str:
    return dtype.name.lower() if dtype is not None else "of unknown type"


def full_lengths(builder: Builder, query: ir.Value, key: ir.Value, rank: int) -> ir.Value:
    """nonpad_kv_seqlen of all keys, by which the operator puts the last query beside the last key.

    Q and K are (batch, sequence, ...) or, of `rank` 4, (batch, heads, sequence, size).
    """
    whole = ((query, 0), (key, rank - 2))  # of which Shape takes a part from opset 15 on
    shapes = [(builder.op("Shape", value, dtype=ir.DataType.INT64), builder.ints([axis])) for value, axis in whole]
    batch, keys = (builder.op("Gather", *shape, axis=0, dtype=ir.DataType.INT64) for shape in shapes)
    return builder.op("Expand", keys, batch, dtype=ir.DataType.INT64)
