"""A vision transformer: attention without a mask over the patches of an image, in float32.

    python samples/vit/run.py

The model is tiny and has random weights, so that nothing is downloaded. Needs
`pip install flashonnx[torch,ort] transformers`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import flashonnx
import numpy as np
import torch
import transformers

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # on GPUs: float32 in full, as it is compared with the CPU's


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10, initializer_range=0.3)
    model = transformers.ViTForImageClassification(config).eval()
    images = torch.randn(3, 3, 32, 32)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vit.onnx"
        report = flashonnx.export_onnx(
            model,
            (),
            file,
            kwargs={"pixel_values": images},
            dynamic_shapes={"pixel_values": {0: "batch"}},
            output_names=["logits"],
        )
        print(report)
        assert report.fused == report.total == config.num_hidden_layers
        session = flashonnx.session(file)
    for batch in (3, 1):
        logits = session.run(["logits"], {"pixel_values": images[:batch].numpy()})[0]
        with torch.inference_mode():
            expected = model(pixel_values=images[:batch]).logits.numpy()
        print(f"{batch} images of {(32 // 8) ** 2 + 1} tokens: {np.abs(logits - expected).max():.1e} from PyTorch")
        np.testing.assert_allclose(logits, expected, atol=1e-4)


if __name__ == "__main__":
    main()
