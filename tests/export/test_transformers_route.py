"""export_onnx of transformers' models, through their attention and mask interfaces: layers, masks, guards, results."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
flashonnx = pytest.importorskip("flashonnx")
from flashonnx.export.pytorch import transformers_masks, transformers_route  # noqa: E402
from transformers import masking_utils  # noqa: E402
from transformers_models import FAMILIES, Family, text  # noqa: E402

OPERATOR = "torch.ops.flashonnx.attention"
TOLERANCE = 1e-5  # of hidden states of size 1 to 4: float32 sums in another order
EVERYDAY = ("bert", "gemma2")
_BY_ID = {family.id: family for family in FAMILIES}


def export(model: Any, path: Path, inputs: dict[str, Any], axes: Any = None) -> Any:
    report = flashonnx.export_onnx(model, (), path, kwargs=inputs, dynamic_shapes=axes)
    return type(report)(report.sites, tuple(note for note in report.notes if "every axis" not in note))


def run(path: Path, inputs: dict[str, Any]) -> list[np.ndarray]:
    session = flashonnx.session(path, ["CPUExecutionProvider"])
    return session.run(None, {i.name: inputs[i.name].numpy() for i in session.get_inputs()})


def tensors(outputs: Any) -> list[Any]:
    """All of them, those of outputs within outputs too."""
    if isinstance(outputs, torch.Tensor):
        return [outputs]
    parts = outputs.to_tuple() if hasattr(outputs, "to_tuple") else outputs
    return [x for part in parts if part is not None for x in tensors(part)]


def shapes(path: Path) -> dict[str, tuple[tuple[Any, ...], int]]:
    """Dimensions and element type of every value that has them."""
    graph = onnx.load(path).graph
    values = [*graph.value_info, *graph.input, *graph.output]
    types = {value.name: value.type.tensor_type for value in values}
    return {
        name: (tuple(d.dim_param or d.dim_value for d in kind.shape.dim), kind.elem_type)
        for name, kind in types.items()
    }


def check_graph(path: Path, family: Family) -> None:
    """As many nodes as layers, each with its attributes and its mask, and no mask of queries x keys anywhere."""
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    nodes = [node for node in model.graph.node if node.domain == "flashonnx"]
    assert len(nodes) == family.nodes
    assert "Softmax" not in {n.op_type for n in model.graph.node} or family.id == "gpt_oss"  # whose router has one
    known = shapes(path)
    for i, node in enumerate(nodes):
        found = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        # One product makes all three where K and V are missing.
        packed = b"3hd" if found.get("q_num_heads") == found.get("kv_num_heads") else b"gqa"
        assert found.pop("qkv_layout", b"separate") == (b"separate" if any(node.input[1:3]) else packed), node
        for name in ("q_num_heads", "kv_num_heads", "scale"):
            found.pop(name, None)
        # Models without sdpa are eager ones, where a row without a key is the mean of V (and with a sink nearly 0).
        eager = not family.sdpa and not (len(node.input) > 7 and node.input[7])
        rows = {"empty_row": b"mean"} if eager else {}
        assert found == {**family.attributes[i % len(family.attributes)], **rows}, node
        mask = known[node.input[3]][0] if len(node.input) > 3 and node.input[3] else None
        assert mask == family.masks[i % len(family.masks)], node
    masks = {name: dims for name, (dims, kind) in known.items() if kind == onnx.TensorProto.BOOL and len(dims) == 4}
    assert not [name for name, dims in masks.items() if isinstance(dims[3], str) and dims[2] == dims[3]]


def check_results(path: Path, family: Family, eager: Any, sdpa: Any) -> None:
    """Eager PyTorch's results for tokens that are no padding, and sdpa's for all: there a row without a key is 0 too.

    In float32: with the most negative float64 as its mask, and softmax in float32, eager attention gives NaN.
    """
    for batch, sequence, left in ((2, 9, False), (3, 17, False), (3, 17, True)):
        inputs = family.inputs(batch, sequence, left)
        with torch.no_grad():
            expected = tensors(eager(**inputs))
            zeros = tensors(sdpa(**inputs)) if sdpa is not None else None
        outputs = run(path, inputs)
        assert len(outputs) == len(expected)
        for i, out in enumerate(outputs):
            rows: Any = Ellipsis
            if "attention_mask" in inputs and out.shape[:2] == inputs["attention_mask"].shape:
                rows = inputs["attention_mask"].numpy().astype(bool)
            assert np.isfinite(out).all()
            name = f"output {i} for {batch} x {sequence}, padded {'left' if left else 'right'}"
            np.testing.assert_allclose(out[rows], expected[i].numpy()[rows], atol=TOLERANCE, err_msg=name)
            if zeros is not None:
                np.testing.assert_allclose(out, zeros[i].numpy(), atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize(
    "id", [f.id if f.id in EVERYDAY else pytest.param(f.id, marks=pytest.mark.slow) for f in FAMILIES]
)
def test_family(id: str, tmp_path: Path) -> None:
    family = _BY_ID[id]
    model, path = family.make(), tmp_path / "model.onnx"
    before = [config._attn_implementation for config in transformers_route._configs(model)]
    report = export(model, path, family.inputs(2, 9), family.axes)
    assert (report.fused, report.total) == (family.nodes, family.nodes), str(report)
    assert not report.notes, str(report)
    assert {site.kind for site in report.sites} == {OPERATOR}
    assert [config._attn_implementation for config in transformers_route._configs(model)] == before
    check_graph(path, family)
    check_results(path, family, family.make("eager"), family.make("sdpa") if family.sdpa else None)


class Small(torch.nn.Module):
    """A BERT of one layer, and what a test does with it."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.BertConfig(**config, intermediate_size=16, max_position_embeddings=32)
        config._attn_implementation = arguments.pop("attention", "sdpa")
        self.inner = transformers.BertModel(config, add_pooling_layer=False)
        self.arguments = arguments
        self.eval()

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        return self.inner(input_ids, attention_mask=attention_mask, **self.arguments).last_hidden_state


def check_fallback(model: Any, path: Path, reason: str, *, fused: int = 1, total: int = 1) -> Any:
    """The export is done as written, says why, and is right."""
    inputs = text(2, 9)
    report = export(model, path, inputs)
    assert (report.fused, report.total) == (fused, total), str(report)
    assert OPERATOR not in {site.kind for site in report.sites}
    (note,) = report.notes
    assert note.startswith("transformers: exported as written, not through its attention interface: ")
    assert reason in note
    assert model.inner.config._attn_implementation == "sdpa"
    with torch.no_grad():
        expected = model(**inputs)
    np.testing.assert_allclose(run(path, inputs)[0], expected.numpy(), atol=TOLERANCE)
    return report


def test_an_argument_that_is_not_known(tmp_path: Path) -> None:
    check_fallback(
        Small(temperature=0.5), tmp_path / "model.onnx", "passes 'temperature', which the route does not know"
    )


def test_a_layer_that_reads_the_mask(tmp_path: Path) -> None:
    """A mask that was taken apart on its way has lost its meaning; its token must not reach the file."""
    model = Small()
    attention = model.inner.encoder.layer[0].attention.self

    def slice_mask(module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        mask = arguments[1] if len(arguments) > 1 else keywords["attention_mask"]
        sliced = mask[:, :, :, :]
        if len(arguments) > 1:
            return (arguments[0], sliced, *arguments[2:]), keywords
        return arguments, {**keywords, "attention_mask": sliced}

    attention.register_forward_pre_hook(slice_mask, with_kwargs=True)
    check_fallback(model, tmp_path / "model.onnx", "a mask is read by other code than the attention function")


class AttendsOnItsOwn(Small):
    """Adds an attention that transformers knows nothing of."""

    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        x = super().forward(input_ids, attention_mask)[:, None]
        return x + torch.softmax(x @ x.transpose(-1, -2), -1) @ x


@pytest.mark.slow
def test_an_attention_beside_the_interface(tmp_path: Path) -> None:
    check_fallback(AttendsOnItsOwn(), tmp_path / "model.onnx", "attends without it (Softmax)", fused=2, total=2)


@pytest.mark.slow
def test_weights_that_are_asked_for(tmp_path: Path) -> None:
    """The model collects them in its forward call; only its own eager attention has them."""
    check_fallback(Small(output_attentions=True), tmp_path / "model.onnx", "is to give its attention weights")


@pytest.mark.slow
def test_bloom_is_not_touched(tmp_path: Path) -> None:
    """It takes any name for its attention, asks nobody, and adds a mask of bools to its scores."""
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=99, hidden_size=16, n_layer=1, n_head=2, use_cache=False)
    model = transformers.BloomModel(config).eval()
    inputs, path = text(2, 9), tmp_path / "model.onnx"
    report = export(model, path, inputs)
    assert any("BloomModel does not ask transformers for its attention function" in note for note in report.notes)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
    np.testing.assert_allclose(run(path, inputs)[0], expected.numpy(), atol=TOLERANCE)


class LooksAtTheName(transformers.BertModel):
    """A model whose file compares the name of its attention function with one that it knows."""

    def masks(self) -> bool:
        return self.config._attn_implementation == "sdpa"


def test_a_model_that_looks_at_the_name() -> None:
    """With a name that it does not know it might make no masks at all."""
    model = Small()
    assert transformers_route.candidate(model) is None
    looking = torch.nn.Sequential(LooksAtTheName(model.inner.config))
    reason = "LooksAtTheName does something else depending on the name of its attention function"
    assert transformers_route.candidate(looking) == reason


class Failing(Small):
    def forward(self, input_ids: Any, attention_mask: Any) -> Any:
        assert super().forward(input_ids, attention_mask) is not None
        raise ArithmeticError("this model cannot run")


def test_an_error_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    model = Failing(attention="eager")
    with pytest.raises(Exception, match="cannot run"):
        export(model, tmp_path / "model.onnx", text(2, 9))
    assert model.inner.config._attn_implementation == "eager"
    for interface in transformers_route._interfaces():
        assert transformers_route.NAME not in interface
    assert not list(tmp_path.iterdir())


class WithoutMask(torch.nn.Module):
    """A Llama without a mask: transformers looks into the positions for packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _BY_ID["llama"].make()
        self.eval()

    def forward(self, input_ids: Any, position_ids: Any = None) -> Any:
        return self.inner(input_ids, position_ids=position_ids).last_hidden_state


@pytest.mark.slow
def test_no_mask_is_a_triangle(tmp_path: Path) -> None:
    """Positions that the model counts out itself hold one sequence."""
    model, path = WithoutMask(), tmp_path / "model.onnx"
    inputs = {"input_ids": text(2, 9)["input_ids"]}
    report = export(model, path, inputs, {"input_ids": {0: "batch", 1: "sequence"}})
    assert {site.kind for site in report.sites} == {OPERATOR}
    assert not report.notes, str(report)
    for site in report.sites:
        assert "is_causal=1" in site.became
        assert "attn_mask" not in site.became
    inputs = {"input_ids": text(3, 17)["input_ids"]}
    with torch.no_grad():
        np.testing.assert_allclose(run(path, inputs)[0], model(**inputs).numpy(), atol=TOLERANCE)


@pytest.mark.slow
def test_a_mask_that_is_more_than_structure(tmp_path: Path) -> None:
    """Packed sequences: the mask stays queries x keys, the rest of the route stays too, and the report says so."""
    model, path = WithoutMask(), tmp_path / "model.onnx"
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8]])
    inputs = {"input_ids": text(2, 9)["input_ids"], "position_ids": positions}
    report = export(model, path, inputs)
    assert {site.kind for site in report.sites} == {OPERATOR}
    (note,) = report.notes
    assert "a mask stays queries x keys" in note
    for inputs["position_ids"] in (positions, positions.flip(0), torch.arange(9).expand(2, 9).contiguous()):
        with torch.no_grad():
            np.testing.assert_allclose(run(path, inputs)[0], model(**inputs).numpy(), atol=TOLERANCE)


class Decoder(torch.nn.Module):
    """One step with keys and values of the steps before."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model
        self.eval()

    def forward(self, input_ids: Any, attention_mask: Any, past: list[tuple[Any, Any]]) -> Any:
        cache = transformers.DynamicCache()
        for i, (key, value) in enumerate(past):
            cache.update(key, value, i)
        positions = attention_mask.cumsum(1)[:, -input_ids.shape[1] :] - 1
        outputs = self.inner(
            input_ids, attention_mask=attention_mask, cache=cache, position_ids=positions, use_cache=True
        )
        return outputs.last_hidden_state


@pytest.mark.slow
def test_past(tmp_path: Path) -> None:
    """Queries stand at the end of the keys: still no mask of queries x keys."""
    model, path = Decoder(_BY_ID["llama"].make()), tmp_path / "model.onnx"

    def inputs(batch: int, new: int, old: int) -> dict[str, Any]:
        mask = torch.ones(batch, old + new, dtype=torch.int64)
        mask[0, : old // 2] = 0
        past = [tuple(torch.randn(batch, 2, old, 8) for _ in range(2)) for _ in range(2)]
        return {"input_ids": torch.randint(3, 99, (batch, new)), "attention_mask": mask, "past": past}

    batch, new, old = (torch.export.Dim(name) for name in ("batch", "new", "old"))
    axes = {
        "input_ids": {0: batch, 1: new},
        "attention_mask": {0: batch, 1: torch.export.Dim.AUTO},
        "past": [({0: batch, 2: old},) * 2] * 2,
    }
    report = export(model, path, inputs(2, 3, 7), axes)
    assert {site.kind for site in report.sites} == {OPERATOR}
    assert not report.notes, str(report)
    for site in report.sites:
        assert "is_causal=1" in site.became
        assert "nonpad_kv_seqlen" in site.became
    assert not [name for name, (dims, kind) in shapes(path).items() if kind == 9 and len(dims) == 4 and dims[2] != 1]
    session = flashonnx.session(path, ["CPUExecutionProvider"])
    for sizes in ((2, 3, 7), (3, 1, 12), (1, 5, 4)):
        given = inputs(*sizes)
        flat = [given["input_ids"], given["attention_mask"], *(x for pair in given["past"] for x in pair)]
        feeds = {i.name: x.numpy() for i, x in zip(session.get_inputs(), flat, strict=True)}
        with torch.no_grad():
            np.testing.assert_allclose(session.run(None, feeds)[0], model(**given).numpy(), atol=TOLERANCE)


def test_a_layer_without_a_mask() -> None:
    """Is what its own word or the argument says, where transformers' sdpa function would take that word, too."""
    causal, other = SimpleNamespace(is_causal=True), SimpleNamespace(is_causal=False)
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    route = transformers_route.Route(Small())
    assert route._without_mask(other, q, k, None).bounds == transformers_masks.Bounds()
    assert route._without_mask(causal, q, k, False).bounds == transformers_masks.Bounds()
    assert route._without_mask(causal, q, q, None).bounds == transformers_masks.Bounds(right=0)
    for kind, keys in (("sdpa", k), ("eager", q)):
        with pytest.raises(transformers_route.RouteRefusalError, match="is causal but gives no mask"):
            transformers_route.Route(Small(attention=kind))._without_mask(causal, q, keys, None)


MASK_FUNCTIONS = {
    "causal": (masking_utils.causal_mask_function, (None, 0)),
    "bidirectional": (masking_utils.bidirectional_mask_function, (None, None)),
    "window": (masking_utils.sliding_window_causal_mask_function(4), (3, 0)),
    "window-of-one": (masking_utils.sliding_window_causal_mask_function(1), (0, 0)),
    "both-sides": (masking_utils.sliding_window_bidirectional_mask_function(3), (3, 3)),
    "nested": (
        masking_utils.and_masks(
            masking_utils.sliding_window_causal_mask_function(9), masking_utils.sliding_window_overlay(4)
        ),
        (3, 0),
    ),
}


@pytest.mark.parametrize("name", MASK_FUNCTIONS)
def test_bounds(name: str) -> None:
    """What the bounds say is what transformers' own mask says."""
    function, sides = MASK_FUNCTIONS[name]
    bounds = transformers_masks.bounds_of(function)
    assert (bounds.left, bounds.right) == sides
    mask = masking_utils.sdpa_mask(1, 12, 12, mask_function=function, allow_is_causal_skip=False)[0, 0].numpy()
    distance = np.arange(12) - np.arange(12)[:, None]
    left, right = (np.inf if side is None else side for side in sides)
    np.testing.assert_array_equal(mask, (distance >= -left) & (distance <= right))


def _shifted_causal() -> Any:
    """A function of transformers' name that means something else, as another version of it might."""

    def causal_mask_function(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key < query

    causal_mask_function.__module__, causal_mask_function.__qualname__ = masking_utils.__name__, "causal_mask_function"
    return causal_mask_function


NO_BOUNDS = {
    "chunks": masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
    "union": masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.sliding_window_bidirectional_overlay(2)
    ),
    "padding": masking_utils.and_masks(
        masking_utils.causal_mask_function, masking_utils.padding_mask_function(torch.ones(1, 12, dtype=torch.bool))
    ),
    "packed": masking_utils.packed_sequence_mask_function(torch.zeros(1, 12)),
    "of-the-user": lambda batch, head, query, key: key <= query,
    "another-causal": _shifted_causal(),
}


@pytest.mark.parametrize("name", NO_BOUNDS)
def test_what_is_more_than_bounds(name: str) -> None:
    assert transformers_masks.bounds_of(NO_BOUNDS[name]) is None
