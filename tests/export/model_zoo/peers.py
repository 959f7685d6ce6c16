"""What other fusions make of the same files: ONNX Runtime's own optimizer, and onnxscript's for ONNX Runtime."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable
from pathlib import Path

import onnx

from model_zoo.check import Case, difference, feeds, tolerance

# The closest of the types that ONNX Runtime's optimizer has: it looks for the graph of each as it once was.
_TYPES = {
    **dict.fromkeys(("bart", "whisper"), "bart"),
    **dict.fromkeys(
        ("gpt2", "gpt2_past", "nanoGPT", "llama", "llama_past", "mistral", "mistral_past", "mixtral"), "gpt2"
    ),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_past", "gemma2", "gemma3"), "qwen3"),
    **dict.fromkeys(("vit", "deit", "dinov2", "siglip", "detr"), "vit"),
    **dict.fromkeys(("phi", "phi3"), "phi"),
    **{name: name for name in ("clip", "gpt_neox", "swin", "t5")},
    "mixtral": "gpt2",
    **dict.fromkeys(("sam", "sam_vision"), "sam2"),
    "diffusers UNet": "unet",
    "diffusers DiT": "mmdit",
}


def onnxruntime(path: Path, case: Case) -> onnx.ModelProto:
    """The model after `onnxruntime.transformers.optimizer`."""
    from onnxruntime.transformers import optimizer

    kind = _TYPES.get(case.entry.id, "vit" if case.entry.id.startswith("timm") else "bert")
    return optimizer.optimize_model(str(path), model_type=kind, num_heads=0, hidden_size=0, opt_level=0).model


def onnxscript(path: Path, case: Case) -> onnx.ModelProto:
    """The model after `onnxscript.rewriter.ort_fusions.optimize_for_ort`."""
    import onnx_ir as ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    optimized = optimize_for_ort(ir.from_proto(onnx.load(path)))
    return ir.to_proto(optimized[0] if isinstance(optimized, tuple) else optimized)


def cell(fusion: Callable[[Path, Case], onnx.ModelProto], path: Path, case: Case) -> str:
    """How many attentions it fused, and what is wrong with the result, in the words of the table."""
    original = onnx.load(path)
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            made = fusion(path, case)
    except Exception as error:  # whatever goes wrong in it
        return f"fails: {type(error).__name__}"
    finally:
        logging.disable(logging.NOTSET)
    count = _attentions(made) - _attentions(original)
    return f"{count}{_fault(case, original, made) if count else ''}"


def _attentions(model: onnx.ModelProto) -> int:
    return sum(node.domain == "com.microsoft" and node.op_type.endswith("Attention") for node in model.graph.node)


def _fault(case: Case, original: onnx.ModelProto, made: onnx.ModelProto) -> str:
    """Whether ONNX Runtime runs it, and gives what the original gives, with and without padding."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        before = ort.InferenceSession(original.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:  # bfloat16: nothing to compare with
        return ""
    try:
        session = ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception:
        return " (does not load)"
    for sizes in case.compared:
        given = feeds(case.inputs(sizes), original)
        try:
            expected = before.run(None, given)
        except Exception:  # frozen axes
            continue
        try:
            got = session.run(None, given)
        except Exception:
            return " (does not run)"
        for x, y in zip(got, expected, strict=True):
            if x.shape != y.shape or not difference(x, y) <= tolerance(case):
                return " (wrong)"
    return ""
