"""unfuse(): fused nodes become standard Attention again, or plain operators."""

from __future__ import annotations

import os

import onnx
import onnx_ir as ir
from flashonnx.export.fusion import remove_unused
from flashonnx.export.model.build import Names
from flashonnx.export.model.files import AnyModel, check_output, load, save
from flashonnx.export.operator import portable, schema
from flashonnx.export.reports.report import Report, Site
from flashonnx.export.values.facts import Facts


def unfuse(model: AnyModel, output: str | os.PathLike[str] | None = None) -> tuple[onnx.ModelProto | ir.Model, Report]:
    """Replaces every flashonnx node by standard operators.

    A node becomes one Attention where the model's opset has that operator and it means the same,
    else MatMul, Softmax and their like (always for sinks, lse and empty_row "mean").

    Args:
        model: a file, an onnx.ModelProto or an onnx_ir.Model; it is not changed.
        output: where to write the result; nothing is written without it.

    Returns:
        The model and a report whose sites are the flashonnx nodes; `fused` is true for those that
        could not be replaced. The reason of a replaced one says where a runtime departs from the
        standard operator.

    Raises:
        FileNotFoundError: there is no such file, or a weight file is missing.
        ValueError: the file is not a valid ONNX model.
    """
    if output is not None:
        check_output(output)
    schema.register_schema()
    source = load(model)
    schema.check_nodes(source.model.graph.all_nodes())
    facts, names = Facts(source.model), Names(source.model)
    sites = []
    foreign = [function for function in source.model.functions.values() if function.domain != schema.DOMAIN]
    holders: list[ir.Graph | ir.Function] = [source.model.graph, *foreign]
    for holder in holders:
        nodes = [node for node in holder.all_nodes() if _is_fused(node)]
        sites += [_replace(facts, names, node) for node in nodes]
    if not any(site.fused for site in sites):
        for identifier in [key for key in source.model.functions if key[0] == schema.DOMAIN]:
            del source.model.functions[identifier]
        for holder in holders:
            holder.opset_imports.pop(schema.DOMAIN, None)
    changed = any(not site.fused for site in sites)
    result = source.result(changed)
    if output is not None:
        save(source, output, result)
    return result, Report(tuple(sites), undone=True)


def _is_fused(node: ir.Node) -> bool:
    return node.domain == schema.DOMAIN and node.op_type in schema.OPERATORS


def _replace(facts: Facts, names: Names, node: ir.Node) -> Site:
    """Puts the body of `node` in its place."""
    kind = node.op_type
    label = node.name or node.outputs[0].name or kind
    try:
        function = ir.serde.deserialize_function(portable.function_for(facts, node, prefer_standard=True))
        caveat = portable.caveat(portable.signature_of(facts, node, facts.opset)) if kind == schema.OP_TYPE else ""
    except ValueError as error:
        return Site(label, kind, True, str(error))
    values: dict[ir.Value, ir.Value | None] = dict(zip(function.inputs, node.inputs, strict=True))
    outputs = dict(zip(function.outputs, node.outputs, strict=True))
    graph = node.graph
    assert graph is not None
    made = []
    for inner in function:
        if all(value in outputs and not outputs[value].name for value in inner.outputs):
            continue  # fills the place of an output that the node does not have
        new = ir.Node(
            inner.domain,
            inner.op_type,
            [values[value] if value is not None else None for value in inner.inputs],
            inner.attributes.values(),
            num_outputs=len(inner.outputs),
            name=names.fresh(f"{label}_{inner.op_type}"),
        )
        for old, value in zip(inner.outputs, new.outputs, strict=True):
            values[old] = value
            value.name = names.fresh(f"{label}_{inner.op_type.lower()}") if old.name else ""
        made.append(new)
    graph.insert_before(node, made)
    for inside, old in outputs.items():
        new_value = values.get(inside)
        if old.name and new_value is not None:
            new_value.type, new_value.shape, name = old.type, old.shape, old.name
            if (dims := facts.dims(old)) is not None:
                facts.set_dims(new_value, dims)
            ir.convenience.replace_all_uses_with(old, new_value, replace_graph_outputs=True)
            old.name, new_value.name = names.fresh(f"{name}_before"), name
    before = [producer for value in node.inputs if value is not None and (producer := value.producer()) is not None]
    graph.remove(node, safe=True)
    remove_unused([*made[::-1], *before])  # constants of a body, or beside the node, that this form does not need
    standard = any(inner.op_type == "Attention" for inner in made)
    remark = caveat if standard else ""
    return Site(label, kind, False, remark, "Attention" if standard else "plain operators")
