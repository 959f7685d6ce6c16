"""Finding the tensors that Q, K, V and the output really are, so that transposes vanish.

Each operand can be taken at several places of its layout chain. A place fits the three-dimensional
form when its elements lie as (batch | sequence | heads x size), the four-dimensional one when they
lie as (batch | heads | sequence | size); the cheapest form for all four tensors together wins.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import onnx_ir as ir
from flashonnx.export.build import Builder
from flashonnx.export.dims import Dim, product
from flashonnx.export.facts import Facts, constant_tensor
from flashonnx.export.products import Labels
from flashonnx.export.views import LAYOUT_OPERATORS, Axis, Factor, View, peel, regroup

# What layout operators cost at run time, besides a little for each: those that copy, and repetitions, which grow.
Step = Callable[[Builder, ir.Value], ir.Value]

TRANSPOSE = 10
_REPEAT = 40


def _cost(node: ir.Node) -> int:
    return {"Transpose": TRANSPOSE, "Expand": _REPEAT}.get(node.op_type, 1)


@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor of a product, its axes named by `labels`."""

    value: ir.Value
    labels: Labels


@dataclasses.dataclass(frozen=True)
class Heads:
    """How the batch axes of the scores divide into batch and heads."""

    batch: Dim
    heads: Dim


@dataclasses.dataclass(frozen=True)
class Place:
    """One way to hand a tensor to the operator in the form of `rank` dimensions."""

    rank: int
    cost: int
    source: ir.Value
    step: Step
    factor: float
    heads: Dim
    sequence: Dim
    size: Dim

    def build(self, builder: Builder) -> ir.Value:
        return self.step(builder, self.source)


@dataclasses.dataclass(frozen=True)
class Exit:
    """One way to give the operator's output of `rank` dimensions back to the graph."""

    rank: int
    cost: int
    replaces: ir.Value
    build: Step


def groupings(facts: Facts, query: Operand, batch: Labels) -> Iterator[Heads]:
    """The ways to divide the batch axes into batch and heads, the likeliest first."""
    seen = set()
    for peeled in peel(facts, query.value, scales=True):
        axes = [peeled.view.axes[query.labels.index(label)] for label in batch]
        if any(factor.repeats for axis in axes for factor in axis):
            continue
        factors = [factor.size for axis in axes for factor in axis]
        if len(batch) >= 2:
            options = [len(factors) - len(axes[-1])]
        else:
            options = [len(factors)]
            if len(factors) > 1 and factors[-1].value is not None:
                options.insert(0, len(factors) - 1)
        for cut in options:
            heads = Heads(product(factors[:cut]), product(factors[cut:]))
            if heads not in seen:
                seen.add(heads)
                yield heads


def places(
    facts: Facts,
    operand: Operand,
    batch: Labels,
    sequence: str,
    size: str,
    heads: Heads,
    *,
    is_query: bool,
    scales: bool,
) -> list[Place]:
    """Every way to hand `operand` to the operator, given how batch and heads divide."""
    found = []
    for peeled in peel(facts, operand.value, scales=scales):
        view = peeled.view
        parts = _parts(view, operand.labels, batch, sequence, size, heads)
        if parts is None:
            continue
        view, b, h, s, d = parts
        kept = tuple(factor for factor in h if not factor.repeats)
        if h != kept + h[len(kept) :] or any(f.repeats for f in (*b, *s, *d)):
            continue  # heads repeated as a whole (h % Hkv), or repeats elsewhere
        if is_query and h != kept:
            continue
        if product(f.size for f in h) != heads.heads and (h or is_query):
            continue  # a single key head serves all; else the counts must agree
        counts = (product(f.size for f in axis) for axis in (kept, s, d))
        sizes = tuple(counts)
        left = sum(map(_cost, peeled.before))
        for rank, cost, step in _forms(view, b, kept, s, d):
            found.append(Place(rank, cost + left, view.source, step, peeled.factor, *sizes))
    return found


def _parts(
    view: View, labels: Labels, batch: Labels, sequence: str, size: str, heads: Heads
) -> tuple[View, Axis, Axis, Axis, Axis] | None:
    """The factors of batch, heads, sequence and size; None when they do not divide so."""
    named = {label: index for index, label in enumerate(labels)}
    if len(batch) >= 2:
        groups = [named[label] for label in batch]
        b = tuple(f for index in groups[:-1] for f in view.axes[index])
        h = view.axes[groups[-1]]
        if product(f.size for f in b) != heads.batch:
            return None
    else:
        merged = view.axes[named[batch[0]]] if batch else ()
        total = product(f.size for f in merged)
        rest = total.divided_by(heads.batch)
        divided = (
            regroup(View(view.source, view.layout, (merged,)), (heads.batch, rest)) if (rest is not None) else None
        )
        if divided is None:
            return None
        b, h = divided.axes
        axes = list(view.axes)
        if batch:
            axes[named[batch[0]]] = (*b, *h)
        view = View(divided.source, divided.layout, tuple(axes))
    return view, b, h, view.axes[named[sequence]], view.axes[named[size]]


def _forms(view: View, b: Axis, h: Axis, s: Axis, d: Axis) -> Iterator[tuple[int, int, Step]]:
    """(rank, cost, step) for every way to make the operator's input of the view's source."""
    layout = view.layout
    heads, size = _count(h), _count(d)
    if layout == (b, s, h + d):
        yield 3, 0, _as_it_is
    if layout == (b, h, s, d):
        yield 4, 0, _as_it_is
    if layout == (b, s, h, d) and heads is not None and size is not None:
        yield 3, 1, _reshape(0, 0, heads * size)
    if layout == (s, h + d) and not b:
        yield 3, 1, _with_axes("Unsqueeze", 0)
    for rank, wanted in ((4, (b, h, s, d)), (3, (b, s, h + d))):
        perm = _permutation(layout, wanted)
        if perm is not None:
            yield rank, TRANSPOSE, _transpose(perm)


def exits(
    facts: Facts,
    value: ir.Value,
    labels: Labels,
    batch: Labels,
    query: str,
    size: str,
    heads: Heads,
    query_size: Dim,
    value_size: Dim,
) -> list[Exit]:
    """Every way to replace `value`, or a later layout of it, by the operator's output."""

    def axis(size: Dim) -> Axis:
        return () if size == 1 else (Factor(size),)

    b, h, s, d = (axis(dim) for dim in (heads.batch, heads.heads, query_size, value_size))
    dims = facts.dims(value)
    if dims is None:
        return []
    named: dict[str, Axis] = {query: s, size: d}
    if len(batch) >= 2:
        named[batch[-1]] = h
        named[batch[0]] = b
        if len(batch) > 2:
            return []
    elif batch:
        named[batch[0]] = b + h
    view = View(value, (), tuple(named[label] for label in labels))
    found: list[Exit] = []
    while True:
        found += list(_returns(view, value, b, h, s, d))
        users = [use.node for use in value.uses()]
        if value.is_graph_output() or len(users) != 1 or users[0].domain:
            return found
        node = users[0]
        if node.op_type not in LAYOUT_OPERATORS or node.op_type == "Expand":
            return found
        after = view.after(facts, node)
        if after is None:
            return found
        found = [dataclasses.replace(way, cost=way.cost + _cost(node)) for way in found]  # it stays behind them
        view, value = after, node.outputs[0]


def _returns(view: View, value: ir.Value, b: Axis, h: Axis, s: Axis, d: Axis) -> Iterator[Exit]:
    axes = view.axes
    heads, size = _count(h), _count(d)
    flat = tuple(factor for axis in axes for factor in axis)
    again = _same_reshape(value)
    for rank, whole in ((3, (b, s, h + d)), (4, (b, h, s, d))):
        if axes == whole:
            yield Exit(rank, 0, value, _as_it_is)
        elif flat == tuple(factor for axis in whole for factor in axis) and again is not None:
            yield Exit(rank, 1, value, again)
        elif (perm := _permutation(whole, axes)) is not None:
            yield Exit(rank, TRANSPOSE, value, _transpose(perm))
    if axes == (s, h + d) and not b:
        yield Exit(3, 1, value, _with_axes("Squeeze", 0))
    if heads is not None and size is not None:
        apart = _reshape(0, 0, heads, size)
        perm = _permutation((b, s, h, d), axes)
        if axes == (b, s, h, d):
            yield Exit(3, 1, value, apart)
        elif perm is not None:
            turn = _transpose(perm)
            yield Exit(3, TRANSPOSE + 1, value, lambda builder, y: turn(builder, apart(builder, y)))


def _count(axis: Axis) -> int | None:
    return product(factor.size for factor in axis).value


def _permutation(axes: tuple[Axis, ...], wanted: tuple[Axis, ...]) -> tuple[int, ...] | None:
    """The perm of a Transpose that makes `wanted` of `axes`; None if there is none, or nothing to do."""
    if len(axes) != len(wanted) or axes == wanted:
        return None
    every = itertools.permutations(range(len(axes)))
    return next((perm for perm in every if tuple(axes[index] for index in perm) == wanted), None)


def _as_it_is(builder: Builder, value: ir.Value) -> ir.Value:
    return value


def _transpose(perm: Sequence[int]) -> Step:
    return lambda builder, value: builder.op("Transpose", value, perm=perm)


def _reshape(*shape: int) -> Step:
    return lambda builder, value: builder.op("Reshape", value, builder.ints(shape))


def _with_axes(op_type: str, *axes: int) -> Step:
    return lambda builder, value: builder.op(op_type, value, builder.ints(axes))


def _same_reshape(value: ir.Value) -> Step | None:
    """The Reshape that made `value`, for another input, if its target means the same on any."""
    node = value.producer()
    if node is None or node.op_type != "Reshape" or node.domain:
        return None
    target = node.inputs[1]
    tensor = constant_tensor(target)
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    if not attributes.get("allowzero") and (tensor is None or (tensor.numpy() == 0).any()):
        return None
    return lambda builder, y: builder.op("Reshape", y, target, **attributes)
