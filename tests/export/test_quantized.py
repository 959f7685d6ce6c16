"""What tools that quantize weights make of exports: they find all of them, and a sentence has its own numbers still."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
flashonnx = pytest.importorskip("flashonnx")
nbits = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")

SMALL = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
PROMPTS = ([5, 17, 33, 60, 2, 41, 7], [11, 8, 23])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **SMALL)
    model = transformers.LlamaForCausalLM(config).eval()
    path = tmp_path_factory.mktemp("quantized") / "model.onnx"
    flashonnx.export_onnx(model, (), path, kv_cache="static")
    return model, path


def logits(path: Path, prompts: list[list[int]]) -> np.ndarray:
    """Of prompts that are padded on the right, with empty caches."""
    session = flashonnx.session(path, ["CPUExecutionProvider"])
    longest = max(map(len, prompts))
    ids = np.array([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    shape = (len(prompts), 2, 16, 16)
    names = [value.name for value in session.get_inputs()][2:]
    caches = {name: np.zeros(shape, np.float32) for name in names}
    return session.run(None, {"input_ids": ids, "cache_lengths": np.zeros(len(prompts), np.int64), **caches})[0]


def test_joined_projections_are_weights(exported: Any) -> None:
    """Q, K and V have one weight each layer, with the numbers of the three; nothing joins them at run time."""
    model, path = exported
    graph = onnx.load(path).graph
    weights = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    producers = {name: node for node in graph.node for name in node.output}
    attentions = [node for node in graph.node if node.op_type == "FlashAttentionKVCache"]
    assert len(attentions) == 2
    for node, layer in zip(attentions, model.model.layers, strict=True):
        product = producers[node.input[0]]
        parts = [getattr(layer.self_attn, f"{x}_proj").weight.detach().numpy().T for x in "qkv"]
        assert product.op_type == "MatMul"
        np.testing.assert_array_equal(weights[product.input[1]], np.concatenate(parts, axis=1))


def test_weights_of_4_bits(exported: Any, tmp_path: Path) -> None:
    """MatMulNBits, of every weight: a sentence gives the same in a batch as by itself."""
    _, path = exported
    quantizer = nbits.MatMulNBitsQuantizer(onnx.load(path), block_size=32, is_symmetric=True)
    quantizer.process()
    small = tmp_path / "small.onnx"
    quantizer.model.save_model_to_file(str(small))
    graph = onnx.load(small).graph
    constant = {tensor.name for tensor in graph.initializer}
    left = [node.name for node in graph.node if node.op_type == "MatMul" and set(node.input) & constant]
    assert not left and sum(node.op_type == "MatMulNBits" for node in graph.node) == 5 * 2 + 1
    together = logits(small, [*PROMPTS])
    for got, prompt in zip(together, PROMPTS, strict=True):
        np.testing.assert_allclose(got[: len(prompt)], logits(small, [prompt])[0], atol=1e-5)
        assert np.abs(got[: len(prompt)] - logits(path, [prompt])[0]).max() < 0.2
