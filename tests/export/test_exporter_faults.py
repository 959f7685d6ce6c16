"""What torch's exporter gets wrong around attention, and export_onnx does not: the files run and are right.

Each is a fault of torch 2.13 with onnxscript 0.7.2, shown by the smallest module that has it. The truth is the module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")
flashonnx = pytest.importorskip("flashonnx")
functional = torch.nn.functional

Q, K = (2, 3, 5, 8), (2, 3, 7, 8)
AXES = {0: "batch", 2: "sequence"}


def export(model: Any, args: tuple[Any, ...], path: Path, **options: Any) -> onnx.ModelProto:
    with torch.no_grad():
        flashonnx.export_onnx(model.eval(), args, path, **options)
    return onnx.load(path)


def check(model: Any, path: Path, *inputs: Any, atol: float = 2e-6) -> None:
    session = flashonnx.session(path, ["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    (got,) = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
    with torch.no_grad():
        np.testing.assert_allclose(got, model(*inputs).numpy(), atol=atol)


class Sdpa(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return functional.scaled_dot_product_attention(q, k, v, mask, **self.options)


@pytest.mark.parametrize("opset", [18, 23])
def test_rows_of_a_bool_mask_without_a_key(opset: int, tmp_path: Path) -> None:
    """Below opset 23 torch writes the lowest number for False, and such a row becomes the mean of V; it is 0."""
    q, k, v = torch.randn(Q), torch.randn(K), torch.randn(K)
    mask = torch.rand(2, 1, 5, 7) < 0.6
    mask[0, :, 2] = False
    model, path = Sdpa(), tmp_path / "model.onnx"
    export(model, (q, k, v, mask), path, opset=opset)
    check(model, path, q, k, v, mask)
    assert (model(q, k, v, mask)[0, :, 2] == 0).all()


@pytest.mark.parametrize("opset", [18, 23])
def test_rows_of_minus_infinity(opset: int, tmp_path: Path) -> None:
    """NaN below opset 23."""
    q, k, v = torch.randn(Q), torch.randn(K), torch.randn(K)
    mask = torch.zeros(5, 7)
    mask[1], mask[3, 2:] = -torch.inf, -torch.inf
    model, path = Sdpa(), tmp_path / "model.onnx"
    export(model, (q, k, v, mask), path, opset=opset)
    check(model, path, q, k, v, mask)


def test_a_mask_of_keys_alone(tmp_path: Path) -> None:
    """ONNX Runtime refuses torch's Attention of opset 23 with a mask of one row."""
    q, k, v = torch.randn(Q), torch.randn(K), torch.randn(K)
    mask = torch.arange(7) < torch.tensor([7, 4])[:, None, None, None]
    model, path = Sdpa(), tmp_path / "model.onnx"
    export(model, (q, k, v, mask), path, opset=23)
    check(model, path, q, k, v, mask)


def test_dropout_with_a_bool_mask(tmp_path: Path) -> None:
    """At opset 23 torch adds the bools to the scores, which is no valid model."""
    q, k, v, mask = torch.randn(Q), torch.randn(K), torch.randn(K), torch.rand(2, 1, 5, 7) < 0.6
    path = tmp_path / "model.onnx"
    with pytest.warns(UserWarning, match="dropout_p=0.1; it is left out"):
        export(Sdpa(dropout_p=0.1), (q, k, v, mask), path, opset=23)
    check(Sdpa(), path, q, k, v, mask)


def test_equal_heads_with_enable_gqa(tmp_path: Path) -> None:
    """An AssertionError of torch at opset 23."""
    q, k, v = torch.randn(Q), torch.randn(K), torch.randn(K)
    model, path = Sdpa(enable_gqa=True), tmp_path / "model.onnx"
    export(model, (q, k, v), path, opset=23)
    check(model, path, q, k, v)


class Rotary(torch.nn.Module):
    """Attention of rotated queries and keys, as transformers writes it, with positions of one row for all entries."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 100.0 ** -(torch.arange(0, 8, 2) / 8))

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        positions = torch.arange(q.shape[2])[None, :]
        angles = (self.frequencies[None, :, None] @ positions[:, None, :].float()).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        q, k = (x * cos + self.turned(x) * sin for x in (q, k))
        return functional.scaled_dot_product_attention(q, k, v)

    @staticmethod
    def turned(x: Any) -> Any:
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def test_rotary_caches_of_batch_one(tmp_path: Path) -> None:
    """At opset 23 torch makes RotaryEmbedding with caches of batch 1, which ONNX Runtime refuses for other batches."""
    model, path = Rotary(), tmp_path / "model.onnx"
    inputs = tuple(torch.randn(2, 3, 6, 8) for _ in range(3))
    made = export(model, inputs, path, opset=23, dynamic_shapes=(AXES, AXES, AXES))
    assert sum(node.op_type == "RotaryEmbedding" for node in made.graph.node) == 2
    for batch, sequence in ((2, 6), (3, 9), (1, 4)):
        check(model, path, *(torch.randn(batch, 3, sequence, 8) for _ in range(3)))


class Upcast(torch.nn.Module):
    """A softmax in float32 of float16 scores."""

    def forward(self, scores: Any) -> Any:
        return functional.softmax(scores, dim=-1, dtype=torch.float32)


def test_softmax_is_computed_in_the_type_it_asks_for(tmp_path: Path) -> None:
    """Torch's exporter casts what comes out of a softmax in float16."""
    scores, path = torch.randn(2, 64, 64, dtype=torch.float16), tmp_path / "model.onnx"
    made = export(Upcast(), (scores,), path)
    assert [node.op_type for node in made.graph.node] == ["Cast", "Softmax"]
    check(Upcast(), path, scores, atol=1e-6)


class UpcastAttention(torch.nn.Module):
    """Eager attention of transformers."""

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        weights = functional.softmax(q @ k.transpose(-1, -2) * 0.3, dim=-1, dtype=torch.float32).to(q.dtype)
        return weights @ v


def test_attention_with_a_softmax_in_float32_is_fused(tmp_path: Path) -> None:
    inputs = tuple(torch.randn(2, 3, 16, 8, dtype=torch.float16) for _ in range(3))
    model, path = UpcastAttention(), tmp_path / "model.onnx"
    made = export(model, inputs, path)
    assert [node.op_type for node in made.graph.node if node.domain == "flashonnx"] == ["FlashAttention"]
    check(model, path, *inputs, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("opset", [23, 24])
def test_llama_without_position_ids(opset: int, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    model, path = transformers.LlamaModel(config).eval(), tmp_path / "model.onnx"
    ids, mask = torch.randint(3, 99, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    axes = {0: "batch", 1: "sequence"}
    export(model, (ids, mask), path, opset=opset, dynamic_shapes=(axes, axes))
    for batch, sequence in ((2, 7), (3, 11)):
        ids, mask = torch.randint(3, 99, (batch, sequence)), torch.ones(batch, sequence, dtype=torch.int64)
        session = flashonnx.session(path, ["CPUExecutionProvider"])
        (got, *_) = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        with torch.no_grad():
            np.testing.assert_allclose(got, model(ids, attention_mask=mask)[0].numpy(), atol=1e-5)


class Normalised(torch.nn.Module):
    """As RMS norms of transformers, whose rows of padding may be zeros; 1.000004 is a weight."""

    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon

    def forward(self, x: Any) -> Any:
        variance = (x * 1.000004).pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.epsilon)


@pytest.mark.parametrize("opset", [18, 20, 23])
@pytest.mark.parametrize("epsilon", [1e-8, 1e-12])
def test_a_small_epsilon(epsilon: float, opset: int, tmp_path: Path) -> None:
    """The optimizer of onnxscript takes away what it adds: 0 / 0 is NaN then."""
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)) * 1e-4
    x[1] = 0
    path = tmp_path / "model.onnx"
    export(Normalised(epsilon), (x,), path, opset=opset, dynamic_shapes={"x": {0: "rows"}})
    check(Normalised(epsilon), path, x, atol=1e-6)


class Scalars(torch.nn.Module):
    """A norm of all numbers, which has no dimensions; and an epsilon that is a tensor."""

    def forward(self, x: Any) -> Any:
        norm = x.pow(2).sum() + 1e-9
        return torch.where(x.sum() > 0, x / norm.sqrt(), (x + torch.tensor(1e-9)) / norm)


def test_small_numbers_beside_scalars(tmp_path: Path) -> None:
    x, path = torch.zeros(3, 8), tmp_path / "model.onnx"
    export(Scalars(), (x,), path)
    check(Scalars(), path, x)
    check(Scalars(), path, torch.full((3, 8), 1e-6))


# A small number that the graph works out of others.
WORKED_OUT = {
    "alpha": lambda x: torch.add(x, torch.ones(()), alpha=1e-9),
    "alpha of a number": lambda x: torch.add(x, 1, alpha=1e-9),
    "alpha of a vector": lambda x: torch.add(x, torch.ones(x.shape[-1:]), alpha=1e-9),
    "alpha, subtracted": lambda x: torch.sub(x, torch.ones(()), alpha=-1e-9),
    "a product": lambda x: x + torch.ones(()) * 1e-5 * torch.tensor(1e-4),
    "a quotient and a root": lambda x: x + torch.sqrt(torch.ones(()) / 1e18),
    "of double": lambda x: x + (torch.ones((), dtype=torch.float64) * 1e-9).float(),
}


class WorkedOut(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.add = WORKED_OUT[name]

    def forward(self, x: Any) -> Any:
        return 1e-9 / self.add(x), 1e-9 / self.add(x.sum())


@pytest.mark.parametrize("name", WORKED_OUT)
def test_small_numbers_that_are_worked_out(name: str, tmp_path: Path) -> None:
    """Beside a tensor and beside a scalar."""
    path, model = tmp_path / "model.onnx", WorkedOut(name)
    export(model, (torch.zeros(3, 8),), path, dynamic_shapes={"x": {0: "rows"}})
    session = flashonnx.session(path, ["CPUExecutionProvider"])
    for x in (torch.zeros(3, 8), torch.full((2, 8), 1e-9)):
        for got, want in zip(session.run(None, {"x": x.numpy()}), model(x), strict=True):
            np.testing.assert_allclose(got, want.numpy(), atol=1e-4)


def test_helium_at_zero(tmp_path: Path) -> None:
    """A token whose embedding is zero, of which transformers makes zeros."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 8}
    config = transformers.HeliumConfig(num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, **small)
    config.use_cache, config.rms_norm_eps = False, 1e-8
    model = transformers.HeliumForCausalLM(config).eval()
    ids = torch.tensor([[0, 0, 5, 17]])
    with torch.no_grad():
        model.model.embed_tokens.weight[0] = 0
        flashonnx.export_onnx(model, (ids,), tmp_path / "model.onnx", dynamic_shapes={"input_ids": {1: "sequence"}})
        want = model(ids).logits.numpy()
    session = flashonnx.session(tmp_path / "model.onnx", ["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"input_ids": ids.numpy()})[0], want, atol=2e-5)
