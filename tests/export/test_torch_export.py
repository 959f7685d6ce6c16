"""export_onnx: PyTorch modules in, one fused node an attention out, with PyTorch's own results.

The truth is the module in float64, the plain computation the module as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from compare import assert_close

torch = pytest.importorskip("torch")
functional = torch.nn.functional
flashonnx = pytest.importorskip("flashonnx")

BATCH_SEQUENCE = {0: "batch", 1: "sequence"}


class Sdpa(torch.nn.Module):
    """scaled_dot_product_attention with fixed options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.eval()

    def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return functional.scaled_dot_product_attention(q, k, v, mask, **self.options)


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to call scaled_dot_product_attention: the shapes of Q, K and V, options, and a mask."""

    id: str
    q: tuple[int, ...] = (2, 3, 5, 8)
    k: tuple[int, ...] = (2, 3, 7, 8)
    v: tuple[int, ...] = (2, 3, 7, 8)
    mask: Callable[[], Any] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: Any = torch.float32


def bools(*shape: int) -> Callable[[], Any]:
    return lambda: torch.rand(shape) < 0.6


def floats(*shape: int) -> Callable[[], Any]:
    return lambda: torch.randn(shape)


def dead_row() -> Any:
    mask = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    mask[1, :, 2] = False
    return mask


VARIANTS = (
    Variant("plain", v=(2, 3, 7, 6)),
    Variant("causal", options={"is_causal": True}),
    Variant("causal-more-queries", q=(2, 3, 9, 8), options={"is_causal": True}),
    Variant("bool-mask", mask=bools(2, 1, 5, 7)),
    Variant("bool-mask-dead-row", mask=dead_row),
    Variant("float-mask-dead-row", mask=lambda: torch.where(dead_row(), 0.0, -torch.inf)),
    Variant("key-mask", mask=lambda: torch.arange(7) < torch.tensor([7, 3])[:, None, None, None]),
    Variant("head-bias", mask=floats(3, 5, 7)),
    Variant("rank-2-mask", mask=bools(5, 7)),
    Variant("bool-mask-one-wide", mask=bools(2, 1, 5, 1)),
    Variant("float-mask-one-wide", mask=floats(3, 5, 1)),
    Variant("scale", options={"scale": 0.3}),
    Variant("scale-zero", options={"scale": 0.0}),
    Variant("scale-negative", options={"scale": -0.5}),
    Variant("grouped", q=(2, 6, 5, 8), k=(2, 2, 7, 8), v=(2, 2, 7, 8), options={"enable_gqa": True}),
    Variant("grouped-equal", options={"enable_gqa": True}),
    Variant("rank-2", q=(5, 8), k=(7, 8), v=(7, 8)),
    Variant("rank-3", q=(4, 5, 8), k=(4, 7, 8), v=(4, 7, 8), mask=bools(4, 5, 7)),
    Variant("rank-5", q=(2, 3, 4, 5, 8), k=(2, 3, 4, 7, 8), v=(2, 3, 4, 7, 6)),
    Variant("rank-5-mask", q=(2, 3, 4, 5, 8), k=(2, 3, 4, 7, 8), v=(2, 3, 4, 7, 8), mask=floats(3, 1, 1, 7)),
    Variant("rank-5-grouped", q=(2, 3, 4, 5, 8), k=(2, 3, 2, 7, 8), v=(2, 3, 2, 7, 8), options={"enable_gqa": True}),
    Variant("broadcast-batch", k=(1, 3, 7, 8), v=(2, 1, 7, 8)),
    Variant("broadcast-queries", q=(1, 3, 5, 8)),
    Variant("float16", mask=bools(2, 1, 5, 7), dtype=torch.float16),
)


def widened(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def export(model: Any, args: tuple[Any, ...], path: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return flashonnx.export_onnx(model, args, path, **options)


def check(model: Any, path: Path, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """Runs the file and compares every output with the module's."""
    kwargs = kwargs or {}
    with torch.no_grad():
        naive = leaves(model(*args, **kwargs))
        wide = {name: widened(value) for name, value in kwargs.items()}
        truth = leaves(copy.deepcopy(model).double()(*map(widened, args), **wide))
    session = flashonnx.session(path, ["CPUExecutionProvider"])
    given = [*args, *kwargs.values()]
    names = [i.name for i in session.get_inputs()]
    outputs = session.run(None, {n: x.numpy() for n, x in zip(names, given, strict=True)})
    assert len(outputs) == len(truth)
    for i, (out, ref, plain) in enumerate(zip(outputs, truth, naive, strict=True)):
        assert_close(f"output {i}", out, ref.numpy(), plain.numpy())


def leaves(result: Any) -> list[Any]:
    if isinstance(result, torch.Tensor):
        return [result]
    values = result.values() if hasattr(result, "values") else result
    return [x for x in values if isinstance(x, torch.Tensor)]


def attention_nodes(path: Path) -> list[onnx.NodeProto]:
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    return [node for node in model.graph.node if node.domain == "flashonnx"]


def operators(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(path).graph.node}


class AllVariants(torch.nn.Module):
    """Every variant, each on inputs of its own: one export takes as long as the next."""

    def forward(self, problems: list[tuple[Any, ...]]) -> list[Any]:
        return [Sdpa(**variant.options)(*inputs) for variant, inputs in zip(VARIANTS, problems, strict=True)]


@dataclasses.dataclass(frozen=True)
class Exported:
    """The file of all variants, what went in and what came out."""

    report: Any
    path: Path
    problems: list[tuple[Any, ...]]
    outputs: list[np.ndarray]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    torch.manual_seed(0)
    problems = []
    for variant in VARIANTS:
        inputs = [torch.randn(shape).to(variant.dtype) for shape in (variant.q, variant.k, variant.v)]
        problems.append((*inputs, *([variant.mask()] if variant.mask is not None else [])))
    path = tmp_path_factory.mktemp("variants") / "model.onnx"
    report = export(AllVariants().eval(), (problems,), path)
    session = flashonnx.session(path, ["CPUExecutionProvider"])
    given = [tensor.numpy() for inputs in problems for tensor in inputs]
    feeds = {i.name: array for i, array in zip(session.get_inputs(), given, strict=True)}
    return Exported(report, path, problems, session.run(None, feeds))


@pytest.mark.parametrize("index", range(len(VARIANTS)), ids=[v.id for v in VARIANTS])
def test_sdpa(index: int, exported: Exported) -> None:
    inputs = exported.problems[index]
    model = Sdpa(**VARIANTS[index].options)
    truth, naive = model(*map(widened, inputs)), model(*inputs)
    assert_close("Y", exported.outputs[index], truth.numpy(), naive.numpy())


def test_sdpa_is_one_node_each(exported: Exported) -> None:
    number = len(VARIANTS)
    assert (exported.report.fused, exported.report.total) == (number, number), str(exported.report)
    assert {site.kind for site in exported.report.sites} == {"scaled_dot_product_attention"}
    assert len(attention_nodes(exported.path)) == number
    assert "Softmax" not in operators(exported.path)


@pytest.mark.parametrize("opset", [18, 23, 25])
def test_opset(opset: int, tmp_path: Path) -> None:
    args = (torch.randn(1, 2, 4, 8),) * 3
    report = export(Sdpa(is_causal=True), args, tmp_path / "model.onnx", opset=opset)
    assert report.fused == 1
    versions = {entry.domain: entry.version for entry in onnx.load(tmp_path / "model.onnx").opset_import}
    assert (versions[""], versions["flashonnx"]) == (opset, 1)
    check(Sdpa(is_causal=True), tmp_path / "model.onnx", args)


def test_dropout_is_left_out_and_said(tmp_path: Path) -> None:
    args = (torch.randn(1, 2, 4, 8),) * 3
    with pytest.warns(UserWarning, match=r"dropout_p=0\.5"):
        report = flashonnx.export_onnx(Sdpa(dropout_p=0.5), args, tmp_path / "model.onnx")
    assert report.fused == 1
    check(Sdpa(), tmp_path / "model.onnx", args)


def test_float64_stays_as_torch_exports_it(tmp_path: Path) -> None:
    args = (torch.randn(1, 2, 4, 8, dtype=torch.float64),) * 3
    report = export(Sdpa(), args, tmp_path / "model.onnx")
    assert (report.fused, report.total) == (0, 1)
    assert "float64" in str(report) or "double" in str(report)
    assert not attention_nodes(tmp_path / "model.onnx")
    ours = flashonnx.session(tmp_path / "model.onnx", ["CPUExecutionProvider"])
    out = ours.run(None, {i.name: x.numpy() for i, x in zip(ours.get_inputs(), args, strict=True)})[0]
    np.testing.assert_allclose(out, Sdpa()(*args).numpy(), rtol=0, atol=1e-14)


class MergedHeads(torch.nn.Module):
    """Attention over merged batch and heads by bmm, as many models write it, with a bias that is expanded to them."""

    def forward(self, q: Any, k: Any, v: Any, bias: Any) -> Any:
        b, h, s, d = q.shape
        q, k, v = (x.reshape(b * h, s, d) for x in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) * 0.3 + bias.expand(b, h, s, s).reshape(b * h, s, s)
        return torch.bmm(torch.softmax(scores, -1), v).reshape(b, h, s, d)


@pytest.mark.parametrize("shape", [(4, 1, 1, 6), (1, 4, 1, 6), (1, 1, 6, 6)], ids=["batch", "heads", "neither"])
def test_bias_of_merged_heads(shape: tuple[int, ...], tmp_path: Path) -> None:
    """With as many heads as batch entries nothing but the expansion says whose the bias is."""
    torch.manual_seed(0)
    args = (*(torch.randn(4, 4, 6, 8) for _ in range(3)), torch.randn(shape))
    report = export(MergedHeads(), args, tmp_path / "model.onnx")
    assert (report.fused, report.total) == (1, 1), str(report)
    check(MergedHeads(), tmp_path / "model.onnx", args)


class SelfAttention(torch.nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.inner = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Any, padding: Any) -> Any:
        return self.inner(x, x, x, key_padding_mask=padding, need_weights=self.need_weights)[0]


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention(need_weights: bool, tmp_path: Path) -> None:
    """With need_weights the module multiplies out its probabilities; they are not used, so that is attention too."""
    torch.manual_seed(0)
    model = SelfAttention(need_weights).eval()
    x, padding = torch.randn(2, 6, 32), torch.arange(6) >= torch.tensor([6, 4])[:, None]
    path = tmp_path / "model.onnx"
    report = export(model, (x, padding), path, dynamic_shapes=(BATCH_SEQUENCE, BATCH_SEQUENCE))
    assert (report.fused, report.total) == (1, 1), str(report)
    assert "Softmax" not in operators(path)
    check(model, path, (x, padding))
    check(model, path, (torch.randn(3, 11, 32), torch.arange(11) >= torch.tensor([1, 11, 7])[:, None]))


def test_encoder_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    path = tmp_path / "model.onnx"
    report = export(model, (torch.randn(2, 6, 32),), path, dynamic_shapes=(BATCH_SEQUENCE,))
    assert (report.fused, report.total) == (1, 1), str(report)
    check(model, path, (torch.randn(3, 17, 32),))


@pytest.fixture(scope="module")
def bert() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def tokens(batch: int, sequence: int) -> dict[str, Any]:
    lengths = torch.arange(batch) * 3 % sequence + 1
    mask = (torch.arange(sequence) < lengths[:, None]).long()
    return {"input_ids": torch.randint(0, 99, (batch, sequence)), "attention_mask": mask}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bert(bert: Any, attention: str, tmp_path: Path) -> None:
    """Padding masks stay (batch, 1, 1, sequence), and other batches and sequence lengths run."""
    bert.set_attn_implementation(attention)
    axes = {"input_ids": BATCH_SEQUENCE, "attention_mask": BATCH_SEQUENCE}
    path = tmp_path / "bert.onnx"
    report = export(bert, (), path, kwargs=tokens(2, 9), dynamic_shapes=axes)
    assert (report.fused, report.total) == (2, 2), str(report)
    shapes = {v.name: v.type.tensor_type.shape.dim for v in onnx.load(path).graph.value_info}
    for node in attention_nodes(path):
        dims = shapes[node.input[3]]
        assert [d.dim_value for d in dims[-3:-1]] == [1, 1], node
    for shape in ((2, 9), (1, 1), (4, 33)):
        check(bert, path, (), tokens(*shape))


def test_llama(tmp_path: Path) -> None:
    """The triangle becomes is_causal, padding stays small, K and V keep two heads; padded queries give 0."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    path = tmp_path / "llama.onnx"
    axes = {"input_ids": BATCH_SEQUENCE, "attention_mask": BATCH_SEQUENCE}
    report = export(model, (), path, kwargs=tokens(2, 9), dynamic_shapes=axes)
    assert (report.fused, report.total) == (1, 1), str(report)
    (node,) = attention_nodes(path)
    numbers = {a.name: a.i for a in node.attribute}
    assert (numbers["is_causal"], numbers["q_num_heads"], numbers["kv_num_heads"]) == (1, 4, 2)
    shapes = {v.name: v.type.tensor_type.shape.dim for v in onnx.load(path).graph.value_info}
    assert [shapes[name][-1].dim_value for name in node.input[1:3]] == [2 * 8, 2 * 8]
    assert [d.dim_value for d in shapes[node.input[3]]][-3:-1] == [1, 1]
    left = tokens(3, 17)
    left["attention_mask"] = left["attention_mask"].flip(1)
    check(model, path, (), tokens(2, 5))
    check(model, path, (), left)


def test_runs_without_the_library(bert: Any, tmp_path: Path) -> None:
    """A portable file is an ordinary one for an ONNX Runtime that knows nothing of flashonnx."""
    ort = pytest.importorskip("onnxruntime")
    bert.set_attn_implementation("sdpa")
    feeds = tokens(2, 9)
    export(bert, (), tmp_path / "portable.onnx", kwargs=feeds)
    export(bert, (), tmp_path / "bare.onnx", kwargs=feeds, portable=False)
    arrays = {name: tensor.numpy() for name, tensor in feeds.items()}
    ours = flashonnx.session(tmp_path / "bare.onnx", ["CPUExecutionProvider"]).run(None, arrays)[0]
    plain = ort.InferenceSession(tmp_path / "portable.onnx", providers=["CPUExecutionProvider"]).run(None, arrays)[0]
    np.testing.assert_allclose(ours, plain, atol=1e-5)
    with pytest.raises(Exception, match="FlashAttention"):
        ort.InferenceSession(tmp_path / "bare.onnx", providers=["CPUExecutionProvider"])


def test_external_data(tmp_path: Path) -> None:
    model = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True).eval()
    args = (torch.randn(2, 6, 64),)
    export(model, args, tmp_path / "model.onnx", external_data=True)
    assert (tmp_path / "model.onnx.data").stat().st_size > 4 * 64 * 256
    check(model, tmp_path / "model.onnx", args)


class Failing(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        raise ArithmeticError("this module cannot run")


def test_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"what was there before")
    with pytest.raises(Exception, match="cannot run"):
        export(Failing(), (torch.randn(2, 2),), path)
    assert path.read_bytes() == b"what was there before"
    assert [p.name for p in tmp_path.iterdir()] == ["model.onnx"]


def test_arguments(tmp_path: Path) -> None:
    args = (torch.randn(1, 2, 4, 8),) * 3
    with pytest.raises(TypeError, match="opset="):
        flashonnx.export_onnx(Sdpa(), args, tmp_path / "m.onnx", opset_version=20)
    for opset in (11, 17, 26, 99):  # torch would convert to 11 afterwards, and leave 99 at 18
        with pytest.raises(ValueError, match=rf"opset is expected to be 18 to 25, got {opset}"):
            flashonnx.export_onnx(Sdpa(), args, tmp_path / "m.onnx", opset=opset)
    with pytest.raises(FileNotFoundError, match="no folder"):
        export(Sdpa(), args, tmp_path / "missing" / "m.onnx")
    with pytest.raises(IsADirectoryError, match=rf"cannot write '{tmp_path}': it is a folder"):
        export(Sdpa(), args, tmp_path)
    for model, given, words in (
        (lambda x: x, args, r"expected to be a torch\.nn\.Module, got function"),
        (torch.jit.ScriptModule(), args, "before torch.jit"),
        (Sdpa(), {"q": args[0]}, "a tuple of inputs, got dict; inputs by name go into kwargs"),
    ):
        with pytest.raises(TypeError, match=words):
            flashonnx.export_onnx(model, given, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_inputs_that_are_no_tuple(tmp_path: Path) -> None:
    """A list of them, or a tensor alone."""
    x = torch.randn(1, 2, 4, 8)
    assert flashonnx.export_onnx(Sdpa(), [x, x, x], tmp_path / "m.onnx").fused == 1
    assert flashonnx.export_onnx(torch.nn.ReLU(), x, tmp_path / "m.onnx").total == 0


def test_without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="pip install torch"):
        flashonnx.export_onnx(object(), (), tmp_path / "m.onnx")
