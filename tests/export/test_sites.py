"""The detector: attention is found whatever stands around its softmax, and what is no attention is not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse
from models import parse
from onnx import helper, numpy_helper

QKV = "float[b,2,s,8] q, float[b,2,s,8] k, float[b,2,s,8] v"
Y = "float[b,2,s,8] y"
START = "kt = Transpose<perm=[0,1,3,2]>(k) scores = MatMul(q, kt) "
END = " y = MatMul(p, v)"
BETWEEN = START + "{}" + " p = Softmax(x)" + END
BEHIND = START + "x = Softmax(scores) {}" + END


def weights(model: onnx.ModelProto, **shapes: list[int]) -> onnx.ModelProto:
    for name, shape in shapes.items():
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    return model


def kinds(model: onnx.ModelProto) -> list[str]:
    """What is found, each model checked to be one that the checker takes."""
    return [site.kind for site in fuse(model)[1].sites]


@pytest.mark.parametrize(
    "body",
    [
        BETWEEN.format("x = Sin(scores)"),
        BETWEEN.format("a = Cos(scores) d = Erf(a) e = Mod<fmod=1>(d, a) x = Mul(e, d)"),
        BETWEEN.format("x = own.Anything(scores)"),
        BETWEEN.format("last = Constant<value_ints=[2]>() n = Shape(q) i = Gather(n, last) x, o = TopK(scores, i)"),
        BETWEEN.format("a, o = own.Two(scores) x = Where(o, a, a)"),
        BETWEEN.format(" ".join(["x0 = Neg(scores)", *(f"x{i + 1} = Neg(x{i})" for i in range(40)), "x = Neg(x40)"])),
        BEHIND.format("r = Relu(x) p = Softplus(r)"),
        BEHIND.format("p = own.Anything(x)"),
        BETWEEN.format("l = LayerNormalization(scores, g) x = Add(l, scores)"),
        # scores of two heads mixed by weights, before or behind the softmax
        BETWEEN.format('x = Einsum<equation="bhqk,hg->bgqk">(scores, w)'),
        BETWEEN.format("x = Conv(scores, c)"),
        BETWEEN.format(
            "t = Transpose<perm=[0,2,3,1]>(scores) m = MatMul(t, w) n = MatMul(m, w) x = Transpose<perm=[0,3,1,2]>(n)"
        ),
        BEHIND.format('p = Einsum<equation="bhqk,hg->bgqk">(x, w)'),
        BEHIND.format("t = Transpose<perm=[0,2,3,1]>(x) m = MatMul(t, w) p = Transpose<perm=[0,3,1,2]>(m)"),
    ],
)
def test_whatever_is_between(body: str) -> None:
    model = weights(parse(body, QKV, Y), w=[2, 2], c=[2, 2, 1, 1], g=[8])
    model.opset_import.append(helper.make_opsetid("own", 1))
    assert kinds(model) == ["Softmax"]


@pytest.mark.parametrize(
    "body",
    [
        # the sum written out, in each form
        START + "e = Exp(scores) t = ReduceSum(e, last) p = Div(e, t)" + END,
        START + "m = ReduceMax(scores, last) d = Sub(scores, m) e = Exp(d) t = ReduceSum(e, last) p = Div(e, t)" + END,
        START + "e = Exp(scores) t = ReduceSum(e, last) r = Reciprocal(t) p = Mul(e, r)" + END,
        START + "e = Exp(scores) t = ReduceSum(e, last) n = Add(t, eps) c = Clip(n, eps) p = Div(e, c)" + END,
        START + "e = Exp(scores) t = ReduceSum(e, last) o = MatMul(e, v) y = Div(o, t)",
        START + "s = Sin(scores) e = Exp(s) t = ReduceSum(e, last) p = Div(e, t)" + END,
        START + "l = LogSoftmax(scores) p = Exp(l)" + END,
    ],
)
def test_softmax_written_out(body: str) -> None:
    model = parse("last = Constant<value_ints=[-1]>() eps = Constant<value_float=1e-9>() " + body, QKV, Y)
    (kind,) = kinds(model)
    assert "Exp" in kind or kind == "Softmax"


@pytest.mark.parametrize("quantized", ["MatMulInteger", "QLinearMatMul"])
def test_products_of_quantized_tensors(quantized: str) -> None:
    if quantized == "MatMulInteger":
        product = "i = MatMulInteger(q, kt) scores = Cast<to=1>(i)"
    else:
        product = "i = QLinearMatMul(q, f, z, kt, f, z, f, z) scores = DequantizeLinear(i, f, z)"
    body = f"kt = Transpose<perm=[0,1,3,2]>(k) {product} p = Softmax(scores)" + END
    model = parse(body, "uint8[b,2,s,8] q, uint8[b,2,s,8] k, float[b,2,s,8] v", Y)
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0.1), "f"))
    model.graph.initializer.append(numpy_helper.from_array(np.uint8(3), "z"))
    assert kinds(model) == ["Softmax"]


def test_constant_queries() -> None:
    """Learnt queries: a site, as their keys are activations; a projection's weights stand on the right."""
    body = "kt = Transpose<perm=[0,1,3,2]>(k) scores = MatMul(w, kt) p = Softmax(scores)" + END
    assert kinds(weights(parse(body, QKV, "float[b,2,3,8] y"), w=[1, 2, 3, 8])) == ["Softmax"]


@pytest.mark.parametrize(
    "body",
    [
        # heads of classifiers, and what weighs a sequence by them
        "x = MatMul(h, w) y = Softmax(x)",
        "x = MatMul(h, w) p = Softmax(x) t = Transpose<perm=[0,2,1]>(p) y = MatMul(t, h)",
        "x = MatMul(h, w) p = Softmax<axis=1>(x) t = Transpose<perm=[0,2,1]>(p) y = MatMul(t, h)",
        # behind a layer of attention: a head; linear attention over features, and over the sequence
        "{} x = MatMul(a, w) y = Softmax(x)",
        "{} x = MatMul(a, w) p = Softmax(x) t = Transpose<perm=[0,2,1]>(p) y = MatMul(t, a)",
        "{} f = MatMul(a, w) p = Softmax<axis=1>(f) t = Transpose<perm=[0,2,1]>(p) y = MatMul(t, a)",
        "{} l = LayerNormalization(a, g) r = Add(l, h) f = MatMul(r, w) p = Softmax<axis=1>(f) "
        "t = Transpose<perm=[0,2,1]>(p) y = MatMul(t, r)",
        "{} x = Gemm(flat, w) y = Softmax(x)",
        # shapes and conditions derive from no scores
        "{} n = Shape(a) c = Cast<to=1>(n) p = Softmax<axis=0>(c) o = Unsqueeze(p, last) m = Expand(o, n) "
        "u = Transpose<perm=[0,2,1]>(h) y = MatMul(m, u)",
        "{} b = Greater(a, h) z = Where(b, one, one) p = Softmax(z) y = MatMul(h, p)",
        # a product, a softmax, but no third; a softmax that no product precedes
        "{} y = Softmax(a)",
        "p = Softmax(h) t = Transpose<perm=[0,2,1]>(h) y = MatMul(p, t)",
        "e = Exp(h) s = ReduceSum(e, last) p = Div(e, s) t = Transpose<perm=[0,2,1]>(h) y = MatMul(p, t)",
        # exponentials of scores that nothing is divided by
        "t = Transpose<perm=[0,2,1]>(h) s = MatMul(h, t) e = Exp(s) y = MatMul(e, h)",
    ],
)
def test_no_attention(body: str) -> None:
    layer = "t0 = Transpose<perm=[0,2,1]>(h) s0 = MatMul(h, t0) p0 = Softmax(s0) a = MatMul(p0, h) flat = Squeeze(a)"
    constants = "last = Constant<value_ints=[-1]>() one = Constant<value_float=1.0>() "
    model = parse(constants + body.format(layer), "float[b,s,8] h", "float y")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    found = [site for site in fuse(weights(model, w=[8, 8], g=[8]))[1].sites if site.node != "p0"]
    assert not found


@pytest.mark.parametrize("domain", ["", "com.microsoft", "ai.onnx.preview"])
@pytest.mark.parametrize("name", ["Attention", "MultiHeadAttention", "FlexAttention", "LinearAttention", "Tension"])
def test_operators(domain: str, name: str) -> None:
    """Every attention operator there is or will be; linear attention has no softmax."""
    node = helper.make_node(name, ["q", "k", "v"], ["y"], domain=domain)
    values = [helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, ["b", 2, "s", 8]) for value in "qkvy"]
    graph = helper.make_graph([node], "one", values[:3], values[3:])
    imports = [helper.make_opsetid(d, v) for d, v in {"": 23, domain: 23 if not domain else 1}.items()]
    found = kinds(helper.make_model(graph, opset_imports=imports, ir_version=10))
    if name in ("LinearAttention", "Tension"):
        assert not found
    else:
        assert found == [f"{domain}::{name}" if domain else name]
