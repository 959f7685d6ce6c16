"""From a PyTorch module to an ONNX file in which attention is one node.

Models of transformers go through their attention interface first (`transformers_route`), if all of their layers do.
`scaled_dot_product_attention` and `torch.ops.flashonnx.attention` are caught before ONNX, by a translation table of
torch's exporter, where their meaning is still whole: rank, masks, causality, grouped heads. What else is attention
(hand-written softmax forms, `nn.MultiheadAttention` with weights) is left to `flashonnx.fuse`, which runs over the
exported graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashonnx.export.model.arguments import check_flags, check_kv_cache, check_opset
from flashonnx.export.pytorch import exporter_faults
from flashonnx.export.pytorch.advice import advice, of_bfloat16, of_experts

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch
    from flashonnx.export.pytorch import transformers_route
    from flashonnx.export.reports.report import Report

# Opset 20 is torch's own default, has Gelu as one operator, and ONNX Runtime's CUDA provider runs all of it. Torch at
# opset 23 exports rotary embeddings in a form that ONNX Runtime refuses for batches, so newer opsets are for those who
# ask.
DEFAULT_OPSET = 20
OLDEST_OPSET, NEWEST_OPSET = 18, 25  # torch exports at 18 and converts from there, silently not at all beyond 25

_OURS = ("dynamo", "f", "opset_version", "fallback", "export_params", "keep_initializers_as_inputs")


def export_onnx(
    model: torch.nn.Module | torch.export.ExportedProgram,
    args: tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: Any = None,
    opset: int | None = None,
    portable: bool = True,
    external_data: bool | None = None,
    kv_cache: str | None = None,
    join_projections: bool = True,
    **kw: Any,
) -> Report:
    """Exports a PyTorch model to ONNX with its attention fused into `flashonnx::FlashAttention`.

    Args:
        model: the module, in eval mode for inference.
        args: example positional inputs; keyword inputs go into `kwargs={...}`.
        path: the file to write. It appears whole or not at all.
        dynamic_shapes: as for `torch.onnx.export`; a name such as `{"input_ids": {0: "batch", 1: "sequence"}}` is
            enough. Dimensions that are not named are fixed to those of the example inputs.
        opset: of the standard operators, 18 to 25; default 20. FlashAttention itself is the same at any.
        portable: add function bodies, so that the file also runs where the flashonnx library is not registered.
        external_data: weights in `<path>.data` beside the file. Default: only if the model exceeds protobuf's 2 GB.
        kv_cache: for decoders of transformers, one model for prompts and for single tokens, whose new keys and values
            `FlashAttentionKVCache` appends to caches. "static": inputs are input_ids (batch, sequence), cache_lengths
            (batch,) int64, the keys there are, and past_key_values.0.key, .value, ... (batch, heads, capacity, size);
            outputs are logits and present.0.key, ..., the caches afterwards, to be bound to the same memory. "paged":
            also block_table (batch, pages) int32, and caches (pages, page_size, heads, size). Prompts of several
            lengths are padded on the right; what comes next overwrites the padding. How many positions the model has
            is noted in the file's metadata as `flashonnx:max_positions`. `args` may be empty then, and
            `kwargs` may hold what every call of the model gets, such as logits_to_keep.
        join_projections: one product makes Q, K and V where their weights are constant; else three, as in the model.
        kw: passed on to `torch.onnx.export` (`kwargs`, `input_names`, `output_names`, `custom_translation_table`, ...).

    Returns:
        The report: every attention site, fused or not, and why not.

    Raises:
        ImportError: torch or onnxscript is not installed.
        OSError: there is no such folder, or the path is a folder.
        TypeError: an option is of another type than said here, or the model is no module.
        ValueError: torch does not export at that opset, or `kv_cache` is another word.
        torch.onnx.OnnxExporterError: torch cannot export the model; nothing is written.
    """
    torch = _torch()
    for name in _OURS:
        if name in kw:
            hint = "use opset=" if name == "opset_version" else "export_onnx decides it"
            raise TypeError(f"export_onnx: argument '{name}' is not passed on to torch.onnx.export: {hint}")
    opset = DEFAULT_OPSET if opset is None else opset
    check_opset("export_onnx", opset, OLDEST_OPSET, NEWEST_OPSET)
    flags = {"portable": portable, "join_projections": join_projections}
    check_flags("export_onnx", **flags, **({} if external_data is None else {"external_data": external_data}))
    check_kv_cache("export_onnx", kv_cache)
    args = _inputs(model, args)
    target = Path(path)

    from flashonnx.export.model.files import check_output
    from flashonnx.export.operator import schema
    from flashonnx.export.pytorch import nodes as torch_nodes

    check_output(target)
    schema.register_schema()  # torch's exporter makes nodes from schemas
    if kv_cache is not None:
        kw |= {"dynamic_shapes": dynamic_shapes, "opset_version": opset}
        return _with_cache(model, args, target, kv_cache, flags, external_data, kw)
    kw["custom_translation_table"] = torch_nodes.table() | (kw.get("custom_translation_table") or {})
    kw.setdefault("verbose", False)
    kw |= {"dynamo": True, "dynamic_shapes": dynamic_shapes, "opset_version": opset}

    def convert() -> tuple[ir.Model, Report]:
        with _quiet(), _plain_modules(), torch.no_grad():
            try:
                exported = exporter_faults.export(model, args, kw)
            except Exception as error:
                if advised := advice(model, error):
                    error.add_note(advised)
                raise
        return exported, _fuse(exported, flags)

    converted, notes = _by_route(model, convert)
    exported, report = converted if converted is not None else convert()
    _write(exported, target, external_data)
    return dataclasses.replace(
        report,
        notes=(*notes, *_fixed(exported, dynamic_shapes), *_training(model), *of_bfloat16(exported), *report.notes),
    )


def _fixed(model: ir.Model, dynamic_shapes: Any) -> list[str]:
    """What to say of inputs that are all as large as the example, for want of anything that says otherwise."""
    shapes = [value.shape for value in model.graph.inputs if value.shape is not None and len(value.shape)]
    if dynamic_shapes or not shapes or not all(shape.is_static() for shape in shapes):
        return []
    first = next(value for value in model.graph.inputs if value.shape)
    shape = ", ".join(map(str, first.shape or ()))
    return [
        f"every axis is as long as the example's, such as ({shape}) of '{first.name}': dynamic_shapes says which may "
        'vary, such as {0: "batch"}'
    ]


def _training(model: Any) -> list[str]:
    """What to say of a model of which a part is exported as it trains. torch looks at the outermost module alone."""
    modules = model.named_modules() if hasattr(model, "named_modules") else ()
    names = [name or type(module).__name__ for name, module in modules if module.training]
    if not names:
        return []
    more = f" and {len(names) - 1} more modules are" if len(names) > 1 else " is"
    return [
        f"'{names[0]}'{more} in training mode: attention is exported without its dropout, but other dropout stays and "
        "makes results random, and so do averages of batches; call model.eval() before the export"
    ]


def _with_cache(
    model: Any,
    args: tuple[Any, ...],
    target: Path,
    kind: str,
    how: Mapping[str, bool],
    external_data: bool | None,
    kw: dict[str, Any],
) -> Report:
    """export_onnx of a decoder whose caches are inputs and outputs."""
    from flashonnx.export.model import configuration
    from flashonnx.export.operator.cache_schema import KV_CACHE
    from flashonnx.export.pytorch import kv_cache, transformers_route
    from flashonnx.export.pytorch import nodes as torch_nodes
    from flashonnx.export.pytorch.kv_cache import CacheExportError

    torch = _torch()
    for name in ("dynamic_shapes", "input_names", "output_names"):
        if kw.pop(name, None) is not None:
            raise ValueError(f"export_onnx: argument '{name}' is not for kv_cache, which decides it")
    reason = transformers_route.candidate(model)
    if reason is not None:
        raise CacheExportError(f"export_onnx: {kv_cache.without_interface(model, reason)}")
    if model.training:
        raise CacheExportError(
            f"export_onnx: kv_cache is for generating, and this {type(model).__name__} is in training mode, in which "
            "its Dropout would draw at every step: call model.eval() first"
        )
    more = dict(kw.pop("kwargs", None) or {})
    module, route, arguments = kv_cache.prepared(model, args, kind, more)
    table = torch_nodes.table() | kv_cache.table() | (kw.pop("custom_translation_table", None) or {})
    kw = {"verbose": False} | kw | arguments | {"dynamo": True, "custom_translation_table": table}
    try:
        with route, _quiet(), _held_back(), _plain_modules(), torch.no_grad():
            exported = exporter_faults.export(module, kw.pop("args"), kw)
            kv_cache.check_numbers(exported, route)
            unproved = _prove_rows(exported)  # before tables of all sentences' angles are made
            report = _fuse(exported, how)
    except Exception as error:
        why = of_experts(model, error) or kv_cache.why_not(route, error)
        raise CacheExportError(f"export_onnx: {type(model).__name__} with kv_cache: {why}") from error
    if unproved and not more:
        raise CacheExportError(f"export_onnx: {type(model).__name__} with kv_cache: {unproved}")
    others = [site for site in report.sites if site.kind != KV_CACHE]
    if others:
        raise CacheExportError(f"export_onnx: '{others[0].node}' ({others[0].kind}) attends without kv_cache")
    positions = kv_cache.positions(model)
    if positions is not None:
        exported.metadata_props[configuration.POSITIONS] = str(positions)
    _write(exported, target, external_data)
    sites = tuple(dataclasses.replace(site, kind="attention with a cache", reason="") for site in report.sites)
    notes = [*(f"transformers: {remark}" for remark in route.remarks), *of_bfloat16(exported)]
    if unproved:
        notes.append(f"with these kwargs for prompts of equal length only: {unproved}")
    return dataclasses.replace(report, sites=sites, notes=(*notes, *report.notes))


def _prove_rows(model: ir.Model) -> str:
    """Why a sentence may get something else in an uneven batch than by itself; "" if it is proved to get the same."""
    from flashonnx.export.caches import rows
    from flashonnx.export.caches.pairs import CacheError

    values = [*model.graph.inputs, *model.graph.outputs]
    tokens = next(value for value in values if value.name == "input_ids")
    try:
        rows.prove(model, tokens, {value for value in values if (value.name or "").startswith("present.")})
    except CacheError as error:
        return str(error).removeprefix("fuse: kv_cache: ")
    return ""


def _by_route(
    model: Any, convert: Callable[[], tuple[ir.Model, Report]]
) -> tuple[tuple[ir.Model, Report] | None, list[str]]:
    """The export of a model of transformers through its interfaces, None if that cannot be; and what to say of it."""
    from flashonnx.export.pytorch import transformers_route

    reason = transformers_route.candidate(model)
    if reason is None:
        route = None
        try:
            with transformers_route.Route(model) as route:
                exported, report = convert()
        except Exception as error:  # whatever it was: the export without the route fails for it, too, or does not
            reason = transformers_route.why_not(route, error)
        else:
            reason = _not_all(route, report)
            if not reason:
                return (exported, report), [f"transformers: {remark}" for remark in route.remarks]
    return None, [f"transformers: exported as written, not through its attention interface: {reason}"] if reason else []


def _not_all(route: transformers_route.Route, report: Report) -> str:
    """Why a model did not attend through the route alone; empty if it did."""
    ours = ("torch.ops.flashonnx.attention", "torch.ops.flashonnx.attention_varlen")
    others = [site for site in report.sites if site.kind not in ours]
    if not route.layers:
        return "no layer asked for its attention function"
    return f"'{others[0].node}' attends without it ({others[0].kind})" if others else ""


def _fuse(model: ir.Model, how: Mapping[str, bool]) -> Report:
    """Fuses the whole model in place; the nodes of the translation table come into their best form by it."""
    from flashonnx.export import Report, fusion
    from flashonnx.export.operator import schema
    from flashonnx.export.operator.cache_schema import KV_CACHE, VARLEN
    from flashonnx.export.rules import projections

    exporter_faults.spread_rotary_caches(model)
    ours = (schema.DOMAIN, schema.OP_TYPE)
    caught = [node for node in model.graph.all_nodes() if (node.domain, node.op_type) == ours]
    for node in caught:
        _tidy(node, schema.ATTRIBUTES)
    for kind, outputs in ((KV_CACHE, 3), (VARLEN, 1)):
        for node in [node for node in model.graph.all_nodes() if (node.domain, node.op_type) == (schema.DOMAIN, kind)]:
            _tidy(node, schema.OPERATORS[kind], outputs)
    kinds = {node.name: _kind(node) for node in caught}
    report = fusion.fuse_ir(model, **how)
    projections.store_joined(model)
    sites = [
        dataclasses.replace(site, kind="torch.ops.flashonnx.attention_varlen", reason="")
        if site.kind == VARLEN
        else dataclasses.replace(site, kind=kinds.get(site.node, site.kind))
        for site in report.sites
    ]
    return Report(tuple(sites), report.notes)


def _kind(node: ir.Node) -> str:
    """What stood in PyTorch's program where `node` is, from what the exporter notes beside it."""
    for name in ("attention_outputs", "attention"):
        if f"torch.ops.flashonnx.{name}.default" in node.metadata_props.get("pkg.torch.onnx.fx_node", ""):
            return f"torch.ops.flashonnx.{name}"
    return "scaled_dot_product_attention"


def _inputs(model: Any, args: Any) -> tuple[Any, ...]:
    """The positional inputs, of which torch's exporter says nothing that helps if they, or the model, are none.

    Raises:
        TypeError: see there.
    """
    torch = _torch()
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("export_onnx: the model is expected to be a module as it was before torch.jit: pass that one")
    if not isinstance(model, (torch.nn.Module, torch.export.ExportedProgram)):
        raise TypeError(f"export_onnx: the model is expected to be a torch.nn.Module, got {type(model).__name__}")
    if isinstance(args, (tuple, list)):
        return tuple(args)
    if isinstance(args, torch.Tensor):
        return (args,)
    hint = "; inputs by name go into kwargs={...}" if isinstance(args, Mapping) else ""
    raise TypeError(f"export_onnx: args is expected to be a tuple of inputs, got {type(args).__name__}{hint}")


def _write(model: ir.Model, path: Path, external_data: bool | None) -> None:
    """Writes the file, and its weights beside it if asked or needed: under other names first, then by renaming."""
    import onnx
    import onnx_ir as ir
    from flashonnx.export.model.files import INLINE_LIMIT

    if external_data is None:
        weights = (value.const_value for value in model.graph.initializers.values())
        external_data = sum(tensor.nbytes for tensor in weights if tensor is not None) > INLINE_LIMIT
    data = f"{path.name}.data" if external_data else None
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        temporary = Path(folder) / path.name
        ir.save(model, temporary, external_data=data)
        onnx.checker.check_model(str(temporary))
        if data is not None and (Path(folder) / data).exists():
            os.replace(Path(folder) / data, path.parent / data)
        os.replace(temporary, path)


def _tidy(node: ir.Node, defaults: Mapping[str, Any], outputs: int = 1) -> None:
    """Drops what torch's exporter adds from the schema: outputs that nobody reads, attributes at their defaults."""
    if not any(output.uses() or output.is_graph_output() for output in node.outputs[outputs:]):
        node.resize_outputs(outputs)
    for name, default in defaults.items():
        if name in node.attributes and node.attributes[name].value == default:
            del node.attributes[name]


@contextlib.contextmanager
def _plain_modules() -> Iterator[None]:
    """Keeps PyTorch's transformer modules from what cannot be traced.

    That is their fast path, operators without an ONNX form, and a look into the mask whether it is causal, which would
    only be a hint beside the mask.
    """
    import torch
    from torch.nn.modules import transformer

    fast, look = torch.backends.mha.get_fastpath_enabled(), transformer._detect_is_causal_mask
    torch.backends.mha.set_fastpath_enabled(False)
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        transformer._detect_is_causal_mask = look


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps back what torch's exporter says about itself, none of which is about the model."""
    exporter, folding = "torch.onnx._internal.exporter", "onnxscript.optimizer._constant_folding"
    loggers = [logging.getLogger(name) for name in (f"{exporter}._core", f"{exporter}._registration", folding)]
    said = ("Expected meta_vals to be a sequence", "torchvision is not installed", "Evaluation failed")

    def keep(record: logging.LogRecord) -> bool:
        return not record.msg.startswith(said)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="# The axis name")  # two inputs share a named dimension
        warnings.filterwarnings("ignore", message=".*treespec, LeafSpec")
        for logger in loggers:
            logger.addFilter(keep)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(keep)


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """Keeps what is written to stderr until it is known that all went well: else the error says it in fewer words."""
    with contextlib.redirect_stderr(io.StringIO()) as held:
        yield
    print(held.getvalue(), end="", file=sys.stderr)


def _torch() -> Any:
    try:
        import onnxscript  # noqa: F401  torch.onnx needs it and says so late
        import torch
    except ImportError as error:
        raise ImportError(
            f"export_onnx needs PyTorch and onnxscript ({error}): pip install torch onnxscript"
        ) from error
    return torch
