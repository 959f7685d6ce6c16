"""A block of a diffusion model's UNet: pixels attend to pixels, then to the text of the prompt.

    python samples/diffusion/run.py

The block is that of Stable Diffusion (`CrossAttnDownBlock2D` of diffusers), tiny and with random weights, so that
nothing is downloaded. Needs `pip install flashonnx[torch,ort] diffusers`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import flashonnx
import numpy as np
import torch
from torch import Tensor, nn

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # on GPUs: float32 in full, as it is compared with the CPU's


class Block(nn.Module):
    """The block, with its inputs by position and without what is for training."""

    def __init__(self) -> None:
        from diffusers.models.unets.unet_2d_blocks import CrossAttnDownBlock2D

        super().__init__()
        self.block = CrossAttnDownBlock2D(
            in_channels=16,
            out_channels=32,
            temb_channels=32,
            num_layers=2,
            resnet_groups=8,
            num_attention_heads=4,
            cross_attention_dim=24,
        )

    def forward(self, image: Tensor, time: Tensor, prompt: Tensor) -> Tensor:
        return self.block(image, temb=time, encoder_hidden_states=prompt)[0]


def main() -> None:
    torch.manual_seed(0)
    model = Block().eval()
    args = torch.randn(2, 16, 8, 8), torch.randn(2, 32), torch.randn(2, 7, 24)
    names = ("image", "time", "prompt")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "block.onnx"
        axes = {"image": {0: "batch"}, "time": {0: "batch"}, "prompt": {0: "batch", 1: "words"}}
        report = flashonnx.export_onnx(model, args, file, dynamic_shapes=axes, output_names=["out"])
        print(report)
        assert report.fused == report.total == 2 * 2, "two layers, each with self- and cross-attention"
        session = flashonnx.session(file)
    for words in (7, 3):
        feeds = dict(zip(names, (*args[:2], args[2][:, :words]), strict=True))
        out = session.run(["out"], {name: tensor.numpy() for name, tensor in feeds.items()})[0]
        with torch.inference_mode():
            expected = model(**feeds).numpy()
        print(f"64 pixels, {words} words: {np.abs(out - expected).max():.1e} from PyTorch")
        np.testing.assert_allclose(out, expected, atol=1e-4)


if __name__ == "__main__":
    main()
