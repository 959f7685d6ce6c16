"""`torch.ops.flashonnx.attention`: PyTorch's own tensors in, the operator's results out, whatever runs around it."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from typing import Any

import cases
import cases_bias
import numpy as np
import pytest
from cases import Case
from compare import assert_close
from seam import check_outputs

torch = pytest.importorskip("torch")
functional = torch.nn.functional
import flashonnx.torch  # noqa: E402  registers the operators, and needs torch

attention = torch.ops.flashonnx.attention
attention_outputs = torch.ops.flashonnx.attention_outputs
BIASED = [replace(case, id=f"bias-{case.id}") for case in cases_bias.SMALL]
CASES = [c for c in (*cases.REGULAR, *cases.ODD, *cases.FEATURES, *cases.CORNER, *BIASED) if not c.gpu and not c.slow]
_BY_ID = {case.id: case for case in CASES}


def tensor(array: np.ndarray, device: str = "cpu") -> Any:
    """As a torch tensor, bfloat16 too."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def array(result: Any) -> np.ndarray:
    if result.dtype == torch.bfloat16:
        return result.cpu().contiguous().view(torch.int16).numpy().view(cases.numpy_dtype("bfloat16"))
    return result.cpu().numpy()


def call(case: Case, device: str = "cpu") -> tuple[list[Any], dict[str, Any]]:
    """Arguments of the operator."""
    given = case.inputs()
    inputs = [tensor(given[name], device) if name in given else None for name in cases.INPUTS]
    return inputs, {name: value for name, value in case.attributes.items() if value is not None}


@pytest.mark.parametrize("case", CASES, ids=[c.id for c in CASES])
def test_case(case: Case, device: str) -> None:
    """Every input, attribute and output, against the float64 definition.

    Both operators agree to the bit, unless one of them is asked for lse in a 16-bit type on a GPU: another kernel's.
    """
    inputs, attributes = call(case, device)
    attributes["is_causal"] = bool(attributes["is_causal"])
    y, *others = attention_outputs(*inputs, **attributes, present=case.present, lse=case.lse)
    outputs = dict(zip(("present_key", "present_value", "lse"), others, strict=True))
    asked = {"present_key": case.present, "present_value": case.present, "lse": case.lse}
    for name, output in outputs.items():
        assert asked[name] or output.numel() == 0
    check_outputs(case, case.inputs(), {"Y": array(y)} | {n: array(x) for n, x in outputs.items() if asked[n]})
    alone = array(attention(*inputs, **attributes))
    check_outputs(case, case.inputs(), {"Y": alone})
    if device == "cpu" or case.dtype == "float32" or not case.lse:
        assert alone.tobytes() == array(y).tobytes()


SDPA = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "grouped": {"enable_gqa": True, "is_causal": True},
    "bool-mask": {"attn_mask": (2, 1, 17, 29)},
    "key-mask": {"attn_mask": (2, 1, 1, 29)},
    "float-mask": {"attn_mask": (6, 17, 29)},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=cases.DTYPES)
@pytest.mark.parametrize("name", SDPA)
def test_sdpa(name: str, dtype: Any, device: str) -> None:
    """As good as PyTorch's scaled_dot_product_attention, measured against itself in float64."""
    torch.manual_seed(0)
    options = dict(SDPA[name])
    grouped = options.pop("enable_gqa", False)
    heads = 2 if grouped else 6
    q, k, v = (torch.randn(2, h, s, 32, device=device).to(dtype) for h, s in ((6, 17), (heads, 29), (heads, 29)))
    mask = options.pop("attn_mask", None)
    if mask is not None:
        mask = torch.randn(mask, device=device)
        mask = mask.to(dtype) if name == "float-mask" else mask < 0.7
    y = attention(q, k, v, mask, **options)
    wide = mask if mask is None or mask.dtype == torch.bool else mask.double()
    options |= {"enable_gqa": grouped}
    truth = functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), wide, **options)
    plain = functional.scaled_dot_product_attention(q, k, v, mask, **options)
    assert_close("Y", array(y), array(truth), array(plain))


def _views(device: str) -> dict[str, Any]:
    """(B, H, S, D) tensors in all manner of memory."""
    b, h, s, d = 2, 4, 9, 16
    base = torch.randn(2 * b * h * s * d * 3, device=device)
    flat = base[: b * h * s * d]
    return {
        "bshd": flat.view(b, s, h, d).transpose(1, 2),
        "sbhd": flat.view(s, b, h, d).permute(1, 2, 0, 3),
        "packed": base[: 3 * b * h * s * d].view(b, s, 3, h, d)[:, :, 1].transpose(1, 2),
        "one-element-off": base[1 : 1 + b * h * s * d].view(b, h, s, d),
        "columns-of-wider": base[: 2 * b * h * s * d].view(b, h, s, 2 * d)[..., 3 : 3 + d],
        "every-second-row": base[: 2 * b * h * s * d].view(b, h, 2 * s, d)[:, :, ::2],
        "one-for-all-heads": flat[: b * s * d].view(b, 1, s, d).expand(b, h, s, d),
        "last-dimension-apart": flat.view(b, h, d, s).transpose(2, 3),
        "every-second-column": base[: 2 * b * h * s * d].view(b, h, s, 2 * d)[..., ::2],
    }


@pytest.mark.parametrize("name", list(_views("cpu")))
def test_strides(name: str, device: str) -> None:
    """Bit-equal with contiguous copies, for each input alone and all together, the mask transposed too."""
    torch.manual_seed(0)
    dense = torch.randn(2, 4, 9, 16, device=device)
    view = _views(device)[name]
    mask = torch.randn(9, 9, 2, 4, device=device).permute(2, 3, 1, 0)
    for q, k, v in ((view, dense, dense), (dense, view, dense), (dense, dense, view), (view, view, view)):
        copies = [x.contiguous() for x in (q, k, v, mask)]
        assert torch.equal(attention(q, k, v, mask, is_causal=True), attention(*copies, is_causal=True))
    y = attention(dense, dense, dense)
    past = attention_outputs(dense, dense, dense, None, view, view, present=True)
    assert torch.equal(past[1], torch.cat((view, dense), 2))
    assert y.transpose(1, 2).is_contiguous()  # so that the heads side by side are a view


def test_views_are_not_copied(device: str) -> None:
    """The only allocations are the outputs and the workspace."""
    q, k, v = torch.randn(2, 9, 3, 4, 16, device=device).permute(2, 0, 3, 1, 4).unbind(0)
    attention(q, k, v)
    with torch.profiler.profile() as profile:
        attention(q, k, v, torch.ones(9, 9, device=device).T)
    names = {event.name for event in profile.events()}
    assert "flashonnx::attention" in names
    assert not names & {"aten::contiguous", "aten::clone", "aten::copy_"}


OPCHECK = [
    "layout-bhsd-float32", "layout-3hd-float16", "layout-gqa-6-2-mask", "layout-time_major-past", "past-bshd-3",
    "everything", "bias-past-gqa-float16", "mask-short-4-bool", "causal-lengths-bfloat16", "no-batch-bhsd",
    "no-keys-bshd", "no-queries-bshd",
]  # fmt: skip


@pytest.mark.parametrize("id", OPCHECK)
def test_opcheck(id: str, device: str) -> None:
    """PyTorch's own tests of an operator: schema, fake tensors, dynamic shapes, functionalisation."""
    inputs, attributes = call(_BY_ID[id], device)
    attributes["is_causal"] = bool(attributes["is_causal"])
    torch.library.opcheck(attention, tuple(inputs), attributes)
    torch.library.opcheck(attention_outputs, tuple(inputs), attributes | {"present": True, "lse": True})


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile(backend: str, device: str) -> None:
    """One graph for all shapes."""

    def layer(x: Any, mask: Any) -> Any:
        q, k, v = (x * 2).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        y, _, _, lse = attention_outputs(q, k, v, mask[:, None, None], is_causal=True, lse=True)
        return attention(q, k, v, mask[:, None, None]).transpose(1, 2).flatten(2) + 1, y, lse

    torch.compiler.reset()
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=count)
    for batch, length in ((2, 9), (3, 5), (4, 33)):
        x, mask = torch.randn(batch, length, 96, device=device), torch.rand(batch, length, device=device) < 0.7
        with torch.no_grad():
            for got, expected in zip(compiled(x, mask), layer(x, mask), strict=True):
                assert got.shape == expected.shape
                torch.testing.assert_close(got, expected)
    assert len(graphs) == 1


def test_meta_tensors() -> None:
    """Shapes, dtypes and strides as the real ones, without data."""
    for case in CASES[::7]:
        inputs, attributes = call(case)
        attributes["is_causal"] = bool(attributes["is_causal"])
        real = attention_outputs(*inputs, **attributes, present=True, lse=True)
        meta = [None if x is None else x.to("meta") for x in inputs]
        for a, b in zip(real, attention_outputs(*meta, **attributes, present=True, lse=True), strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()), case.id


def test_gradient_is_refused(device: str) -> None:
    """In the forward call already; without grad mode, or with detached inputs, there is nothing to refuse."""
    q, k, v = (torch.randn(1, 2, 3, 8, device=device) for _ in range(3))
    for trained in (q.clone().requires_grad_(), torch.nn.Parameter(q), q.clone().requires_grad_() * 2):
        with pytest.raises(NotImplementedError, match=r"requires grad.*torch\.no_grad"):
            attention(trained, k, v)
        with pytest.raises(NotImplementedError, match="requires grad"):
            attention_outputs(q, k, trained)
        with torch.no_grad():
            assert not attention(trained, k, v).requires_grad
        assert torch.equal(attention(trained.detach(), k, v), attention(q * (trained.grad_fn is not None) + q, k, v))


def _wrong() -> dict[str, tuple[dict[str, Any], str]]:
    x = torch.randn(2, 4, 5, 8)
    flat = torch.randn(2, 5, 32)
    heads = {"q_num_heads": 4, "kv_num_heads": 4}
    return {
        "rank": ({"query": x[0, 0]}, r"input 'Q' is expected to have 3 or 4 dimensions, got 2"),
        "rank-of-k": ({"key": x[0]}, r"input 'K' is expected to have 4 dimensions, got 3"),
        "no-value": ({"value": None}, r"input 'V' is expected to be there .*, got none"),
        "batch": ({"key": x[:1]}, r"input 'K' is expected to have batch size 2, got 1"),
        "head-size": ({"key": x[..., :4]}, r"input 'K' is expected to have head size 8, got 4"),
        "heads-of-v": ({"value": x[:, :2]}, r"input 'V' is expected to have heads 4, got 2"),
        "length-of-v": ({"value": x[:, :, :3]}, r"input 'V' is expected to have sequence length 5, got 3"),
        "group": ({"key": x[:, :3], "value": x[:, :3]}, r"input 'Q' is expected to have a multiple of 3 heads"),
        "dtype": ({"query": x.double()}, "input 'Q' is expected to have dtype float32 or float16 or bfloat16, got"),
        "mixed": ({"value": x.half()}, r"input 'V' is expected to have dtype float32, got float16"),
        "mask-dtype": ({"attn_mask": x.long()[..., :5]}, "'attn_mask' is expected to have dtype bool or float32"),
        "mask-batch": ({"attn_mask": torch.ones(3, 1, 5, 5)}, r"'attn_mask' is expected .* \(or 1\) 2, got 3"),
        "mask-keys": ({"attn_mask": torch.ones(6)}, r"'attn_mask' is expected to have a last dimension of at most 5"),
        "half-a-past": ({"past_key": x}, r"'past_key' and 'past_value' are expected together, got only 'past_key'"),
        "past-heads": ({"past_key": x[:, :2], "past_value": x}, r"input 'past_key' is expected to have heads 4, got 2"),
        "past-and-lengths": (
            {"past_key": x, "past_value": x, "nonpad_kv_seqlen": torch.ones(2, dtype=torch.int64)},
            "'nonpad_kv_seqlen' cannot be combined",
        ),
        "lengths": ({"nonpad_kv_seqlen": torch.ones(3).long()}, "'nonpad_kv_seqlen' is expected .* 2, got 3"),
        "sinks": ({"sinks": torch.ones(2)}, "'sinks' is expected to have as many .* query heads, 4, got 2"),
        "device": ({"key": x.to("meta")}, r"input 'K' is expected to be on cpu like 'Q', got meta"),
        "head-counts": ({"q_num_heads": 2}, r"attribute 'q_num_heads' is expected to be 4 as in the shapes, got 2"),
        "no-head-counts": ({"query": flat, "key": flat, "value": flat}, "attribute 'q_num_heads' is expected with 3-"),
        "odd-heads": ({"query": flat, "key": flat, "value": flat, **heads, "q_num_heads": 5}, "positive multiple of 5"),
        "layout": ({"qkv_layout": "bhsd"}, "qkv_layout. is expected to be one of separate"),
        "packed-and-k": ({"qkv_layout": "gqa"}, "K. is expected to be absent"),
        "scale": ({"scale": 0.0}, r"attribute 'scale' is expected to be positive and finite, got 0"),
        "scale-float32": ({"scale": 1e-50}, r"attribute 'scale' is expected to be positive and finite, got 1e-50"),
        "softcap-float32": ({"softcap": 1e-60}, r"'softcap' is expected to be 0 \(none\) or positive and finite"),
        "softcap": ({"softcap": -1.0}, r"'softcap' is expected to be 0 \(none\) or positive and finite, got -1"),
        "window": ({"left_window_size": -2}, r"'left_window_size' is expected to be -1 or more, got -2"),
        "empty-row": ({"empty_row": "nan"}, r"attribute 'empty_row' is expected to be \"zero\" or \"mean\""),
        "mean-and-sinks": ({"empty_row": "mean", "sinks": torch.ones(4)}, "cannot be combined with 'sinks'"),
    }  # fmt: skip


@pytest.mark.parametrize("name", list(_wrong()))
def test_errors(name: str) -> None:
    """The input, what was expected, what came."""
    x = torch.randn(2, 4, 5, 8)
    changed, message = _wrong()[name]
    with pytest.raises(ValueError, match=message):
        attention(**({"query": x, "key": x, "value": x} | changed))


def test_import_is_lazy() -> None:
    code = "import sys, flashonnx; assert 'torch' not in sys.modules; flashonnx.torch.attention"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
def test_current_stream() -> None:
    """Work is enqueued on the stream that is current, behind what is there and before what comes."""
    q = torch.zeros(1, 1, 1, 64, device="cuda", dtype=torch.float16)
    k = torch.zeros(1, 1, 4096, 64, device="cuda", dtype=torch.float16)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        v = torch.ones_like(k)
        y = attention(q, k, v) * 2
        v.zero_()
    stream.synchronize()
    assert (y == 2).all()


@pytest.mark.gpu
@pytest.mark.parametrize("past", [False, True])
def test_cuda_graph(past: bool) -> None:
    """Captured once, replayed on other numbers."""
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    inputs = [q, k, v, None, k.clone(), v.clone()] if past else [q, k, v]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        attention(*inputs, is_causal=True)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = attention(*inputs, is_causal=True)
    for _ in range(3):
        q.normal_()
        graph.replay()
        assert torch.equal(y, attention(*inputs, is_causal=True))


@pytest.mark.gpu
def test_second_device() -> None:
    """The tensors' device, not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one CUDA device only")
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda:0", dtype=torch.float16) for _ in range(3))
    y = attention(*(x.to("cuda:1") for x in (q, k, v)))
    assert y.device.index == 1
    assert torch.cuda.current_device() == 0
    assert torch.equal(y.cpu(), attention(q, k, v).cpu())


class Exported(torch.nn.Module):
    """The operators between layers, with everything that a node can have; and one that has next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(24, 24)
        self.bias = torch.nn.Parameter(torch.randn(72))
        self.eval()

    def forward(self, x: Any, past: Any, mask: Any, sinks: Any, lengths: Any) -> Any:
        q, k, v = self.project(x), x, x * 2
        heads = {"q_num_heads": 6, "kv_num_heads": 6}
        everything = {"softcap": 3.0, "scale": 0.4, "left_window_size": 8, "right_window_size": 3, **heads}
        everything |= {"present": True, "lse": True}
        y, key, value, lse = attention_outputs(q, k, v, mask, past, past, None, sinks, **everything)
        ragged = attention(q, k, v, nonpad_kv_seqlen=lengths, is_causal=True, empty_row="mean", **heads)
        packed = attention(torch.cat((q, k, v), -1), bias=self.bias, qkv_layout="gqa", **heads)
        return y, key, value, lse, ragged, packed


@pytest.mark.parametrize("opset", [20, 23])
def test_export(opset: int, tmp_path: Any) -> None:
    """One node each, every attribute kept, the same numbers in ONNX Runtime, at other shapes too."""
    onnx = pytest.importorskip("onnx")
    torch.manual_seed(0)

    def inputs(batch: int, length: int, past: int) -> tuple[Any, ...]:
        mask = torch.randn(batch, 1, length, length + past)
        sizes = torch.arange(batch, dtype=torch.int32) % length
        return torch.randn(batch, length, 24), torch.randn(batch, 6, past, 4), mask, torch.randn(6), sizes

    shapes = ({0: "b", 1: "s"}, {0: "b", 2: "p"}, {0: "b", 2: "s", 3: "p + s"}, None, {0: "b"})
    path = tmp_path / "model.onnx"
    dims = {name: torch.export.Dim(name) for name in "bsp"} | {"p + s": torch.export.Dim.AUTO}
    dynamic = tuple(None if axes is None else {axis: dims[name] for axis, name in axes.items()} for axes in shapes)
    model = Exported()
    report = flashonnx.export_onnx(model, inputs(2, 5, 3), path, dynamic_shapes=dynamic, opset=opset)
    assert (report.fused, report.total) == (3, 3), str(report)
    assert {s.kind for s in report.sites} == {"torch.ops.flashonnx.attention", "torch.ops.flashonnx.attention_outputs"}
    nodes = [n for n in onnx.load(path).graph.node if n.domain == "flashonnx"]
    found = [{a.name: onnx.helper.get_attribute_value(a) for a in node.attribute} for node in nodes]
    heads = {"q_num_heads": 6, "kv_num_heads": 6}
    everything = {"softcap": 3.0, "scale": pytest.approx(0.4), "left_window_size": 8, "right_window_size": 3}
    assert found[0] == everything | heads
    assert found[1] == {"is_causal": 1, "empty_row": b"mean"} | heads
    assert found[2] == {"qkv_layout": b"gqa"} | heads
    assert [len(node.input) for node in nodes] == [8, 7, 9]  # the bias is the last
    session = flashonnx.session(path, ["CPUExecutionProvider"])
    for sizes in ((2, 5, 3), (3, 7, 2)):
        given = inputs(*sizes)
        with torch.no_grad():
            expected = model(*given)
        feeds = {i.name: x.numpy() for i, x in zip(session.get_inputs(), given, strict=True)}
        for name, got, want in zip(range(6), session.run(None, feeds), expected, strict=True):
            np.testing.assert_allclose(got, want.numpy(), atol=2e-6 * math.sqrt(24), err_msg=f"output {name}")


class Sums(torch.nn.Module):
    """Attention of which lse is used, and present keys are not."""

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        y, _, _, lse = attention_outputs(q, k, v, present=True, lse=True)
        return y, lse


def test_outputs_that_nobody_uses(tmp_path: Any) -> None:
    """They are absent from the node, so that they are not computed; with the library and without it."""
    onnx = pytest.importorskip("onnx")
    ort = pytest.importorskip("onnxruntime")
    inputs, path = dict(zip("qkv", torch.randn(3, 2, 4, 5, 8), strict=True)), tmp_path / "model.onnx"
    flashonnx.export_onnx(Sums().eval(), tuple(inputs.values()), path)
    (node,) = [n for n in onnx.load(path).graph.node if n.domain == "flashonnx"]
    assert [bool(name) for name in node.output] == [True, False, False, True]
    feeds = {name: x.numpy() for name, x in inputs.items()}
    providers = ["CPUExecutionProvider"]
    for session in (flashonnx.session(path, providers), ort.InferenceSession(path, providers=providers)):
        for got, want in zip(session.run(None, feeds), Sums()(*inputs.values()), strict=True):
            np.testing.assert_allclose(got, want.numpy(), atol=2e-6)
