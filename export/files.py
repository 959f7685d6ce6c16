"""Reading models from whatever they come in, and writing them whole or not at all."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tempfile

import onnx
import onnx_ir as ir

AnyModel = str | os.PathLike[str] | onnx.ModelProto | ir.Model


@dataclasses.dataclass
class Source:
    """A model as onnx-ir, free to be changed, and where it came from."""

    model: ir.Model
    original: onnx.ModelProto | ir.Model
    path: pathlib.Path | None = None

    def result(self, changed: bool) -> onnx.ModelProto | ir.Model:
        """The model in the type in which it came; the original itself if nothing changed."""
        if not changed:
            return self.original
        if isinstance(self.original, ir.Model):
            return self.model
        try:
            return ir.to_proto(self.model)
        except Exception as error:
            raise ValueError(f"the model is not a valid ONNX model: {_root(error)}") from error


def load(model: AnyModel) -> Source:
    """Takes a path, an onnx.ModelProto or an onnx_ir.Model.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not an ONNX model.
        TypeError: something else altogether.
    """
    if isinstance(model, ir.Model):
        return Source(model.clone(), model)
    if isinstance(model, onnx.ModelProto):
        return Source(_checked(model, "the model"), model)
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"expected a path, an onnx.ModelProto or an onnx_ir.Model, got {type(model).__name__}")
    path = pathlib.Path(model)
    if not path.is_file():
        raise FileNotFoundError(f"no ONNX model at '{path}'")
    try:
        proto = onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf's own exceptions differ between its versions
        raise ValueError(f"'{path}' is not an ONNX model: {error}") from error
    source = Source(_checked(proto, f"'{path}'"), proto, path)
    _check_external_data(source)
    return source


def _checked(proto: onnx.ModelProto, what: str) -> ir.Model:
    if not proto.HasField("graph") or not proto.opset_import:
        raise ValueError(f"{what} is not an ONNX model: it has no graph or imports no opset")
    try:
        return ir.from_proto(proto)
    except Exception as error:
        raise ValueError(f"{what} is not a valid ONNX model: {_root(error)}") from error


def _root(error: BaseException) -> BaseException:
    """What is wrong: onnx-ir says where it was, its cause what."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _external(model: ir.Model) -> list[ir.ExternalTensor]:
    return [
        value.const_value
        for value in model.graph.initializers.values()
        if isinstance(value.const_value, ir.ExternalTensor)
    ]


def _check_external_data(source: Source) -> None:
    assert source.path is not None
    folder = source.path.resolve().parent
    ir.external_data.set_base_dir(source.model.graph, folder)
    for tensor in _external(source.model):
        if not pathlib.Path(tensor.path).is_file():
            raise FileNotFoundError(f"'{source.path}' keeps weights in '{tensor.path}', which does not exist")


def save(source: Source, output: str | os.PathLike[str], changed: bool) -> None:
    """Writes the model to `output`: a temporary file beside it first, then one rename.

    Weights in external files stay in the file that they are in when `output` is beside it, else
    they are written to "<output>.data".
    """
    target = pathlib.Path(output)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"cannot write '{target}': there is no folder '{target.parent}'")
    if target.is_dir():
        raise IsADirectoryError(f"cannot write '{target}': it is a folder")
    model = source.model
    external = _external(model)
    moves = external and (source.path is None or source.path.resolve().parent != target.resolve().parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        temporary = pathlib.Path(folder) / target.name
        if moves:
            data = f"{target.name}.data"
            ir.save(model, temporary, external_data=data)
            os.replace(pathlib.Path(folder) / data, target.parent / data)
        elif not changed and source.path is not None and not external:
            temporary.write_bytes(source.path.read_bytes())
        else:
            proto = source.original if not changed else ir.to_proto(model)
            if isinstance(proto, ir.Model):
                proto = ir.to_proto(proto)
            temporary.write_bytes(proto.SerializeToString())
        os.replace(temporary, target)
