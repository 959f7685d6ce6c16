"""`flashonnx export`: functions and folders of transformers; the exported file against PyTorch."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from cli_driver import Command, flashonnx_command

pytest.importorskip("onnxruntime")
torch = pytest.importorskip("torch")
__all__ = ["flashonnx_command"]

MODELS = """
import torch


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return torch.nn.functional.dropout(y.transpose(1, 2).flatten(2), 0.5, self.training)


def with_axes():
    axes = {0: "batch", 1: "sequence"}
    return {"model": Attention(), "args": (torch.ones(2, 5, 32),), "dynamic_shapes": (axes,)}


def pair():
    return Attention(), torch.ones(2, 5, 32)


def named():
    return Attention(), {"x": torch.ones(2, 5, 32)}


def number():
    return 3


def not_a_module():
    return "a model", ()
"""


@pytest.fixture
def models(flashonnx_command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """In a folder with that module, which each test imports anew."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "models_to_export", raising=False)
    Path("models_to_export.py").write_text(MODELS)
    return flashonnx_command


def test_a_function(models: Command) -> None:
    import flashonnx

    said = models("export", "models_to_export:with_axes", "-o", "out.onnx", "--report", "json", "--strict")
    assert "1 of 1 attentions fused" in said and "every axis" not in said
    assert json.loads(Path("out.report.json").read_text())["fused"] == 1
    x = torch.randn(3, 7, 32)
    module = importlib.import_module("models_to_export")
    with torch.no_grad():
        expected = module.Attention().eval()(x).numpy()
    y = flashonnx.session("out.onnx").run(None, {"x": x.numpy()})[0]
    np.testing.assert_allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize("function", ["pair", "named"])
def test_what_functions_may_return(function: str, models: Command) -> None:
    done = models.json(
        "export", f"models_to_export.py:{function}", "-o", "out.onnx", "--opset", "21", "--dtype", "float16"
    )
    assert (done["fused"], done["output"]) == (1, "out.onnx")
    model = onnx.load("out.onnx")
    assert model.graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    assert next(opset.version for opset in model.opset_import if not opset.domain) == 21
    (note,) = done["notes"]
    assert "every axis is as long as the example's, such as (2, 5, 32) of 'x'" in note


def test_projections_may_stay_apart(models: Command) -> None:
    """What the exporter wrote as one product stays so; what it wrote as three is not joined."""
    import flashonnx

    Path("three.py").write_text(
        "import torch\n\n\nclass Three(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.parts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))\n\n"
        "    def forward(self, x):\n"
        "        q, k, v = (part(x).unflatten(2, (4, 8)).transpose(1, 2) for part in self.parts)\n"
        "        return torch.nn.functional.scaled_dot_product_attention(q, k, v)\n\n\n"
        "def made():\n    torch.manual_seed(0)\n    return Three(), torch.ones(2, 5, 32)\n"
    )
    answers = []
    for option, products in (("--join-projections", 1), ("--no-join-projections", 3)):
        models("export", "three.py:made", "-o", "out.onnx", option, "--no-portable")
        kinds = [node.op_type for node in onnx.load("out.onnx").graph.node]
        assert kinds.count("MatMul") + kinds.count("Gemm") == products, kinds
        answers.append(flashonnx.session("out.onnx").run(None, {"x": np.ones((2, 5, 32), np.float32)})[0])
    np.testing.assert_allclose(*answers, atol=1e-6)


def test_errors(models: Command, tmp_path: Path) -> None:
    for source, expected in (
        ("models_to_export:number", "is expected to return (model, args)"),
        ("models_to_export:not_a_module", "expected to be a torch.nn.Module, got str"),
        ("models_to_export:nothing", "has no 'nothing'"),
        ("models_to_export:MODELS", "has no 'MODELS'"),
        ("missing_module:f", "there is no module 'missing_module'"),
        ("missing.py:f", "there is no file 'missing.py'"),
        ("models_to_export", "expected as hf:FOLDER or module:function"),
        (f"hf:{tmp_path}", "has none"),
        (str(tmp_path), f"in that folder write hf:{tmp_path}"),
    ):
        said = models("export", source, "-o", "out.onnx", code=2)
        assert expected in said and said.startswith("flashonnx: ") and said.count("\n") == 1, said
    assert not Path("out.onnx").exists()
    assert "--size are for hf:" in models(
        "export", "models_to_export:pair", "-o", "x.onnx", "--size", "batch=2", code=2
    )


def small(name: str) -> Any:
    """A model of transformers with few, narrow layers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shared = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    if name == "bert":
        return transformers.BertModel(transformers.BertConfig(vocab_size=50, **shared))
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, num_key_value_heads=1, **shared))
    if name == "vit":
        return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=16, patch_size=8, **shared))
    if name == "ast":
        sizes = {"patch_size": 8, "time_stride": 8, "frequency_stride": 8, "max_length": 32, "num_mel_bins": 16}
        return transformers.ASTModel(transformers.ASTConfig(**sizes, **shared))
    if name == "mixtral":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 1}
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=50, **experts, **shared))
    config = transformers.T5Config(vocab_size=50, d_model=32, num_layers=1, num_heads=2, d_kv=16, d_ff=64)
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("name", ["bert", pytest.param("llama", marks=pytest.mark.slow),
                                  pytest.param("vit", marks=pytest.mark.slow),
                                  pytest.param("ast", marks=pytest.mark.slow),
                                  pytest.param("mixtral", marks=pytest.mark.slow),
                                  pytest.param("t5", marks=pytest.mark.slow)])  # fmt: skip
def test_folders_of_transformers(name: str, flashonnx_command: Command) -> None:
    """Weights are those of the folder; inputs get the names and axes of their kind."""
    import flashonnx

    model = small(name).eval()
    model.save_pretrained("folder")
    done = flashonnx_command.json("export", "hf:folder", "-o", "out.onnx", "--size", "sequence=9")
    assert done["fused"] == done["total"] == (3 if name == "t5" else 1)
    session = flashonnx.session("out.onnx")
    random = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for value in session.get_inputs():
        sizes = {"batch": 3, "sequence": 7, "decoder_sequence": 5}
        shape = [sizes[size] if isinstance(size, str) else size for size in value.shape]
        feeds[value.name] = (
            np.ones(shape, np.int64) if "mask" in value.name
            else np.zeros(shape, np.int64) if "type" in value.name
            else random.integers(0, 50, shape) if value.type == "tensor(int64)"
            else random.standard_normal(shape).astype(np.float32)
        )  # fmt: skip
    with torch.no_grad():
        expected = model(**{key: torch.from_numpy(x) for key, x in feeds.items()}, return_dict=True)[0].numpy()
    y = session.run(None, feeds)[0]
    np.testing.assert_allclose(y, expected, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", None])
def test_types_of_folders(dtype: str | None, flashonnx_command: Command) -> None:
    """Weights are converted, or as the folder has them; inverse frequencies stay float32, which angles far on need."""
    model = small("llama").eval().bfloat16()
    model.save_pretrained("folder")
    more = () if dtype is None else ("--dtype", dtype)
    done = flashonnx_command.json("export", "hf:folder", "-o", "out.onnx", "--kv-cache", "static", *more)
    exported = onnx.load("out.onnx")
    (cache,) = (value for value in exported.graph.input if value.name.endswith(".key"))
    kinds = {"float16": onnx.TensorProto.FLOAT16, "float32": onnx.TensorProto.FLOAT}
    assert cache.type.tensor_type.elem_type == kinds.get(str(dtype), onnx.TensorProto.BFLOAT16)
    assert ("bfloat16" in " ".join(done["notes"])) == (dtype in (None, "bfloat16"))
    right = 10000.0 ** -(np.arange(8) / 8)
    arrays = [onnx.numpy_helper.to_array(tensor) for tensor in exported.graph.initializer]
    assert any(array.size == 8 and np.allclose(array.ravel(), right, rtol=1e-6, atol=0) for array in arrays)


@pytest.mark.slow
def test_caches(flashonnx_command: Command) -> None:
    """A decoder's folder with its caches as inputs and outputs."""
    small("llama").eval().save_pretrained("folder")
    done = flashonnx_command.json("export", "hf:folder", "-o", "out.onnx", "--kv-cache", "static")
    assert done["fused"] == done["total"] == 1
    inputs = [value.name for value in onnx.load("out.onnx").graph.input]
    assert inputs == ["input_ids", "cache_lengths", "past_key_values.0.key", "past_key_values.0.value"]
