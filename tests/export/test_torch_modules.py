"""nn.MultiheadAttention and nn.Transformer*, as export_onnx takes them; what stays as it is says why."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from compare import assert_close

torch = pytest.importorskip("torch")
flashonnx = pytest.importorskip("flashonnx")
nn = torch.nn

WIDTH, HEADS = 32, 4
B, S, T = 2, 6, 9  # batch, queries or targets, keys or sources


@pytest.fixture(autouse=True)
def no_fast_path() -> Iterator[None]:
    """PyTorch's fast path of encoders writes 0 where padding is; what is exported is the plain path."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


def tokens(length: int, first: bool = True) -> Callable[[], Any]:
    return lambda: torch.randn(B, length, WIDTH) if first else torch.randn(length, B, WIDTH)


def padding(length: int, additive: bool = False) -> Callable[[], Any]:
    def make() -> Any:
        hidden = torch.arange(length) >= torch.tensor([length, length - 2])[:, None]
        return torch.where(hidden, -torch.inf, torch.rand(B, length)) if additive else hidden

    return make


def bools(*shape: int) -> Callable[[], Any]:
    def make() -> Any:  # True hides; every query sees its first key
        hidden = torch.rand(shape) < 0.4
        hidden[..., 0] = False
        return hidden

    return make


def biases(*shape: int) -> Callable[[], Any]:
    return lambda: torch.randn(shape)


def triangle(length: int) -> Callable[[], Any]:
    return lambda: nn.Transformer.generate_square_subsequent_mask(length)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A module and a call of it.

    Attributes:
        id: name of the test.
        make: the module.
        inputs: what makes its tensors, by argument.
        options: the other arguments.
        sites: how many attentions it holds.
        is_causal: how many of its nodes have that attribute instead of a mask.
    """

    id: str
    make: Callable[[], Any]
    inputs: dict[str, Callable[[], Any]]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    sites: int = 1
    is_causal: int = 0


def attend(first: bool = True, **config: Any) -> Callable[[], Any]:
    return lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=first, **config)


def itself(first: bool = True) -> dict[str, Callable[[], Any]]:
    return {name: tokens(S, first) for name in ("query", "key", "value")}


CROSS = {"query": tokens(S), "key": tokens(T), "value": tokens(T)}
MASKS = {
    "none": {},
    "padding": {"key_padding_mask": padding(T)},
    "float-padding": {"key_padding_mask": padding(T, additive=True)},
    "mask": {"attn_mask": bools(S, T)},
    "float-mask": {"attn_mask": biases(S, T)},
    "mask-of-heads": {"attn_mask": bools(B * HEADS, S, T)},
    "both": {"key_padding_mask": padding(T), "attn_mask": bools(S, T)},
    "both-float": {"key_padding_mask": padding(T, additive=True), "attn_mask": biases(S, T)},
    "both-mixed": {"key_padding_mask": padding(T, additive=True), "attn_mask": biases(B * HEADS, S, T)},
}
EVERYDAY = (
    "padding-weights-False", "padding-weights-True", "float-mask-weights-True", "both-weights-False",
    "both-mixed-weights-True", "time-first", "causal", "added-zeros", "encoder", "decoder-layer",
)  # fmt: skip
NO_WEIGHTS = {"need_weights": False}
ENCODER = {"d_model": WIDTH, "nhead": HEADS, "dim_feedforward": 64, "batch_first": True}
SOURCE = {"src": tokens(T)}
TARGET = {"tgt": tokens(S), "memory": tokens(T)}
VARIANTS = (
    *(Variant(f"{name}-weights-{w}", attend(), CROSS | masks, {"need_weights": w})
      for name, masks in MASKS.items() for w in (False, True)),
    Variant("weights-of-heads", attend(), CROSS, {"need_weights": True, "average_attn_weights": False}),
    Variant("time-first", attend(first=False), itself(first=False) | {"key_padding_mask": padding(S)}, NO_WEIGHTS),
    Variant("time-first-weights", attend(first=False), itself(first=False) | {"attn_mask": bools(S, S)}),
    Variant("causal", attend(), itself() | {"attn_mask": triangle(S)}, NO_WEIGHTS | {"is_causal": True}, 1, 1),
    Variant("causal-padding", attend(), itself() | {"attn_mask": triangle(S), "key_padding_mask": padding(S)},
            NO_WEIGHTS | {"is_causal": True}),
    Variant("widths", attend(kdim=20, vdim=12), {
        "query": tokens(S), "key": lambda: torch.randn(B, T, 20), "value": lambda: torch.randn(B, T, 12)}),
    Variant("added-bias", attend(add_bias_kv=True), CROSS | {"key_padding_mask": padding(T)}, NO_WEIGHTS),
    Variant("added-zeros", attend(add_zero_attn=True), CROSS | {"attn_mask": biases(S, T)}, NO_WEIGHTS),
    Variant("no-bias", attend(bias=False), CROSS),
    Variant("no-batch", attend(), {name: lambda: torch.randn(S, WIDTH) for name in ("query", "key", "value")}),
    Variant("encoder-layer", lambda: nn.TransformerEncoderLayer(**ENCODER),
            SOURCE | {"src_key_padding_mask": padding(T)}),
    Variant("encoder", lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**ENCODER, norm_first=True), 2),
            SOURCE | {"mask": bools(T, T), "src_key_padding_mask": padding(T)}, sites=2),
    Variant("encoder-causal", lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**ENCODER), 2),
            SOURCE | {"mask": triangle(T)}, {"is_causal": True}, 2, 2),
    Variant("decoder-layer", lambda: nn.TransformerDecoderLayer(**ENCODER),
            TARGET | {"tgt_mask": bools(S, S), "memory_key_padding_mask": padding(T)}, sites=2),
    Variant("decoder", lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**ENCODER), 2),
            TARGET | {"tgt_mask": triangle(S), "tgt_key_padding_mask": padding(S, additive=True),
                      "memory_key_padding_mask": padding(T)}, sites=4),
    Variant("transformer", lambda: nn.Transformer(WIDTH, HEADS, 1, 1, 64, batch_first=True),
            {"src": tokens(T), "tgt": tokens(S), "tgt_mask": triangle(S)}, {"tgt_is_causal": True}, 3, 1),
)  # fmt: skip
GROUPS = {
    "everyday": [v for v in VARIANTS if v.id in EVERYDAY],
    "others": [v for v in VARIANTS if v.id not in EVERYDAY],
}
PARAMETERS = [
    pytest.param(group, i, id=v.id, marks=[] if group == "everyday" else [pytest.mark.slow])
    for group, variants in GROUPS.items()
    for i, v in enumerate(variants)
]


class AllVariants(nn.Module):
    """Every variant, each on inputs of its own: one export takes as long as the next. The first output of each."""

    def __init__(self, variants: list[Variant]) -> None:
        super().__init__()
        self.variants = variants
        self.modules_ = nn.ModuleList(variant.make() for variant in variants)
        self.eval()

    def forward(self, problems: list[dict[str, Any]]) -> list[Any]:
        results = []
        for variant, module, inputs in zip(self.variants, self.modules_, problems, strict=True):
            result = module(**inputs, **variant.options)
            results.append(result[0] if isinstance(result, tuple) else result)
        return results


@dataclasses.dataclass(frozen=True)
class Exported:
    """The file, and what came out of PyTorch, in float64 too, and of ONNX Runtime."""

    variants: list[Variant]
    report: Any
    path: Path
    outputs: list[tuple[Any, Any, np.ndarray]]


def wide(value: Any) -> Any:
    return value.double() if value.is_floating_point() else value


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """Gives the export of a group of variants, made once."""
    return functools.cache(lambda group: export_group(GROUPS[group], tmp_path_factory.mktemp(group) / "model.onnx"))


def export_group(variants: list[Variant], path: Path) -> Exported:
    torch.manual_seed(0)
    model = AllVariants(variants)
    problems = [{name: make() for name, make in variant.inputs.items()} for variant in variants]
    report = flashonnx.export_onnx(model, (problems,), path)
    session = flashonnx.session(path, ["CPUExecutionProvider"])
    given = [tensor.numpy() for inputs in problems for tensor in inputs.values()]
    feeds = {i.name: array for i, array in zip(session.get_inputs(), given, strict=True)}
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.no_grad():
        plain = model(problems)
        truth = copy.deepcopy(model).double()([{n: wide(x) for n, x in inputs.items()} for inputs in problems])
    return Exported(variants, report, path, list(zip(plain, truth, session.run(None, feeds), strict=True)))


@pytest.mark.parametrize(("group", "index"), PARAMETERS)
def test_module(exports: Callable[[str], Exported], group: str, index: int) -> None:
    plain, truth, out = exports(group).outputs[index]
    assert_close("Y", out, truth.numpy(), plain.numpy())


@pytest.mark.parametrize("group", ["everyday", pytest.param("others", marks=pytest.mark.slow)])
def test_every_attention_is_one_node(exports: Callable[[str], Exported], group: str) -> None:
    exported = exports(group)
    number = sum(variant.sites for variant in exported.variants)
    assert (exported.report.fused, exported.report.total) == (number, number), str(exported.report)
    nodes = onnx.load(exported.path).graph.node
    fused = [node for node in nodes if node.domain == "flashonnx"]
    assert len(fused) == number
    assert "Softmax" not in {node.op_type for node in nodes}
    causal = [node for node in fused if any(a.name == "is_causal" and a.i for a in node.attribute)]
    assert len(causal) == sum(variant.is_causal for variant in exported.variants)


class Weights(nn.Module):
    """Gives its probabilities too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.eval()

    def forward(self, x: Any) -> Any:
        return self.inner(x, x, x)


def test_weights_that_are_used_are_left(tmp_path: Path) -> None:
    """Fused attention never forms the probabilities; the report says what to change."""
    model, x = Weights(), torch.randn(B, S, WIDTH)
    report = flashonnx.export_onnx(model, (x,), tmp_path / "model.onnx")
    assert (report.fused, report.total) == (0, 1), str(report)
    assert "probabilities" in report.sites[0].reason, str(report)
    session = flashonnx.session(tmp_path / "model.onnx", ["CPUExecutionProvider"])
    for got, want in zip(session.run(None, {"x": x.numpy()}), model(x), strict=True):
        np.testing.assert_allclose(got, want.detach().numpy(), atol=1e-6)


def test_fast_path_is_off_only_while_exporting(tmp_path: Path) -> None:
    torch.backends.mha.set_fastpath_enabled(True)
    look, seen = nn.modules.transformer._detect_is_causal_mask, []
    layer = nn.TransformerEncoderLayer(**ENCODER).eval()
    layer.register_forward_pre_hook(lambda *_: seen.append(torch.backends.mha.get_fastpath_enabled()))
    with torch.no_grad():
        report = flashonnx.export_onnx(layer, (torch.randn(B, S, WIDTH),), tmp_path / "model.onnx")
    assert report.fused == 1
    assert seen
    assert not any(seen)
    assert torch.backends.mha.get_fastpath_enabled()
    assert nn.modules.transformer._detect_is_causal_mask is look


@pytest.mark.parametrize(("part", "said"), [(None, ""), ("", "'Model' and 5 more modules are"), ("1", "'1' is")])
def test_training_mode_is_told(part: str | None, said: str, tmp_path: Path) -> None:
    """Also of a part alone, of which torch says nothing; its dropout would make each answer another."""
    layer = nn.Sequential(nn.MultiheadAttention(WIDTH, HEADS), nn.Dropout(0.5))

    class Model(nn.Sequential):
        def forward(self, x: Any) -> Any:
            return self[1](self[0][0](x, x, x, need_weights=False)[0])

    model = Model(layer, nn.Dropout(0.5)).eval()
    if part is not None:
        model.get_submodule(part).train()
    report = flashonnx.export_onnx(model, (torch.randn(S, B, WIDTH),), tmp_path / "model.onnx")
    assert report.fused == report.total == 1
    notes = [note for note in report.notes if "training mode" in note]
    assert len(notes) == bool(said) and all(note.startswith(said) for note in notes), notes
