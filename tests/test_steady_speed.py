"""No common problem falls off a cliff: what a kernel does in exceptional cases is many times slower.

Hopper's kernel takes exponentials before it knows the maximum, and rows whose scores then exceed what it counted on are
computed again, one key at a time. Right, but only masks' or numbers' rarest forms should come to that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

if TYPE_CHECKING:
    from torch import Tensor


def milliseconds(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> float:
    """The least of several launches."""
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.ops.flashonnx.attention(q, k, v, **options)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)


def tensors(head_dim: int, queries: int, keys: int) -> list[Tensor]:
    import flashonnx.torch  # noqa: F401

    torch.manual_seed(0)
    return [
        torch.randn(2, 8, length, head_dim, device="cuda", dtype=torch.bfloat16) for length in (queries, keys, keys)
    ]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("fill", [-1e4, float(torch.finfo(torch.bfloat16).min)])
def test_finite_padding(head_dim: int, fill: float) -> None:
    """Padding as transformers' models add it: a tile's scores are all far below those of the next."""
    q, k, v = tensors(head_dim, 2048, 2048)
    mask = torch.zeros(2, 1, 1, 2048, device="cuda", dtype=torch.bfloat16)
    mask[..., 1300:] = fill
    assert milliseconds(q, k, v, attn_mask=mask) < 3 * milliseconds(q, k, v)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_offset(head_dim: int) -> None:
    """Bounds of every kind of remainder: at some, the last key of a tile's first query ends a tile of keys."""
    slowest = 3 * milliseconds(*tensors(head_dim, 2048, 2048), is_causal=True) + 0.05
    for offset in (15, 31, 47, 63, 64, 79, 127):
        q, k, v = tensors(head_dim, 2048, 2048 + offset)
        assert milliseconds(q, k, v, right_window_size=offset) < slowest, offset


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("garbage", [1e30, "sink"])
@pytest.mark.parametrize("causal", [False, True])
def test_hidden_garbage(head_dim: int, garbage: float | str, causal: bool) -> None:
    """Large numbers in hidden keys, at random places or as padding, cost no time; what is no number may."""
    q, k, v = tensors(head_dim, 2048, 2048)
    slowest = 10 * milliseconds(q, k, v, is_causal=causal)
    places = torch.arange(2048, device="cuda")
    for seen in (torch.rand(2048, device="cuda") < 0.7, places >= 300, places < 1300):
        mask = seen.expand(2, 1, 1, 2048).contiguous()
        if isinstance(garbage, float):
            k[:, :, ~seen], v[:, :, ~seen] = garbage, garbage
        else:  # scores some hundreds above all others
            q[..., 0], k[..., 0] = 16, 0
            k[:, :, ~seen, 0] = 16 * head_dim**0.5
        assert milliseconds(q, k, v, attn_mask=mask, is_causal=causal) < slowest, garbage
        q, k, v = tensors(head_dim, 2048, 2048)
