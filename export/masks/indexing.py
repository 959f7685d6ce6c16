"""How operators that move elements move the forms of positions.py, one small function an operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import onnx_ir as ir
from flashonnx.export.layout.factors import View
from flashonnx.export.layout.steps import after
from flashonnx.export.masks.forms import Affine, Form, Formula, moved, of_array
from flashonnx.export.values.dims import Dim, is_positive_or_zero, minimum
from flashonnx.export.values.facts import Dims, Facts

# Elements of a constant mask or table of positions; larger ones are not looked at.
LARGEST_CONSTANT = 1 << 24


class Reader(Protocol):
    """Whoever knows the forms of values."""

    facts: Facts

    def read(self, value: ir.Value | None) -> Form | None: ...

    def operands(self, node: ir.Node, *indices: int) -> list[Form | None]: ...


def _identity(reader: Reader, node: ir.Node) -> Form | None:
    return reader.read(node.inputs[0])


def _expand(reader: Reader, node: ir.Node) -> Form | None:
    return reader.operands(node, 0)[0]


def _view(reader: Reader, node: ir.Node) -> Form | None:
    form, value = reader.read(node.inputs[0]), node.inputs[0]
    inner = View.identity(reader.facts, value) if value is not None else None
    view = after(reader.facts, inner, node.outputs[0]) if inner is not None else None
    if form is None or view is None:
        return None
    if node.op_type == "Reshape" and reader.facts.dims(value) == reader.facts.dims(node.outputs[0]):
        return form  # to the shape that it has, also where a part is not understood

    def of(affine: Affine) -> Affine | None:
        steps = [0] * len(view.axes)
        for step, axis in zip(affine.steps, view.layout, strict=True):
            if step and axis:
                places = [index for index, factors in enumerate(view.axes) if factors == axis]
                if len(places) != 1:
                    return None
                steps[places[0]] = step
        return Affine(affine.offset, tuple(steps))

    return moved(form, of)


def _slice(reader: Reader, node: ir.Node) -> Form | None:
    facts = reader.facts
    form, dims = reader.read(node.inputs[0]), facts.dims(node.inputs[0])
    starts = facts.ints(node.inputs[1]) if len(node.inputs) > 2 else None
    if form is None or dims is None or starts is None:
        return None

    def given(index: int, default: Sequence[int]) -> Dims | None:
        is_there = len(node.inputs) > index and node.inputs[index] is not None
        return facts.ints(node.inputs[index]) if is_there else tuple(map(Dim.of, default))

    axes, steps = given(3, range(len(starts))), given(4, [1] * len(starts))
    if axes is None or steps is None or any(step != 1 for step in steps):
        return None
    if dims == facts.dims(node.outputs[0]) and all(start == 0 for start in starts):
        return form  # all of it, also where a part is not understood
    shifts = [Dim.of(0)] * len(dims)
    for start, axis in zip(starts, axes, strict=True):
        if axis.value is None:
            return None
        from_end = start.value is not None and start.value < 0
        shifts[axis.value] = dims[axis.value] + start if from_end else start

    def of(affine: Affine) -> Affine | None:
        moves = [(shift, step) for shift, step in zip(shifts, affine.steps, strict=True) if step]
        if not all(is_positive_or_zero(shift) for shift, _ in moves):
            return None  # or it may count from the end
        return Affine(sum((shift * step for shift, step in moves), affine.offset), affine.steps)

    return moved(form, of)


def _gather(reader: Reader, node: ir.Node) -> Form | None:
    dims, index_dims = (reader.facts.dims(item) for item in node.inputs[:2])
    if dims is None or index_dims is None:
        return None
    axis = (node.attributes["axis"].as_int() if "axis" in node.attributes else 0) % len(dims)
    width = len(index_dims)
    after = len(dims) - 1 - axis
    index = reader.read(node.inputs[1])
    if isinstance(index, Affine):
        index = Affine(index.offset, (*[0] * axis, *index.steps, *[0] * after))
    places = [*range(axis), None, *range(axis + width, axis + width + after)]
    return _looked_up(reader, node, places, {axis: index})


def _gather_nd(reader: Reader, node: ir.Node) -> Form | None:
    dims, index_dims = (reader.facts.dims(item) for item in node.inputs[:2])
    if (
        dims is None
        or index_dims is None
        or ("batch_dims" in node.attributes and node.attributes["batch_dims"].as_int())
    ):
        return None
    rank = len(index_dims) - 1
    columns = _columns(reader, node.inputs[1], rank)
    if columns is None or index_dims[-1] != len(columns):
        return None
    width, after = len(columns), len(dims) - len(columns)
    indices: dict[int, Form | None] = {
        axis: Affine(form.offset, form.steps + (0,) * after)
        for axis, form in enumerate(columns)
        if isinstance(form, Affine)
    }
    return _looked_up(reader, node, [*[None] * width, *range(rank, rank + after)], indices)


def _columns(reader: Reader, value: ir.Value | None, rank: int) -> list[Form | None] | None:
    """The indices of each axis, which are joined along the last one or side by side in a constant."""
    table = reader.facts.constant(value, limit=LARGEST_CONSTANT)
    if table is not None:
        return [of_array(table[..., axis]) for axis in range(table.shape[-1])]
    joined = value.producer() if value is not None else None
    if joined is None or joined.op_type != "Concat" or joined.domain:
        return None
    if joined.attributes["axis"].as_int() not in (-1, rank):
        return None
    forms = [reader.read(item) for item in joined.inputs]
    return [
        Affine(form.offset, form.steps[:-1]) if isinstance(form, Affine) and not form.steps[-1] else None
        for form in forms
    ]


def _looked_up(
    reader: Reader, node: ir.Node, places: Sequence[int | None], indices: dict[int, Form | None]
) -> Form | None:
    """Elements of the first input at `indices` of some of its axes; its other axes go to `places`."""
    form, dims = reader.read(node.inputs[0]), reader.facts.dims(node.outputs[0])
    if form is None or dims is None:
        return None

    def of(affine: Affine) -> Affine | None:
        result = Affine(affine.offset, (0,) * len(dims))
        for axis, (step, place) in enumerate(zip(affine.steps, places, strict=True)):
            if step and place is not None:
                result += Affine(Dim.of(0), tuple(step * (at == place) for at in range(len(dims))))
            elif step:
                index = indices.get(axis)
                if not isinstance(index, Affine) or not is_positive_or_zero(index.lowest(dims)):
                    return None  # a negative one would count from the end
                result += Affine(index.offset * step, tuple(step * own for own in index.steps))
        return result

    return moved(form, of)


def _tile(reader: Reader, node: ir.Node) -> Form | None:
    """Copies side by side, of what is the same along an axis that has more than one."""
    form, dims, whole = reader.read(node.inputs[0]), *(reader.facts.dims(v) for v in (node.inputs[0], node.outputs[0]))
    if form is None or dims is None or whole is None or len(whole) != len(dims):
        return None

    def of(affine: Affine) -> Affine | None:
        steps = tuple(0 if size == 1 else step for step, size in zip(affine.steps, dims, strict=True))
        copied = any(step and a != b for step, a, b in zip(steps, dims, whole, strict=True))
        return None if copied else Affine(affine.offset, steps)

    return moved(form, of)


def _concat(reader: Reader, node: ir.Node) -> Form | None:
    """Pieces of one arithmetic progression, or of one truth."""
    shapes = [reader.facts.dims(item) for item in node.inputs]
    forms = [reader.read(item) for item in node.inputs]
    first = forms[0]
    if isinstance(first, Formula) and first.always is not None:
        same = all(isinstance(form, Formula) and form.always is first.always for form in forms)
        return first if same else None
    if not isinstance(first, Affine) or shapes[0] is None:
        return None
    axis = node.attributes["axis"].as_int() % len(shapes[0])
    sizes = [shape[axis] if shape is not None else reader.facts.unknown() for shape in shapes]
    for whole in set(sizes):
        cut = minimum(Dim.of(1), whole)
        if set(sizes) == {whole, cut}:  # [:1] of an axis: empty only if all the pieces are
            sizes = [Dim.of(1) if size == cut else size for size in sizes]
            break
    pieces = [form for form in forms if isinstance(form, Affine)]
    if len(pieces) < len(forms):
        return None
    long = next((piece for piece, size in zip(pieces, sizes, strict=True) if size != 1), None)
    step = long.steps[axis] if long is not None else (pieces[-1].offset - pieces[0].offset).value
    if step is None or (long is None and len(pieces) > 2):
        return None
    end, steps = first.offset, tuple(step if at == axis else own for at, own in enumerate(first.steps))
    for piece, size in zip(pieces, sizes, strict=True):
        same = all(own == of for at, (own, of) in enumerate(zip(piece.steps, steps, strict=True)) if at != axis)
        if not same or piece.offset != end or (size != 1 and piece.steps[axis] != step):
            return None
        end = end + size * step
    return Affine(first.offset, steps)


INDEXING: dict[str, Callable[[Reader, ir.Node], Form | None]] = {
    "Identity": _identity,
    "Expand": _expand,
    "Slice": _slice,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "Concat": _concat,
    "Tile": _tile,
    **dict.fromkeys(("Unsqueeze", "Squeeze", "Reshape", "Transpose", "Flatten"), _view),
}
