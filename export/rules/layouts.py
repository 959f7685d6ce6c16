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
from flashonnx.export.layout.factors import Axis, Factor, View, regroup
from flashonnx.export.layout.products import Labels, Roles
from flashonnx.export.layout.steps import LAYOUT_OPERATORS, after
from flashonnx.export.layout.views import Peeled, peel
from flashonnx.export.model.build import Builder
from flashonnx.export.rules.sizes import shape_users
from flashonnx.export.values.dims import Dim, product
from flashonnx.export.values.facts import Facts, constant_tensor

# What layout operators cost at run time, besides a little for each: those that copy, and repetitions, which grow.
Step = Callable[[Builder, ir.Value], ir.Value]

TRANSPOSE = 10
_COSTS = {"Transpose": TRANSPOSE, **dict.fromkeys(("Expand", "Tile", "Concat", "Gather"), 40)}


def cost_of(node: ir.Node) -> int:
    return _COSTS.get(node.op_type, 1)


@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor of a product, its axes named by `labels`; its last axis holds the last two of them if `heads` is given.

    `heads` is the number of heads on that axis. With `narrow` it is wanted in that type, from which it was
    cast to float32, or, behind the attention, to which it is cast.
    """

    value: ir.Value
    labels: Labels
    heads: int | None = None
    narrow: ir.DataType | None = None

    def peel(self, facts: Facts, *, scales: bool, parts: bool = False) -> Iterator[Peeled]:
        """The ways to write the tensor as a view of something upstream, with one axis for each label."""
        for peeled in peel(facts, self.value, scales=scales, parts=parts, narrow=self.narrow):
            if self.narrow is not None and facts.dtype(peeled.view.source) != self.narrow:
                continue
            view: View | None = peeled.view
            if self.heads is not None:
                *outer, last = peeled.view.dims
                size = last.divided_by(self.heads)
                view = regroup(peeled.view, (*outer, Dim.of(self.heads), size)) if size is not None else None
            if view is not None:
                yield dataclasses.replace(peeled, view=view)


@dataclasses.dataclass(frozen=True)
class Heads:
    """How the batch axes of the scores divide into batch and heads."""

    batch: Dim
    heads: Dim


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The tensors of one attention, with their axes named: those of V's own size by `value_size`.

    `key_heads` is how many heads K and V have where these are not as many as the scores.
    """

    query: Operand
    key: Operand
    value: Operand
    output: Operand
    roles: Roles
    value_size: str
    key_heads: Dim | None = None

    def inputs(self) -> tuple[tuple[Operand, str, str], ...]:
        """Q, K and V, each with the labels of its sequence and its size."""
        roles = self.roles
        return (
            (self.query, roles.query, roles.depth),
            (self.key, roles.key, roles.depth),
            (self.value, roles.key, self.value_size),
        )

    def divided(
        self, view: View, operand: Operand, sequence: str, size: str, heads: Heads
    ) -> tuple[View, Axis, Axis, Axis, Axis] | None:
        """The factors of batch, own heads, sequence and size in a view of `operand`; None where it has no such parts.

        Heads of K and V may repeat, each one in a row.
        """
        parts = _parts(view, operand.labels, self.roles.batch, sequence, size, heads)
        if parts is None:
            return None
        view, b, h, s, d = parts
        is_query = operand is self.query
        kept = tuple(factor for factor in h if not factor.repeats)
        if h != kept + h[len(kept) :] or any(f.repeats for f in (*b, *s, *d)):
            return None  # heads repeated as a whole (h % Hkv), or repeats elsewhere
        if is_query and h != kept:
            return None
        count = heads.heads if is_query or self.key_heads is None else self.key_heads
        if product(f.size for f in h) != count and (h or is_query):
            return None  # a single key head serves all; else the counts must agree
        return view, b, kept, s, d


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
    """One way to give the operator's output of `rank` dimensions, with time before batch or not, back to the graph.

    `shapes` are nodes that ask for the shape of what goes before.
    """

    rank: int
    time_major: bool
    cost: int
    replaces: ir.Value
    build: Step
    shapes: tuple[ir.Node, ...] = ()


def groupings(facts: Facts, query: Operand, batch: Labels) -> Iterator[Heads]:
    """The ways to divide the batch axes into batch and heads, the likeliest first."""
    seen = set()
    for peeled in dataclasses.replace(query, narrow=None).peel(facts, scales=True):
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
    facts: Facts, tensors: Tensors, operand: Operand, sequence: str, size: str, heads: Heads, *, scales: bool
) -> list[Place]:
    """Every way to hand `operand` to the operator, given how batch and heads divide."""
    found = []
    for peeled in operand.peel(facts, scales=scales):
        parts = tensors.divided(peeled.view, operand, sequence, size, heads)
        if parts is None:
            continue
        view, b, h, s, d = parts
        sizes = tuple(product(f.size for f in axis) for axis in (h, s, d))
        left = sum(map(cost_of, peeled.before))
        for rank, cost, step in _forms(view, b, h, s, d):
            found.append(Place(rank, cost + left, view.source, step, peeled.factor, *sizes))
    return found


def _parts(
    view: View, labels: Labels, batch: Labels, sequence: str, size: str, heads: Heads
) -> tuple[View, Axis, Axis, Axis, Axis] | None:
    named = {label: index for index, label in enumerate(labels)}
    if len(batch) >= 2:
        groups = [named[label] for label in batch]
        b = tuple(f for index in groups[:-1] for f in view.axes[index])
        h = view.axes[groups[-1]]
        if product(f.size for f in b) != heads.batch:
            return None
    else:
        joint = view.axes[named[batch[0]]] if batch else ()
        rest = product(f.size for f in joint).divided_by(heads.batch)
        apart = regroup(dataclasses.replace(view, axes=(joint,)), (heads.batch, rest)) if rest is not None else None
        if apart is None:
            return None
        b, h = apart.axes
        axes = list(view.axes)
        if batch:
            axes[named[batch[0]]] = (*b, *h)
        view = apart.with_axes(axes)
    return view, b, h, view.axes[named[sequence]], view.axes[named[size]]


def _forms(view: View, b: Axis, h: Axis, s: Axis, d: Axis) -> Iterator[tuple[int, int, Step]]:
    """(rank, cost, step) for every way to make the operator's input of the view's source."""
    layout = view.layout
    heads, size = _count(h), _count(d)
    if layout == (b, s, h + d):
        yield 3, 0, as_it_is
    if layout == (b, h, s, d):
        yield 4, 0, as_it_is
    if heads is not None and size is not None:
        if layout == (b, s, h, d):
            yield 3, 1, reshape_to(0, 0, heads * size)
        elif (perm := _permutation(layout, (b, s, h, d))) is not None:
            yield 3, TRANSPOSE + 1, _chain(_transpose(perm), reshape_to(0, 0, heads * size))
    if layout == (s, h + d) and not b:
        yield 3, 1, _with_axes("Unsqueeze", 0)
    for rank, wanted in ((4, (b, h, s, d)), (3, (b, s, h + d))):
        perm = _permutation(layout, wanted)
        if perm is not None:
            yield rank, TRANSPOSE, _transpose(perm)


def exits(
    facts: Facts, output: Operand, batch: Labels, query: str, size: str, heads: Heads, query_size: Dim, value_size: Dim
) -> list[Exit]:
    """Every way to replace `output`, or a later layout of it, by the operator's output."""

    def axis(size: Dim) -> Axis:
        return () if size == 1 else (Factor(size),)

    b, h, s, d = (axis(dim) for dim in (heads.batch, heads.heads, query_size, value_size))
    value = output.value
    if facts.dims(value) is None or len(batch) > 2:
        return []
    named: dict[str, Axis] = {query: s, size: d}
    if len(batch) == 2:
        named |= {batch[0]: b, batch[1]: h}
    elif batch:
        named[batch[0]] = b + h
    axes = [named[label] for label in output.labels]
    if output.heads is not None:
        axes[-2:] = [axes[-2] + axes[-1]]
    view = View(value, (), tuple(axes))
    found: list[Exit] = []
    shapes: list[ir.Node] = []
    is_wide = output.narrow is not None  # before the Cast nothing has the attention's type
    while True:
        found += (
            []
            if is_wide
            else [dataclasses.replace(way, shapes=tuple(shapes)) for way in _returns(view, value, b, h, s, d)]
        )
        asking = shape_users(value)
        users = [use.node for use in value.uses() if use.node not in asking]
        shapes += asking
        if value.is_graph_output() or len(users) != 1 or users[0].domain:
            return found
        node = users[0]
        if is_wide and node.op_type == "Cast":
            is_wide, value = False, node.outputs[0]
            continue
        if node.op_type not in LAYOUT_OPERATORS:
            return found
        following = after(facts, view, node.outputs[0])
        if following is None:
            return found
        found = [dataclasses.replace(way, cost=way.cost + cost_of(node)) for way in found]  # it stays behind them
        view, value = following, node.outputs[0]


def _returns(view: View, value: ir.Value, b: Axis, h: Axis, s: Axis, d: Axis) -> Iterator[Exit]:
    axes = view.axes
    flat = tuple(factor for axis in axes for factor in axis)
    again = _same_reshape(value)
    for rank, time_major, whole in ((3, False, (b, s, h + d)), (4, False, (b, h, s, d)), (3, True, (s, b, h + d))):
        if axes == whole:
            yield Exit(rank, time_major, 0, value, as_it_is)
        elif flat == tuple(factor for axis in whole for factor in axis) and again is not None:
            yield Exit(rank, time_major, 1, value, again)
        elif (perm := _permutation(whole, axes)) is not None:
            yield Exit(rank, time_major, TRANSPOSE, value, _transpose(perm))
        gone = next((i for i, axis in enumerate(whole) if not axis and (*whole[:i], *whole[i + 1 :]) == axes), None)
        if gone is not None:
            yield Exit(rank, time_major, 1, value, _with_axes("Squeeze", gone))
        if rank == 3:
            yield from _heads_apart(axes, value, whole[:2], h, d, time_major)


def _heads_apart(
    axes: tuple[Axis, ...], value: ir.Value, outer: tuple[Axis, ...], h: Axis, d: Axis, time_major: bool
) -> Iterator[Exit]:
    heads, size = _count(h), _count(d)
    if heads is None or size is None:
        return
    apart = reshape_to(0, 0, heads, size)
    perm = _permutation((*outer, h, d), axes)
    if axes == (*outer, h, d):
        yield Exit(3, time_major, 1, value, apart)
    elif perm is not None:
        yield Exit(3, time_major, TRANSPOSE + 1, value, _chain(apart, _transpose(perm)))


def _count(axis: Axis) -> int | None:
    return product(factor.size for factor in axis).value


def _permutation(axes: tuple[Axis, ...], wanted: tuple[Axis, ...]) -> tuple[int, ...] | None:
    """The perm of a Transpose that makes `wanted` of `axes`; None if there is none, or nothing to do."""
    if len(axes) != len(wanted) or axes == wanted:
        return None
    every = itertools.permutations(range(len(axes)))
    return next((perm for perm in every if tuple(axes[index] for index in perm) == wanted), None)


def as_it_is(builder: Builder, value: ir.Value) -> ir.Value:
    return value


def _transpose(perm: Sequence[int]) -> Step:
    return lambda builder, value: builder.op("Transpose", value, perm=perm)


def _chain(first: Step, second: Step) -> Step:
    return lambda builder, value: second(builder, first(builder, value))


def reshape_to(*shape: int) -> Step:
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
