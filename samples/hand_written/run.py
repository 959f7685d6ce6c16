"""A decoder written by hand, as in nanoGPT: softmax between two products, a triangle that is a buffer, one projection.

    python samples/hand_written/run.py

Nothing in the model says "attention", and nothing in it is changed. The file that PyTorch's exporter writes is fused,
then verified. Needs `pip install flashonnx[torch,ort]`.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path

import flashonnx
import torch
from torch import Tensor, nn

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # on GPUs: float32 in full, as it is compared with the CPU's


class CausalSelfAttention(nn.Module):
    """Heads of one fused projection, and a mask as large as the longest text."""

    mask: Tensor

    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(longest, longest)).view(1, 1, longest, longest))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        y = torch.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    """Attention, then two layers; each with its norm before and the input added after."""

    def __init__(self, width: int, heads: int, longest: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = CausalSelfAttention(width, heads, longest)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """Tokens in, the next token's logits out."""

    def __init__(self, words: int = 100, width: int = 64, heads: int = 4, longest: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(Block(width, heads, longest) for _ in range(layers)))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.blocks(self.tokens(ids) + self.positions(positions)))


def main() -> None:
    torch.manual_seed(0)
    model = Decoder().eval()
    ids = torch.randint(100, (2, 16))
    axes = ({0: "batch", 1: torch.export.Dim("sequence", max=128)},)
    with tempfile.TemporaryDirectory() as folder:
        plain, fused = Path(folder) / "plain.onnx", Path(folder) / "fused.onnx"
        torch.onnx.export(
            model, (ids,), plain, dynamo=True, dynamic_shapes=axes, external_data=False, output_names=["logits"]
        )
        _, report = flashonnx.fuse(plain, fused)
        print(report)
        assert report.fused == report.total == len(model.blocks)
        assert all("is_causal" in str(site) for site in report.sites), "the triangle is a word, not a matrix"

        verdict = flashonnx.verify(plain, fused, {"ids": ids.numpy()})
        print(verdict)
        assert verdict.ok
        logits = flashonnx.session(fused).run(["logits"], {"ids": ids[:1, :9].numpy()})[0]
    with torch.inference_mode():
        torch.testing.assert_close(torch.from_numpy(logits), model(ids[:1, :9]), atol=1e-5, rtol=1e-5)


if __name__ == "__main__":
    main()
