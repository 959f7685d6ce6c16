"""bfloat16 masks with a row per query that heads share: on Hopper biases are weights of P up to head size 128.

The reference is PyTorch in float64 on the device: problems have to be large for a mask to be packed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from compare import assert_close
from flashonnx._capi import CUDA, Library, attention_params

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

LEAST = torch.finfo(torch.bfloat16).min
Tensor = Any


def _hidden(query: Tensor, key: Tensor, by: float) -> Tensor:
    """Normal biases, of which `by` takes the place of some, of whole tiles, and of whole rows."""
    biases = torch.randn(len(query), key.numel(), device="cuda")
    hides = (torch.rand_like(biases) < 0.3) | ((query // 200 + key // 150) % 3 == 0)
    return biases.masked_fill(hides | (query % 50 == 7) | ((query > 700) & (query < 860)), by)


def _gaps(query: Tensor, key: Tensor) -> Tensor:
    """Normal biases; of three tiles that the kernels have, one is hidden."""
    biases = torch.randn(len(query), key.numel(), device="cuda")
    return biases.masked_fill((key // 128 + query // 192) % 3 == 1, -math.inf)


def _seen(where: Tensor) -> Tensor:
    return torch.zeros(where.shape, device="cuda").masked_fill(~where, -math.inf)


# From queries, as a column, and keys.
FILLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "normal": lambda query, key: torch.randn(len(query), key.numel(), device="cuda"),
    "zeros": lambda query, key: _seen(query + key >= 0),
    "nothing": lambda query, key: _seen(query + key < 0),
    "causal": lambda query, key: _seen(key <= query),
    "anticausal": lambda query, key: _seen(key > query),
    "some": lambda query, key: _seen(torch.rand(len(query), key.numel(), device="cuda") < 0.7),
    "few": lambda query, key: _seen(torch.rand(len(query), key.numel(), device="cuda") < 0.002),
    "infinite": lambda query, key: _hidden(query, key, -math.inf),
    "gaps": lambda query, key: _gaps(query, key),
    "least": lambda query, key: _hidden(query, key, LEAST),
    "sentinel": lambda query, key: _hidden(query, key, -1e4),
    "only-least": lambda query, key: torch.full((len(query), key.numel()), LEAST, device="cuda"),
    "distance": lambda query, key: -0.5 * (query - key).abs().float(),
    "far": lambda query, key: 2000 * torch.rand(len(query), key.numel(), device="cuda") - 1000,
    "rising": lambda query, key: (key + 0 * query).float(),  # causal rows do not see the largest
    "lifted": lambda query, key: 3e4 + 1e4 * torch.randn(len(query), 1, device="cuda") + key % 7,
    "late": lambda query, key: torch.where(key < 5, 0, -torch.where(query % 2 == 1, 300, 20)).float(),
}
BOOLEAN = ("zeros", "nothing", "causal", "anticausal", "some", "few")

# Sizes, structure, and what dimensions the mask has: batch entries, heads.
MORE: dict[str, dict[str, Any]] = {
    "alone": {},
    "causal": {"is_causal": True},
    "window": {"window": (300, 50), "sinks": True},
    "lengths": {"batch": 2, "masks": (2, 1), "lengths": (700, 1153), "empty_row": "mean"},
    "shared-lengths": {"batch": 2, "lengths": (700, 1153), "is_causal": True},
    "heads": {"batch": 4, "masks": (1, 4)},
    "short": {"mask_keys": 1100},
    "wide": {"queries": 130, "keys": 9000},
    "many-tiles": {"queries": 40, "keys": 128 * 485 + 5, "head_dims": (64,)},
    "unscaled": {"scale": 1.0},
    "steep": {"spread": 6.0},
}


def _check(
    library: Library,
    head_dim: int,
    fill: str,
    *,
    boolean: bool = False,
    change: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
    batch: int = 1,
    masks: tuple[int, int] = (1, 1),
    queries: int = 1073,
    keys: int = 1153,
    mask_keys: int | None = None,
    lengths: tuple[int, ...] | None = None,
    is_causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    sinks: bool = False,
    empty_row: str = "zero",
    scale: float | None = None,
    spread: float = 1.0,
) -> None:
    torch.manual_seed(0)
    heads, kv_heads, covered = 4, 2, mask_keys or keys
    scale = scale or 1 / math.sqrt(head_dim)
    shapes = {"q": (heads, queries), "k": (kv_heads, keys), "v": (kv_heads, keys)}
    tensors = {n: torch.randn(batch, *s, head_dim, device="cuda").bfloat16() for n, s in shapes.items()}
    tensors["q"] *= spread
    query, key = torch.arange(queries, device="cuda")[:, None], torch.arange(covered, device="cuda")
    biases = torch.stack([FILLS[fill](query, key) for _ in range(masks[0] * masks[1])]).bfloat16()
    # Rows at multiples of 16 bytes.
    mask = torch.zeros(*masks, queries, (covered + 15) // 16 * 16, device="cuda", dtype=torch.bfloat16)
    tensors["mask"] = mask[..., :covered]
    tensors["mask"][...] = biases.view(*masks, queries, covered)
    change(tensors)
    q, k, v, mask = (tensors[name] for name in ("q", "k", "v", "mask"))
    seen = torch.zeros(*masks, queries, (covered + 15) // 16 * 16, device="cuda", dtype=torch.bool)[..., :covered]
    seen[...] = mask > -math.inf
    # What is no number stands in hidden slots alone.
    reference_k, reference_v = (x.double().nan_to_num(0, 0, 0) for x in (k, v))
    reference_k, reference_v = (x.repeat_interleave(heads // kv_heads, 1) for x in (reference_k, reference_v))

    scores = scale * q.double() @ reference_k.transpose(-1, -2)
    scores[..., covered:] = -math.inf
    scores[..., :covered] += mask.double()
    key = torch.arange(keys, device="cuda")
    ends = torch.tensor(lengths or [keys] * batch, device="cuda")
    position = query + (ends[:, None, None, None] - queries if lengths else 0)
    if is_causal:
        window = (-1, 0)
    if window[0] >= 0:
        scores = scores.masked_fill(key < position - window[0], -math.inf)
    if window[1] >= 0:
        scores = scores.masked_fill(key > position + window[1], -math.inf)
    scores = scores.masked_fill((key >= ends[:, None])[:, None, None], -math.inf)
    extra = torch.randn(heads, device="cuda") if sinks else None
    top = scores.amax(-1, keepdim=True)
    if extra is not None:
        top = top.maximum(extra.double()[:, None, None])
    top = torch.where(top == -math.inf, 0, top)
    p = (scores - top).exp()
    total = p.sum(-1, keepdim=True)
    if extra is not None:
        total = total + (extra.double()[:, None, None] - top).exp()
    p = torch.where(total == 0, 0, p / total)
    if empty_row == "mean":
        mean = (key < ends[:, None]).double() / ends[:, None]
        p = torch.where((scores == -math.inf).all(-1, keepdim=True), mean[:, None, None], p)
    expected, naive = p @ reference_v, (p.bfloat16().double() @ reference_v).bfloat16()

    outputs = []
    for _ in range(2):
        o = torch.full_like(q, math.nan)
        params = attention_params(
            library, library.device(CUDA), q, k, v, o, mask=seen if boolean else mask,
            key_lengths=ends if lengths else None, sinks=extra, is_causal=is_causal, scale=scale, empty_row=empty_row,
            window_left=window[0], window_right=-1 if is_causal else window[1],
        )  # fmt: skip
        size, guard = library.workspace(params), 4096
        workspace = torch.full((size + guard,), 255, dtype=torch.uint8, device="cuda")
        library.run(params, workspace.data_ptr(), torch.cuda.current_stream().cuda_stream)
        assert (workspace[size:] == 255).all(), "memory after the workspace was written"
        outputs.append(o)
    assert torch.equal(outputs[0].view(torch.int16), outputs[1].view(torch.int16)), "a repeat differs"
    got = outputs[0].float().cpu().numpy().astype(np.float32)
    import ml_dtypes

    assert_close("Y", got.astype(ml_dtypes.bfloat16), expected.cpu().numpy(), naive.float().cpu().numpy())


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("head_dim", (64, 96, 128, 256))
def test_biases(library: Library, head_dim: int, fill: str, more: str) -> None:
    how = dict(MORE[more])
    if head_dim not in how.pop("head_dims", (head_dim,)):
        pytest.skip("for another head size")
    _check(library, head_dim, fill, **how)


@pytest.mark.parametrize("fill", BOOLEAN)
@pytest.mark.parametrize("head_dim", (64, 96, 128, 256))
def test_booleans(library: Library, head_dim: int, fill: str) -> None:
    for more in ("alone", "causal", "window", "lengths", "heads"):
        _check(library, head_dim, fill, boolean=True, **MORE[more])


@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("bias", (-math.inf, -1000.0, -100.0))
def test_best_scores_are_behind(library: Library, head_dim: int, bias: float) -> None:
    """Of keys that a row's biases put behind: others that count have tiny probabilities before they are weighed."""

    def change(tensors: dict[str, Tensor]) -> None:
        direction = torch.randn(head_dim, device="cuda").sign()
        tensors["q"] += 4 * direction
        tensors["k"][..., ::5, :] += 4 * direction  # scores of 16 sqrt(D)
        tensors["mask"][..., ::5] = bias

    _check(library, head_dim, "normal", change=change)


@pytest.mark.parametrize("poison", (math.nan, math.inf, 1e6))
@pytest.mark.parametrize("boolean", (False, True))
@pytest.mark.parametrize("head_dim", (64, 128, 256))
def test_hidden_slots_hold_anything(library: Library, head_dim: int, boolean: bool, poison: float) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["mask"][..., 3::97] = -math.inf
        tensors["k"][..., 3::97, :] = tensors["v"][..., 3::97, :] = poison

    _check(library, head_dim, "some" if boolean else "normal", boolean=boolean, change=change)


@pytest.mark.parametrize("value", (math.nan, math.inf))
@pytest.mark.parametrize("head_dim", (64, 128))
def test_biases_that_are_no_numbers(library: Library, head_dim: int, value: float) -> None:
    """Make their row one of NaN, and no other."""

    def change(tensors: dict[str, Tensor]) -> None:
        for row, key in ((3, 0), (500, 777), (1072, 1152)):
            tensors["mask"][..., row, key] = value

    _check(library, head_dim, "normal", change=change)
