"""From a PyTorch module to an ONNX file in which attention is one node.

`scaled_dot_product_attention` is caught before ONNX, by a translation table of torch's exporter, where its meaning is
still whole: rank, masks, causality, grouped heads. What else computes attention (hand-written softmax forms,
`nn.MultiheadAttention` with weights) is left to `flashonnx.fuse`, which runs over the exported graph.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch
    from flashonnx.export.report import Report

# Opset 20 is torch's own default, has Gelu as one operator, and ONNX Runtime's CUDA provider runs all of it. Torch at
# opset 23 exports rotary embeddings in a form that ONNX Runtime refuses for batches, so newer opsets are for those who
# ask.
DEFAULT_OPSET = 20

_OURS = ("dynamo", "f", "opset_version", "fallback", "export_params", "keep_initializers_as_inputs")
_INLINE_LIMIT = 2**31 - 2**26  # bytes of weights: protobuf's 2 GB, less what the graph itself may take
_FLOATS = ("FLOAT", "FLOAT16", "BFLOAT16")


def export_onnx(
    model: torch.nn.Module | torch.export.ExportedProgram,
    args: tuple[Any, ...],
    path: str | os.PathLike[str],
    *,
    dynamic_shapes: Any = None,
    opset: int | None = None,
    portable: bool = True,
    external_data: bool | None = None,
    **kw: Any,
) -> Report:
    """Exports a PyTorch model to ONNX with its attention fused into `flashonnx::FlashAttention`.

    Args:
        model: the module, in eval mode for inference.
        args: example positional inputs; keyword inputs go into `kwargs={...}`.
        path: the file to write. It appears whole or not at all.
        dynamic_shapes: as for `torch.onnx.export`; a name such as `{"input_ids": {0: "batch", 1: "sequence"}}` is
            enough. Dimensions that are not named are fixed to those of the example inputs.
        opset: of the standard operators, 18 or newer; default 20. FlashAttention itself is the same at any.
        portable: add function bodies, so that the file also runs where the flashonnx library is not registered.
        external_data: weights in `<path>.data` beside the file. Default: only if the model exceeds protobuf's 2 GB.
        kw: passed on to `torch.onnx.export` (`kwargs`, `input_names`, `output_names`, `custom_translation_table`, ...).

    Returns:
        The report: every attention site, fused or not, and why not.

    Raises:
        ImportError: torch or onnxscript is not installed.
        torch.onnx.OnnxExporterError: torch cannot export the model; nothing is written.
    """
    torch = _torch()
    for name in _OURS:
        if name in kw:
            hint = "use opset=" if name == "opset_version" else "export_onnx decides it"
            raise TypeError(f"export_onnx: argument '{name}' is not passed on to torch.onnx.export: {hint}")
    opset = DEFAULT_OPSET if opset is None else opset
    if opset < 18:
        raise ValueError(
            f"export_onnx: opset is expected to be 18 or newer (torch converts older ones down afterwards), got {opset}"
        )

    from flashonnx.export import schema

    schema.register_schema()  # torch's exporter makes nodes from schemas
    table = {
        torch.ops.aten.scaled_dot_product_attention.default: translate_sdpa,
        **(kw.pop("custom_translation_table", None) or {}),
    }
    kw.setdefault("verbose", False)
    with _quiet():
        program = torch.onnx.export(
            model,
            args,
            dynamo=True,
            dynamic_shapes=dynamic_shapes,
            opset_version=opset,
            custom_translation_table=table,
            **kw,
        )
    report = _fuse(program.model, portable)
    _write(program.model, Path(path), external_data)
    return report


def _fuse(model: ir.Model, portable: bool) -> Report:
    """Fuses the whole model in place; the nodes of the translation table come into their best form by it."""
    from flashonnx.export import Report, fusion, schema

    ours = (schema.DOMAIN, schema.OP_TYPE)
    caught = [node for node in model.graph.all_nodes() if (node.domain, node.op_type) == ours]
    for node in caught:
        _tidy(node, schema.ATTRIBUTES)
    names = {node.name for node in caught}
    report = fusion.fuse_ir(model, portable=portable)
    sites = [
        dataclasses.replace(site, kind="scaled_dot_product_attention") if site.node in names else site
        for site in report.sites
    ]
    return Report(tuple(sites), report.notes)


def _write(model: ir.Model, path: Path, external_data: bool | None) -> None:
    """Writes the file, and its weights beside it if asked or needed: under other names first, then by renaming."""
    import onnx
    import onnx_ir as ir

    if not path.parent.is_dir():
        raise FileNotFoundError(f"export_onnx: cannot write '{path}': there is no folder '{path.parent}'")
    if external_data is None:
        weights = (value.const_value for value in model.graph.initializers.values())
        external_data = sum(tensor.nbytes for tensor in weights if tensor is not None) > _INLINE_LIMIT
    data = f"{path.name}.data" if external_data else None
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        temporary = Path(folder) / path.name
        ir.save(model, temporary, external_data=data)
        onnx.checker.check_model(str(temporary))
        if data is not None and (Path(folder) / data).exists():
            os.replace(Path(folder) / data, path.parent / data)
        os.replace(temporary, path)


def translate_sdpa(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`aten.scaled_dot_product_attention` as a FlashAttention node; an entry of a torch.onnx translation table.

    Called by torch's exporter with symbolic tensors: query (..., Hq, L, E), key (..., Hkv, S, E), value (..., Hkv, S,
    Ev), attn_mask broadcastable to (..., Hq, L, S). The operator's rules for empty rows, causality and grouped heads
    are PyTorch's: https://pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html
    """
    if query.dtype.name not in _FLOATS:
        from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention

        return aten_scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    import onnxscript

    op: Any = onnxscript.opset18

    if dropout_p > 0:
        warnings.warn(
            f"export_onnx: an attention has dropout_p={dropout_p}; it is left out, as in inference", stacklevel=2
        )
    if attn_mask is not None and attn_mask.shape[-1] != key.shape[-2]:
        # A last dimension of 1: PyTorch broadcasts it, ONNX pads it with -inf.
        attn_mask = op.Expand(attn_mask, op.Shape(key, start=-2, end=-1))
    query, key, value, attn_mask, shape = _to_rank_4(op, query, key, value, attn_mask, enable_gqa)
    attributes: dict[str, Any] = {"is_causal": int(is_causal)}
    if isinstance(scale, (int, float)) and scale > 0:
        attributes["scale"] = float(scale)
    elif scale is not None:  # zero, negative or computed in the graph: more than the attribute of every runtime can say
        query, attributes["scale"] = op.Mul(query, op.CastLike(scale, query)), 1.0
    inputs = [query, key, value] if attn_mask is None else [query, key, value, attn_mask]
    y = _flashonnx_opset().FlashAttention(*inputs, **attributes)[0]
    return y if shape is None else op.Reshape(y, shape)


def _to_rank_4(op: Any, query: Any, key: Any, value: Any, mask: Any, grouped: bool) -> tuple[Any, Any, Any, Any, Any]:
    """Q, K, V as (B, H, S, D), the mask to match, and the shape to give the output (None: leave it).

    Leading dimensions broadcast in PyTorch, but with grouped heads not the third last. Fewer than four dimensions
    become heads and a batch of 1, more are merged into the batch.
    """
    kept = 3 if grouped else 2
    leads = [list(tensor.shape[:-kept]) for tensor in (query, key, value)]
    rank = max(len(tensor.shape) for tensor in (query, key, value))
    out_lead = op.Shape(query, end=-1)
    if any(lead != leads[0] for lead in leads):
        ones = op.Constant(value_ints=[1] * kept)
        shapes = [op.Concat(op.Shape(tensor, end=-kept), ones, axis=0) for tensor in (query, key, value)]
        query, key, value = (_expand(op, tensor, shapes) for tensor in (query, key, value))
        out_lead = op.Shape(query, end=-1)
    if rank == 4:
        return query, key, value, mask, None
    out_shape = op.Concat(out_lead, op.Shape(value, start=-1), axis=0)
    if rank < 4:
        axes = op.Constant(value_ints=list(range(4 - rank)))
        query, key, value = (op.Unsqueeze(tensor, axes) for tensor in (query, key, value))
    else:
        if mask is not None and len(mask.shape) > 3:
            lead = op.Shape(query, end=-3)
            mask = _merge_lead(op, op.Expand(mask, op.Concat(lead, op.Constant(value_ints=[1, 1, 1]), axis=0)))
        query, key, value = (_merge_lead(op, tensor) for tensor in (query, key, value))
    return query, key, value, mask, out_shape


def _expand(op: Any, tensor: Any, shapes: list[Any]) -> Any:
    for shape in shapes:  # Expand broadcasts both ways
        tensor = op.Expand(tensor, shape)
    return tensor


def _merge_lead(op: Any, tensor: Any) -> Any:
    """(..., H, S, D) as (product of ..., H, S, D)."""
    batch = op.ReduceProd(op.Shape(tensor, end=-3), keepdims=1)
    return op.Reshape(tensor, op.Concat(batch, op.Shape(tensor, start=-3), axis=0))


def _flashonnx_opset() -> Any:
    import onnxscript

    return onnxscript.values.Opset("flashonnx", 1)


def _tidy(node: ir.Node, defaults: Mapping[str, Any]) -> None:
    """Drops what torch's exporter adds from the schema: outputs that nobody reads, attributes at their defaults."""
    if not any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        node.resize_outputs(1)
    for name, default in defaults.items():
        if name in node.attributes and node.attributes[name].value == default:
            del node.attributes[name]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps back what torch's exporter says about itself, none of which is about the model."""
    loggers = [logging.getLogger(f"torch.onnx._internal.exporter.{name}") for name in ("_core", "_registration")]

    def keep(record: logging.LogRecord) -> bool:
        return not record.msg.startswith(("Expected meta_vals to be a sequence", "torchvision is not installed"))

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


def _torch() -> Any:
    try:
        import onnxscript  # noqa: F401  torch.onnx needs it and says so late
        import torch
    except ImportError as error:
        raise ImportError(
            f"export_onnx needs PyTorch and onnxscript ({error}): pip install torch onnxscript"
        ) from error
    return torch
