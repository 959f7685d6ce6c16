"""The rules on small graphs, each a way in which exporters or people write attention, or nearly."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse
from models import attributes, fuse_and_check, nodes, op_types, parse, random_inputs, run
from onnx import helper

QKV = "float[b,2,s,8] q, float[b,2,s,8] k, float[b,2,s,8] v"
Y = "float[b,2,s,8] y"
SIZES = ({"b": 2, "s": 5, "t": 7}, {"b": 1, "s": 9, "t": 3}, {"b": 3, "s": 1, "t": 4})

PLAIN = """
    kt = Transpose<perm=[0,1,3,2]>(k)
    scores = MatMul(q, kt)
    p = Softmax<axis=-1>(scores)
    y = MatMul(p, v)
"""


def test_plain() -> None:
    model, report = fuse_and_check(parse(PLAIN, QKV, Y), *SIZES)
    assert op_types(model) == {"FlashAttention"}
    assert attributes(nodes(model)[0]) == {"scale": 1.0}
    assert "4-D" in report.sites[0].became


# -- the scale, wherever it is

SCALE = """
    c = Constant<value_float=0.35>() r = Sqrt(c) i = Constant<value_float=2.857142857>()
    o = Constant<value_floats=[0.35]>()
"""


@pytest.mark.parametrize(
    "product",
    [
        "kt = Transpose<perm=[0,1,3,2]>(k) qs = Mul(q, c) scores = MatMul(qs, kt)",
        "kt = Transpose<perm=[0,1,3,2]>(k) qs = Div(q, i) scores = MatMul(qs, kt)",
        "kt = Transpose<perm=[0,1,3,2]>(k) ks = Mul(c, kt) scores = MatMul(q, ks)",
        "ks = Mul(k, c) kt = Transpose<perm=[0,1,3,2]>(ks) scores = MatMul(q, kt)",
        "kt = Transpose<perm=[0,1,3,2]>(k) qs = Mul(q, r) ks = Mul(kt, r) scores = MatMul(qs, ks)",
        "kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) scores = Mul(raw, c)",
        "kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) scores = Mul(o, raw)",
        "kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) scores = Div(raw, i)",
    ],
)
def test_scale_everywhere(product: str) -> None:
    body = f"{SCALE} {product} p = Softmax<axis=-1>(scores) y = MatMul(p, v)"
    model, _ = fuse_and_check(parse(body, QKV, Y), *SIZES)
    assert attributes(nodes(model)[0])["scale"] == pytest.approx(0.35)


def test_scale_computed_from_the_shape() -> None:
    """As TorchScript writes 1 / sqrt(size): Shape, Slice, Cast, Sqrt, Div, Sqrt, on Q and on K^T."""
    body = """
        m1 = Constant<value_ints=[-1]>() end = Constant<value_ints=[9223372036854775807]>()
        shape = Shape(q) size = Slice(shape, m1, end) f = Cast<to=1>(size) root = Sqrt(f)
        one = Constant<value_floats=[1.0]>() inverse = Div(one, root) half = Sqrt(inverse)
        kt = Transpose<perm=[0,1,3,2]>(k) qs = Mul(q, half) ks = Mul(kt, half)
        scores = MatMul(qs, ks) p = Softmax<axis=-1>(scores) y = MatMul(p, v)
    """
    model, _ = fuse_and_check(parse(body, QKV, Y), *SIZES)
    assert attributes(nodes(model)[0])["scale"] == pytest.approx(8**-0.5)
    assert op_types(model) == {"FlashAttention"}


def test_scale_that_is_an_input() -> None:
    body = PLAIN.replace("scores = MatMul(q, kt)", "raw = MatMul(q, kt) scores = Mul(raw, c)")
    _, report = fuse_and_check(parse(body, f"{QKV}, float c", Y), fused=0, total=1)
    assert "Mul" in report.sites[0].reason


def test_negative_scale() -> None:
    body = (
        "c = Constant<value_float=-1.0>() kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) scores = Mul(raw, c) "
    )
    _, report = fuse_and_check(parse(body + "p = Softmax(scores) y = MatMul(p, v)", QKV, Y), fused=0, total=1)
    assert "not positive" in report.sites[0].reason


# -- softcap


def test_softcap() -> None:
    """Gemma 2: scores / 5, Tanh, times 5, then the mask."""
    body = """
        c = Constant<value_float=0.35>() cap = Constant<value_float=5.0>()
        kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) scaled = Mul(raw, c)
        down = Div(scaled, cap) bent = Tanh(down) up = Mul(bent, cap) scores = Add(up, mask)
        p = Softmax<axis=-1>(scores) y = MatMul(p, v)
    """
    model, _ = fuse_and_check(parse(body, f"{QKV}, float[b,1,s,s] mask", Y), *SIZES)
    found = attributes(nodes(model)[0])
    assert (found["scale"], found["softcap"]) == (pytest.approx(0.35), pytest.approx(5.0))


def test_mask_before_the_softcap() -> None:
    body = """
        kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) masked = Add(raw, mask)
        bent = Tanh(masked) p = Softmax<axis=-1>(bent) y = MatMul(p, v)
    """
    _, report = fuse_and_check(parse(body, f"{QKV}, float[b,1,s,s] mask", Y), fused=0, total=1)
    assert "softcap" in report.sites[0].reason


# -- casts, dropout, guards


def test_casts_around_softmax() -> None:
    body = """
        kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) wide = Cast<to=1>(raw)
        c = Constant<value_float=0.35>() scores = Mul(wide, c) p = Softmax<axis=-1>(scores)
        narrow = Cast<to=10>(p) y = MatMul(narrow, v)
    """
    inputs = "float16[b,2,s,8] q, float16[b,2,s,8] k, float16[b,2,s,8] v"
    model, _ = fuse_and_check(parse(body, inputs, "float16[b,2,s,8] y"), *SIZES)
    assert op_types(model) == {"FlashAttention"}


def test_casts_before_the_product() -> None:
    """Q and K upcast, V not, as of GPT-J: the operator adds up in float32 by itself."""
    body = """
        qw = Cast<to=1>(q) kt = Transpose<perm=[0,1,3,2]>(k) kw = Cast<to=1>(kt) scores = MatMul(qw, kw)
        p = Softmax<axis=-1>(scores) narrow = Cast<to=10>(p) y = MatMul(narrow, v)
    """
    inputs = "float16[b,2,s,8] q, float16[b,2,s,8] k, float16[b,2,s,8] v"
    model, _ = fuse_and_check(parse(body, inputs, "float16[b,2,s,8] y"), *SIZES)
    assert op_types(model) == {"FlashAttention"}
    wider = inputs.replace("float16[b,2,s,8] q", "float[b,2,s,8] q")
    _, report = fuse_and_check(parse(body, wider, "float16[b,2,s,8] y"), *SIZES, fused=0, total=1)
    assert "different types" in report.sites[0].reason


def test_casts_behind_the_product() -> None:
    """The scores and V upcast, as a mask of float32 makes TorchScript do: Q and K follow."""
    body = """
        kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) wide = Cast<to=1>(raw) scores = Add(wide, mask)
        p = Softmax<axis=-1>(scores) vw = Cast<to=1>(v) y = MatMul(p, vw)
    """
    inputs = "float16[b,2,s,8] q, float16[b,2,s,8] k, float16[b,2,s,8] v, float[b,1,s,s] mask"
    before = parse(body, inputs, "float[b,2,s,8] y")
    model, _ = fuse_and_check(before)
    assert op_types(model) == {"FlashAttention", "Cast"}
    for number, sizes in enumerate(SIZES):  # the original's scores are float16
        feeds = random_inputs(before, sizes, number)
        for library in (False, True):
            np.testing.assert_allclose(run(model, feeds, library=library)[0], run(before, feeds)[0], atol=5e-3)


def test_double() -> None:
    inputs = QKV.replace("float[", "double[")
    _, report = fuse_and_check(parse(PLAIN, inputs, Y.replace("float[", "double[")), fused=0, total=1)
    assert "double" in report.sites[0].reason


@pytest.mark.parametrize("training", [False, True])
def test_dropout(training: bool) -> None:
    flag = "t = Constant<value = bool {1}>() d = Dropout(p, r, t)" if training else "d = Dropout(p, r)"
    body = PLAIN.replace("y = MatMul(p, v)", f"r = Constant<value_float=0.5>() {flag} y = MatMul(d, v)")
    if training:
        _, report = fuse_and_check(parse(body, QKV, Y), fused=0, total=1)
        assert "Dropout" in report.sites[0].reason
    else:
        fuse_and_check(parse(body, QKV, Y), *SIZES)


def test_isnan_guard() -> None:
    body = PLAIN.replace("MatMul(q, kt)", "MatMul(q, kt) masked = Add(scores, mask)").replace(
        "Softmax<axis=-1>(scores)", "Softmax<axis=-1>(masked)"
    )
    body = body.replace(
        "y = MatMul(p, v)",
        """
        bad = IsNaN(p) zero = Constant<value_float=0.0>() safe = Where(bad, zero, p) y = MatMul(safe, v)
    """,
    )
    model = parse(body, f"{QKV}, float[b,1,s,s] mask", Y)
    fused, report = fuse_and_check(model, *SIZES)
    assert not report.sites[0].reason
    inputs = random_inputs(model, SIZES[0])
    inputs["mask"][0, 0, 1] = -np.inf  # a query that sees no key
    expected, got = run(model, inputs)[0], run(fused, inputs)[0]
    assert not expected[0, :, 1].any()
    assert not got[0, :, 1].any()
    np.testing.assert_allclose(got, expected, atol=1e-5)


SAFE_SOFTMAX = """
    ninf = Constant<value_float=-99999.0>() zero = Constant<value_float=0.0>() last = Constant<value_ints=[-1]>()
    kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) scores = Add(raw, mask) p = Softmax<axis=-1>(scores)
    hidden = Equal(scores, ninf) seen = Not(hidden) number = Cast<to=7>(seen) best = ReduceMax(number, last)
    any = Cast<to=9>(best) none = Not(any) safe = Where(none, zero, p) y = MatMul(safe, v)
"""


def test_safe_softmax() -> None:
    """What aten's _safe_softmax decomposes into: rows of -inf alone become zeros."""
    model = parse(SAFE_SOFTMAX, f"{QKV}, float[b,1,s,s] mask", Y)
    fused, _ = fuse_and_check(model, *SIZES)
    assert op_types(fused) == {"FlashAttention"}
    inputs = random_inputs(model, SIZES[0])
    inputs["mask"][0, 0, 1] = -np.inf
    assert not run(fused, inputs)[0][0, :, 1].any()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("best = ReduceMax(number, last)", "best = ReduceMin(number, last)"),  # zeros where any key is hidden
        ("hidden = Equal(scores, ninf)", "hidden = Equal(raw, ninf)"),
        ("none = Not(any)", "none = Identity(any)"),
        ("Constant<value_ints=[-1]>()", "Constant<value_ints=[-2]>()"),
    ],
)
def test_not_safe_softmax(old: str, new: str) -> None:
    model = parse(SAFE_SOFTMAX.replace(old, new), f"{QKV}, float[b,1,s,s] mask", Y)
    fuse_and_check(model, *SIZES, fused=0, total=1)


# -- what is not attention, or more than it


def test_probabilities_used() -> None:
    _, report = fuse_and_check(parse(PLAIN, QKV, f"{Y}, float[b,2,s,s] p"), fused=0, total=1)
    assert "output of the model" in report.sites[0].reason
    assert "output_attentions" in report.sites[0].reason


@pytest.mark.parametrize("product", ["y = Gemm<alpha=3.0>(p, v)", "y = com.microsoft.FusedMatMul<alpha=3.0>(p, v)"])
def test_product_with_values_that_is_scaled(product: str) -> None:
    body = f"scores = Gemm<transB=1, alpha=0.5>(q, k) p = Softmax(scores) {product}"
    model = parse(body, "float[s,8] q, float[s,8] k, float[s,8] v", "float[s,8] y")
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    _, report = fuse(model)
    assert report.fused == 0
    assert "multiplied by 3.0" in report.sites[0].reason


@pytest.mark.parametrize("own", [0, 1])
def test_products_of_other_domains(own: int) -> None:
    """A function that happens to be called MatMul."""
    products = ["own.MatMul" if index == own else "MatMul" for index in range(2)]
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["" : 18, "own" : 1]>
        graph ({QKV}) => ({Y}) {{
            kt = Transpose<perm=[0,1,3,2]>(k) scores = {products[0]}(q, kt)
            p = Softmax(scores) y = {products[1]}(p, v)
        }}
        <domain: "own", opset_import: ["" : 18]> MatMul (a, b) => (c) {{ d = MatMul(a, b) c = Neg(d) }}
    """)
    model.graph.value_info.append(helper.make_tensor_value_info("scores", onnx.TensorProto.FLOAT, ["b", 2, "s", "s"]))
    fuse_and_check(model, *SIZES, fused=own, total=1)


def test_probabilities_used_inside() -> None:
    _, report = fuse_and_check(parse(PLAIN + "z = Relu(p)", QKV, f"{Y}, float[b,2,s,s] z"), fused=0, total=1)
    assert "used more than once" in report.sites[0].reason


def test_scores_used() -> None:
    _, report = fuse_and_check(parse(PLAIN, QKV, f"{Y}, float[b,2,s,s] scores"), fused=0, total=1)
    assert "output of the model" in report.sites[0].reason


@pytest.mark.parametrize(
    ("softmax", "sites"),
    [
        ("p = Softmax<axis=1>(scores)", 1),
        ("p = Softmax<axis=2>(scores)", 1),  # over the queries
    ],
)
def test_softmax_over_another_axis(softmax: str, sites: int) -> None:
    body = PLAIN.replace("p = Softmax<axis=-1>(scores)", softmax)
    _, report = fuse_and_check(parse(body, QKV, Y), fused=0, total=sites)
    assert "last axis" in report.sites[0].reason


def test_softmax_not_attention() -> None:
    """A classifier's head, a softmax over products with weights, linear attention's softmax on Q."""
    head = "w = Constant<value = float[8,3] {" + ",".join(["0.1"] * 24) + "}>() z = MatMul(x, w) y = Softmax(z)"
    _, report = fuse_and_check(parse(head, "float[b,s,8] x", "float[b,s,3] y"), fused=0)
    assert "no attention found" in str(report)
    pooled = head.replace("y = Softmax(z)", "p = Softmax(z) pt = Transpose<perm=[0,2,1]>(p) y = MatMul(pt, x)")
    fuse_and_check(parse(pooled, "float[b,s,8] x", "float[b,3,8] y"), fused=0)
    linear = "qs = Softmax<axis=-1>(q) kt = Transpose<perm=[0,1,3,2]>(k) c = MatMul(kt, v) y = MatMul(qs, c)"
    fuse_and_check(parse(linear, QKV, Y), fused=0)


@pytest.mark.parametrize("inputs", ["n", "n, n, two"])
def test_arithmetic_of_shapes_with_any_number_of_inputs(inputs: str) -> None:
    """Min takes one or more."""
    body = f"two = Constant<value_ints=[2]>() n = Shape<start=2,end=3>(q) m = Min({inputs}) {PLAIN}"
    fuse_and_check(parse(body, QKV, f"{Y}, int64[1] m"), *SIZES)


def test_nothing_to_fuse_is_the_same_model() -> None:
    model = parse("y = Relu(x)", "float[n] x", "float[n] y")
    result, report = fuse(model)
    assert result is model
    assert report.total == 0


def test_unknown_ranks() -> None:
    model = parse(PLAIN, "float q, float k, float v", "float y")
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    result, report = fuse(model)
    assert result is model
    assert "rank" in report.sites[0].reason


@pytest.mark.parametrize("size", ["?", "?0", -1])
def test_sizes_that_mean_any_size(size: str | int) -> None:
    """Some exporters name every open dimension "?", or write -1: that proves no two of them equal."""
    inputs = "float[b,2,s,8] q, float[b,2,s,8] k, float[b,2,s,8] v, float[s,s] m"
    body = PLAIN.replace("scores = MatMul(q, kt)", "raw = MatMul(q, kt) scores = Add(raw, m)")
    model = parse(body, inputs, "float[b,2,s,e] y")
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param and isinstance(size, str):
                dim.dim_param = size
            elif dim.dim_param:
                dim.dim_value = size
    _, report = fuse(model)
    assert report.fused == 0
    assert report.total == 1


def test_two_key_lengths_are_not_one() -> None:
    """Keys of one length broadcast against values of another: valid, and not attention."""
    body = PLAIN.replace("scores = MatMul(q, kt)", "raw = MatMul(q, kt) scores = Add(raw, mask)")
    inputs = "float[b,2,s,8] q, float[b,2,1,8] k, float[b,2,t,8] v, float[b,1,s,t] mask"
    _, report = fuse_and_check(parse(body, inputs, Y), fused=0, total=1)
    assert "mask" in report.sites[0].reason


def test_batches_that_broadcast() -> None:
    inputs = "float[b,2,s,8] q, float[1,2,s,8] k, float[1,2,s,8] v"
    fuse_and_check(parse(PLAIN, inputs, Y), fused=0, total=1)


def test_a_rule_that_raises_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashonnx.export.rules import sdpa

    def fail(*_: object) -> None:
        raise KeyError("boom")

    monkeypatch.setattr(sdpa, "read_scores", fail)
    model = parse(PLAIN, QKV, Y)
    result, report = fuse(model)
    assert result is model
    assert "KeyError" in report.sites[0].reason


# -- structure of the whole


def test_the_rest_stays() -> None:
    body = f"q = Relu(x) {PLAIN} unused = Relu(v)"
    model = parse(body, QKV.replace("] q", "] x"), Y)
    fused, _ = fuse_and_check(model, *SIZES)
    assert [node.op_type for node in fused.graph.node] == ["Relu", "FlashAttention", "Relu"]
    assert [value.name for value in fused.graph.output] == ["y"]


def test_in_a_subgraph() -> None:
    then = f"{{ {PLAIN} }}"
    text = f"""<ir_version: 10, opset_import: ["" : 18]> graph ({QKV}, bool c) => ({Y}) {{
        y = If (c) <then_branch = t () => ({Y.replace(" y", " y1")}) {then.replace("y = ", "y1 = ")},
                    else_branch = e () => (float[b,2,s,8] y2) {{ y2 = Identity(v) }}>
    }}"""
    model = onnx.parser.parse_model(text)
    for flag in (True, False):
        fused, report = fuse_and_check(model, *SIZES, c=np.array(flag))
    assert "If" in report.sites[0].node
    assert "FlashAttention" in str(fused.graph.node[0])
    assert {o.domain for o in fused.opset_import} == {"", "flashonnx"}


def test_operators_without_a_rule_are_listed() -> None:
    op_type = "QOrderedLongformerAttention"
    node = helper.make_node(op_type, ["q", "k", "v"], ["y"], domain="com.microsoft", num_heads=2)
    values = [helper.make_tensor_value_info(name, 1, ["b", "s", 16]) for name in "qkvy"]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", values[:3], values[3:]), opset_imports=opsets)
    result, report = fuse(model)
    assert result is model
    assert report.sites[0].kind == f"com.microsoft::{op_type}"
    assert "no rule" in report.sites[0].reason
