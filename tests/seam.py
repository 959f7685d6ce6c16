"""Running a case through the C seam, on memory that tells when it is written or read where it should not be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from cases import Case, numpy_dtype
from compare import SANE, assert_close, naive_attention
from flashonnx._capi import CPU, CUDA, Device, Library, Params, attention_params
from flashonnx.reference import Array, split, split_bias

GUARD = 4096  # bytes on either side of every array, all ones: NaN in every float dtype
ALIGNMENT = 256
# `pytest --tight` turns guards off, so that a sanitizer sees where each array ends.
guarded = True
# `pytest --arch 80` has the kernels chosen for a device of that compute capability, where the device's own is newer.
arch: int | None = None


class Buffer:
    """An array on a device, between guards; without `array` it is all NaN itself."""

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, device: str, *, array: Array | None = None, shift: int = 0
    ) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.size = math.prod(shape) * self.dtype.itemsize
        offset = shift * self.dtype.itemsize
        total = self.size + offset + (2 * GUARD + ALIGNMENT if guarded else 0)
        if device == "cpu":
            self.bytes: Any = np.full(total, 255, np.uint8)
            address = self.bytes.ctypes.data
        else:
            import torch

            self.bytes = torch.full((total,), 255, dtype=torch.uint8, device=device)
            address = self.bytes.data_ptr()
        # Aligned, or off by `shift` elements.
        self.begin = offset + (GUARD + -address % ALIGNMENT if guarded else 0)
        inside = self.bytes[self.begin : self.begin + self.size]
        if array is not None:
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            inside[...] = raw if device == "cpu" else torch.from_numpy(raw)
        kind = self.dtype if device == "cpu" else getattr(__import__("torch"), self.dtype.name)
        self.view = inside.view(kind).reshape(shape)

    def numpy(self) -> Array:
        """The content, after a look at the guards."""
        raw, end = self._on_host(self.bytes), self.begin + self.size
        self._look_at(raw[: self.begin], raw[end:])
        return raw[self.begin : end].view(self.dtype).reshape(self.shape)

    def check_guards(self) -> None:
        """What is around the array is as it was; the array itself stays where it is."""
        end = self.begin + self.size
        self._look_at(self._on_host(self.bytes[: self.begin]), self._on_host(self.bytes[end:]))

    @staticmethod
    def _on_host(raw: Any) -> Array:
        return raw if isinstance(raw, np.ndarray) else raw.cpu().numpy()

    @staticmethod
    def _look_at(before: Array, after: Array) -> None:
        assert (before == 255).all(), "memory before the array was written"
        assert (after == 255).all(), "memory after the array was written"


class Problem:
    """A case on a device: its arrays, the parameters that describe them, and its run."""

    def __init__(
        self,
        library: Library,
        case: Case,
        device: str = "cpu",
        *,
        inputs: dict[str, Array] | None = None,
        shift: int = 0,
        parallel_for: Callable[..., None] | None = None,
    ) -> None:
        self.library, self.case, self.device = library, case, device
        self.given = case.inputs() if inputs is None else inputs
        self.inputs = {n: Buffer(x.shape, x.dtype, device, array=x, shift=shift) for n, x in self.given.items()}
        dtype = numpy_dtype(case.dtype)
        shapes = case.output_shapes()
        self.outputs = {"Y": Buffer(shapes["Y"], dtype, device, shift=shift)}
        for name in ("present_key", "present_value") if case.present else ():
            self.outputs[name] = Buffer(shapes[name], dtype, device, shift=shift)
        if case.lse:
            self.outputs["lse"] = Buffer(shapes["lse"], np.float32, device, shift=shift)
        view = {name: buffer.view for name, buffer in (self.inputs | self.outputs).items()}
        layout = case.attributes["qkv_layout"]
        q, k, v = split(view["Q"], view.get("K"), view.get("V"), *case.heads, layout)
        if "bias" in view:
            parts = split_bias(view["bias"], q, k, v, layout)
            view |= dict(zip(("q_bias", "k_bias", "v_bias"), parts, strict=True))
        self.params = describe(
            library, device, case, view, q, k, v, case.heads_view(view["Y"]), parallel_for=parallel_for
        )

    def launch(self) -> None:
        """Runs on the current stream, on outputs that are all NaN before."""
        for buffer in self.outputs.values():
            buffer.bytes[...] = 255
        workspace = Buffer((self.library.workspace(self.params),), np.int8, self.device)
        self.library.run(self.params, address(workspace.view), current_stream(self.device))
        workspace.check_guards()

    def run(self) -> dict[str, Array]:
        """Runs and returns the outputs."""
        assert self.library.supported(self.params)
        self.launch()
        return {name: buffer.numpy() for name, buffer in self.outputs.items()}

    def check(self) -> None:
        """Runs and compares every output with the reference."""
        check_outputs(self.case, self.given, self.run())


def check_outputs(case: Case, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
    """Compares outputs, by name, with the reference; present_* must be copies."""
    expected = case.reference(inputs)
    y, lse, rounding = naive_attention(inputs, case.attributes)
    shapes = case.output_shapes()
    for name, out in outputs.items():
        assert out.shape == shapes[name], f"{name}: shape {out.shape}, expected {shapes[name]}"
        if name == "Y":
            views = case.heads_view(out), case.heads_view(expected[name])
            assert_close(name, *views, y, rounding, unit=case.spread[1])
        elif name == "lse":
            # With a bias, queries and keys are rounded to their type once more.
            sane = SANE[case.dtype] if case.bias is not None else None
            assert_close(name, out, expected[name], lse, rounding, sane=sane)
        else:
            assert out.dtype == expected[name].dtype
            assert out.tobytes() == np.ascontiguousarray(expected[name]).tobytes(), f"{name} is not past and new keys"


def describe(library: Library, device: str, case: Case, views: dict[str, Any], *qkvy: Any, **more: Any) -> Params:
    """The seam's description of a case: of its other tensors by name, and of Q, K, V and Y as (B, H, S, D)."""
    return attention_params(
        library,
        query_device(library, device),
        *qkvy,
        lse=views.get("lse"),
        mask=views.get("attn_mask"),
        past_k=views.get("past_key"),
        past_v=views.get("past_value"),
        present_k=views.get("present_key"),
        present_v=views.get("present_value"),
        key_lengths=views.get("nonpad_kv_seqlen"),
        sinks=views.get("sinks"),
        q_bias=views.get("q_bias"),
        k_bias=views.get("k_bias"),
        v_bias=views.get("v_bias"),
        is_causal=bool(case.is_causal),
        scale=case.scale,
        softcap=case.softcap,
        window_left=case.left,
        window_right=case.right,
        empty_row=case.empty_row,
        **more,
    )


def query_device(library: Library, device: str) -> Device:
    """The seam's description of "cpu", "cuda" or "cuda:1"."""
    kind, _, ordinal = device.partition(":")
    described = library.device(CPU if kind == "cpu" else CUDA, int(ordinal or -1))
    if arch and kind != "cpu":
        described.arch = arch
    return described


def current_stream(device: str) -> int:
    """PyTorch's on a CUDA device; 0 on the CPU."""
    if device == "cpu":
        return 0
    import torch

    return torch.cuda.current_stream(device).cuda_stream


def address(view: Any) -> int:
    """Of an array or tensor."""
    return view.data_ptr() if hasattr(view, "data_ptr") else view.ctypes.data
