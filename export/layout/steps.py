"""What layout operators make of a view: one small function an operator, (view, facts, node) -> view or None."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from flashonnx.export.layout.factors import Axis, Factor, View, divided_by_reshape, regroup
from flashonnx.export.values.dims import Dim, product
from flashonnx.export.values.facts import Facts
from flashonnx.export.values.shape_rules import axes_of, normal


def after(facts: Facts, view: View, value: ir.Value) -> View | None:
    """The view that `value` is, made of `view` by one operator; None where nothing is proved."""
    node = value.producer()
    if node is None or node.domain:
        return None
    if is_part(facts, node):
        return _PARTS[node.op_type](view, facts, value)
    step = _STEPS.get(node.op_type) or _REPEATS.get(node.op_type)
    return step(view, facts, node) if step is not None else None


def is_part(facts: Facts, node: ir.Node) -> bool:
    """Whether `node` takes a part of its first input."""
    return node.op_type in _PARTS and not node.domain and not is_repetition(facts, node)


def is_repetition(facts: Facts, node: ir.Node) -> bool:
    """Whether `node` repeats its first input along an axis, or may do."""
    if node.domain or node.op_type not in _REPEATS:
        return False
    if node.op_type == "Concat":
        return len(node.inputs) > 1 and all(value is node.inputs[0] for value in node.inputs)
    if node.op_type == "Gather":
        index = facts.constant(node.inputs[1])
        return index is not None and index.ndim == 1 and index.size > 1
    return True


def _transpose(view: View, facts: Facts, node: ir.Node) -> View | None:
    perm = node.attributes["perm"].as_ints() if "perm" in node.attributes else None
    order = perm or range(len(view.axes))[::-1]
    return view.with_axes([view.axes[index] for index in order])


def _unsqueeze(view: View, facts: Facts, node: ir.Node) -> View | None:
    axes = axes_of(facts, node)
    if axes is None:
        return None
    rank = len(view.axes) + len(axes)
    new = {normal(axis, rank) for axis in axes}
    rest = iter(view.axes)
    return view.with_axes([() if i in new else next(rest) for i in range(rank)])


def _squeeze(view: View, facts: Facts, node: ir.Node) -> View | None:
    axes = axes_of(facts, node)
    if not axes:
        return None
    gone = {normal(axis, len(view.axes)) for axis in axes}
    if any(view.axes[axis] for axis in gone):
        return None
    return view.with_axes([axis for i, axis in enumerate(view.axes) if i not in gone])


def _reshape(view: View, facts: Facts, node: ir.Node) -> View | None:
    dims = facts.dims(node.outputs[0])
    if dims is None:
        return None
    result = regroup(view, dims)
    return result if result is not None else divided_by_reshape(view, dims)


def _identity(view: View, facts: Facts, node: ir.Node) -> View | None:
    return view


_STEPS = {
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Identity": _identity,
    "Flatten": _reshape,
}

LAYOUT_OPERATORS = frozenset(_STEPS)


def _expand(view: View, facts: Facts, node: ir.Node) -> View | None:
    target = facts.ints(node.inputs[1])
    if target is None:
        return None
    axes = [()] * (len(target) - len(view.axes)) + list(view.axes)
    for index in range(-1, -len(target) - 1, -1):
        size = product(factor.size for factor in axes[index])
        if target[index] == size or target[index] == 1:
            continue
        if axes[index]:
            return None
        axes[index] = (Factor(target[index], repeats=True),)
    return view.with_axes(axes)


def _tile(view: View, facts: Facts, node: ir.Node) -> View | None:
    repeats = facts.ints(node.inputs[1])
    if repeats is None or len(repeats) != len(view.axes):
        return None
    return view.with_axes([_again(axis, count) for axis, count in zip(view.axes, repeats, strict=True)])


def _concat(view: View, facts: Facts, node: ir.Node) -> View | None:
    """The same value several times."""
    axis = normal(node.attributes["axis"].as_int(), len(view.axes))
    axes = list(view.axes)
    axes[axis] = _again(axes[axis], Dim.of(len(node.inputs)))
    return view.with_axes(axes)


def _again(axis: Axis, count: Dim) -> Axis:
    """`axis` as a whole `count` times."""
    return axis if count == 1 else (Factor(count, repeats=True), *axis)


def _repeat_interleave(view: View, facts: Facts, node: ir.Node) -> View | None:
    """Gather with an index that counts every element, or all of them, several times."""
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    axis, index = normal(axis, len(view.axes)), facts.constant(node.inputs[1])
    size = view.dims[axis].value
    if index is None or not size or index.size % size:
        return None
    count = Dim.of(index.size // size)
    axes, every = list(view.axes), np.arange(size)
    if (index == np.repeat(every, index.size // size)).all():
        axes[axis] = (*axes[axis], *_again((), count))
    elif (index == np.tile(every, index.size // size)).all():
        axes[axis] = _again(axes[axis], count)
    else:
        return None
    return view.with_axes(axes)


_REPEATS = {"Expand": _expand, "Tile": _tile, "Concat": _concat, "Gather": _repeat_interleave}


def _split(view: View, facts: Facts, value: ir.Value) -> View | None:
    node = value.producer()
    assert node is not None
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    axis = normal(axis, len(view.axes))
    start = 0
    for output in node.outputs:
        dims = facts.dims(output)
        size = dims[axis].value if dims is not None else None
        if size is None:
            return None
        if output is value:
            return view.part(axis, range(start, start + size))
        start += size
    return None


def _slice(view: View, facts: Facts, value: ir.Value) -> View | None:
    node = value.producer()
    assert node is not None
    arrays = [facts.constant(item) for item in node.inputs[1:]]
    given = [item is not None for item in node.inputs[1:]]
    if len(arrays) < 2 or given != [array is not None for array in arrays]:
        return None
    starts, ends, axes, steps = ([] if a is None else a.reshape(-1).tolist() for a in (*arrays, None, None)[:4])
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = normal(axes[index], len(view.axes)) if axes else index
        size, step = view.dims[axis].value, steps[index] if steps else 1
        whole = start == 0 and step == 1 and end >= 2**31 - 1
        if whole:
            continue
        part = view.part(axis, range(size)[start:end:step]) if size is not None else None
        if part is None:
            return None
        view = part
    return view


def _gather(view: View, facts: Facts, value: ir.Value) -> View | None:
    """One index: the part is one wide, or the axis goes."""
    node = value.producer()
    assert node is not None
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
    axis, index = normal(axis, len(view.axes)), facts.constant(node.inputs[1])
    size = view.dims[axis].value
    if index is None or index.size != 1 or index.ndim > 1 or size is None or not -size <= int(index.item()) < size:
        return None
    number = int(index.item()) % size
    part = view.part(axis, range(number, number + 1))
    if part is None or index.ndim:
        return part
    return part.with_axes([*part.axes[:axis], *part.axes[axis + 1 :]])


_PARTS = {"Split": _split, "Slice": _slice, "Gather": _gather}
