"""Models that optimum exported, fused in their folders, in optimum's own classes: as docs/migration.md says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import flashonnx
import numpy as np
import pytest

torch = pytest.importorskip("torch")
onnxruntime = pytest.importorskip("onnxruntime")
ort_models = pytest.importorskip("optimum.onnxruntime", exc_type=ImportError)
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parent.parent / "docs" / "migration.md"
SMALL = {"vocab_size": 100, "initializer_range": 0.3}
LAYERS = 2


def exported(model: torch.nn.Module, task: str, folder: Path) -> Path:
    """The folder that `optimum-cli export onnx` makes of the model."""
    source, target = folder / "pytorch", folder / "folder"
    model.eval().save_pretrained(source)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "text", ",", *(f"w{i}" for i in range(92))]
    (source / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(str(source / "vocab.txt")).save_pretrained(source)
    command = [
        Path(sys.executable).with_name("optimum-cli"),
        "export",
        "onnx",
        "--model",
        source,
        "--task",
        task,
        target,
    ]
    done = subprocess.run(
        command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return target


def fuse_all(folder: Path) -> None:
    """Each file in its place, every attention."""
    for file in folder.glob("*.onnx"):
        report = flashonnx.fuse(file, file)[1]
        assert report.fused == report.total > 0, report


def options() -> onnxruntime.SessionOptions:
    made = onnxruntime.SessionOptions()
    flashonnx.register(made)
    return made


def test_the_page(
    tmp_path: Path, library_path: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its own block of Python, on a padded batch; the kernel runs once a layer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "intermediate_size": 128}
    bert = transformers.BertModel(transformers.BertConfig(**sizes, **SMALL), add_pooling_layer=False)
    folder = exported(bert, "feature-extraction", tmp_path)
    plain = ort_models.ORTModelForFeatureExtraction.from_pretrained(folder)
    fuse_all(folder)

    (block,) = re.findall(r"^```python\n((?:(?!^```).)*?optimum.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHONNX_LOG", "1")
    names: dict = {}
    exec(block, names)
    assert capfd.readouterr().err.count("flashonnx: cpu for") == LAYERS
    tokens, hidden = names["tokens"], names["model"](**names["tokens"]).last_hidden_state.numpy()
    assert not tokens["attention_mask"].all(), "a row is padded"
    with torch.inference_mode():
        expected = bert(**tokens).last_hidden_state.numpy()
    for other in (plain(**tokens).last_hidden_state.numpy(), expected):
        np.testing.assert_allclose(hidden, other, atol=2e-5)


def decoder(kind: str) -> tuple[torch.nn.Module, str, str, list[list[int]]]:
    """The model, optimum's task and class, and the mask of a batch of two prompts."""
    right, left = [[1, 1, 1, 1], [1, 1, 0, 0]], [[1, 1, 1, 1], [0, 0, 1, 1]]
    if kind == "Llama":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 2}
        heads = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "bos_token_id": 2, "eos_token_id": 3}
        config = transformers.LlamaConfig(**sizes, **heads, **SMALL)
        return transformers.LlamaForCausalLM(config), "text-generation-with-past", "CausalLM", left
    if kind == "T5":
        sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": LAYERS, "num_heads": 4, "vocab_size": 100}
        config = transformers.T5Config(**sizes, decoder_start_token_id=0)
        return transformers.T5ForConditionalGeneration(config), "text2text-generation-with-past", "Seq2SeqLM", right
    sizes = {f"{part}_{name}": n for part in ("encoder", "decoder")
             for name, n in (("layers", LAYERS), ("attention_heads", 4), ("ffn_dim", 128))}  # fmt: skip
    config = transformers.BartConfig(
        **sizes, vocab_size=100, d_model=64, max_position_embeddings=64, init_std=0.3, forced_eos_token_id=None
    )
    return transformers.BartForConditionalGeneration(config), "text2text-generation-with-past", "Seq2SeqLM", right


@pytest.mark.parametrize("kind", ["Llama", "Bart", "T5"])
def test_greedy_text(kind: str, tmp_path: Path, library_path: str) -> None:
    """A decoder with past keys, and encoders with decoders of two branches: the tokens are PyTorch's."""
    torch.manual_seed(0)
    model, task, runner, mask = decoder(kind)
    folder = exported(model, task, tmp_path)
    fuse_all(folder)
    fused = getattr(ort_models, f"ORTModelFor{runner}").from_pretrained(folder, session_options=options())
    prompt = {"input_ids": torch.tensor([[5, 17, 6, 90], [8, 9, 30, 31]]), "attention_mask": torch.tensor(mask)}
    greedy = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "num_beams": 1, "pad_token_id": 0}
    assert torch.equal(fused.generate(**prompt, **greedy), model.generate(**prompt, **greedy))
