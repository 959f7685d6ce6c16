"""Makes a model repository for Triton Inference Server of a fused ONNX model.

    python samples/triton/run.py fused.onnx REPOSITORY --name encoder

Triton's onnxruntime backend registers the libraries that a configuration names in `model_operations`. Needs
`pip install flashonnx`; not Triton.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import flashonnx
import onnx
import typer

# Triton's names of types, by ONNX's.
TYPES = {
    onnx.TensorProto.FLOAT: "TYPE_FP32",
    onnx.TensorProto.FLOAT16: "TYPE_FP16",
    onnx.TensorProto.BFLOAT16: "TYPE_BF16",
    onnx.TensorProto.DOUBLE: "TYPE_FP64",
    onnx.TensorProto.INT32: "TYPE_INT32",
    onnx.TensorProto.INT64: "TYPE_INT64",
    onnx.TensorProto.BOOL: "TYPE_BOOL",
}


def tensor(kind: str, value: onnx.ValueInfoProto) -> str:
    """One input or output; its first axis is the batch, which Triton leaves out where max_batch_size is not 0."""
    kinds = value.type.tensor_type
    sizes = [d.dim_value if d.HasField("dim_value") else -1 for d in kinds.shape.dim]
    if not sizes or sizes[0] != -1:
        raise SystemExit(
            f"{kind} '{value.name}' is expected to have a batch of any size as its first axis, got {sizes}"
        )
    if kinds.elem_type not in TYPES:
        raise SystemExit(f"{kind} '{value.name}' has type {kinds.elem_type} of ONNX, which this sample does not know")
    dims = ", ".join(map(str, sizes[1:]))
    return f'{kind} [ {{ name: "{value.name}" data_type: {TYPES[kinds.elem_type]} dims: [ {dims} ] }} ]'


def configuration(model: onnx.ModelProto, name: str, library: Path, batch: int) -> str:
    lines = [
        f'name: "{name}"',
        'backend: "onnxruntime"',
        f"max_batch_size: {batch}",
        *(tensor("input", value) for value in model.graph.input),
        *(tensor("output", value) for value in model.graph.output),
        "dynamic_batching { }",
        f'model_operations {{ op_library_filename: "{library}" }}',
    ]
    return "\n".join(lines) + "\n"


def main(
    file: Annotated[Path, typer.Argument(help="A model that flashonnx has fused.")],
    repository: Annotated[Path, typer.Argument(help="The folder that tritonserver gets as --model-repository.")],
    name: Annotated[str, typer.Option(help="Of the model in Triton.")] = "model",
    batch: Annotated[int, typer.Option(help="The largest batch that Triton may form.")] = 8,
    library: Annotated[Path | None, typer.Option(help="Where libflashonnx.so lies on the server.")] = None,
) -> None:
    """Writes NAME/config.pbtxt, NAME/1/model.onnx and, unless it lies elsewhere on the server, libflashonnx.so."""
    model = onnx.load(file)
    version = repository / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    onnx.save(model, version / "model.onnx")
    if library is None:
        library = (repository / "libflashonnx.so").absolute()
        shutil.copy(flashonnx.library_path(), library)
    (repository / name / "config.pbtxt").write_text(configuration(model, name, library, batch))
    print(f"tritonserver --model-repository={repository.absolute()}")


if __name__ == "__main__":
    typer.run(main)
