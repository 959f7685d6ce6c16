"""The C seam (`flashonnx/attention.h`) through ctypes, for tests, torch.ops.flashonnx.attention and other callers.

NumPy arrays and torch tensors are passed without copies, by address and strides, as (B, H, S, D) views.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, byref, c_char, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from os import PathLike, fspath
from typing import Any

DTYPES = {
    "float32": 1,
    "float16": 2,
    "bfloat16": 3,
    "float8_e4m3fn": 4,
    "bool": 5,
    "int8": 6,
    "int32": 7,
    "int64": 8,
}
CPU, CUDA = 0, 1
EMPTY_ROW = {"zero": 0, "mean": 1}
# body(data, index) for every index in [0, count), and parallel_for(context, count, body, data) that calls it.
Body = ctypes.CFUNCTYPE(None, c_void_p, c_int64)
ParallelFor = ctypes.CFUNCTYPE(None, c_void_p, c_int64, Body, c_void_p)


class Status(ctypes.Structure):
    """flashonnx_status."""

    _fields_ = (("code", c_int32), ("message", c_char * 508))

    def check(self) -> str:
        """The message of an OK status; otherwise raises it.

        Raises:
            ValueError: the problem contradicts itself (INVALID_ARGUMENT).
            NotImplementedError: no kernel of this build solves it on this device (NOT_IMPLEMENTED).
            RuntimeError: the device or the driver refused.
        """
        text = self.message.decode()
        if self.code:
            raise {1: ValueError, 2: NotImplementedError}.get(self.code, RuntimeError)(text)
        return text


class Device(ctypes.Structure):
    """flashonnx_device."""

    _fields_ = (
        ("kind", c_int32),
        ("ordinal", c_int32),
        ("arch", c_int32),
        ("sm_count", c_int32),
        ("shared_memory", c_int64),
    )


class Tensor(ctypes.Structure):
    """flashonnx_tensor: a strided view, absent while dtype is 0."""

    _fields_ = (("data", c_void_p), ("stride", c_int64 * 4), ("dtype", c_int32), ("reserved", c_int32))


class Params(ctypes.Structure):
    """flashonnx_attention_params; see attention.h for what each field means."""

    _fields_ = (
        ("struct_size", c_int64),
        ("device", Device),
        *((name, c_int64) for name in ("batch", "q_heads", "kv_heads", "q_length", "kv_length", "past_length")),
        *((name, c_int64) for name in ("head_dim", "value_dim")),
        *((name, Tensor) for name in ("q", "k", "v", "o", "lse", "past_k", "past_v", "present_k", "present_v")),
        ("mask", Tensor),
        ("mask_keys", c_int64),
        ("key_lengths", Tensor),
        ("is_causal", c_int32),
        ("offset_from_lengths", c_int32),
        *((name, c_int64) for name in ("causal_offset", "window_left", "window_right")),
        ("scale", c_float),
        ("softcap", c_float),
        ("empty_row", c_int32),
        ("fixed_split", c_int32),
        *((name, Tensor) for name in ("sinks", "q_descale", "k_descale", "v_descale")),
        ("dropout", c_float),
        ("reserved", c_int32),
        ("dropout_seed", POINTER(c_uint64)),
        ("dropout_offset", POINTER(c_uint64)),
        *((name, Tensor) for name in ("cu_seqlens_q", "cu_seqlens_k", "cache_k", "cache_v")),
        ("cache_capacity", c_int64),
        ("cache_lengths", Tensor),
        ("block_table", Tensor),
        ("page_size", c_int64),
        *((name, Tensor) for name in ("rotary_cos", "rotary_sin", "rotary_positions")),
        ("rotary_dim", c_int64),
        ("rotary_interleaved", c_int32),
        ("reserved_cache", c_int32),
        *((name, c_int64) for name in ("num_pages", "rotary_length", "q_tokens", "kv_tokens")),
        ("parallel_for", ParallelFor),
        ("parallel_context", c_void_p),
        *((name, Tensor) for name in ("q_bias", "k_bias", "v_bias")),
    )


class Library:
    """The C functions of one libflashonnx.so; errors come as exceptions (see `Status.check`)."""

    def __init__(self, path: str | PathLike[str]) -> None:
        self._functions = library = ctypes.CDLL(fspath(path))
        if not hasattr(library, "flashonnx_version"):
            raise OSError(f"{fspath(path)} is a shared library, but not flashonnx's: it has no flashonnx_version")
        library.flashonnx_version.restype = c_char_p
        library.flashonnx_attention_init.restype = None
        library.flashonnx_attention_init.argtypes = (POINTER(Params),)
        status_functions = {
            "device_query": (c_int32, c_int32, POINTER(Device)),
            "attention_supported": (POINTER(Params),),
            "attention_workspace": (POINTER(Params), POINTER(c_int64)),
            "attention_workspace_bound": (POINTER(Params), POINTER(c_int64)),
            "attention_run": (POINTER(Params), c_void_p, c_void_p),
        }
        for name, arguments in status_functions.items():
            function = getattr(library, f"flashonnx_{name}")
            function.restype, function.argtypes = Status, arguments

    def version(self) -> str:
        """The library's version."""
        return self._functions.flashonnx_version().decode()

    @property
    def has_tensorrt_plugin(self) -> bool:
        """Whether it was built with TensorRT's headers, and so with the plugin."""
        return hasattr(self._functions, "flashonnx_tensorrt_register")

    def device(self, kind: int = CPU, ordinal: int = -1) -> Device:
        """The CPU, or CUDA device `ordinal` (-1: the thread's current one)."""
        device = Device()
        self._functions.flashonnx_device_query(kind, ordinal, byref(device)).check()
        return device

    def params(self) -> Params:
        """An empty problem with every default."""
        params = Params()
        self._functions.flashonnx_attention_init(byref(params))
        return params

    def supported(self, params: Params) -> str:
        """The name of the kernel that would run; raises the reason if there is none."""
        return self._functions.flashonnx_attention_supported(byref(params)).check()

    def workspace(self, params: Params) -> int:
        """Bytes of workspace that this problem needs."""
        size = c_int64()
        self._functions.flashonnx_attention_workspace(byref(params), byref(size)).check()
        return size.value

    def workspace_bound(self, maxima: Params) -> int:
        """Bytes of workspace that no problem of sizes up to these exceeds."""
        size = c_int64()
        self._functions.flashonnx_attention_workspace_bound(byref(maxima), byref(size)).check()
        return size.value

    def run(self, params: Params, workspace: int = 0, stream: int = 0) -> None:
        """Enqueues the work; `workspace` and `stream` are addresses. ctypes releases the GIL meanwhile."""
        self._functions.flashonnx_attention_run(byref(params), workspace, stream).check()


def tensor(array: Any) -> Tensor:
    """The view of a NumPy array or torch tensor of rank <= 4, leading dimension first."""
    name = str(array.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"FlashAttention: dtype {name} is not among {', '.join(DTYPES)}")
    if hasattr(array, "data_ptr"):
        address, strides = array.data_ptr(), array.stride()
    else:
        address, strides = array.ctypes.data, [stride // array.itemsize for stride in array.strides]
    # A stride over one element says nothing (NumPy and torch put anything there); the seam wants 1 innermost.
    strides = [1 if i == 3 and array.shape[i] <= 1 else stride for i, stride in enumerate(strides)]
    return Tensor(address, (c_int64 * 4)(*strides), DTYPES[name])


def broadcast(mask: Any) -> Tensor:
    """The view of a mask of rank 1 to 4, broadcast over all but its last dimension by zero strides."""
    view = tensor(mask)
    missing = 4 - len(mask.shape)
    strides = [0] * missing + [
        0 if size == 1 and i + missing < 3 else stride
        for i, (size, stride) in enumerate(zip(mask.shape, view.stride, strict=False))
    ]
    return Tensor(view.data, (c_int64 * 4)(*strides), view.dtype)


def attention_params(
    library: Library,
    device: Device,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    *,
    lse: Any = None,
    mask: Any = None,
    past_k: Any = None,
    past_v: Any = None,
    present_k: Any = None,
    present_v: Any = None,
    key_lengths: Any = None,
    sinks: Any = None,
    q_bias: Any = None,
    k_bias: Any = None,
    v_bias: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    window_left: int = -1,
    window_right: int = -1,
    empty_row: str = "zero",
    parallel_for: Callable[..., None] | None = None,
) -> Params:
    """Describes dense attention over arrays or tensors, which the caller keeps alive.

    Args:
        library: for the defaults.
        device: where the arrays are.
        q: (B, Hq, Sq, D) view, innermost dimension contiguous, as all of these.
        k: (B, Hkv, Skv, D).
        v: (B, Hkv, Skv, Dv).
        o: (B, Hq, Sq, Dv), written.
        lse: (B, Hq, Sq) float32, written.
        mask: rank 1 to 4, broadcast to (B, Hq, Sq, keys) with keys <= Sk; bool, int8, int32, q's dtype or float32.
        past_k: (B, Hkv, P, D).
        past_v: (B, Hkv, P, Dv).
        present_k: (B, Hkv, P + Skv, D), written.
        present_v: (B, Hkv, P + Skv, Dv), written.
        key_lengths: (B,) int32 or int64.
        sinks: (Hq,) float32.
        q_bias: (Hq, D), added to every row of q.
        k_bias: (Hkv, D), likewise.
        v_bias: (Hkv, Dv), likewise.
        is_causal: as in `flashonnx.reference.attention`, like the rest.
        scale: default 1 / sqrt(D).
        softcap: 0 means none.
        window_left: -1 means no bound.
        window_right: -1 means no bound.
        empty_row: "zero" or "mean".
        parallel_for: a `ParallelFor` that the CPU kernel shall use.
    """
    params = library.params()
    params.device = device
    params.batch, params.q_heads, params.q_length, params.head_dim = q.shape
    params.kv_heads, params.kv_length, params.value_dim = k.shape[1], k.shape[2], v.shape[3]
    views = {"q": q, "k": k, "v": v, "o": o, "lse": lse, "past_k": past_k, "past_v": past_v}
    views |= {"present_k": present_k, "present_v": present_v, "key_lengths": key_lengths, "sinks": sinks}
    for name, array in views.items():
        if array is not None:
            setattr(params, name, tensor(array))
    for name, bias in {"q_bias": q_bias, "k_bias": k_bias, "v_bias": v_bias}.items():
        if bias is not None:
            setattr(params, name, tensor(bias[None, :, None]))
    if mask is not None:
        params.mask, params.mask_keys = broadcast(mask), mask.shape[-1]
    if past_k is not None:
        params.past_length = params.causal_offset = past_k.shape[2]
    params.offset_from_lengths = key_lengths is not None
    params.is_causal, params.window_left, params.window_right = is_causal, window_left, window_right
    if scale is not None:
        params.scale = scale
    params.softcap, params.empty_row = softcap, EMPTY_ROW[empty_row]
    if parallel_for is not None:
        params.parallel_for = parallel_for
    return params
