"""Calls of model-local functions, written out where attention goes through them.

Inside a function nothing is known of its inputs, neither shapes nor types nor which of them are weights, so that proofs
need the call. Writing it out changes no answer; it is done on a copy of the model, which the caller takes if more
attention can be fused in it.
"""

from __future__ import annotations

import collections

import onnx_ir as ir
from flashonnx.export.model.build import Names
from flashonnx.export.operator import schema

# What attention consists of: a function without any of these stays.
_PARTS = frozenset(["Softmax", "BiasSoftmax", "LogSoftmax", "Exp", "MatMul", "FusedMatMul", "Gemm", "Einsum"])
_FUNCTION, _CALL = "flashonnx.function", "flashonnx.call"


def concerned(model: ir.Model) -> set[ir.OperatorIdentifier]:
    """The functions that hold a part of attention, or call one that does."""
    functions = {key: function for key, function in model.functions.items() if key[0] != schema.DOMAIN}
    calls = {key: {node.op_identifier() for node in function.all_nodes()} for key, function in functions.items()}
    found = {key for key, called in calls.items() if any(op in _PARTS or "Attention" in op for _, op, _ in called)}
    pending = list(found)
    while pending:
        callee = pending.pop()
        callers = {key for key, called in calls.items() if callee in called} - found
        found |= callers
        pending += callers
    return found


def written_out(model: ir.Model, keys: set[ir.OperatorIdentifier]) -> tuple[ir.Model, dict[ir.Node, str]]:
    """A copy of `model` without the functions `keys`, and for each node from one of them which it was, and from where.

    Raises:
        ValueError: the functions call each other in a circle, or are of another opset than the model.
    """
    from onnx_ir.passes.common import InlinePass

    copy = model.clone()
    for node in copy.graph.all_nodes():
        if node.op_identifier() in keys:
            node.metadata_props[_CALL] = node.name or node.op_type
    for key in keys:
        for node in copy.functions[key].all_nodes():
            node.metadata_props[_FUNCTION] = f"{key[0]}::{key[1]}"
            node.name = node.name or next((value.name for value in node.outputs if value.name), None)
    try:
        InlinePass(lambda function: function.identifier() in keys)(copy)
    except Exception as error:  # onnx-ir's, of several kinds
        raise ValueError(f"the function cannot be written out where it is called: {_first_line(error)}") from error
    places = {}
    for node in copy.graph.all_nodes():
        name, call = node.metadata_props.pop(_FUNCTION, None), node.metadata_props.pop(_CALL, None)
        if name is not None:
            places[node] = f"function {name} in {call} / "
    _rename(copy, set(places))
    return copy, places


def _rename(model: ir.Model, nodes: set[ir.Node]) -> None:
    """Gives what came from functions names that no subgraph has either."""
    counts = collections.Counter(value.name for node in model.graph.all_nodes() for value in node.outputs)
    names = Names(model)
    for node in nodes:
        for value in node.outputs:
            if value.name and counts[value.name] > 1:
                value.name = names.fresh(value.name)


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
