"""The one comparison of all tests: special values coincide, errors are at most twice those of plain attention."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from flashonnx.reference import Array, prepare

# Units in the last place of the largest value, and of the largest score, allowed where plain attention happens to be
# exact: a sum of D products is off by about sqrt(D) / 5 of them, a score's tanh and exponential in hardware by 2 each.
FLOOR_ULPS = 4
SCORE_ULPS = 8
WEIGHTY = 2.0**-20  # probabilities below it, of 1 for the row's best, do not show
# More than plain attention is ever off by; else a fault of the reference would pass as tolerance.
SANE = {"float32": 2e-3, "float16": 2e-2, "bfloat16": 5e-2}
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def assert_close(
    name: str,
    out: Array,
    ref: Array,
    naive: Array,
    rounding: float = 0.0,
    *,
    unit: float = 1.0,
    sane: float | None = None,
) -> None:
    """Fails unless `out` is as good an answer as can be asked of its dtype.

    NaN and infinities stand in the same places, vectors (along the last dimension) that are exactly zero are so in
    both, and max|out - ref| <= 2 max|naive - ref| + floor. Errors of values beyond 1 count relatively, else a row of
    lse near -1e38 would hide all others.

    Args:
        name: of the output, for the message.
        out: what a kernel or runtime wrote.
        ref: the float64 truth.
        naive: plain attention in out's dtype, see `naive_attention`.
        rounding: relative change of a probability by the last bit of its score.
        unit: what values are like, the standard deviation of V.
        sane: what plain attention may be off by; default: by out's dtype.
    """
    assert out.shape == ref.shape, f"{name}: shape {out.shape}, expected {ref.shape}"
    got = out.astype(np.float64)
    for kind, test in (("NaN", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = test(got) != test(ref)
        assert not wrong.any(), f"{name}: {kind} out of place, {wrong.sum()} times, {_first(wrong, got, ref)}"
    if ref.ndim == 4:
        wrong = (ref == 0).all(axis=-1) & (got != 0).any(axis=-1)
        assert not wrong.any(), f"{name}: not exactly zero, {wrong.sum()} times, {_first(wrong, got, ref)}"
    finite = np.isfinite(ref)
    size = np.abs(np.where(finite, ref, 0)) / unit
    scale = unit * np.maximum(size, 1)
    with np.errstate(invalid="ignore"):
        error, plain = (
            np.where(finite & np.isfinite(x), np.abs(x - ref), 0) / scale for x in (got, naive.astype(np.float64))
        )
    sane = sane or SANE[out.dtype.name]
    assert plain.max(initial=0) <= sane, (
        f"{name}: plain attention is off by {plain.max():.3g}: it or the reference is wrong"
    )
    # Sums of many values are off by the values' last bits, however small they come out; and all sums are float32's.
    floor = (FLOOR_ULPS * EPSILON[out.dtype.name] + SCORE_ULPS * rounding) * min(1, max(size.max(initial=0), 1 / 32))
    allowed = 2 * plain.max(initial=0) + floor + EPSILON["float32"] / 2
    assert error.max(initial=0) <= allowed, (
        f"{name}: error {error.max():.3g} > {allowed:.3g} allowed (plain attention has {plain.max():.3g}), "
        f"{(error > allowed).sum()} of {error.size} values, worst {_first(error == error.max(), got, ref)}"
    )


def _first(where: Array, got: Array, ref: Array) -> str:
    index = tuple(int(i) for i in np.argwhere(where)[0])
    return f"at {index}: got {got[index]}, expected {ref[index]}"


def naive_attention(inputs: dict[str, Array], attributes: dict[str, Any]) -> tuple[Array, Array, float]:
    """Attention as one writes it down, in the inputs' dtype: float32 sums, probabilities and result rounded.

    Args:
        inputs: the operator's inputs by name.
        attributes: its attributes by name.

    Returns:
        Y as (B, Hq, Sq, Dv) and lse (B, Hq, Sq), in float32, and the last bit of the largest score.
    """
    masks = ("is_causal", "q_num_heads", "kv_num_heads", "left_window_size", "right_window_size", "qkv_layout")
    names = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen", "bias")
    problem = prepare(*(inputs.get(n) for n in names), **{m: attributes[m] for m in masks})
    dtype = inputs["Q"].dtype
    q, k, v = (np.nan_to_num(x.astype(dtype).astype(np.float32)) for x in (problem.q, problem.k, problem.v))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scale = np.float32(attributes["scale"] or 1 / math.sqrt(q.shape[3]))
    softcap = np.float32(attributes["softcap"])
    with np.errstate(all="ignore"):
        scores = _product(q, k.swapaxes(-1, -2)) * scale
        largest = float(np.abs(np.where(problem.seen, scores, 0)).max(initial=0))
        if softcap > 0:
            scores = softcap * np.tanh(scores / softcap)
            # Tensor cores' kernels make tanh of an exponential: exact to a last bit of 1, however small it comes out.
            largest = max(largest, float(softcap) if dtype != np.float32 else 0)
        scores = np.where(problem.seen, scores + problem.bias.astype(np.float32), -np.inf).astype(np.float32)
        top = scores.max(axis=-1, keepdims=True, initial=np.finfo(np.float32).min)
        p = np.exp(scores - top)
        # A bias of -1e4 on a whole row leaves the scores its own last bits; a sentinel of 1e38 leaves them none.
        weighty = (p > WEIGHTY) & (np.abs(scores) < 1 / EPSILON["float32"])
        rounding = EPSILON["float32"] * max(largest, float(np.abs(np.where(weighty, scores, 0)).max(initial=0)))
        total = _product(p, np.ones((*p.shape[:-2], p.shape[-1], 1), np.float32))
        sinks = inputs.get("sinks")
        denominator = total if sinks is None else total + np.exp(sinks.astype(np.float32)[:, None, None] - top)
        p = np.nan_to_num(p / denominator)
        if attributes["empty_row"] == "mean":
            below = (np.arange(k.shape[2]) < problem.lengths[:, None])[:, None, None]
            uniform = below / np.maximum(problem.lengths, 1)[:, None, None, None]
            p = np.where(problem.seen.any(axis=-1, keepdims=True), p, uniform)
        p = p.astype(dtype).astype(np.float32)
        return _product(p, v).astype(dtype).astype(np.float32), (top + np.log(total))[..., 0], rounding


def _product(a: Array, b: Array) -> Array:
    """A @ b, summed in order: a BLAS would sum in blocks, and be more exact than a loop over long vectors."""
    out = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    term = np.empty_like(out)
    for i in range(a.shape[-1]):
        out += np.multiply(a[..., :, i, None], b[..., None, i, :], out=term)
    return out
