"""What became of one node, and why."""

from __future__ import annotations

import difflib

import onnx_ir as ir
from flashonnx.export.model.files import AnyModel, load
from flashonnx.export.operator import schema
from flashonnx.export.reports.report import Report
from flashonnx.export.sites.finder import Finder
from flashonnx.export.values.facts import Facts


def explain(model: AnyModel, report: Report, name: str) -> str:
    """All that fusion knows about node `name` of `model`, by its report: the attention it is part of, or why of none.

    Args:
        model: what was fused, as it was before.
        report: the report of that.
        name: a node, or a value that it makes.

    Raises:
        ValueError: there is no such node.
    """
    source = load(model).model
    holders: list[ir.Graph | ir.Function] = [source.graph]
    holders += [function for key, function in source.functions.items() if key[0] != schema.DOMAIN]
    nodes = [node for holder in holders for node in holder.all_nodes()]
    node = next((node for node in nodes if name == node.name or name in (value.name for value in node.outputs)), None)
    known = report.explain(name)
    if not known and node is not None:
        known = report.explain(node.name or node.outputs[0].name or "")
    if known:
        return known
    if node is None:
        names = [text for node in nodes for text in (node.name, *(value.name for value in node.outputs)) if text]
        close = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean '{close[0]}'?" if close else f"; attention is at {_places(report)}"
        raise ValueError(f"the model has no node '{name}'{hint}")
    return f"{node.op_type} '{name}' is part of no attention: {_why(source, node)}"


def _places(report: Report) -> str:
    return ", ".join(f"'{site.node}'" for site in report.sites[:5]) or "no node"


def _why(model: ir.Model, node: ir.Node) -> str:
    finder = Finder(model, Facts(model))
    finder.find()
    if node.op_type not in ("Softmax", "LogSoftmax", "Exp") or not node.inputs:
        return "it is on no way from a product of two activations through a softmax to a product with a third"
    if finder.flow.source(node.inputs[0], None) is None:
        return "what it normalises derives from no product of two activations"
    if finder.flow.target(node.outputs[0], None) is None:
        return "what it makes goes into no product with another activation"
    return "nothing divides by the sum of it"
