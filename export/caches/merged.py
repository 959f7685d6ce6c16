"""Merged decoders: an If that chooses between a branch with past keys and one for prompts without any."""

from __future__ import annotations

import onnx_ir as ir
from flashonnx.export.caches.pairs import CacheError, read_by
from flashonnx.export.model.build import called

_SAME = frozenset(["Cast", "Identity", "Reshape", "Squeeze", "Unsqueeze", "Gather"])


def keep_branch_with_past(model: ir.Model) -> list[str]:
    """Writes out the branch with past keys in the place of the If, in place; the inputs that went.

    It does for a prompt what the other one does, as a past without keys: a cache of length 0.

    Raises:
        CacheError: the other branch reads something else besides, so that it does more.
    """
    gone = []
    for node in [node for node in model.graph if (node.domain, node.op_type) == ("", "If")]:
        branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
        inputs = [_inputs(model, branch) for branch in branches]
        cached = [{value for value in read if value.shape is not None and len(value.shape) == 4} for read in inputs]
        choice = _choice(model, node)
        if choice is None or bool(cached[0]) == bool(cached[1]):
            continue
        index = 0 if cached[0] else 1
        more = sorted(value.name or "" for value in inputs[1 - index] - inputs[index])
        if more:
            raise CacheError(
                f"'{called(node)}' chooses between decoders with and without a past, and the "
                f"latter reads {', '.join(more)} besides: take the file of the decoder with a past and its mate"
            )
        _forget(branches[1 - index])
        _write_out(model, node, branches[index])
        if not choice.uses():
            model.graph.inputs.remove(choice)
            gone.append(choice.name or "")
    return gone


def _inputs(model: ir.Model, graph: ir.Graph) -> set[ir.Value]:
    """The model's inputs that a branch reads."""
    read = {value for node in graph for value in read_by(node)} | set(graph.outputs)
    return read & {value for value in model.graph.inputs if value.name not in model.graph.initializers}


def _choice(model: ir.Model, node: ir.Node) -> ir.Value | None:
    """The input of the model that is the condition."""
    value = node.inputs[0]
    while value is not None and value not in model.graph.inputs:
        producer = value.producer()
        if producer is None or producer.domain or producer.op_type not in _SAME:
            return None
        value = producer.inputs[0]
    return value


def _forget(graph: ir.Graph) -> None:
    """Makes the nodes of a graph that goes read nothing, as they would count as users."""
    for node in graph.all_nodes():
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)


def _write_out(model: ir.Model, node: ir.Node, branch: ir.Graph) -> None:
    outputs, inner = list(branch.outputs), list(branch)
    for value in list(branch.initializers.values()):
        del branch.initializers[value.name or ""]
        model.graph.initializers[value.name or ""] = value
    branch.outputs.clear()
    branch.remove(inner)
    model.graph.insert_before(node, inner)
    for old, new in zip(node.outputs, outputs, strict=True):
        name = old.name
        new.type, new.shape = old.type or new.type, old.shape if old.shape is not None else new.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        old.name = f"{name}_before"
        new.name = name
    made = node.inputs[0]
    model.graph.remove(node, safe=True)
    while made is not None and made.producer() is not None and not made.uses():
        node = made.producer()  # type: ignore[assignment]
        made = node.inputs[0]
        model.graph.remove(node, safe=True)
