"""Q, K and V that lie in one tensor as the operator's packed layouts have them, so that nothing is copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import onnx_ir as ir
from flashonnx.export.layout.factors import Axis, merged
from flashonnx.export.rules.layouts import Heads, Operand, Place, Step, Tensors, as_it_is, cost_of, reshape_to
from flashonnx.export.values.dims import Dim, product
from flashonnx.export.values.facts import Facts

_ZERO = Dim.of(0)


@dataclasses.dataclass(frozen=True)
class Packing:
    """Q, K and V in one tensor: the value of qkv_layout, and where each of them is taken."""

    layout: str
    query: Place
    key: Place
    value: Place

    @property
    def is_time_major(self) -> bool:
        return self.layout == "time_major"


@dataclasses.dataclass(frozen=True)
class _Part:
    """One of Q, K and V: its sizes, and how many elements of the packed tensor are between two of its own."""

    sizes: tuple[Dim, ...]  # batch, heads, sequence, size
    strides: tuple[Dim, ...]
    start: Dim
    factor: float
    cost: int


def packings(facts: Facts, tensors: Tensors, heads: Heads, *, scales: bool) -> list[Packing]:
    """The ways to hand Q, K and V to the operator in one tensor.

    Args:
        facts: what is known about the model.
        tensors: the attention's tensors.
        heads: how the batch axes of the scores divide.
        scales: whether numbers that multiply Q and K may be taken into the scale.
    """
    found = [
        dict(_parts(facts, tensors, *named, heads, scales=scales and named[0] is not tensors.value))
        for named in tensors.inputs()
    ]
    result = []
    for source in found[0]:
        if all(source in parts for parts in found):
            result += list(_arranged(facts, source, [parts[source] for parts in found]))
    return result


def _parts(
    facts: Facts, tensors: Tensors, operand: Operand, sequence: str, size: str, heads: Heads, *, scales: bool
) -> Iterator[tuple[ir.Value, _Part]]:
    """The tensors upstream that `operand` is a part of."""
    for peeled in operand.peel(facts, scales=scales, parts=True):
        axes = tensors.divided(peeled.view, operand, sequence, size, heads)
        if axes is None:
            continue
        view, *runs = axes
        strides = [_stride(run) for run in runs]
        sizes = tuple(product(factor.size for factor in run) for run in runs)
        if all(stride is not None for stride in strides):
            cost = sum(map(cost_of, peeled.before))
            part = _Part(sizes, tuple(s for s in strides if s is not None), view.start, peeled.factor, cost)
            yield view.source, part


def _stride(axis: Axis) -> Dim | None:
    """The elements between neighbours on `axis`: 0 where there is one alone; None where they are not even."""
    runs = merged(axis)
    if not runs:
        return _ZERO
    return runs[0].stride if len(runs) == 1 else None


def _arranged(facts: Facts, source: ir.Value, parts: list[_Part]) -> Iterator[Packing]:
    query, key, value = parts
    batch, q_heads, length, size = query.sizes
    kv_heads = key.sizes[1]
    if q_heads.value is None or kv_heads.value is None:
        return
    if key.sizes != (batch, kv_heads, length, size) or value.sizes != key.sizes:
        return
    row = (q_heads + kv_heads + kv_heads) * size
    dims = facts.dims(source)
    if dims is None or product(dims) != batch * length * row:
        return
    for layout, outer, head, starts in (
        ("3hd", (length * row, row), size, (_ZERO, q_heads * size, (q_heads + kv_heads) * size)),
        ("h3d", (length * row, row), size * 3, (_ZERO, size, size * 2)),
        ("time_major", (row, batch * row), size, (_ZERO, q_heads * size, (q_heads + kv_heads) * size)),
    ):
        strides = (outer[0], head, outer[1], Dim.of(1))
        fits = all(
            stride == wanted or count == 1
            for part in parts
            for stride, wanted, count in zip(part.strides, strides, part.sizes, strict=True)
        )
        name = layout if q_heads == kv_heads else {"3hd": "gqa"}.get(layout)
        if not fits or name is None or tuple(part.start for part in parts) != starts:
            continue
        step = _step(dims, name, query.sizes, row)
        if step is not None:
            cost = query.cost + step[1]
            places = [
                Place(3, cost if part is query else 0, source, step[0], part.factor, part.sizes[1], length, size)
                for part in parts
            ]
            yield Packing(name, *places)


def _step(dims: tuple[Dim, ...], layout: str, sizes: tuple[Dim, ...], row: Dim) -> tuple[Step, int] | None:
    """What makes the packed input of a tensor of `dims`, and its cost; None where the model's shapes do not tell."""
    batch, heads, length, size = sizes
    outer = (length, batch) if layout == "time_major" else (batch, length)
    three = Dim.of(3)
    whole = {"3hd": (*outer, three, heads, size), "h3d": (*outer, heads, three, size)}
    if dims in ((*outer, row), whole.get(layout)):
        return as_it_is, 0
    if row.value is None:
        return None
    if dims[:2] == outer:
        return reshape_to(0, 0, row.value), 1
    for index, known in enumerate(size.value for size in outer):
        if known is not None:  # the other one is what is left
            shape = [-1, -1, row.value]
            shape[index] = known
            return reshape_to(*shape), 1
    return None
