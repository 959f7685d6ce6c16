"""Assignments to a whole tensor, `mask[:, :, :, :n] = ...`, which exporters write as a ScatterND at every index."""

from __future__ import annotations

import onnx_ir as ir
from flashonnx.export.masks.forms import Affine
from flashonnx.export.masks.positions import form_of
from flashonnx.export.values.facts import Facts


def see_through(model: ir.Model, facts: Facts) -> list[ir.Node]:
    """Puts what is assigned in the place of what it is assigned to, where every element is; what nobody reads then."""
    done = []
    for node in list(model.graph.all_nodes()):
        if (node.domain, node.op_type) == ("", "ScatterND") and _is_whole(facts, node):
            old, new = node.outputs[0], node.inputs[2]
            if new is not None and not old.is_graph_output():
                ir.convenience.replace_all_uses_with(old, new)
                done.append(node)
    return done


def _is_whole(facts: Facts, node: ir.Node) -> bool:
    """Whether the indices count along each axis in turn, and so reach every element once, in order."""
    if "reduction" in node.attributes and node.attributes["reduction"].as_string() != "none":
        return False
    data, indices, updates = (facts.dims(value) for value in node.inputs)
    if data is None or updates != data or indices is None or indices[-1] != len(data) or indices[:-1] != data:
        return False
    joined = node.inputs[1].producer() if node.inputs[1] is not None else None
    if joined is None or joined.op_type != "Concat" or joined.domain or len(joined.inputs) != len(data):
        return False
    for axis, value in enumerate(joined.inputs):
        form, dims = form_of(facts, value), facts.dims(value)
        if not isinstance(form, Affine) or form.offset != 0 or dims is None or len(dims) != len(data) + 1:
            return False
        steps = [int(index == axis and size != 1) for index, size in enumerate(dims)]
        if [0 if size == 1 else step for step, size in zip(form.steps, dims, strict=True)] != steps:
            return False
    return True
