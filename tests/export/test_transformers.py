"""Tiny models of transformers, exported by torch without our help, then fused: every attention, small masks."""

from __future__ import annotations

import io
import logging
import warnings
from typing import Any

import numpy as np
import onnx
import pytest
from models import attributes, fuse_and_check, nodes, shape_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {**SIZES, "vocab_size": 99, "max_position_embeddings": 64}
GROUPED = {**TEXT, "num_key_value_heads": 2}
IMAGE = {**SIZES, "image_size": 16, "patch_size": 4}
# Class, configuration, and what every fused node has besides head counts and the scale.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bert": ("Bert", TEXT, {}),
    "roberta": ("Roberta", {**TEXT, "pad_token_id": 1}, {}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "n_positions": 64}, {"is_causal": 1}),
    "llama": ("Llama", GROUPED, {"is_causal": 1}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": 4}, {"is_causal": 1, "left_window_size": 3}),
    "vit": ("ViT", IMAGE, {}),
    "clip_text": ("CLIPText", TEXT, {"is_causal": 1}),
}


def export(name: str, attention: str, opset: int, dynamo: bool) -> onnx.ModelProto:
    prefix, config, _ = MODELS[name]
    torch.manual_seed(0)
    kind = getattr(transformers, f"{prefix}Model")
    config = getattr(transformers, f"{prefix}Config")(**config, attn_implementation=attention)
    model = kind(config).eval()
    is_image = name == "vit"

    class Last(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any, attention_mask: Any = None) -> Any:
            if is_image:
                return self.model(x).last_hidden_state
            cache = {} if name in ("bert", "roberta", "clip_text") else {"use_cache": False}
            return self.model(input_ids=x, attention_mask=attention_mask, **cache).last_hidden_state

    names, sizes = ["x"], {0: "b"}
    arguments = (torch.randn(2, 3, 16, 16),)
    if not is_image:
        names, sizes = ["x", "attention_mask"], {0: "b", 1: "s"}
        arguments = (torch.randint(2, 99, (2, 7)), torch.ones(2, 7, dtype=torch.long))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            if not dynamo:
                file = io.BytesIO()
                axes = {name: dict(sizes) for name in names}
                torch.onnx.export(
                    Last().eval(), arguments, file, dynamo=False, opset_version=opset, input_names=names,
                    output_names=["y"], dynamic_axes=axes,
                )  # fmt: skip
                return onnx.load_model_from_string(file.getvalue())
            dims = {axis: torch.export.Dim(size) for axis, size in sizes.items()}
            dynamic = {name: dict(dims) for name in names}
            program = torch.onnx.export(
                Last().eval(), arguments, dynamo=True, opset_version=opset, dynamic_shapes=dynamic, verbose=False
            )
        finally:
            logging.disable(logging.NOTSET)
    return program.model_proto


def check(name: str, attention: str, opset: int, *, dynamo: bool = True) -> None:
    """All layers fused; answers at other sizes than the example, with interleaved padding and a row of nothing else."""
    model = export(name, attention, opset, dynamo)
    fused, report = fuse_and_check(model, {"b": 2, "s": 7}, {"b": 3, "s": 11}, fused=2)
    padding = np.array([[0, 0, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], np.int64)
    if name != "vit":
        fuse_and_check(model, {"b": 3, "s": 5}, fused=2, attention_mask=padding)
    for node in nodes(fused):
        found = attributes(node)
        for key, value in MODELS[name][2].items():
            assert found[key] == value
        mask = node.input[3] if len(node.input) > 3 else ""
        if name == "vit":
            assert not mask  # what transformers makes is true everywhere
        else:
            assert shape_of(fused, mask) == ["b", 1, 1, "s"]
    assert "2 of 2" in str(report)


# eager and sdpa; both below opset 23 and from it on
@pytest.mark.parametrize(("attention", "opset"), [("eager", 18), ("sdpa", 18), ("sdpa", 23)])
def test_bert(attention: str, opset: int) -> None:
    check("bert", attention, opset)


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "opset"), [("eager", 20), ("eager", 23), ("sdpa", 20)])
def test_bert_otherwise(attention: str, opset: int) -> None:
    check("bert", attention, opset)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "bert"])
def test_family(name: str, attention: str) -> None:
    check(name, attention, 18)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "name", [name if name in ("bert", "llama") else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_torchscript(name: str, attention: str) -> None:
    """The older exporter writes no shapes and computes scales and masks from Shape nodes."""
    check(name, attention, 17, dynamo=False)
