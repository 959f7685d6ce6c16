"""Weights that several graphs share: one file, the same name at the same place in each, filled with random numbers.

A graph of a model with 1.5 billion parameters is a few megabytes without them, and how long it takes does not depend on
their values. So graphs refer to a file that need not exist before they run.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.end_to_end.models import LIMIT, SPREAD

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir
    import torch

_ALIGNMENT = 4096
_CHUNK = 1 << 24


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One parameter in the file.

    Attributes:
        shape: in the file.
        turned: whether that is the transpose of PyTorch's, as MatMul wants it.
        offset: in bytes.
        bytes: its size.
    """

    shape: tuple[int, ...]
    turned: bool
    offset: int
    bytes: int


def layout(module: torch.nn.Module) -> dict[str, Matrix]:
    """Where each large parameter lies, by name. Matrices of linear layers are turned."""
    import torch

    linear = {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)}
    places, offset = {}, 0
    for name, parameter in module.named_parameters():
        if parameter.ndim < 2 or parameter.numel() < LIMIT:
            continue
        shape = tuple(reversed(parameter.shape)) if name in linear else tuple(parameter.shape)
        size = parameter.numel() * parameter.element_size()
        places[name] = Matrix(shape, name in linear, offset, size)
        offset += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places


def put_outside(model: ir.Model, places: Mapping[str, Matrix], file: str) -> None:
    """Makes the large initializers of an export refer to `file`; a Transpose of one that is stored turned goes.

    Raises:
        ValueError: one that is stored turned is used as it is.
    """
    import onnx_ir as ir

    for name, place in places.items():
        value = model.graph.initializers[name]
        kind = value.dtype
        assert kind is not None
        value.const_value = ir.ExternalTensor(
            file, place.offset, place.bytes, kind, shape=ir.Shape(place.shape), name=name
        )
        value.shape = ir.Shape(place.shape)
        if not place.turned:
            continue
        for node, _ in tuple(value.uses()):
            if node.op_type != "Transpose":
                raise ValueError(f"{node.op_type} '{node.name}' reads '{name}', which was expected to be transposed")
            node.outputs[0].replace_all_uses_with(value)
            model.graph.remove(node, safe=True)


def tensor(name: str, place: Matrix, file: str, kind: int) -> onnx.TensorProto:
    """An initializer that refers to `file`."""
    import onnx

    proto = onnx.TensorProto(name=name, data_type=kind, dims=place.shape)
    proto.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", file), ("offset", place.offset), ("length", place.bytes)):
        proto.external_data.add(key=key, value=str(value))
    return proto


def write(module: torch.nn.Module, places: Mapping[str, Matrix], path: Path) -> None:
    """The module's own values."""
    parameters = dict(module.named_parameters())
    with path.open("wb") as file:
        for name, place in places.items():
            value = parameters[name].T if place.turned else parameters[name]
            file.seek(place.offset)
            file.write(value.contiguous().numpy().tobytes())


def fill(graphs: Iterable[Path], device: str = "cpu") -> list[Path]:
    """Writes the files that these graphs refer to and that are not there: seeded random numbers of a small spread.

    Args:
        graphs: .onnx files; those in one folder share files.
        device: where PyTorch draws the numbers.

    Returns:
        The files that were written.
    """
    sizes: dict[Path, tuple[int, str]] = {}
    for path in graphs:
        for file, (end, kind) in _outside(path).items():
            place = path.parent / file
            if not place.exists():
                sizes[place] = (max(end, sizes.get(place, (0, kind))[0]), kind)
    for place, (size, kind) in sizes.items():
        _draw(place, size, kind, device)
    return list(sizes)


def _outside(path: Path) -> dict[str, tuple[int, str]]:
    """The files that a graph refers to: bytes up to the last reference, and the type."""
    import onnx

    ends: dict[str, tuple[int, str]] = {}
    for proto in onnx.load(path, load_external_data=False).graph.initializer:
        if proto.data_location != onnx.TensorProto.EXTERNAL:
            continue
        entry = {item.key: item.value for item in proto.external_data}
        kind = str(onnx.helper.tensor_dtype_to_np_dtype(proto.data_type))
        size = math.prod(proto.dims) * onnx.helper.tensor_dtype_to_np_dtype(proto.data_type).itemsize
        end = int(entry.get("offset", 0)) + size
        ends[entry["location"]] = (max(end, ends.get(entry["location"], (0, ""))[0]), kind)
    return ends


def _draw(path: Path, size: int, kind: str, device: str) -> None:
    import torch

    draw = torch.Generator(device).manual_seed(3)
    dtype: Any = getattr(torch, kind)
    count = -(-size // dtype.itemsize)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        for begin in range(0, count, _CHUNK):
            length = min(_CHUNK, count - begin)
            values = torch.randn(length, generator=draw, device=device, dtype=torch.float32) * SPREAD
            file.write(values.to(dtype).cpu().numpy().tobytes())
    partial.rename(path)  # a run that is cut short leaves no file of half the size
