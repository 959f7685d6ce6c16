"""FlashAttentionKVCache behind rotary embeddings and transposes: what becomes the operator's own, and what must not."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse
from models import attributes, has_library, nodes, op_types, run
from onnx import TensorProto

SIZES = ({"b": 2, "s": 3, "c": 9}, {"b": 1, "s": 1, "c": 5}, {"b": 3, "s": 4, "c": 12})
PROJECTIONS = "float[b,s,32] q3, float[b,s,16] k3, float[b,s,16] v3"
CACHES = "float[b,2,c,8] keys, float[b,2,c,8] values, int64[b] n"
CONSTANTS = """
    o0 = Constant<value_ints=[0]>() o1 = Constant<value_ints=[1]>() o3 = Constant<value_ints=[3]>()
    h4 = Constant<value_ints=[4]>() h2 = Constant<value_ints=[2]>() end = Constant<value_ints=[9223372036854775807]>()
    qs = Constant<value_ints=[0,0,4,8]>() ks = Constant<value_ints=[0,0,2,8]>() a2 = Constant<value_ints=[2]>()
    i0 = Constant<value_int=0>() i1 = Constant<value_int=1>() two = Constant<value_float=2.0>()
"""
HEADS = """
    q4 = Reshape(q3, qs) k4 = Reshape(k3, ks) v4 = Reshape(v3, ks) q = Transpose<perm=[0,2,1,3]>(q4)
    k = Transpose<perm=[0,2,1,3]>(k4) v = Transpose<perm=[0,2,1,3]>(v4)
"""
ANGLES = """
    s1 = Shape<start=1,end=2>(q3) s = Squeeze(s1) r = Range(i0, s, i1) n2 = Unsqueeze(n, o1) at = Add(n2, r)
    f = Cast<to=1>(at) col = Unsqueeze(f, a2) freq = Constant<value_floats=[1.0, 0.3, 0.1, 0.03]>()
    angle = Mul(col, freq) both = Concat<axis=-1>(angle, angle)
    c3 = Cos(both) z3 = Sin(both) cos = Unsqueeze(c3, o1) sin = Unsqueeze(z3, o1)
"""
# {x} turned by {c} and {z}.
TURN = """
    {x}a = Slice({x}, o0, h4, o3, o1) {x}b = Slice({x}, h4, end, o3, o1) {x}m = Neg({x}b)
    {x}h = Concat<axis=-1>({x}m, {x}a) {x}c = Mul({x}, {c}) {x}z = Mul({x}h, {z}) {x}r = Add({x}c, {x}z)
"""
ATTEND = """
    y4, pk, pv = flashonnx.FlashAttentionKVCache<scale=0.3>({q}, {k}, v, keys, values, n)
    yt = Transpose<perm=[0,2,1,3]>(y4) ys = Constant<value_ints=[0,0,32]>() y = Reshape(yt, ys)
"""
library = pytest.mark.skipif(not has_library(), reason="the node before needs the library")


def turn(x: str, c: str = "cos", z: str = "sin") -> str:
    return TURN.format(x=x, c=c, z=z)


def model(body: str, q: str = "qr", k: str = "kr") -> onnx.ModelProto:
    text = f"""<ir_version: 10, opset_import: ["" : 20, "flashonnx" : 1]>
        g ({PROJECTIONS}, {CACHES}) => (float[b,s,32] y, float[b,2,c,8] pk, float[b,2,c,8] pv)
        {{ {CONSTANTS} {HEADS} {ANGLES} {body} {ATTEND.format(q=q, k=k)} }}"""
    return onnx.parser.parse_model(text)


def check(before: onnx.ModelProto) -> Any:
    """The same answers by the library before and after, and by the body; the fused node."""
    fused, report = fuse(before)
    assert report.fused == report.total == 1 and not report.notes, str(report)
    onnx.checker.check_model(fused, full_check=True)
    for number, sizes in enumerate(SIZES):
        random = np.random.default_rng(number)
        inputs = {}
        for value in before.graph.input:
            tensor = value.type.tensor_type
            shape = [d.dim_value or sizes[d.dim_param] for d in tensor.shape.dim]
            inputs[value.name] = (
                random.integers(0, sizes["c"] - sizes["s"] + 1, shape)
                if tensor.elem_type == TensorProto.INT64
                else random.standard_normal(shape).astype(np.float32)
            )
        expected = run(before, inputs, library=True)
        for with_library in (True, False):
            for got, want in zip(run(fused, inputs, library=with_library), expected, strict=True):
                np.testing.assert_allclose(got, want, atol=2e-5)
    (node,) = nodes(fused)
    return node, fused


HALF = "scaled = Mul(c3, two) cs = Unsqueeze(scaled, o1)"
TURNED = {
    "whole": turn("q") + turn("k"),
    "the other way round": (turn("q") + turn("k")).replace("Add(qc, qz)", "Add(qz, qc)").replace(
        "Mul(kh, sin)", "Mul(sin, kh)"),
    "by Split": turn("k") + """qa, qb = Split<axis=3, num_outputs=2>(q) qm = Neg(qb) qh = Concat<axis=3>(qm, qa)
        qc = Mul(cos, q) qz = Mul(qh, sin) qr = Add(qc, qz)""",
    "scaled tables": HALF + turn("q", "cs") + turn("k", "cs"),
}  # fmt: skip


@library
@pytest.mark.parametrize("name", TURNED)
def test_rotation(name: str) -> None:
    node, fused = check(model(TURNED[name]))
    assert list(node.input[:3]) == ["q3", "k3", "v3"]
    assert node.input[8] and node.input[9] and node.input[10]
    assert attributes(node) == {"scale": pytest.approx(0.3), "q_num_heads": 4, "kv_num_heads": 2}
    assert not {"Neg", "Transpose"} & op_types(fused)


# Neighbours turned, by tables that have each number twice; and halves, by tables that have it once.
PAIRS = """
    av = Unsqueeze(angle, last) twice = Constant<value_ints=[1,1,1,2]>() ax = Expand(av, twice)
    flat = Constant<value_ints=[0,0,8]>() aw = Reshape(ax, flat) pc3 = Cos(aw) pz3 = Sin(aw)
    pcos = Unsqueeze(pc3, o1) psin = Unsqueeze(pz3, o1)
"""
NEIGHBOURS = """
    {x}a = Slice({x}, o0, end, o3, a2) {x}b = Slice({x}, o1, end, o3, a2) {x}m = Neg({x}b)
    {x}u = Unsqueeze({x}m, last) {x}w = Unsqueeze({x}a, last) {x}k = Concat<axis=-1>({x}u, {x}w)
    {x}o = Constant<value_ints=[0,{heads},-1,8]>() {x}h = Reshape({x}k, {x}o)
    {x}c = Mul({x}, {c}) {x}z = Mul({x}h, psin) {x}r = Add({x}c, {x}z)
"""
ONCE = "oc = Cos(angle) oz = Sin(angle) ocos = Unsqueeze(oc, o1) osin = Unsqueeze(oz, o1)"
BOTH_HALVES = """
    {x}a, {x}b = Split<axis=3, num_outputs=2>({x}) {x}ac = Mul({x}a, ocos) {x}bz = Mul({x}b, osin)
    {x}bc = Mul({x}b, ocos) {x}az = Mul(osin, {x}a) {x}l = Sub({x}ac, {x}bz) {x}m = Add({x}bc, {x}az)
    {x}r = Concat<axis=-1>({x}l, {x}m)
"""


def neighbours(c: str = "pcos") -> str:
    last = "last = Constant<value_ints=[-1]>()"
    return last + PAIRS + "".join(NEIGHBOURS.format(x=x, heads=n, c=c) for x, n in (("q", 4), ("k", 2)))


def halves() -> str:
    return ONCE + BOTH_HALVES.format(x="q") + BOTH_HALVES.format(x="k")


@library
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_of_neighbours_and_by_single_tables(interleaved: bool) -> None:
    node, fused = check(model(neighbours() if interleaved else halves()))
    assert list(node.input[:3]) == ["q3", "k3", "v3"] and node.input[8] and node.input[9] and node.input[10]
    assert attributes(node).get("rotary_interleaved", 0) == interleaved
    assert not {"Neg", "Sub", "Transpose"} & op_types(fused)


NOT_QUITE = {
    "equal halves for neighbours": neighbours("cos"),
    "neighbours of two tensors": neighbours().replace("qb = Slice(q, o1", "qq = Add(q, cos) qb = Slice(qq, o1"),
    "the same neighbour twice": neighbours().replace("qb = Slice(q, o1", "qb = Slice(q, o0"),
    "the second one not negated": neighbours().replace("Unsqueeze(qm", "Unsqueeze(qb"),
    "first and second in the other order": neighbours().replace("Concat<axis=-1>(qu, qw)", "Concat<axis=-1>(qw, qu)"),
    "difference the other way round": halves().replace("Sub(qac, qbz)", "Sub(qbz, qac)"),
    "sines where cosines belong": halves().replace("qbc = Mul(qb, ocos)", "qbc = Mul(qb, osin)"),
    "one half twice": halves().replace("qbc = Mul(qb, ocos)", "qbc = Mul(qa, ocos)"),
    "the halves in the other order": halves().replace("Concat<axis=-1>(ql, qm)", "Concat<axis=-1>(qm, ql)"),
}  # fmt: skip


@library
@pytest.mark.parametrize("name", NOT_QUITE)
def test_nearly_such_a_rotation(name: str) -> None:
    node, _ = check(model(NOT_QUITE[name]))
    assert not any(node.input[8:])


@library
def test_part_of_the_head() -> None:
    """The first half of each head is turned, the rest goes by."""
    small = """fr = Constant<value_floats=[1.0, 0.2]>() an = Mul(col, fr) bo = Concat<axis=-1>(an, an) cc = Cos(bo)
        ss = Sin(bo) pc = Unsqueeze(cc, o1) ps = Unsqueeze(ss, o1)"""
    part = """
        {x}t = Slice({x}, o0, h4, o3, o1) {x}p = Slice({x}, h4, end, o3, o1)
        {x}a = Slice({x}t, o0, h2, o3, o1) {x}b = Slice({x}t, h2, end, o3, o1) {x}m = Neg({x}b)
        {x}h = Concat<axis=-1>({x}m, {x}a) {x}c = Mul({x}t, pc) {x}z = Mul({x}h, ps) {x}w = Add({x}c, {x}z)
        {x}r = Concat<axis=-1>({x}w, {x}p)
    """
    node, _ = check(model(small + part.format(x="q") + part.format(x="k")))
    assert attributes(node)["rotary_dim"] == 4
    assert list(node.input[:3]) == ["q3", "k3", "v3"]


# Of cos and sin, one for all sentences alike.
ALIKE = """
    rf = Cast<to=1>(r) rc = Unsqueeze(rf, o0) rcol = Unsqueeze(rc, a2) ra = Mul(rcol, freq)
    rb = Concat<axis=-1>(ra, ra) rc3 = Cos(rb) rz3 = Sin(rb) cos1 = Unsqueeze(rc3, o1) sin1 = Unsqueeze(rz3, o1)
"""
NOT_TURNED = {
    "cos for all sentences alike": ALIKE + turn("q", "cos1") + turn("k", "cos1"),
    "sin for all sentences alike": ALIKE + turn("q", "cos", "sin1") + turn("k", "cos", "sin1"),
    "halves of the tables differ": """fr = Constant<value_floats=[0.9, 0.2, 0.1, 0.01]>() an = Mul(col, fr)
        bo = Concat<axis=-1>(angle, an) cc = Cos(bo) pc = Unsqueeze(cc, o1)""" + turn("q", "pc") + turn("k", "pc"),
    "other angles for keys": "cs = Mul(cos, two)" + turn("q") + turn("k", "cs"),
    "the wrong half negated": (turn("q") + turn("k")).replace("qm = Neg(qb)", "qm = Neg(qa)").replace(
        "Concat<axis=-1>(qm, qa)", "Concat<axis=-1>(qm, qb)"),
    "halves of unequal size": (turn("q") + turn("k")).replace("Slice(q, o0, h4", "Slice(q, h4, end").replace(
        "(q, h4, end, o3, o1) qb", "(q, h4, end, o3, o1) qb"),
    "a table of its own for each head": """hs = Constant<value_ints=[1,4,1,1]>() cw = Expand(cos, hs)
        kh1 = Slice(cw, o0, h2, o1) """ + turn("q", "cw") + turn("k", "kh1"),
}  # fmt: skip


@library
@pytest.mark.parametrize("name", NOT_TURNED)
def test_no_rotation(name: str) -> None:
    """The tensors stay turned outside; only what is proved moves."""
    node, fused = check(model(NOT_TURNED[name]))
    assert not any(node.input[8:])
    assert "Neg" in op_types(fused)


@library
def test_queries_alone() -> None:
    node, _ = check(model(turn("q"), k="k"))
    assert not any(node.input[8:])


@library
def test_without_rotation() -> None:
    """Transposes vanish all the same."""
    node, fused = check(model("", q="q", k="k"))
    assert list(node.input[:3]) == ["q3", "k3", "v3"]
    assert "Transpose" not in op_types(fused)


@library
def test_heads_first_stay() -> None:
    """What is no transpose stays in four dimensions."""
    node, fused = check(model("w = Neg(q) u = Neg(k)", q="w", k="u"))
    assert list(node.input[:2]) == ["w", "u"]
    assert "Transpose" in op_types(fused)
