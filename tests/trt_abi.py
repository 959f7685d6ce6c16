"""TensorRT's plugin creator and plugin driven through their virtual function tables, as a runtime drives them.

The slots are those of NvInferPluginBase.h and NvInferRuntime.h (the same in TensorRT 10, 11 and TensorRT-RTX 1.7),
under the Itanium C++ ABI: every interface begins with getAPILanguage, getInterfaceInfo and two destructors.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from typing import Any

CREATE_PLUGIN, FIELD_NAMES, NAME, VERSION, NAMESPACE = range(4, 9)  # of a creator
CAPABILITY = 4  # of a plugin
FIELDS_TO_SERIALIZE = 8  # of its runtime capability
BUILD_PHASE, RUNTIME_PHASE = 0, 1
RUNTIME_CAPABILITY = 2

_FLOAT32, _INT32, _CHAR, _INT64 = 1, 5, 6, 10  # PluginFieldType


class _Field(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("data", c_void_p), ("type", c_int32), ("length", c_int32))


class _Collection(ctypes.Structure):
    _fields_ = (("count", c_int32), ("fields", ctypes.POINTER(_Field)))


def call(this: int, slot: int, result: Any, *arguments: tuple[Any, Any]) -> Any:
    """Virtual function `slot` of the object at `this`; arguments are (ctypes type, value)."""
    table = ctypes.cast(this, ctypes.POINTER(ctypes.POINTER(c_void_p))).contents
    function = ctypes.CFUNCTYPE(result, c_void_p, *(kind for kind, _ in arguments))(table[slot])
    return function(this, *(value for _, value in arguments))


def creators(library: ctypes.CDLL) -> list[int]:
    """What getCreators returns."""
    count = c_int32()
    library.getCreators.restype = ctypes.POINTER(c_void_p)
    found = library.getCreators(ctypes.byref(count))
    return [found[i] for i in range(count.value)]


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
        CREATE_PLUGIN,
        c_void_p,
        (c_char_p, b"node"),
        (c_void_p, ctypes.addressof(collection)),
        (c_int32, phase),
    )


def serialized_fields(plugin: int) -> dict[str, Any]:
    """What the plugin would have an engine remember."""
    runtime = call(plugin, CAPABILITY, c_void_p, (c_int32, RUNTIME_CAPABILITY))
    collection = _Collection.from_address(call(runtime, FIELDS_TO_SERIALIZE, c_void_p))
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
