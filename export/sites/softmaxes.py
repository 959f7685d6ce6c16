"""A softmax that is written out, made one Softmax for as long as rules look at it."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir
from flashonnx.export.model.build import Builder, Names, called
from flashonnx.export.sites.finder import LOG_SOFTMAX, Candidate
from flashonnx.export.values.facts import Facts


class NotSoftmaxError(Exception):
    """Why what is written out is no softmax, or not proved to be one."""


@dataclasses.dataclass
class Restored:
    """One Softmax in the place of what was written out; `undo` puts that back.

    Attributes:
        candidate: the site, with the Softmax as its node.
        old: what the Softmax stands for.
        readers: inputs of what was written out that are cut off meanwhile, so that the scores have one reader.
    """

    candidate: Candidate
    old: ir.Value
    readers: list[tuple[ir.Node, int, ir.Value]]

    def undo(self) -> None:
        """Puts everything back as it was."""
        new = self.candidate.node.outputs[0]
        for node, index, value in self.readers:
            node.replace_input_with(index, value)
        ir.convenience.replace_all_uses_with(new, self.old, replace_graph_outputs=True)
        graph = self.candidate.node.graph
        assert graph is not None
        graph.remove(self.candidate.node, safe=True)


def restore(facts: Facts, names: Names, candidate: Candidate) -> Restored:
    """Puts a Softmax in the place of exp(x) / sum(exp(x)), also with the maximum taken off, or of exp(LogSoftmax(x)).

    Raises:
        NotSoftmaxError: it is something else, such as a sum with an epsilon.
    """
    node = candidate.node
    if candidate.kind == LOG_SOFTMAX:
        source = node.inputs[0].producer() if node.inputs[0] is not None else None
        assert source is not None
        axis = source.attributes["axis"].as_int() if "axis" in source.attributes else -1
        return _replace(facts, names, candidate, source.inputs[0], axis, [source])
    exp, total = _quotient(node)
    axis = _axis(facts, total)
    x, readers = exp.inputs[0], [exp]
    shift = x.producer() if x is not None else None
    if shift is not None and shift.op_type == "Sub" and not shift.domain:
        top = shift.inputs[1].producer() if shift.inputs[1] is not None else None
        if top is not None and top.op_type == "ReduceMax" and top.inputs[0] is shift.inputs[0]:
            if _axis(facts, top) != axis:
                raise NotSoftmaxError("the maximum is taken over another axis than the sum")
            x, readers = shift.inputs[0], [shift, top]
    if x is exp.inputs[0] and _is_caught(node.outputs[0]):
        raise NotSoftmaxError(
            "it takes no maximum off, so that large or very small scores give NaN, which IsNaN catches"
        )
    return _replace(facts, names, candidate, x, axis, readers)


def _quotient(node: ir.Node) -> tuple[ir.Node, ir.Node]:
    """The Exp and the ReduceSum of exp / sum, or of exp * (1 / sum)."""
    order = (0, 1)
    if node.op_type == "Mul":
        first = node.inputs[0].producer() if node.inputs[0] is not None else None
        order = (1, 0) if first is not None and first.op_type == "Reciprocal" else (0, 1)
    above, below = (node.inputs[index] for index in order)
    exp, total = (value.producer() if value is not None else None for value in (above, below))
    if node.op_type == "Mul" and total is not None and total.op_type == "Reciprocal":
        total = total.inputs[0].producer() if total.inputs[0] is not None else None
    if exp is None or exp.op_type != "Exp" or total is None or total.op_type != "ReduceSum":
        what = f"{total.op_type} '{called(total)}'" if total is not None else "nothing known"
        if exp is None or exp.op_type != "Exp":
            raise NotSoftmaxError(f"'{called(node)}' divides no exponential, but what was made of one")
        raise NotSoftmaxError(f"the exponentials are divided by {what}, not by their sum alone")
    if total.inputs[0] is not exp.outputs[0] or exp.domain or total.domain:
        raise NotSoftmaxError(f"'{called(total)}' does not sum what '{called(node)}' divides")
    return exp, total


def _axis(facts: Facts, node: ir.Node) -> int:
    """The one axis of a reduction that keeps it."""
    keeps = node.attributes["keepdims"].as_int() if "keepdims" in node.attributes else 1
    if "axes" in node.attributes:
        axes = [int(axis) for axis in node.attributes["axes"].as_ints()]
    else:
        array = facts.constant(node.inputs[1]) if len(node.inputs) > 1 else None
        axes = [int(axis) for axis in array.reshape(-1)] if array is not None else []
    rank = facts.rank(node.inputs[0])
    if not keeps or len(axes) != 1 or rank is None:
        raise NotSoftmaxError(f"'{called(node)}' is not over one known axis, kept")
    return axes[0] - rank if axes[0] >= 0 else axes[0]


def _replace(
    facts: Facts, names: Names, candidate: Candidate, x: ir.Value | None, axis: int, readers: list[ir.Node]
) -> Restored:
    if x is None:
        raise NotSoftmaxError("it has no input")
    node, old = candidate.node, candidate.node.outputs[0]
    builder = Builder(names, node.name or node.op_type)
    new = builder.op("Softmax", x, dtype=facts.dtype(old), axis=axis)
    softmax = new.producer()
    assert softmax is not None and node.graph is not None
    softmax.name = node.name
    node.graph.insert_after(node, builder.nodes)
    facts.learn(builder.nodes)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    cut = [(reader, i, value) for reader in readers for i, value in enumerate(reader.inputs) if value is x]
    if not all(_is_private(reader, node) for reader in readers):
        cut = []  # others need it, and then the scores stay
    for reader, index, _ in cut:
        reader.replace_input_with(index, None)
    return Restored(dataclasses.replace(candidate, node=softmax, kind="Softmax", scores=x), old, cut)


def _is_caught(value: ir.Value) -> bool:
    """Whether an IsNaN reads `value`, also past operators that leave NaN alone."""
    pending = [(value, 0)]
    for value, steps in pending:
        for node in (use.node for use in value.uses()):
            if node.op_type == "IsNaN":
                return True
            if node.op_type in ("Cast", "Identity", "Dropout", "Mul", "Where") and steps < 4:
                pending.append((node.outputs[0], steps + 1))
    return False


def _is_private(first: ir.Node, last: ir.Node) -> bool:
    """Whether all that `first` makes ends in `last`."""
    pending, seen = [first], set()
    while pending:
        node = pending.pop()
        if node is last or node in seen:
            continue
        seen.add(node)
        for value in node.outputs:
            if value.is_graph_output() or not value.uses() or len(seen) > 16:
                return False
            pending += [use.node for use in value.uses()]
    return True
