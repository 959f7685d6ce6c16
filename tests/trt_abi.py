"""TensorRT's plugin creator and plugin driven through their virtual function tables, as a runtime drives them.

The slots are those of NvInferPluginBase.h and NvInferRuntime.h (the same in TensorRT 10, 11 and TensorRT-RTX 1.7),
under the Itanium C++ ABI: every interface begins with getAPILanguage, getInterfaceInfo and two destructors.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from typing import Any

import pytest

NAME, VERSION, NAMESPACE = 6, 7, 8  # of a creator
BUILD_PHASE, RUNTIME_PHASE = 0, 1
LINEAR, CHANNELS_BY_2 = 0, 2  # TensorFormat
DATA_TYPES = {"float32": 0, "float16": 1, "int8": 2, "int32": 3, "bool": 4, "bfloat16": 7, "int64": 8}

_CREATE_PLUGIN = 4  # of a creator
_DELETE, _CAPABILITY, _CLONE = 3, 4, 5  # of a plugin
_BUILD, _RUNTIME = 1, 2  # PluginCapabilityType
_CONFIGURE, _SUPPORTS, _WORKSPACE = 4, 7, 9  # of the build capability
_SHAPE_CHANGE, _ENQUEUE, _ATTACH, _FIELDS_TO_SERIALIZE = 5, 6, 7, 8  # of the runtime capability

Described = list[tuple[str, tuple[int, ...]]]  # a dtype of DATA_TYPES and a shape, for each tensor

_FLOAT32, _INT32, _CHAR, _INT64 = 1, 5, 6, 10  # PluginFieldType


class _Field(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("data", c_void_p), ("type", c_int32), ("length", c_int32))


class _Dims(ctypes.Structure):
    _fields_ = (("count", c_int32), ("sizes", c_int64 * 8))


class _Desc(ctypes.Structure):
    _fields_ = (("dims", _Dims), ("type", c_int32), ("format", c_int32), ("scale", ctypes.c_float))


class _DynamicDesc(ctypes.Structure):
    _fields_ = (("desc", _Desc), ("min", _Dims), ("max", _Dims), ("opt", _Dims))


class _Collection(ctypes.Structure):
    _fields_ = (("count", c_int32), ("fields", ctypes.POINTER(_Field)))


def call(this: int, slot: int, result: Any, *arguments: tuple[Any, Any]) -> Any:
    """Virtual function `slot` of the object at `this`; arguments are (ctypes type, value)."""
    table = ctypes.cast(this, ctypes.POINTER(ctypes.POINTER(c_void_p))).contents
    function = ctypes.CFUNCTYPE(result, c_void_p, *(kind for kind, _ in arguments))(table[slot])
    return function(this, *(value for _, value in arguments))


def only_creator(library_path: str) -> int:
    """The one that getCreators returns; skips the test if the library has no such function."""
    library = ctypes.CDLL(library_path)
    if not hasattr(library, "getCreators"):
        pytest.skip("tier tensorrt: the library was built without TensorRT's headers")
    count = c_int32()
    library.getCreators.restype = ctypes.POINTER(c_void_p)
    found = library.getCreators(ctypes.byref(count))
    assert count.value == 1
    return found[0]


def create_plugin(creator: int, fields: dict[str, Any], phase: int = BUILD_PHASE) -> int | None:
    """A plugin from fields as the ONNX parser makes them of int, float and str, or None if the creator refuses."""
    kept, array = [], (_Field * len(fields))()
    for field, (name, value) in zip(array, fields.items(), strict=True):
        if isinstance(value, str):
            kind, data, length = _CHAR, ctypes.create_string_buffer(value.encode()), len(value) + 1
        elif isinstance(value, float):
            kind, data, length = _FLOAT32, ctypes.c_float(value), 1
        elif phase == RUNTIME_PHASE:
            kind, data, length = _INT64, c_int64(value), 1
        else:
            kind, data, length = _INT32, c_int32(value), 1
        kept.append(data)
        field.name, field.data, field.type, field.length = name.encode(), ctypes.addressof(data), kind, length
    collection = _Collection(len(fields), array)
    return call(
        creator,
        _CREATE_PLUGIN,
        c_void_p,
        (c_char_p, b"node"),
        (c_void_p, ctypes.byref(collection)),
        (c_int32, phase),
    )


def serialized_fields(plugin: int) -> dict[str, Any]:
    """What the plugin would have an engine remember."""
    collection = _Collection.from_address(call(_capability(plugin, _RUNTIME), _FIELDS_TO_SERIALIZE, c_void_p))
    fields = {}
    for i in range(collection.count):
        field = collection.fields[i]
        data = ctypes.string_at(field.data, {_INT64: 8, _FLOAT32: 4, _CHAR: 1}[field.type] * field.length)
        if field.type == _CHAR:
            assert data.endswith(b"\0")
            fields[field.name.decode()] = data[:-1].decode()
        else:
            kind = c_int64 if field.type == _INT64 else ctypes.c_float
            fields[field.name.decode()] = kind.from_buffer_copy(data).value
    return fields


def clone(plugin: int) -> int:
    """A copy, as TensorRT makes many."""
    copy = call(plugin, _CLONE, c_void_p)
    assert copy
    return copy


def delete(plugin: int) -> None:
    """As TensorRT deletes what it owns."""
    call(plugin, _DELETE, None)


def supports(plugin: int, position: int, inputs: Described, outputs: Described, format: int = LINEAR) -> bool:
    """What supportsFormatCombination says for the tensor at `position` among inputs and outputs."""
    tensors = _dynamic(inputs + outputs)
    tensors[position].desc.format = format
    arguments = ((c_int32, position), (c_void_p, tensors), *_counts(inputs, outputs))
    return call(_capability(plugin, _BUILD), _SUPPORTS, ctypes.c_bool, *arguments)


def configure(plugin: int, inputs: Described, outputs: Described) -> int:
    """Calls configurePlugin for a profile with these maxima; 0 is success."""
    return call(_capability(plugin, _BUILD), _CONFIGURE, c_int32, *_both(_dynamic, inputs, outputs))


def workspace_size(plugin: int, inputs: Described, outputs: Described) -> int:
    """What getWorkspaceSize says for a profile with these maxima."""
    return call(_capability(plugin, _BUILD), _WORKSPACE, ctypes.c_size_t, *_both(_dynamic, inputs, outputs))


def attach(plugin: int) -> int | None:
    """The plugin of an execution context on the current device; None where there is none."""
    return call(_capability(plugin, _RUNTIME), _ATTACH, c_void_p, (c_void_p, None))


def shape_change(plugin: int, inputs: Described, outputs: Described) -> int:
    """Calls onShapeChange; 0 is success."""
    return call(_capability(plugin, _RUNTIME), _SHAPE_CHANGE, c_int32, *_both(_static, inputs, outputs))


def enqueue(
    plugin: int,
    described: tuple[Described, Described],
    addresses: tuple[list[int], list[int]],
    workspace: int,
    stream: int,
) -> int:
    """Runs on `stream`; 0 is success."""
    descs = [_static(tensors) for tensors in described]
    pointers = [(c_void_p * len(values))(*values) for values in addresses]
    arguments = [(c_void_p, array) for array in (*descs, *pointers)]
    runtime = _capability(plugin, _RUNTIME)
    return call(runtime, _ENQUEUE, c_int32, *arguments, (c_void_p, workspace), (c_void_p, stream))


def _capability(plugin: int, kind: int) -> int:
    return call(plugin, _CAPABILITY, c_void_p, (c_int32, kind))


def _static(tensors: Described) -> Any:
    array = (_Desc * len(tensors))()
    for desc, (dtype, shape) in zip(array, tensors, strict=True):
        desc.dims.count, desc.type, desc.format = len(shape), DATA_TYPES[dtype], LINEAR
        desc.dims.sizes[: len(shape)] = shape
    return array


def _dynamic(tensors: Described) -> Any:
    """Every size is open, with the shape's as its maximum."""
    array = (_DynamicDesc * len(tensors))()
    for dynamic, static in zip(array, _static(tensors), strict=True):
        dynamic.desc = static
        dynamic.max = dynamic.opt = dynamic.min = static.dims
        dynamic.desc.dims.sizes[: static.dims.count] = [-1] * static.dims.count
    return array


def _counts(inputs: Described, outputs: Described) -> list[tuple[Any, int]]:
    return [(c_int32, len(inputs)), (c_int32, len(outputs))]


def _both(describe: Any, inputs: Described, outputs: Described) -> list[tuple[Any, Any]]:
    arrays = [describe(inputs), describe(outputs)]
    counts = _counts(inputs, outputs)
    return [argument for array, count in zip(arrays, counts, strict=True) for argument in ((c_void_p, array), count)]
