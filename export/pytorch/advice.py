"""What to do where torch cannot export a model of transformers, in words."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir

_RETURNS_CACHE = (
    "The model returns its cache: set model.config.use_cache = False before the export, or make the caches inputs and "
    'outputs by kv_cache="static" or "paged".'
)
_EXPORTABLE, _GROUPED = "batched_mm", "grouped_mm"


def advice(model: Any, error: BaseException) -> str:
    """What to change about `model`, whose export failed with `error`; "" where that is not known."""
    return _RETURNS_CACHE if "transformers.cache_utils" in str(error) else of_experts(model, error)


def of_experts(model: Any, error: BaseException) -> str:
    """Likewise, of a mixture of experts whose products have no ONNX form."""
    if "transformers" not in sys.modules:
        return ""
    from transformers import PreTrainedModel

    for path, module in getattr(model, "named_modules", list)():
        if not isinstance(module, PreTrainedModel) or not _has_experts(module):
            continue
        found = getattr(module.config, "_experts_implementation", None)
        if found != _EXPORTABLE and (found != _GROUPED or _GROUPED in str(error)):
            where = f"model.{path}" if path else "model"
            return (
                f"its mixture of experts runs as {found!r}, which has no ONNX form; expected {_EXPORTABLE!r}: call "
                f"{where}.set_experts_implementation({_EXPORTABLE!r}) before the export. "
                "That copies the chosen experts' weights for every token, so run long prompts in chunks"
            )
    return ""


def of_bfloat16(model: ir.Model) -> list[str]:
    """What to say of an exported model in bfloat16."""
    import onnx_ir as ir

    if not any(value.dtype == ir.DataType.BFLOAT16 for value in model.graph.initializers.values()):
        return []
    return [
        "weights are bfloat16, which ONNX Runtime computes with on CUDA alone: its CPU provider has no MatMul, Add or "
        "Mul of it. For a CPU load the model in float32 (dtype=torch.float32, --dtype float32) and export that"
    ]


def _has_experts(module: Any) -> bool:
    return bool(getattr(module, "_can_set_experts_implementation", bool)())
