"""Running a cache case through the C seam, and judging what came out, the caches included."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from cache_cases import CacheCase
from cases import numpy_dtype
from compare import EPSILON, SANE, assert_close, naive_attention
from flashonnx._capi import Library
from flashonnx._capi_cache import kv_cache_params
from flashonnx.reference import Array
from flashonnx.reference_cache import ordered
from seam import Buffer, address, current_stream, query_device


class CacheProblem:
    """A case on a device: its arrays, the parameters that describe them, and its run."""

    def __init__(
        self,
        library: Library,
        case: CacheCase,
        device: str = "cpu",
        *,
        inputs: dict[str, Array] | None = None,
        shift: int = 0,
        parallel_for: Callable[..., None] | None = None,
    ) -> None:
        self.library, self.case, self.device = library, case, device
        self.given = case.inputs() if inputs is None else inputs
        self.inputs = {n: Buffer(x.shape, x.dtype, device, array=x, shift=shift) for n, x in self.given.items()}
        shapes, dtype = case.output_shapes(), numpy_dtype(case.dtype)
        self.outputs = {"Y": Buffer(shapes["Y"], dtype, device, shift=shift)}
        if case.lse:
            self.outputs["lse"] = Buffer(shapes["lse"], np.float32, device, shift=shift)
        for name in () if case.in_place else ("present_key_cache", "present_value_cache"):
            self.outputs[name] = Buffer(shapes[name], dtype, device, shift=shift)
        view = {name: buffer.view for name, buffer in (self.inputs | self.outputs).items()}
        (q_heads, kv_heads), parts = case.heads, case.parts(view)
        new = [case.heads_view(parts[n], kv_heads) if n in parts else None for n in ("K", "V")]
        self.params = kv_cache_params(
            library, query_device(library, device), case.heads_view(parts["Q"], q_heads), *new,
            case.heads_view(view["Y"], q_heads), view["key_cache"], view["value_cache"],
            view["cache_lengths"].reshape(-1), block_table=view.get("block_table"),
            cu_seqlens_q=view.get("cu_seqlens_q"), max_q_length=case.max_q_length, cos=view.get("cos_cache"),
            sin=view.get("sin_cache"), position_ids=view.get("position_ids"), rotary_dim=case.rotary_dim,
            rotary_interleaved=case.rotary == "interleaved", present_key=view.get("present_key_cache"),
            present_value=view.get("present_value_cache"), lse=view.get("lse"), mask=view.get("attn_mask"),
            sinks=view.get("sinks"), is_causal=bool(case.is_causal), scale=case.scale, softcap=case.softcap,
            window_left=case.left, window_right=case.right, parallel_for=parallel_for,
        )  # fmt: skip

    def launch(self) -> None:
        """Runs on the current stream, on outputs that are all NaN before."""
        for buffer in self.outputs.values():
            buffer.bytes[...] = 255
        workspace = Buffer((self.library.workspace(self.params),), np.int8, self.device)
        self.library.run(self.params, address(workspace.view), current_stream(self.device))
        workspace.check_guards()

    def run(self) -> dict[str, Array]:
        """Runs and returns the outputs; what is only read is as it was."""
        assert self.library.supported(self.params)
        self.launch()
        found = {name: buffer.numpy() for name, buffer in self.outputs.items()}
        for name, buffer in self.inputs.items():
            if self.case.in_place and name in ("key_cache", "value_cache"):
                found[f"present_{name}"] = buffer.numpy()
            else:
                assert buffer.numpy().tobytes() == np.ascontiguousarray(self.given[name]).tobytes(), f"{name} changed"
        return found

    def check(self) -> None:
        """Runs and compares every output with the reference."""
        check_cache_outputs(self.case, self.given, self.run())


def check_cache_outputs(case: CacheCase, inputs: dict[str, Array], outputs: dict[str, Array]) -> None:
    """Compares outputs, by name, with the reference; caches hold the new keys, and else every bit that they held."""
    expected, shapes = case.reference(inputs), case.output_shapes()
    for name, out in outputs.items():
        assert out.shape == shapes[name], f"{name}: shape {out.shape}, expected {shapes[name]}"
    for name in ("key_cache", "value_cache"):
        if f"present_{name}" in outputs:
            _check_cache(name, inputs[name], outputs[f"present_{name}"], expected[f"present_{name}"])
    y, lse, rounding = naive(case, inputs, expected)
    views = (tokens_first(case, x) for x in (outputs["Y"], expected["Y"]))
    assert_close("Y", *views, y[None], rounding)
    if "lse" in outputs:
        ragged = case.ragged is not None
        views = (x if ragged else x.transpose(1, 0, 2).reshape(len(lse), -1) for x in (outputs["lse"], expected["lse"]))
        assert_close("lse", *views, lse, rounding, sane=SANE[case.dtype])  # of queries that are rotated in its dtype


def tokens_first(case: CacheCase, x: Array) -> Array:
    """Y as (1, T, Hq, Dv)."""
    x = case.heads_view(x, case.heads[0])
    return (x if case.ragged is not None else x.swapaxes(1, 2).reshape(-1, case.heads[0], x.shape[-1]))[None]


def _check_cache(name: str, before: Array, out: Array, expected: Array) -> None:
    """Rotated keys are right to their last bit, and to float32's where terms cancel; all else is copied."""
    assert out.dtype == expected.dtype
    got, truth, old = (np.ascontiguousarray(x).view(f"u{x.itemsize}") for x in (out, expected, before))
    wrong = got != truth
    assert not (wrong & (truth == old)).any(), (
        f"{name}: {(wrong & (truth == old)).sum()} values changed, or were not written"
    )
    near = np.abs(out[wrong].astype(np.float64) - expected[wrong].astype(np.float64))
    allowed = EPSILON[out.dtype.name] * np.abs(expected[wrong].astype(np.float64)) + 4 * EPSILON["float32"]
    assert (near <= allowed).all(), f"{name}: off by {near.max(initial=0):.3g}"


def naive(case: CacheCase, inputs: dict[str, Array], expected: dict[str, Array]) -> tuple[Array, Array, float]:
    """Plain attention in the case's dtype, sequence by sequence over the expected caches.

    Returns:
        Y (T, Hq, Dv), lse (Hq, T) and the last bit of the largest score.
    """
    dtype, batch = numpy_dtype(case.dtype), case.batch
    q = tokens_first(case, case.parts(inputs)["Q"])[0]
    ends = ordered(inputs["cu_seqlens_q"], len(q)) if case.ragged is not None else np.arange(batch + 1) * case.q_length
    y, lse, rounding = np.zeros((*q.shape[:2], case.width), np.float32), np.full(q.shape[1::-1], -np.inf), 0.0
    attributes = case.attributes | {
        "q_num_heads": None,
        "kv_num_heads": None,
        "qkv_layout": "separate",
        "empty_row": "zero",
    }
    for b in range(batch):
        rows = slice(ends[b], ends[b + 1])
        tokens = ends[b + 1] - ends[b]
        before = int(np.clip(inputs["cache_lengths"].reshape(-1)[b], 0, case.capacity))
        total = min(before + tokens, case.capacity) if case.append else before
        keys, values, exists = (x[..., :total, :] for x in _gather(case, inputs, expected, b))
        mask = inputs.get("attn_mask")
        keep = np.where(exists[:, 0], 0.0, -np.inf)[None, None, None]
        if mask is not None:
            bias = np.where(mask, 0.0, -np.inf) if mask.dtype == bool else mask.astype(np.float64)
            bias = np.pad(
                bias, [(0, 0)] * (bias.ndim - 1) + [(0, case.capacity - bias.shape[-1])], constant_values=-np.inf
            )
            bias = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
            keep = keep + (bias[b : b + 1] if len(bias) > 1 else bias)[..., :total]
        turned = rotated(case, inputs, q[rows], rows, before - (0 if case.append else tokens))
        one = {
            "Q": turned.astype(dtype).swapaxes(0, 1)[None],
            "K": keys[None], "V": values[None], "attn_mask": keep, "nonpad_kv_seqlen": np.array([total]),
        }  # fmt: skip
        if case.sinks:
            one["sinks"] = inputs["sinks"]
        out, log, rounds = naive_attention(one, attributes)
        shown = min(tokens, case.max_q_length or tokens)
        y[rows][:shown], lse[:, rows][:, :shown] = out[0].swapaxes(0, 1)[:shown], log[0, :, :shown]
        rounding = max(rounding, rounds)
    return y, lse, rounding


def _gather(case: CacheCase, inputs: dict[str, Array], expected: dict[str, Array], b: int) -> tuple[Array, ...]:
    """Keys and values (Hkv, capacity, D), and whether each slot has a page (capacity, 1)."""
    keys, values = expected["present_key_cache"], expected["present_value_cache"]
    if not case.page_size:
        return keys[b], values[b], np.ones((case.capacity, 1), bool)
    table = inputs["block_table"][b]
    valid = (table >= 0) & (table < len(keys))
    found = [x[np.where(valid, table, 0)].reshape(case.capacity, *x.shape[2:]).swapaxes(0, 1) for x in (keys, values)]
    return found[0], found[1], np.repeat(valid, case.page_size)[:, None]


def rotated(case: CacheCase, inputs: dict[str, Array], q: Array, rows: slice, first: int) -> Array:
    """Queries (S, Hq, D) as a kernel rotates them: in float32."""
    if not case.rotary:
        return q
    cos, sin = (inputs[n].astype(np.float32) for n in ("cos_cache", "sin_cache"))
    at = np.arange(first, first + len(q))
    if "position_ids" in inputs:
        at = inputs["position_ids"].reshape(-1)[rows]
    cos, sin = (x[np.clip(at, 0, len(cos) - 1)][:, None] for x in (cos, sin))
    x, half = q.astype(np.float32), cos.shape[-1]
    pairs = x[..., : 2 * half].reshape(*x.shape[:2], half, 2) if case.rotary == "interleaved" else None
    a, b = (pairs[..., 0], pairs[..., 1]) if pairs is not None else (x[..., :half], x[..., half : 2 * half])
    turned = np.stack((a * cos - b * sin, b * cos + a * sin), axis=-1 if pairs is not None else -2)
    return np.concatenate((turned.reshape(*x.shape[:2], 2 * half), x[..., 2 * half :]), axis=-1)
