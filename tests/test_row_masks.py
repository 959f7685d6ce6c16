"""Boolean masks with a row per query that heads share: Hopper's kernel packs them into bits if the problem is large."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from cases import Case
from flashonnx._capi import Library
from flashonnx.reference import Array
from seam import Problem

pytestmark = pytest.mark.gpu

# Whether a query sees a key; whole tiles are hidden, seen, and mixed.
FILLS: dict[str, Callable[[Array, Array, np.random.Generator], Array]] = {
    "all": lambda query, key, random: (query >= 0) & (key >= 0),
    "nothing": lambda query, key, random: (query < 0) & (key < 0),
    "some": lambda query, key, random: random.random((len(query), key.size)) < 0.7,
    "few": lambda query, key, random: random.random((len(query), key.size)) < 0.002,
    "causal": lambda query, key, random: key <= query,
    "anticausal": lambda query, key, random: key > query,  # the last rows see nothing
    "sliding": lambda query, key, random: abs(key - query) < 100,
    "documents": lambda query, key, random: query // 333 == key // 333,
    "some-queries": lambda query, key, random: (query % 3 == 0) & (key >= 0),
    "late": lambda query, key, random: (key < 700) & ((query % 2 == 0) | (key < 5)),  # rows meet keys tiles later
    "holes": lambda query, key, random: (query // 200 + key // 150) % 3 == 0,
}
_BASE = Case("row-mask", batch=1, heads=(2, 1), q_length=1473, kv_length=1537, layout="bhsd", mask="11qk")


def _check(library: Library, case: Case, fill: str, poison: float | None = None) -> None:
    inputs = case.inputs()
    shape = inputs["attn_mask"].shape
    query, key = np.arange(shape[2])[:, None], np.arange(shape[3])[None]
    seen = np.stack([FILLS[fill](query, key, np.random.default_rng(entry)) for entry in range(shape[0])])
    if poison is not None:
        hidden = np.broadcast_to(~seen.any(1)[:, None, :, None], inputs["K"].shape)
        inputs["K"][hidden] = inputs["V"][hidden] = poison
    inputs["attn_mask"] = seen[:, None]
    Problem(library, case, "cuda", inputs=inputs).check()


@pytest.mark.parametrize(
    ("head_dim", "fill"),
    [(d, fill) for d in (64, 128, 256) for fill in FILLS] + [(d, "holes") for d in (40, 96, 192)],
)
def test_fills(library: Library, head_dim: int, fill: str) -> None:
    dtype = "float16" if head_dim % 128 else "bfloat16"
    _check(library, replace(_BASE, id=f"row-mask-{fill}-{head_dim}", dtype=dtype, head_dim=head_dim), fill)


@pytest.mark.parametrize("fill", ("some", "causal", "late", "holes"))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_with_more(library: Library, head_dim: int, fill: str) -> None:
    """Structural bounds, lengths, fewer keys in the mask, sinks, batch entries with masks of their own."""
    case = replace(_BASE, id=f"row-mask-more-{fill}-{head_dim}", dtype="bfloat16", head_dim=head_dim)
    for more in (
        {"is_causal": 1},
        {"left": 300, "right": 50, "sinks": True},
        {"batch": 2, "mask": "b1qk", "lengths": (700, 1537), "empty_row": "mean"},
        {"mask_keys": 1100},
        {"q_length": 8000, "kv_length": 300},
        {"q_length": 130, "kv_length": 20000, "heads": (4, 2)},
        {"scale": 1.0, "value_dim": 40},
    ):
        _check(library, replace(case, **more), fill)  # type: ignore[arg-type]


@pytest.mark.parametrize("poison", (np.nan, np.inf, 1e6))
@pytest.mark.parametrize("fill", ("few", "late", "holes"))
def test_hidden_slots_hold_anything(library: Library, fill: str, poison: float) -> None:
    case = replace(_BASE, id=f"row-mask-poison-{fill}", dtype="bfloat16", head_dim=64)
    _check(library, case, fill, poison=poison)


def test_more_tiles_than_marks(library: Library) -> None:
    case = replace(_BASE, id="row-mask-long", dtype="bfloat16", head_dim=64, q_length=40, kv_length=128 * 485 + 5)
    for fill in ("few", "late", "anticausal"):
        _check(library, case, fill)


@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("fill", ("causal", "documents", "anticausal"))
def test_additive(fill: str, head_dim: int) -> None:
    """Of Q's type: weights of P up to head size 128; beyond, bits if all is 0 or -inf, which is found on the device."""
    torch = pytest.importorskip("torch")
    import flashonnx.torch  # noqa: F401

    length, heads = 2048, 32  # large enough
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, length, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    index = np.arange(length)
    seen = torch.from_numpy(FILLS[fill](index[:, None], index[None], np.random.default_rng(0))).cuda()[None, None]
    bias = torch.zeros(1, 1, length, length, device="cuda", dtype=torch.bfloat16).masked_fill(~seen, -torch.inf)
    if head_dim > 128:
        expected = torch.ops.flashonnx.attention(q, k, v, attn_mask=seen)
        assert torch.equal(torch.ops.flashonnx.attention(q, k, v, attn_mask=bias), expected)
    for more in (None, 3.0):
        if more:
            bias[..., 700, 500] = more
        got = torch.ops.flashonnx.attention(q, k, v, attn_mask=bias)
        for head in (0, heads - 1):
            scores = q[0, head].double() @ k[0, head].double().T / head_dim**0.5 + bias[0, 0].double()
            reference = scores.softmax(-1).nan_to_num(0) @ v[0, head].double()
            assert (got[0, head].double() - reference).abs().max() < 0.02
