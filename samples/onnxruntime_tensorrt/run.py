"""A fused model in ONNX Runtime's TensorRT execution provider, against its CUDA provider.

    python samples/onnxruntime_tensorrt/run.py fused.onnx --shape x=2x100x256

Needs `onnxruntime-gpu` and the TensorRT that it was built for (`libnvinfer.so.10` on LD_LIBRARY_PATH, say from
`pip install tensorrt-cu12`). The provider opens the libraries of `trt_extra_plugin_lib_paths` at the first session of a
process and never again, so they belong to every session that is made before one that needs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import flashonnx
import flashonnx.tensorrt
import numpy as np
import onnx
import onnxruntime
import typer

PROVIDER = "TensorrtExecutionProvider"


def main(
    model: Annotated[Path, typer.Argument(help="A model that flashonnx has fused.")],
    shape: Annotated[list[str], typer.Option(help="Of an input, e.g. x=2x100x256.")],
) -> None:
    """Runs the model in both providers and compares."""
    if PROVIDER not in onnxruntime.get_available_providers():
        raise SystemExit("This onnxruntime has no TensorRT provider: pip install onnxruntime-gpu")
    shapes = {name: [int(size) for size in sizes.split("x")] for name, sizes in (text.split("=") for text in shape)}
    prepared = flashonnx.tensorrt.prepare_for_tensorrt(model, onnxruntime=True)
    feeds = {value.name: _random(value, shapes[value.name]) for value in prepared.graph.input}

    options = {"trt_extra_plugin_lib_paths": flashonnx.tensorrt.autoload_path(), "trt_fp16_enable": False}
    session = onnxruntime.InferenceSession(
        prepared.SerializeToString(), providers=[(PROVIDER, options), "CUDAExecutionProvider"]
    )
    if session.get_providers()[0] != PROVIDER:
        raise SystemExit(f"ONNX Runtime could not use TensorRT; the session runs on {session.get_providers()}")
    outputs = session.run(None, feeds)
    expected = flashonnx.session(model, ["CUDAExecutionProvider"]).run(None, feeds)
    for value, out, reference in zip(prepared.graph.output, outputs, expected, strict=True):
        difference = np.abs(out.astype(np.float64) - reference.astype(np.float64)).max(initial=0)
        print(f"{value.name} {out.shape}: largest difference {difference:.2e}")


def _random(value: onnx.ValueInfoProto, shape: list[int]) -> Any:
    dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    random = np.random.default_rng(0)
    if np.issubdtype(dtype, np.floating):
        return random.standard_normal(shape).astype(dtype)
    return np.ones(shape, dtype)


if __name__ == "__main__":
    typer.run(main)
