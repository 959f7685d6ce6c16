"""Scores that are reshaped on their way, and the masks that they meet in each shape.

Merged batch and heads come apart before a mask is added, batches of windows before each window gets
its own, rows and columns of an image before relative positions are added. The scores of all these
shapes are views of one product; a mask is brought to one in which heads are apart, or to that of the softmax, which
costs a copy of the mask where part of an axis repeats there, and nothing of the scores' size else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import onnx_ir as ir
from flashonnx.export.layout.factors import Axis, Factor, View
from flashonnx.export.layout.products import Labels, Roles
from flashonnx.export.layout.steps import after
from flashonnx.export.model.build import Builder
from flashonnx.export.rules.layouts import Heads
from flashonnx.export.rules.scores import RefusalError, Scores, Term, Weights
from flashonnx.export.rules.sizes import Sizes
from flashonnx.export.values.dims import Dim, product
from flashonnx.export.values.facts import Facts

_ONE = Dim.of(1)


class ScoreSpaces:
    """The views of a product from itself to the softmax and on to the product with V."""

    def __init__(self, facts: Facts, scores: Scores, weights: Weights) -> None:
        self.facts = facts
        self.labels = scores.product.labels
        layouts = scores.layouts[::-1]
        self._count = len(layouts)
        views = _views(facts, scores.product.node.outputs[0], [*layouts, *weights.layouts])
        if views is None:
            raise RefusalError("the scores are reshaped before the softmax, and the model's shapes do not tell how")
        self.views = views
        if views[-1].axes != views[0].axes:
            raise RefusalError(
                "the scores are reshaped before the softmax, and not back before the product with V, "
                "so that its batch and heads are others"
            )

    @property
    def softmax(self) -> View:
        """The scores as the softmax sees them."""
        return self.views[self._count]

    def check_softmax(self, key: str) -> None:
        """Requires that the last axis before the softmax is the keys'."""
        if self.softmax.axes[-1] != self.views[0].axes[self.labels.index(key)]:
            raise RefusalError("the softmax does not run over the keys alone")

    def named(self, roles: Roles, heads: Heads) -> tuple[View, Labels, Roles] | None:
        """The shape in which masks are wanted, and what its axes are.

        That is the softmax's, where it has heads apart, or another one on the way there that has; else the softmax's
        as it is, or the product's.
        """
        first = self.views[0]
        on_the_way = [self.softmax, *self.views[: self._count]]
        wanted = [view for view in on_the_way if view.dims[:-2] == (heads.batch, heads.heads)]
        for view in (*wanted, self.softmax):
            if view.axes == first.axes and len(roles.batch) <= 2:
                return first, self.labels, roles
            axes = dict(zip(self.labels, first.axes, strict=True))
            batch = {factor for label in roles.batch for factor in axes[label]}
            *outer, query, key = view.axes
            is_batch = all(factor in batch for axis in outer for factor in axis)
            if is_batch and (query, key) == (axes[roles.query], axes[roles.key]) and 0 < len(outer) <= 2:
                labels = tuple(f"batch{index}" for index in range(len(outer)))
                return view, (*labels, roles.query, roles.key), dataclasses.replace(roles, batch=labels)
        return (first, self.labels, roles) if len(roles.batch) <= 2 else None

    def bring(self, term: Term, there: View, builder: Builder, operands: Sequence[ir.Value]) -> Term:
        """`term` with a value that broadcasts to `there`.

        Raises:
            RefusalError: the shapes do not tell how.
        """
        here = self.views[self._count - term.layouts]
        if here.axes == there.axes:
            return dataclasses.replace(term, layouts=0)
        first = self.views[0]
        known = self.facts.dims(first.source) or ()
        same = {a: b for a, b in zip(known, first.dims, strict=True) if a != b}
        value = _carried(Sizes(self.facts, builder, operands, same), term.value, here, there)
        return dataclasses.replace(term, value=value, layouts=0)


def _views(facts: Facts, value: ir.Value, nodes: Sequence[ir.Node]) -> list[View] | None:
    """`value` and what the layout operators make of it one after the other, all of the same factors."""
    first = View.identity(facts, value)
    views: list[View] = []
    for _ in range(2):  # the second time nothing has to be divided any more
        if first is None:
            return None
        views = [first]
        for node in nodes:
            following = after(facts, views[-1], node.outputs[0])
            if following is None:
                return None
            views.append(following)
        first = View(value, views[-1].layout, views[-1].layout)
    return views


def _carried(sizes: Sizes, value: ir.Value, here: View, there: View) -> ir.Value:
    """`value`, which broadcasts to `here`, in a shape that broadcasts to `there`."""
    dims = sizes.facts.dims(value)
    if dims is None or len(dims) > len(here.axes):
        raise RefusalError(f"the rank of the mask '{value.name}' is not known; run onnx.shape_inference first")
    present: set[Factor] = set()
    for size, axis in zip(dims[::-1], here.axes[::-1], strict=False):
        if size == product(factor.size for factor in axis):
            present.update(axis)
        elif size != 1:
            raise RefusalError(f"nothing shows that the mask '{value.name}' has the shape of the scores it meets")
    factors = _flat(here.axes)
    if factors != _flat(there.axes):
        raise RefusalError("the scores are transposed before the softmax")
    spread = {factor for axis in there.axes if present & set(axis) for factor in axis if factor not in present}
    if spread:
        value = sizes.reshape(value, [factor.size if factor in present else _ONE for factor in factors])
        value = sizes.expand(value, [factor.size if factor in spread else _ONE for factor in factors])
    seen = present | spread
    return sizes.reshape(value, [product(f.size for f in axis if f in seen) for axis in there.axes])


def _flat(axes: Sequence[Axis]) -> list[Factor]:
    return [factor for axis in axes for factor in axis]
