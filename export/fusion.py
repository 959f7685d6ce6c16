"""fuse(): every attention that is proved to be one becomes one node."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping

import onnx
import onnx_ir as ir
from flashonnx.export import rules
from flashonnx.export.masks.overwrites import see_through
from flashonnx.export.model import configuration, inlining
from flashonnx.export.model.arguments import check_flags, check_kv_cache
from flashonnx.export.model.files import check_output, load, save
from flashonnx.export.operator import portable as portable_bodies
from flashonnx.export.operator import schema
from flashonnx.export.operator.cache_schema import KV_CACHE
from flashonnx.export.reports.report import Report, Site
from flashonnx.export.rules import Fusion, RefusalError, Rewrite, biases, packed_caches, projections
from flashonnx.export.sites.finder import LOG_SOFTMAX, WRITTEN_OUT, Candidate, find
from flashonnx.export.sites.matrices import mask_of, matrix_of
from flashonnx.export.sites.softmaxes import NotSoftmaxError, restore

Model = onnx.ModelProto | ir.Model

# What the standard operator has up to opset 25.
_ATTENTION = {*schema.ATTRIBUTES, "qk_matmul_output_mode"} - {"empty_row", "qkv_layout"}


def fuse(
    model: str | os.PathLike[str] | onnx.ModelProto | ir.Model,
    output: str | os.PathLike[str] | None = None,
    *,
    portable: bool = True,
    shared_cache: bool = False,
    kv_cache: str | None = None,
    join_projections: bool = True,
) -> tuple[Model, Report]:
    """Replaces every attention in `model` that is proved to be one by a flashonnx node.

    Args:
        model: a file, an onnx.ModelProto or an onnx_ir.Model; it is not changed.
        output: where to write the result; nothing is written without it. A failure leaves no
            partly written file.
        portable: also give the model a function body for each fused node, in standard operators, so
            that it runs without the library.
        shared_cache: past and present keys of com.microsoft's GroupQueryAttention are one buffer, as long as the cache
            can get, whatever their shapes are called: nothing is copied. Without it they may be two.
        kv_cache: for decoders that join past and new keys by Concat: other inputs and outputs, those that
            `export_onnx(..., kv_cache=...)` has. Past keys become caches, "static" or "paged", that are appended to in
            place, and each sentence has a length of its own, `cache_lengths`; inputs called attention_mask,
            position_ids and cache_position go, as these follow from the lengths.
        join_projections: where constant weights make Q, K and V of one tensor, one product of the weights side by side
            makes all three, and the fused node adds their bias. Runtimes join the weights when they load the model.

    Returns:
        The fused model (an onnx.ModelProto, or an onnx_ir.Model for one) and the report of every
        attention site. Weights in external files stay there.

    Raises:
        FileNotFoundError: there is no such file, or a weight file is missing.
        TypeError: an option is of another type than said here.
        ValueError: `kv_cache` is another word, the file is not a valid ONNX model, or a FlashAttention node has an
            unknown attribute; with `kv_cache`, the model is none whose past keys are proved to be caches, in words that
            say why.
    """
    check_flags("fuse", portable=portable, shared_cache=shared_cache, join_projections=join_projections)
    check_kv_cache("fuse", kv_cache)
    if output is not None:
        check_output(output)
    source = load(model)
    if kv_cache is not None:
        report = _with_caches(source.model, kv_cache, portable, join_projections)
        configuration.note_positions(source.model, model)
    else:
        report = fuse_ir(source.model, portable=portable, shared_cache=shared_cache, join_projections=join_projections)
    changed = any(site.fused for site in report.sites)
    result = source.result(changed)
    if output is not None:
        save(source, output, result)
    return result, report


def fuse_ir(
    model: ir.Model, *, portable: bool = True, shared_cache: bool = False, join_projections: bool = True
) -> Report:
    """fuse() in place.

    Calls of model-local functions are written out if more attention can be fused then, else the functions stay.
    """
    schema.register_schema()
    schema.check_nodes(_all_nodes(model))
    options = _Options(portable, shared_cache, join_projections)
    keys = inlining.concerned(model)
    if not keys:
        return _fuse(model, options, {})
    try:
        copy, places = inlining.written_out(model, keys)
    except ValueError as error:
        report = _fuse(model, options, {})
        sites = (
            dataclasses.replace(site, reason=str(error)) if _is_left_inside(site) else site for site in report.sites
        )
        return dataclasses.replace(report, sites=tuple(sites))
    whole = _fuse(copy, options, places)
    if all(_is_left_inside(site) for site in whole.sites if site.is_inside_function):
        report = _fuse(model, options, {})
        if whole.fused == report.fused:  # nothing gained; but there more is found, and it is known better why not
            return dataclasses.replace(report, sites=whole.sites)
    model.graph, model.ir_version = copy.graph, copy.ir_version
    model.functions.clear()
    model.functions.update(copy.functions)
    gone = ", ".join(sorted({f"{key[0]}::{key[1]}" for key in keys if key not in copy.functions}))
    return dataclasses.replace(whole, notes=(*whole.notes, f"functions written out where they were called: {gone}"))


def _with_caches(model: ir.Model, kind: str, portable: bool, join_projections: bool) -> Report:
    """fuse() in place, with past keys as caches."""
    from flashonnx.export.caches import rewriting
    from flashonnx.export.caches.pairs import CacheError

    gone = rewriting.prepare(model, kind)
    left = [site for site in fuse_ir(model, portable=False, join_projections=False).sites if not site.fused]
    biases.add_apart(model)
    try:
        notes = rewriting.finish(model, kind)
    except CacheError as error:
        if not left:
            raise
        raise ValueError(f"{error}; '{left[0].node}' is left as it was: {left[0].reason}") from error
    # Nodes for caches in their best form, and bodies for all.
    again = fuse_ir(model, portable=portable, join_projections=join_projections)
    sites = (
        dataclasses.replace(site, kind="attention with a cache", reason="") if site.kind == KV_CACHE else site
        for site in again.sites
    )
    if gone:
        notes.insert(0, f"inputs that follow from cache_lengths are gone: {', '.join(gone)}")
    return Report(tuple(sites), (*notes, *again.notes))


def _is_left_inside(site: Site) -> bool:
    return site.is_inside_function and not site.fused


@dataclasses.dataclass(frozen=True)
class _Options:
    """Those of `fuse`."""

    portable: bool
    shared_cache: bool
    join_projections: bool


def _fuse(model: ir.Model, options: _Options, places: Mapping[ir.Node, str]) -> Report:
    """Fuses all but functions; `places` tells where nodes that were written out come from."""
    fusion = Fusion(model, shared_cache=options.shared_cache)
    remove_unused(see_through(model, fusion.facts, fusion.names))
    fused: list[ir.Node] = []
    sites = []
    for found in find(model, fusion.facts):
        candidate = dataclasses.replace(found, where=found.where + places.get(found.node, ""))
        matrix, chain = matrix_of(fusion.facts, candidate), [(n.op_type, n.name or "") for n in candidate.chain()]
        site, node = _one(fusion, candidate)
        if node is not None:
            steps = [packed_caches.uncut, *([projections.join, biases.take] if options.join_projections else [])]
            if sum(_improve(fusion, node, step) for step in steps):  # all of them
                site = dataclasses.replace(site, became=describe(fusion, node))
        mask = mask_of(fusion.facts, node) if node is not None else None
        sites.append(dataclasses.replace(site, matrix=matrix, operators=tuple(chain), mask=mask))
        if node is not None:
            fused.append(node)
    remove_unused(fusion.reducer.made[::-1])  # smaller masks of sites that were left in the end
    notes = _attach(fusion, fused, options.portable)
    return Report(tuple(sites), tuple(notes))


def _improve(fusion: Fusion, node: ir.Node, step: Callable[[Fusion, ir.Node], list[ir.Node]]) -> bool:
    """Takes more of what is before a fused node into it; whether there was anything."""
    gone = step(fusion, node)
    remove_unused(gone)
    return bool(gone)


def _one(fusion: Fusion, candidate: Candidate) -> tuple[Site, ir.Node | None]:
    """Tries the rules on one site; it stays as it is unless a rule proves its replacement."""
    if candidate.kind not in (WRITTEN_OUT, LOG_SOFTMAX):
        return _by_rules(fusion, candidate)
    try:
        restored = restore(fusion.facts, fusion.names, candidate)
    except NotSoftmaxError as error:
        return Site(candidate.name, candidate.kind, False, f"the softmax is written out: {error}"), None
    site, node = _by_rules(fusion, restored.candidate)
    if node is None:
        restored.undo()
    else:
        remove_unused([candidate.node])
    return dataclasses.replace(site, node=candidate.name, kind=candidate.kind), node


def _by_rules(fusion: Fusion, candidate: Candidate) -> tuple[Site, ir.Node | None]:
    def left(reason: str) -> tuple[Site, None]:
        return Site(candidate.name, candidate.kind, False, reason), None

    if fusion.opset < portable_bodies.MINIMUM_OPSET:
        return left(
            f"the model's opset {fusion.opset} is below {portable_bodies.MINIMUM_OPSET}; convert "
            "it with onnx.version_converter"
        )
    strange = sorted(set(candidate.node.attributes) - _ATTENTION) if candidate.kind == "Attention" else []
    if strange:
        return left(f"attribute {', '.join(strange)} of Attention is not known here, so neither is what it means")
    fitting = [rule for rule in rules.RULES if candidate.kind in rule.kinds]
    if not fitting and candidate.kind not in schema.OPERATORS:
        return left(f"there is no rule for {candidate.kind} yet")
    name = candidate.name
    reasons = []
    for rule in fitting:
        try:
            rewrite = rule.rewrite(fusion, candidate)
        except RefusalError as refusal:
            reasons.append(str(refusal))
        except Exception as error:  # a faulty rule must not lose the model
            reasons.append(f"{type(rule).__name__} failed: {type(error).__name__}: {error}")
        else:
            apply(fusion, rewrite)
            node = rewrite.output.producer()
            assert node is not None
            if candidate.kind == "Attention" or candidate.kind in schema.OPERATORS:
                node.name = candidate.node.name
            remark = "; ".join(
                dict.fromkeys(filter(None, [rewrite.remark, *reasons]))
            )  # of rules that would have made more of it
            return Site(name, candidate.kind, True, remark, describe(fusion, node)), node
    if candidate.kind in schema.OPERATORS:  # it is what it shall be, if not in its best form
        became = describe(fusion, candidate.node) if candidate.kind != schema.OP_TYPE else ""
        return Site(name, candidate.kind, True, "already fused", became), candidate.node
    return left("; ".join(dict.fromkeys(filter(None, reasons))))


def apply(fusion: Fusion, rewrite: Rewrite) -> None:
    """Carries out a replacement and removes what nothing uses any more."""
    anchor = next(iter(rewrite.replaced)).producer()
    assert anchor is not None and anchor.graph is not None
    graph = anchor.graph
    graph.insert_before(anchor, rewrite.builder.nodes)
    fusion.facts.learn(rewrite.builder.nodes)
    for old, new in rewrite.replaced.items():
        dims = fusion.facts.dims(old)
        if dims is not None:
            fusion.facts.set_dims(new, dims)
        new.type, name = old.type or new.type, old.name
        new.shape = old.shape
        new.metadata_props.update(old.metadata_props)
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        old.name = fusion.names.fresh(f"{name}_before") if name else name
        new.name = name
    remove_unused([anchor, *rewrite.nodes, *rewrite.builder.nodes[::-1]])  # of the new ones what a better form spared


def remove_unused(nodes: list[ir.Node]) -> None:
    """Removes those of `nodes` that nothing uses, and what only they used, upstream."""
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node.graph is None or any(v.uses() or v.is_graph_output() for v in node.outputs):
            continue
        inputs = [value for value in node.inputs if value is not None]
        graph = node.graph
        graph.remove(node, safe=True)
        for value in inputs:
            producer = value.producer()
            if producer is not None:
                pending.append(producer)
            elif value.is_initializer() and not (value.uses() or value.is_graph_input() or value.is_graph_output()):
                owner = value.graph
                if owner is not None and value.name is not None and value.name in owner.initializers:
                    del owner.initializers[value.name]


def _attach(fusion: Fusion, fused: list[ir.Node], portable: bool) -> list[str]:
    """Imports the domain and adds the portable bodies; what could not be done, in words."""
    without: dict[str, list[str]] = {}  # nodes by why they have no body
    model = fusion.model
    if not fused:
        return []
    for holder in {_holder(model, node) for node in fused}:
        holder.opset_imports.setdefault(schema.DOMAIN, schema.VERSION)
    model.opset_imports.setdefault(schema.DOMAIN, schema.VERSION)
    if portable:
        for node in fused:
            try:
                portable_bodies.attach(model, fusion.facts, node)
            except Exception as error:  # the model is fused all the same
                without.setdefault(str(error) or type(error).__name__, []).append(node.name or node.op_type)
    used = {node.op_identifier() for node in _all_nodes(model)}
    for identifier in [key for key in model.functions if key[0] == schema.DOMAIN and key not in used]:
        del model.functions[identifier]
    for graph in {id(node.graph): node.graph for node in fused}.values():
        if graph is not None and not _is_sorted(graph):
            graph.sort()
    return [
        f"no portable body for '{names[0]}'{f' and {len(names) - 1} more' if names[1:] else ''}: {why}"
        for why, names in without.items()
    ]


def _all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


def _holder(model: ir.Model, node: ir.Node) -> ir.Graph | ir.Function:
    for function in model.functions.values():
        if node.graph is function or node.graph is function.graph:
            return function
    return model.graph


def _is_sorted(graph: ir.Graph | ir.Function) -> bool:
    seen: set[ir.Node] = set()
    for node in graph:
        for value in node.inputs:
            producer = value.producer() if value is not None else None
            if producer is not None and producer.graph is node.graph and producer not in seen:
                return False
        seen.add(node)
    return True


def describe(fusion: Fusion, node: ir.Node) -> str:
    """A fused node in one line."""
    rank = fusion.facts.rank(node.inputs[0])
    parts = [f"{rank}-D"]
    for name, attribute in node.attributes.items():
        value = attribute.value
        parts.append(f"{name}={value:.6g}" if isinstance(value, float) else f"{name}={value}")
    for name, value in zip(schema.inputs_of(node.op_type)[3:], node.inputs[3:], strict=False):
        if value is not None:
            dims = fusion.facts.dims(value)
            parts.append(f"{name} ({', '.join(map(str, dims))})" if dims is not None else name)
    return f"{node.op_type}({', '.join(parts)})"
