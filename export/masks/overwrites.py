"""What older exports put between a mask and attention: assignments to all of it, and padding told by a sum.

`mask[:, :, :, :n] = new` is a ScatterND at every index. In `where(mask + padding == 0, min, mask)` the sum is 0 where
the triangle lets pass and the padding, which has 1 for tokens that count, does not.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from flashonnx.export.masks.forms import Affine, Choice, Form, moved
from flashonnx.export.masks.positions import form_of
from flashonnx.export.model.build import Builder, Names
from flashonnx.export.values.facts import Facts


def see_through(model: ir.Model, facts: Facts, names: Names) -> list[ir.Node]:
    """Puts what it comes to in the place of either; the nodes that nobody reads then."""
    done = []
    for node in list(model.graph.all_nodes()):
        old = node.outputs[0] if node.outputs else None
        new = _assigned(facts, node)
        if new is not None and old is not None and not old.is_graph_output():
            ir.convenience.replace_all_uses_with(old, new)
            done.append(node)
            continue
        padding = _padding(facts, node)
        if padding is not None:
            builder = Builder(names, node.name or "padding")
            kind = facts.dtype(padding)
            assert kind is not None and node.graph is not None
            test = builder.op("Equal", padding, builder.constant(_zero(kind)), dtype=ir.DataType.BOOL)
            node.graph.insert_before(node, builder.nodes)
            facts.learn(builder.nodes)
            before = node.inputs[0]
            node.replace_input_with(0, test)
            if before is not None and (producer := before.producer()) is not None:
                done.append(producer)
    if done:
        facts.forms.clear()  # what was found out of them before
    return done


def _zero(kind: ir.DataType) -> np.ndarray:
    return np.zeros((), kind.numpy())


def _assigned(facts: Facts, node: ir.Node) -> ir.Value | None:
    """What a ScatterND writes, if its indices count along each axis in turn: every element once, in order."""
    if (node.domain, node.op_type) != ("", "ScatterND") or len(node.inputs) != 3:
        return None
    if "reduction" in node.attributes and node.attributes["reduction"].as_string() != "none":
        return None
    data, indices, updates = (facts.dims(value) for value in node.inputs)
    if data is None or updates != data or indices is None or indices[-1] != len(data) or indices[:-1] != data:
        return None
    joined = node.inputs[1].producer() if node.inputs[1] is not None else None
    if joined is None or joined.op_type != "Concat" or joined.domain or len(joined.inputs) != len(data):
        return None
    for axis, value in enumerate(joined.inputs):
        form, dims = form_of(facts, value), facts.dims(value)
        if not isinstance(form, Affine) or form.offset != 0 or dims is None or len(dims) != len(data) + 1:
            return None
        steps = [int(index == axis and size != 1) for index, size in enumerate(dims)]
        if [0 if size == 1 else step for step, size in zip(form.steps, dims, strict=True)] != steps:
            return None
    return node.inputs[2]


def _padding(facts: Facts, node: ir.Node) -> ir.Value | None:
    """m, where `node` is Where(mask + m == 0, fill, mask) for a mask of 0 and `fill`.

    It comes to Where(m == 0, fill, mask): where the mask is 0 both tests are the same, elsewhere both give `fill`.
    """
    if (node.domain, node.op_type) != ("", "Where") or None in node.inputs:
        return None
    condition, fill, mask = node.inputs
    equal = condition.producer() if condition is not None else None
    while equal is not None and equal.op_type in ("Cast", "Identity") and equal.inputs[0] is not None:
        equal = equal.inputs[0].producer()
    if equal is None or (equal.domain, equal.op_type) != ("", "Equal"):
        return None
    form, dims = _plain(facts, mask), facts.dims(mask)
    if not isinstance(form, Choice) or form.outside != 0.0 or form.inside != facts.uniform(fill):
        return None
    if dims != facts.dims(node.outputs[0]):
        return None
    for total, number in (equal.inputs, equal.inputs[::-1]):
        add = total.producer() if total is not None else None
        if add is None or (add.domain, add.op_type) != ("", "Add") or facts.uniform(number) != 0.0:
            continue
        for same, more in (add.inputs, add.inputs[::-1]):
            if facts.dims(same) == dims and _plain(facts, same) == form:
                return more
    return None


def _plain(facts: Facts, value: ir.Value | None) -> Form | None:
    """What a mask is, whoever made it; None where some of it is not understood."""
    form = form_of(facts, value)
    return moved(form, lambda number: number) if form is not None else None
