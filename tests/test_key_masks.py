"""Masks that do not depend on the query, over many tiles of keys: kernels know each tile's biases before its scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from cases import Case, numpy_dtype
from flashonnx._capi import Library
from flashonnx.reference import Array
from seam import Problem

KEYS = 700  # several tiles of every kernel, the last one cut


def _drawn(random: np.random.Generator, bias: Array, share: float) -> Array:
    return np.where(random.random(bias.shape) < share, bias, -np.inf)


# What is added to the keys' scores, last dimension first; False in a boolean mask is -inf.
FILLS: dict[str, Callable[[np.random.Generator, Array], Array]] = {
    "nothing": lambda random, key: np.zeros_like(key),
    "some": lambda random, key: _drawn(random, np.zeros_like(key), 0.7),
    "few": lambda random, key: _drawn(random, np.zeros_like(key), 0.02),
    "padding": lambda random, key: np.where(key < 150, 0, -np.inf),
    "left-padding": lambda random, key: np.where(key >= 550, 0, -np.inf),
    "holes": lambda random, key: np.where(key // 130 % 2 == 0, 0, -np.inf),  # whole tiles are hidden
    "one-key": lambda random, key: np.where(key == 300, 0, -np.inf),
    "all": lambda random, key: np.full_like(key, -np.inf),
    "one-batch": lambda random, key: np.where(np.arange(len(key))[:, None] == 0, -np.inf, 0 * key),
    "normal": lambda random, key: random.standard_normal(key.shape),
    "normal-and-hidden": lambda random, key: _drawn(random, 3 * random.standard_normal(key.shape), 0.8),
    "rising": lambda random, key: key / 10,
    "falling": lambda random, key: -key / 10,  # the last tile is met first: maxima are raised in every one
    "steep": lambda random, key: -key * 1.5,  # by more than any P may exceed its maximum
    "step": lambda random, key: np.where(key < 256, 80.0, 0.0),
    "far": lambda random, key: np.full_like(key, 1000.0) + random.standard_normal(key.shape),
    "far-below": lambda random, key: np.full_like(key, -10000.0),
    "near-and-far-below": lambda random, key: np.where(random.random(key.shape) < 0.3, -10000.0, 0.0),
    "least": lambda random, key: np.full_like(key, -np.finfo(np.float32).max),
    "least-and-nothing": lambda random, key: np.where(key % 3 == 0, 0, -np.finfo(np.float32).max),
    "least-first": lambda random, key: np.where(key < 207, -np.finfo(np.float32).max, 0),
    "least-last": lambda random, key: np.where(key < 207, 0, -np.finfo(np.float32).max),
}
BOOLEAN = ("nothing", "some", "few", "padding", "left-padding", "holes", "one-key", "all", "one-batch")


def _inputs(case: Case, fill: str) -> tuple[dict[str, Array], Array]:
    """A problem's inputs, and what its mask adds to each key of each batch entry."""
    inputs = case.inputs()
    random = np.random.default_rng(len(fill))
    bias = FILLS[fill](random, np.tile(np.arange(KEYS, dtype=np.float64), (case.batch, 1)))
    if case.mask_dtype == "bool":
        mask: Array = bias == 0
    else:
        dtype = numpy_dtype(case.dtype if case.mask_dtype == "T" else case.mask_dtype)
        with np.errstate(over="ignore"):
            mask = bias.astype(dtype)
        if dtype == np.float16:  # its most negative one, where float32's was meant
            mask[np.isfinite(bias) & np.isinf(mask)] = np.finfo(np.float16).min
    inputs["attn_mask"] = mask[:, None, None]
    return inputs, bias


def _check(library: Library, case: Case, fill: str, poison: float | None = None) -> None:
    inputs, bias = _inputs(case, fill)
    if poison is not None:
        for name in ("K", "V"):
            hidden = np.broadcast_to((bias == -np.inf)[:, None, :, None], inputs[name].shape)
            inputs[name][hidden] = poison
    Problem(library, case, "cuda", inputs=inputs).check()


pytestmark = pytest.mark.gpu  # minutes on two cores; the CPU kernel takes keys one after another anyway
_BASE = Case("key-mask", q_length=70, kv_length=KEYS, heads=(2, 1), layout="bhsd", mask="b11k")


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("head_dim", (40, 64, 128, 192))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_biases(library: Library, dtype: str, head_dim: int, fill: str) -> None:
    """Of Q's type and of float32: near the scores, far from them, rising and falling from tile to tile."""
    case = replace(
        _BASE, id=f"key-mask-{fill}-{head_dim}-{dtype}", dtype=dtype, head_dim=head_dim, mask_dtype="float32"
    )
    _check(library, case, fill)
    if not fill.startswith("least"):
        _check(library, replace(case, mask_dtype="T"), fill)


@pytest.mark.parametrize("fill", BOOLEAN)
@pytest.mark.parametrize("head_dim", (40, 64, 128, 192))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_booleans(library: Library, dtype: str, head_dim: int, fill: str) -> None:
    case = replace(_BASE, id=f"key-mask-bool-{fill}-{head_dim}-{dtype}", dtype=dtype, head_dim=head_dim)
    for more in ({}, {"is_causal": 1}, {"left": 90, "right": 20}, {"lengths": (333, KEYS)}, {"q_length": 300}):
        _check(library, replace(case, **more), fill)  # type: ignore[arg-type]


@pytest.mark.parametrize("fill", ("normal-and-hidden", "falling", "far", "holes"))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_with_bounds(library: Library, dtype: str, fill: str) -> None:
    """Diagonals and windows cut tiles, others are inside; also a soft cap and unusual scales."""
    case = replace(_BASE, id=f"key-mask-bounds-{fill}-{dtype}", dtype=dtype, q_length=400, head_dim=64, mask_dtype="T")
    for more in (
        {"is_causal": 1, "lengths": (500, KEYS)},
        {"left": 300, "right": 300},
        {"softcap": 5.0},
        {"scale": 1.0},
        {"scale": 1e-30},
        {"scale": 1e-40},
        {"sinks": True},
    ):
        _check(library, replace(case, **more), fill)  # type: ignore[arg-type]


@pytest.mark.parametrize("fill", ("least", "least-first", "least-last", "least-and-nothing"))
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_least_causal(library: Library, head_dim: int, fill: str) -> None:
    """Some queries see nothing but keys with the least bias, their neighbours see others."""
    case = replace(_BASE, id=f"key-mask-least-{fill}", dtype="bfloat16", q_length=KEYS, head_dim=head_dim, is_causal=1)
    _check(library, replace(case, mask_dtype="float32"), fill)


@pytest.mark.parametrize("poison", (np.nan, np.inf, -np.inf, 1e6))
@pytest.mark.parametrize("fill", ("some", "padding", "holes", "one-key", "normal-and-hidden"))
@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_hidden_slots_hold_anything(library: Library, dtype: str, head_dim: int, fill: str, poison: float) -> None:
    case = replace(_BASE, id=f"key-mask-poison-{fill}", dtype=dtype, head_dim=head_dim, mask_dtype="float32")
    with np.errstate(over="ignore"):  # 1e6 is infinite in float16
        _check(library, case, fill, poison)


@pytest.mark.parametrize("offset", (-300, 300))
@pytest.mark.parametrize("fill", ("some", "few", "padding", "left-padding", "one-batch", "least-and-nothing"))
@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_hidden_scores_count_for_nothing(library: Library, dtype: str, head_dim: int, fill: str, offset: float) -> None:
    """Scores of hidden keys lie 1000 above those of the others, which stand at `offset`: none becomes a maximum."""
    case = replace(_BASE, id=f"key-mask-above-{fill}-{offset}", dtype=dtype, head_dim=head_dim, mask_dtype="float32")
    for more in ({}, {"is_causal": 1, "lengths": (333, KEYS)}):
        chosen = replace(case, **more)  # type: ignore[arg-type]
        inputs, bias = _inputs(chosen, fill)
        hidden = (bias < -1e30)[:, None, :]
        step = np.sqrt(head_dim) / 16  # a score of 1 in the last feature, of which Q has 16
        inputs["Q"][..., -1] = 16
        inputs["K"][..., -1] = np.where(hidden, step * (offset + 1000), step * offset)
        Problem(library, chosen, "cuda", inputs=inputs).check()
