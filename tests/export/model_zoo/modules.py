"""PyTorch's own transformer modules, and attention written out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from model_zoo.entry import Entry, Sizes

_X = {0: "batch", 1: "sequence"}
_WIDTH, _HEADS = 32, 4


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(_WIDTH, _HEADS, 64, dropout=0.0, batch_first=True)
        self.model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Any, attention_mask: Any) -> Any:
        return self.model(x, src_key_padding_mask=attention_mask == 0)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerDecoderLayer(_WIDTH, _HEADS, 64, dropout=0.0, batch_first=True)
        self.model = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Any, memory: Any, attention_mask: Any) -> Any:
        triangle = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.model(x, memory, tgt_mask=triangle, memory_key_padding_mask=attention_mask == 0)


class Weights(nn.Module):
    """nn.MultiheadAttention with its default need_weights=True; the weights are left unused."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.MultiheadAttention(_WIDTH, _HEADS, batch_first=True)

    def forward(self, x: Any, attention_mask: Any) -> Any:
        return self.model(x, x, x, key_padding_mask=attention_mask == 0)[0]


class Block(nn.Module):
    """Projections around an attention of one's own: q, k, v (batch, sequence, heads, size), a 0/1 mask of keys."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.attend = attend

    def forward(self, x: Any, attention_mask: Any) -> Any:
        batch, sequence, _ = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, _HEADS, _WIDTH // _HEADS).unbind(2)
        return self.out(self.attend(q, k, v, attention_mask).reshape(batch, sequence, _WIDTH))


class NanoGpt(nn.Module):
    """Causal attention as in karpathy/nanoGPT: a buffer of ones below the diagonal, cut to the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.projection = nn.Linear(_WIDTH, _WIDTH)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x: Any) -> Any:
        B, T, C = x.shape
        q, k, v = (part.view(B, T, _HEADS, C // _HEADS).transpose(1, 2) for part in self.attention(x).split(_WIDTH, 2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :T, :T] == 0, -torch.inf)
        y = functional.softmax(scores, dim=-1) @ v
        return self.projection(y.transpose(1, 2).contiguous().view(B, T, C))


def minus_ten_thousand(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """As the first BERT: matrices, and (1 - mask) * -10000 added."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores + (1.0 - mask[:, None, None, :].to(q.dtype)) * -10000.0
    return (scores.softmax(-1) @ v).transpose(1, 2)


def einsum(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Heads beside the tokens, as in flash-attention's own reference."""
    scores = torch.einsum("bthd,bshd->bhts", q, k * q.shape[-1] ** -0.5)
    scores = scores.masked_fill(mask[:, None, None, :] == 0, torch.finfo(q.dtype).min)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)


def einsum_heads_first(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """As lucidrains' modules."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("b h i d, b h j d -> b h i j", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask[:, None, None, :].bool(), -torch.finfo(q.dtype).max)
    return torch.einsum("b h i j, b h j d -> b h i d", scores.softmax(-1), v).transpose(1, 2)


def baddbmm(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Batch and heads merged, the mask as the start of the product."""
    batch, sequence, heads, size = q.shape
    q, k, v = (x.transpose(1, 2).reshape(batch * heads, sequence, size) for x in (q, k, v))
    bias = ((1.0 - mask.to(q.dtype)) * torch.finfo(q.dtype).min)[:, None, None, :]
    bias = bias.expand(batch, heads, sequence, sequence).reshape(batch * heads, sequence, sequence)
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=size**-0.5)
    return torch.bmm(scores.softmax(-1), v).view(batch, heads, sequence, size).transpose(1, 2)


def sdpa(q: Any, k: Any, v: Any, mask: Any) -> Any:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, mask[:, None, None, :].bool()).transpose(1, 2)


def sdpa_causal(q: Any, k: Any, v: Any, mask: Any) -> Any:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    triangle = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    mask = mask[:, None, None, :].bool() & triangle
    return functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


def softcap(q: Any, k: Any, v: Any, mask: Any) -> Any:
    """Gemma 2's, in float32 inside."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.tanh(q @ k.transpose(-1, -2) * 0.3 / 20.0) * 20.0
    scores = scores.masked_fill(mask[:, None, None, :] == 0, -torch.inf)
    return (scores.float().softmax(-1).to(q.dtype) @ v).transpose(1, 2)


def _masked(sizes: Sizes) -> dict[str, Any]:
    return {"x": torch.randn(sizes.batch, sizes.sequence, _WIDTH), "attention_mask": sizes.mask()}


def _made(make: Callable[[], Any]) -> Callable[[str], Any]:
    def seeded(attention: str) -> Any:
        torch.manual_seed(0)
        return make().eval()

    return seeded


def _memory(sizes: Sizes) -> dict[str, Any]:
    memory = torch.randn(sizes.batch, sizes.sequence, _WIDTH)
    return {"x": torch.randn(sizes.batch, sizes.sequence + 2, _WIDTH), "memory": memory, "attention_mask": sizes.mask()}


_MASKED_AXES = {"x": _X, "attention_mask": _X}
_BLOCKS = (minus_ten_thousand, einsum, einsum_heads_first, baddbmm, sdpa, sdpa_causal, softcap)
ENTRIES = (
    Entry("nn.TransformerEncoder", _made(Encoder), _masked, _MASKED_AXES, attentions=("sdpa",)),
    Entry("nn.TransformerDecoder", _made(Decoder), _memory,
          {"x": {0: "batch", 1: "targets"}, "memory": _X, "attention_mask": _X}, sites=4, attentions=("sdpa",),
          cannot=dict.fromkeys(("torch 18", "torch 23"), "torch.export does not let it look into its mask")),
    Entry("nn.MultiheadAttention", _made(Weights), _masked, _MASKED_AXES, sites=1, attentions=("eager",)),
    Entry("nanoGPT", _made(NanoGpt), lambda sizes: {"x": torch.randn(sizes.batch, sizes.sequence, _WIDTH)},
          {"x": _X}, sites=1, attentions=("eager",), others=(Sizes(3, 11), Sizes(1, 1))),
    *(Entry(attend.__name__, _made(lambda attend=attend: Block(attend)), _masked, _MASKED_AXES, sites=1,
            attentions=("sdpa" if "sdpa" in attend.__name__ else "eager",)) for attend in _BLOCKS),
)  # fmt: skip
