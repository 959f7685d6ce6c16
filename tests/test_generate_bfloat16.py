"""Decoders in bfloat16: run on CUDA, where ONNX Runtime can, and said beforehand to run nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
ort = pytest.importorskip("onnxruntime")
flashonnx = pytest.importorskip("flashonnx")
from flashonnx.generate import Generator  # noqa: E402
from test_generate import NEW, PROMPTS, SIZES, made  # noqa: E402

NOTE = "weights are bfloat16, which ONNX Runtime computes with on CUDA alone"


@pytest.mark.parametrize("kind", ["static", "paged"])
def test_a_cpu_is_refused(kind: str, tmp_path: Path, library_path: str) -> None:
    """The report of the export says so already; with dtype=float32 there is nothing to say, and it runs."""
    path, model = tmp_path / "decoder.onnx", made("llama")
    report = flashonnx.export_onnx(model.bfloat16(), (), path, kv_cache=kind)
    assert [note for note in report.notes if note.startswith(NOTE)] and f"note: {NOTE}" in str(report)
    for given in (path, path.read_bytes()):
        with pytest.raises(
            ValueError, match=r"in bfloat16 runs on CUDA alone, .* use device='cuda', or load the model"
        ):
            Generator(given, device="cpu")
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        with pytest.raises(Exception, match="Could not find an implementation for"):  # so it is, and why it is refused
            flashonnx.session(path, ["CPUExecutionProvider"])
    report = flashonnx.export_onnx(model.float(), (), path, kv_cache=kind)
    assert "bfloat16" not in str(report)
    assert len(Generator(path, device="cpu", capacity=16)([[1, 2]], 3).tokens[0]) == 3


def gaps(model: Any, prompt: list[int], tokens: list[int]) -> Any:
    """How far below the best each token's logit is, in float32 with the weights of bfloat16."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :]
    return logits.amax(-1) - logits[torch.arange(len(tokens)), torch.tensor(tokens)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("kind", ["static", "paged"])
def test_on_cuda(kind: str, name: str, tmp_path: Path, library_path: str) -> None:
    """Its tokens are as near the best as those of PyTorch in bfloat16."""
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA")
    path, model = tmp_path / "decoder.onnx", made(name).bfloat16()
    flashonnx.export_onnx(model, (), path, kv_cache=kind)
    theirs = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        how = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        theirs.append(out[0, len(prompt) :].tolist())
    exact = model.float()
    most = max(float(gaps(exact, *pair).max()) for pair in zip(PROMPTS, theirs, strict=True))
    for graph in (True, False):
        generator = Generator(path, device="cuda", cuda_graph=graph, **SIZES[0])
        for prompts in (PROMPTS, PROMPTS[::-1]):
            tokens = generator(prompts, NEW).tokens
            for pair in zip(prompts, tokens, strict=True):
                assert float(gaps(exact, *pair).max()) <= 2 * most + 0.25
        drawn = generator(PROMPTS, NEW, temperature=0.8, seed=3).tokens
        assert drawn == generator(PROMPTS, NEW, temperature=0.8, seed=3).tokens != tokens
