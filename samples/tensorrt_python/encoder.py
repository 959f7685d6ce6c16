"""An encoder layer from PyTorch to a TensorRT engine, and its answers against PyTorch's.

    python samples/tensorrt_python/encoder.py                            # for the GPU that is there
    python samples/tensorrt_python/encoder.py --compute-capability 8.9   # TensorRT-RTX alone: for another, or with none

Writes encoder.onnx (prepared for TensorRT's parser, say that of trtexec) and encoder.engine into --folder.
Needs `pip install flashonnx[torch,tensorrt]`, or `tensorrt` in place of `tensorrt-rtx`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import flashonnx
import flashonnx.tensorrt
import numpy as np
import onnx
import torch
import typer


def main(
    folder: Annotated[Path, typer.Option(help="Where the files go.")] = Path("."),
    compute_capability: Annotated[list[str] | None, typer.Option(help="GPU to build for, e.g. 8.9.")] = None,
    embed: Annotated[bool, typer.Option(help="Put libflashonnx.so into the engine.")] = False,
) -> None:
    """Exports, builds and, where a GPU can run the engine, compares."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(d_model=256, nhead=8, batch_first=True).eval().half()
    x = torch.randn(2, 100, 256, dtype=torch.float16)
    fused = folder / "fused.onnx"
    print(flashonnx.export_onnx(layer, (x,), fused, dynamic_shapes=({0: "batch", 1: "sequence"},)))

    prepared = flashonnx.tensorrt.prepare_for_tensorrt(fused)
    onnx.save(prepared, folder / "encoder.onnx")
    (name,) = (value.name for value in prepared.graph.input)
    profile = {name: ((1, 1, 256), (2, 100, 256), (8, 512, 256))}
    engine = flashonnx.tensorrt.build_engine(
        prepared, profile, compute_capabilities=compute_capability or (), embed_plugin=embed
    )
    (folder / "encoder.engine").write_bytes(engine)
    print(f"encoder.engine: {len(engine) / 1e6:.1f} MB")

    if not torch.cuda.is_available() or importlib.util.find_spec("cuda") is None:
        print("Not run: that needs a GPU, PyTorch for CUDA and cuda-python.")
        return
    with flashonnx.tensorrt.runner(engine, cuda_graphs=True, allow_code=embed) as run:
        for batch, length in ((2, 100), (8, 512), (1, 1)):
            x = torch.randn(batch, length, 256, dtype=torch.float16)
            (y,) = run({name: x.numpy()}).values()
            with torch.inference_mode():
                expected = layer.cuda()(x.cuda()).cpu().numpy()
            worst = np.abs(y.astype(np.float32) - expected.astype(np.float32)).max()
            print(f"{batch} x {length}: largest difference from PyTorch {worst:.4f}")
            if worst > 0.02:
                raise SystemExit("The engine does not compute what the model does.")


if __name__ == "__main__":
    typer.run(main)
