"""Reading models from whatever they come in, and writing them whole or not at all."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

AnyModel = str | os.PathLike[str] | onnx.ModelProto | ir.Model

INLINE_LIMIT = 2**31 - 2**26  # bytes of weights: protobuf's 2 GB, less what the graph itself may take


@dataclasses.dataclass
class Source:
    """A model as onnx-ir, free to be changed, and where it came from."""

    model: ir.Model
    original: onnx.ModelProto | ir.Model
    path: pathlib.Path | None = None
    folder: pathlib.Path | None = None  # that external weights are relative to

    def result(self, changed: bool) -> onnx.ModelProto | ir.Model:
        """The model in the type in which it came; the original itself if nothing changed."""
        if not changed:
            return self.original
        if isinstance(self.original, ir.Model):
            return self.model
        try:
            made = ir.to_proto(self.model)
            made.training_info.extend(self.original.training_info)  # which onnx-ir does not know
            return made
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
        copy = model.clone()
        _check(copy, "the model")
        return Source(copy, model)
    if isinstance(model, onnx.ModelProto):
        return Source(_checked(model, "the model"), model)
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"expected a path, an onnx.ModelProto or an onnx_ir.Model, got {type(model).__name__}")
    path = pathlib.Path(model)
    if path.is_dir():
        raise IsADirectoryError(f"expected an ONNX file, '{path}' is a folder")
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
    newest = onnx.defs.onnx_opset_version()
    for imported in proto.opset_import:
        if imported.domain in ("", "ai.onnx") and not 1 <= imported.version <= newest:
            raise ValueError(
                f"{what} imports opset {imported.version}; the onnx package here knows 1 to {newest} (a newer one may "
                "know it: pip install -U onnx)"
            )
    try:
        model = ir.from_proto(_dense(proto) if proto.graph.sparse_initializer else proto)
    except Exception as error:
        raise ValueError(f"{what} is not a valid ONNX model: {_root(error)}") from error
    _check(model, what)
    return model


def _dense(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with sparse initializers, which onnx-ir does not know, written out."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for sparse in copy.graph.sparse_initializer:
        values = onnx.numpy_helper.to_array(sparse.values)
        places = onnx.numpy_helper.to_array(sparse.indices)
        whole = np.zeros(tuple(sparse.dims), values.dtype)
        if places.ndim == 1:  # counted through all axes, else a place on each
            whole.reshape(-1)[places] = values
        else:
            whole[tuple(places.T)] = values
        copy.graph.initializer.append(onnx.numpy_helper.from_array(whole, sparse.values.name))
    del copy.graph.sparse_initializer[:]
    return copy


def _check(model: ir.Model, what: str) -> None:
    holders: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for holder in holders:
        _check_graph(holder, (), f"{what} is not a valid ONNX model")


def _check_graph(graph: ir.Graph | ir.Function, outer: tuple[set[ir.Value], ...], wrong: str) -> None:
    """Every value that is read is made before, in this graph or one around it; sorts a graph that merely is not sorted.

    Raises:
        ValueError: something is read that nothing makes, or nodes wait for each other in a circle.
    """
    known = set(graph.inputs)
    if isinstance(graph, ir.Graph):
        known.update(graph.initializers.values())
    scopes, later = (known, *outer), {value for node in graph for value in node.outputs}
    is_sorted = True
    for node in graph:
        _check_text(node, wrong)
        for value in node.inputs:
            if value is None or not value.name or any(value in scope for scope in scopes):
                continue
            if value not in later:
                raise ValueError(f"{wrong}: {node.op_type} '{node.name}' reads '{value.name}', which nothing makes")
            is_sorted = False
        for inner in (inner for attribute in node.attributes.values() for inner in _graphs(attribute)):
            _check_graph(inner, scopes if is_sorted else (*scopes, later), wrong)
        known.update(node.outputs)
    for value in graph.outputs:
        if not any(value in scope for scope in scopes):
            raise ValueError(f"{wrong}: nothing makes its output '{value.name}'")
    if not is_sorted:
        try:
            graph.sort()
        except ValueError as error:
            raise ValueError(f"{wrong}: there is a cycle in its graph '{graph.name}'") from error


def _check_text(node: ir.Node, wrong: str) -> None:
    """Names are text: of bytes that are no UTF-8 protobuf makes none, and says nothing."""
    texts: list[Any] = [node.name or "", node.op_type, node.domain, *node.attributes]
    for value in (*node.inputs, *node.outputs):
        if value is not None:
            dims = value.shape if value.shape is not None else ()
            texts += [value.name or "", *(dim.value or "" for dim in dims if isinstance(dim, ir.SymbolicDim))]
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"{wrong}: {text!r} is no UTF-8 text")


def _graphs(attribute: ir.Attr) -> list[ir.Graph]:
    if attribute.type == ir.AttributeType.GRAPH:
        return [attribute.as_graph()]
    return list(attribute.as_graphs()) if attribute.type == ir.AttributeType.GRAPHS else []


def _root(error: BaseException) -> BaseException:
    """What is wrong: onnx-ir says where it was, its cause what."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _weights(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Every initializer, those of subgraphs included."""
    for graph in model.graphs():
        yield from (value.const_value for value in graph.initializers.values() if value.const_value is not None)


def _external(model: ir.Model) -> list[ir.ExternalTensor]:
    return [tensor for tensor in _weights(model) if isinstance(tensor, ir.ExternalTensor)]


def _check_external_data(source: Source) -> None:
    """External files are there and long enough; nothing of them is read.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is shorter than what is said to be in it.
    """
    assert source.path is not None
    sizes: dict[str, int] = {}
    tensors = _external(source.model)
    for folder in (
        source.path.resolve().parent,
        source.path.parent,
    ):  # of a link's two places, the one with the weights
        source.folder = folder
        ir.external_data.set_base_dir(source.model.graph, folder)
        if all(os.path.isfile(tensor.path) for tensor in tensors):
            break
    for tensor in tensors:
        path = str(tensor.path)
        if path not in sizes:
            if not os.path.isfile(path):
                raise FileNotFoundError(f"'{source.path}' keeps weights in '{path}', which does not exist")
            sizes[path] = os.path.getsize(path)
        end = (tensor.offset or 0) + (tensor.length if tensor.length is not None else tensor.nbytes)
        if end > sizes[path]:
            raise ValueError(
                f"'{source.path}' keeps '{tensor.name}' in bytes up to {end} of '{path}', which has only {sizes[path]}"
            )


def check_output(path: str | os.PathLike[str]) -> None:
    """Raises what would keep a file from being written there, before any work is done.

    Raises:
        FileNotFoundError: there is no such folder.
        IsADirectoryError: it is a folder itself.
        PermissionError: its folder takes no new files, of which one is made first and then takes its place.
        OSError: it is a device, a pipe or the like, which a file would take the place of.
    """
    target = pathlib.Path(path)
    for folder in (target.parent, pathlib.Path(os.path.realpath(target)).parent):
        if not folder.is_dir():
            raise FileNotFoundError(f"cannot write '{target}': there is no folder '{folder}'")
    if target.is_dir():
        raise IsADirectoryError(f"cannot write '{target}': it is a folder")
    if target.exists() and not target.is_file():
        raise OSError(f"cannot write '{target}': it is no ordinary file")
    if not os.access(pathlib.Path(os.path.realpath(target)).parent, os.W_OK):
        raise PermissionError(f"cannot write '{target}': nothing can be written to its folder")


def save(source: Source, output: str | os.PathLike[str], result: onnx.ModelProto | ir.Model) -> None:
    """Writes `result` to `output`: a temporary file beside it first, then one rename; a link stays one.

    Weights in external files stay in the file that they are in when `output` is beside it, else they are written to
    "<output>.data", as are those in memory that exceed protobuf's limit.
    """
    check_output(output)
    target = pathlib.Path(output)
    model = source.model
    changed = result is not source.original
    external = _external(model)
    moves = bool(external) and (source.folder is None or source.folder.resolve() != target.parent.resolve())
    inline = (tensor.nbytes for tensor in _weights(model) if not isinstance(tensor, ir.ExternalTensor))
    moves = moves or sum(inline) > INLINE_LIMIT
    file = pathlib.Path(os.path.realpath(target))
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{target.name}.") as folder:
        temporary = pathlib.Path(folder) / file.name
        if moves:
            data = f"{target.name}.data"
            ir.save(model, temporary, external_data=data)
            shutil.move(pathlib.Path(folder) / data, target.parent / data)
        elif not changed and source.path is not None and not external:
            shutil.copyfile(source.path, temporary)
        else:
            proto = ir.to_proto(result) if isinstance(result, ir.Model) else result
            temporary.write_bytes(proto.SerializeToString())
        os.replace(temporary, file)
