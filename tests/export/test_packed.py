"""Q, K and V cut out of one projection: the fused node reads them where they lie, or they stay cut."""

from __future__ import annotations

import onnx
import pytest
from models import attributes, fuse_and_check, nodes, op_types, parse

SIZES = ({"b": 2, "s": 5}, {"b": 1, "s": 9}, {"b": 3, "s": 1}, {"b": 2, "s": 2})
QKV = "float[b,s,48] x"
ATTEND = """
    kt = Transpose<perm=[0,1,3,2]>(kh) raw = MatMul(qh, kt) c = Constant<value_float=0.35>() scores = Mul(raw, c)
    p = Softmax<axis=-1>(scores) o = MatMul(p, vh)
"""
JOIN = "ot = Transpose<perm=[0,2,1,3]>(o) flat = Constant<value_ints=[0,0,16]>() y = Reshape(ot, flat)"
Y = "float[b,s,16] y"


def numbers(**lists: str) -> str:
    return " ".join(f"{name} = Constant<value_ints=[{items}]>()" for name, items in lists.items())


def heads(name: str, source: str) -> str:
    """`source` (b, s, 16) with its two heads apart, as `name`."""
    return f"{source}4 = Reshape({source}, apart) {name} = Transpose<perm=[0,2,1,3]>({source}4) "


HEADS = numbers(apart="0,0,2,8") + heads("qh", "q") + heads("kh", "k") + heads("vh", "v")
# (3, b, h, s, d), as timm makes it
PERMUTED = numbers(five="0,0,3,2,8") + "x5 = Reshape(x, five) t = Transpose<perm=[2,0,3,1,4]>(x5)"
PICKED = "i = Constant<value_int={}>() {} = Gather<axis=0>(t, i) "
UNBOUND = "".join(
    PICKED.format(i, name).replace("i =", f"i{i} =").replace(", i)", f", i{i})")
    for i, name in enumerate(("qh", "kh", "vh"))
)
SLICED = numbers(n0="0", n1="1", n2="2", n3="3") + "".join(
    f" {name}1 = Slice(t, n{i}, n{i + 1}, n0) {name} = Squeeze({name}1, n0)"
    for i, name in enumerate(("qh", "kh", "vh"))
)


def gathered(axis: int, last: int) -> str:
    """Q, K and V of x5 by their places on an axis, V's counted as `last`."""
    places = f" i0 = Constant<value_int=0>() i1 = Constant<value_int=1>() i2 = Constant<value_int={last}>()"
    return places + "".join(
        f" {n}4 = Gather<axis={axis}>(x5, i{i}) {n}h = Transpose<perm=[0,2,1,3]>({n}4)"
        for i, n in enumerate(("q", "k", "v"))
    )


WHOLE = {
    "a Split, as of GPT-2": "q, k, v = Split<axis=2, num_outputs=3>(x)" + HEADS,
    "a Split by sizes": numbers(w="16,16,16") + "q, k, v = Split<axis=-1>(x, w)" + HEADS,
    "Slices": numbers(axis="-1", z="0", a="16", b_="32", end="9223372036854775807")
    + "q = Slice(x, z, a, axis) k = Slice(x, a, b_, axis) v = Slice(x, b_, end, axis)"
    + HEADS,
    "Slices from the end": numbers(axis="2", z="-48", a="-32", b_="-16", end="48")
    + "q = Slice(x, z, a, axis) k = Slice(x, a, b_, axis) v = Slice(x, b_, end, axis)"
    + HEADS,
    "timm's permutation, unbound": PERMUTED + UNBOUND,
    "timm's permutation, sliced": PERMUTED + SLICED,
    "timm's permutation, split": PERMUTED
    + numbers(n0="0")
    + "q5, k5, v5 = Split<axis=0, num_outputs=3>(t) qh = Squeeze(q5, n0) kh = Squeeze(k5, n0) vh = Squeeze(v5, n0)",
    "unbound before the transposes": numbers(five="0,0,3,2,8") + "x5 = Reshape(x, five)" + gathered(2, last=-1),
}


@pytest.mark.parametrize("cut", WHOLE.values(), ids=WHOLE)
def test_thirds(cut: str) -> None:
    """(batch, sequence, 3, heads, size), however it is cut."""
    model, report = fuse_and_check(parse(cut + ATTEND + JOIN, QKV, Y), *SIZES)
    assert op_types(model) == {"FlashAttention"}
    (node,) = nodes(model)
    assert list(node.input) == ["x"]
    assert attributes(node) == {
        "q_num_heads": 2, "kv_num_heads": 2, "scale": pytest.approx(0.35), "qkv_layout": b"3hd"
    }  # fmt: skip
    assert "qkv_layout=3hd" in report.sites[0].became


def test_five_dimensions() -> None:
    """A projection that has its heads apart is taken as it is."""
    cut = "t = Transpose<perm=[2,0,3,1,4]>(x)" + UNBOUND
    model, _ = fuse_and_check(parse(cut + ATTEND + JOIN, "float[b,s,3,2,8] x", Y), *SIZES)
    assert op_types(model) == {"FlashAttention"}


@pytest.mark.parametrize("rows", ["-1,48", "-1,5,48"])
def test_rows_of_all_tokens(rows: str) -> None:
    """GPT-2: the projection is a matrix of all tokens first."""
    body = (
        f"""{numbers(all=rows)} m = Reshape(x, all) r = Relu(m)
        b1 = Shape<start=0,end=1>(x) s1 = Shape<start=1,end=2>(x) {numbers(w="48")} sh = Concat<axis=0>(b1, s1, w)
        z = Reshape(r, sh) q, k, v = Split<axis=2, num_outputs=3>(z)"""
        + HEADS
    )
    sizes = SIZES if "5" not in rows else ({"b": 2, "s": 5}, {"b": 3, "s": 5})
    model, _ = fuse_and_check(parse(body + ATTEND + JOIN, QKV, Y), *sizes)
    assert b"3hd" in attributes(nodes(model)[0]).values()
    assert "Split" not in op_types(model)


INTERLEAVED = {
    "GPT-NeoX": numbers(e="0,0,2,24")
    + """x4 = Reshape(x, e) xh = Transpose<perm=[0,2,1,3]>(x4) qh, kh, vh = Split<axis=-1, num_outputs=3>(xh)""",
    "BLOOM": numbers(e="0,0,2,3,8") + "x5 = Reshape(x, e)" + gathered(3, last=2),
}


@pytest.mark.parametrize("cut", INTERLEAVED.values(), ids=INTERLEAVED)
def test_thirds_of_each_head(cut: str) -> None:
    model, _ = fuse_and_check(parse(cut + ATTEND + JOIN, QKV, Y), *SIZES)
    assert op_types(model) == {"FlashAttention"}
    assert attributes(nodes(model)[0])["qkv_layout"] == b"h3d"


FEWER = {
    "Falcon, one key head": (
        numbers(e="0,0,6,8", z="0", a="-2", b_="-1", end="6", axis="2")
        + """x4 = Reshape(x, e) q = Slice(x4, z, a, axis) k = Slice(x4, a, b_, axis) v = Slice(x4, b_, end, axis)
        qh = Transpose<perm=[0,2,1,3]>(q) kh = Transpose<perm=[0,2,1,3]>(k) vh = Transpose<perm=[0,2,1,3]>(v)"""
    ),
    "two heads, repeated": (
        numbers(w="32,16,16", qe="0,0,4,8", ke="0,0,2,8", a2="2", he="0,4,-1,8", wide="1,1,2,1,1")
        + """q, k, v = Split<axis=2>(x, w) q4 = Reshape(q, qe) qh = Transpose<perm=[0,2,1,3]>(q4)
        k4 = Reshape(k, ke) kk = Transpose<perm=[0,2,1,3]>(k4) k5 = Unsqueeze(kk, a2) kw = Expand(k5, wide)
        v4 = Reshape(v, ke) vv = Transpose<perm=[0,2,1,3]>(v4) v5 = Unsqueeze(vv, a2) vw = Expand(v5, wide)
        b1 = Shape<start=0,end=1>(x) s1 = Shape<start=1,end=2>(x) four = Constant<value_ints=[4]>()
        eight = Constant<value_ints=[8]>() joined = Concat<axis=0>(b1, four, s1, eight)
        kh = Reshape(kw, joined) vh = Reshape(vw, joined)"""
    ),
}


@pytest.mark.parametrize("name", FEWER)
def test_fewer_key_heads(name: str) -> None:
    width, kv_heads = (48, 1) if "one" in name else (64, 2)
    join = JOIN.replace("16", "32")
    model = parse(FEWER[name] + ATTEND + join, f"float[b,s,{width}] x", "float[b,s,32] y")
    fused, _ = fuse_and_check(model, *SIZES)
    assert op_types(fused) == {"FlashAttention"}
    found = attributes(nodes(fused)[0])
    assert (found["q_num_heads"], found["kv_num_heads"], found["qkv_layout"]) == (4, kv_heads, b"gqa")


TIME_MAJOR = (
    numbers(four="0,0,3,16", a0="0", a2="-2", merged="0,-1,8")
    + """u = Reshape(x, four) u5 = Unsqueeze(u, a0) t5 = Transpose<perm=[3,1,2,0,4]>(u5) t = Squeeze(t5, a2)
    i0 = Constant<value_int=0>() i1 = Constant<value_int=1>() i2 = Constant<value_int=2>()"""
    + "".join(
        f""" {n} = Gather<axis=0>(t, i{i}) s1_{n} = Shape<start=0,end=1>(x) b1_{n} = Shape<start=1,end=2>(x)
        two_{n} = Constant<value_ints=[2]>() bh_{n} = Mul(b1_{n}, two_{n}) d_{n} = Constant<value_ints=[8]>()
        sh_{n} = Concat<axis=0>(s1_{n}, bh_{n}, d_{n}) {n}3 = Reshape({n}, sh_{n})
        {n}t = Transpose<perm=[1,0,2]>({n}3)"""
        for i, n in enumerate(("q", "k", "v"))
    )
)


@pytest.mark.parametrize("last", ["float[s,b,16] y", "float[b,s,16] z"])
def test_time_before_batch(last: str) -> None:
    """nn.MultiheadAttention: batch and heads are merged, and the output is (sequence, batch, heads * size)."""
    body = (
        TIME_MAJOR
        + """
        kt = Transpose<perm=[0,2,1]>(kt_) raw = MatMul(qt, kt) c = Constant<value_float=0.35>() scores = Mul(raw, c)
        p = Softmax<axis=-1>(scores) o3 = MatMul(p, vt) o = Transpose<perm=[1,0,2]>(o3)
        w = Constant<value_ints=[16]>() full = Concat<axis=0>(s1_q, b1_q, w) y = Reshape(o, full)
        z = Transpose<perm=[1,0,2]>(y)
    """.replace("kt_", "k_")
    )
    body = body.replace("kt = Transpose<perm=[1,0,2]>(k3)", "k_ = Transpose<perm=[1,0,2]>(k3)")
    model, _ = fuse_and_check(parse(body, "float[s,b,48] x", last), *SIZES)
    (node,) = nodes(model)
    assert attributes(node)["qkv_layout"] == b"time_major"
    assert list(node.input) == ["x"]
    assert op_types(model) <= {"FlashAttention", "Transpose"}


@pytest.mark.parametrize("inputs", ["q, k, v", "q, k, v, , , "])
def test_standard_operator(inputs: str) -> None:
    """Attention of three dimensions right behind a Split."""
    body = (
        f"q, k, v = Split<axis=2, num_outputs=3>(x) y = Attention<q_num_heads=2, kv_num_heads=2, is_causal=1>({inputs})"
    )
    model, _ = fuse_and_check(parse(body, QKV, Y, opset=23), *SIZES)
    assert op_types(model) == {"FlashAttention"}
    assert attributes(nodes(model)[0])["qkv_layout"] == b"3hd"


def test_standard_operator_with_fewer_heads() -> None:
    """Four dimensions and grouped heads that the operator itself spreads."""
    body = (
        numbers(w="32,16,16", qe="0,0,4,8", ke="0,0,2,8")
        + """q, k, v = Split<axis=2>(x, w)
        q4 = Reshape(q, qe) qh = Transpose<perm=[0,2,1,3]>(q4) k4 = Reshape(k, ke) kh = Transpose<perm=[0,2,1,3]>(k4)
        v4 = Reshape(v, ke) vh = Transpose<perm=[0,2,1,3]>(v4) o = Attention(qh, kh, vh)"""
        + JOIN.replace("16", "32")
    )
    model, _ = fuse_and_check(parse(body, "float[b,s,64] x", "float[b,s,32] y", opset=23), *SIZES)
    assert op_types(model) == {"FlashAttention"}
    assert attributes(nodes(model)[0]) == {"q_num_heads": 4, "kv_num_heads": 2, "qkv_layout": b"gqa"}


def test_the_projection_is_used_otherwise_too() -> None:
    body = "q, k, v = Split<axis=2, num_outputs=3>(x) z = Relu(k)" + HEADS + ATTEND + JOIN
    model, _ = fuse_and_check(parse(body, QKV, f"{Y}, float[b,s,16] z"), *SIZES)
    assert op_types(model) == {"FlashAttention", "Split", "Relu"}
    assert list(nodes(model)[0].input) == ["x"]


def test_scaled_parts() -> None:
    """Numbers on Q and on K go into the scale; one on V is its own."""
    body = "q, k, v = Split<axis=2, num_outputs=3>(x)" + HEADS.replace("Reshape(q,", "Reshape(qs,")
    body = body.replace("q4 =", "two = Constant<value_float=2.0>() qs = Mul(q, two) q4 =") + ATTEND + JOIN
    model, _ = fuse_and_check(parse(body, QKV, Y), *SIZES)
    assert attributes(nodes(model)[0])["scale"] == pytest.approx(0.7)
    assert op_types(model) == {"FlashAttention"}


# -- what looks like it, and is not: fused as it is, with the tensors cut out


def not_packed(body: str, inputs: str = QKV) -> onnx.ModelProto:
    model, _ = fuse_and_check(parse(body + ATTEND + JOIN, inputs, Y), *SIZES)
    (node,) = nodes(model)
    assert "qkv_layout" not in attributes(node)
    assert len(node.input) >= 3
    return model


@pytest.mark.parametrize("order", ["k, q, v", "q, v, k", "v, k, q"])
def test_thirds_in_another_order(order: str) -> None:
    not_packed(f"{order} = Split<axis=2, num_outputs=3>(x)" + HEADS)


def test_a_third_twice() -> None:
    not_packed("q, unused, v = Split<axis=2, num_outputs=3>(x) k = Identity(q)" + HEADS)


def test_thirds_of_something_wider() -> None:
    not_packed(numbers(w="16,16,16,16") + "q, k, v, g = Split<axis=2>(x, w)" + HEADS, "float[b,s,64] x")


def test_thirds_of_something_wider_at_one_place() -> None:
    """One sentence of one token: no distance between two rows tells."""
    body = numbers(w="16,16,16,16") + "q, k, v, g = Split<axis=2>(x, w)" + HEADS + ATTEND + JOIN
    model, _ = fuse_and_check(parse(body, "float[1,1,64] x", "float[1,1,16] y"), {})
    assert "qkv_layout" not in attributes(nodes(model)[0])


def test_thirds_that_do_not_start_at_the_start() -> None:
    cut = (
        numbers(axis="2", z="8", a="24", b_="40", e="56")
        + """
        q = Slice(x, z, a, axis) k = Slice(x, a, b_, axis) v = Slice(x, b_, e, axis)"""
    )
    not_packed(cut + HEADS, "float[b,s,56] x")


def test_elements_interleaved() -> None:
    """(batch, sequence, heads, size, 3): the elements of Q, K and V take turns."""
    cut = (
        numbers(e="0,0,2,8,3")
        + "x5 = Reshape(x, e)"
        + "".join(
            f" i{i} = Constant<value_int={i}>() {n}4 = Gather<axis=4>(x5, i{i}) {n}h = Transpose<perm=[0,2,1,3]>({n}4)"
            for i, n in enumerate(("q", "k", "v"))
        )
    )
    not_packed(cut)


def test_every_third_element() -> None:
    cut = (
        numbers(axis="2", z="0", one="1", two="2", e="48", step="3")
        + """
        q = Slice(x, z, e, axis, step) k = Slice(x, one, e, axis, step) v = Slice(x, two, e, axis, step)"""
    )
    not_packed(cut + HEADS)


def test_heads_of_keys_in_another_order() -> None:
    """The heads of K are read as (size, heads): as many elements, elsewhere."""
    cut = "q, k, v = Split<axis=2, num_outputs=3>(x)" + numbers(other="0,0,8,2")
    own = HEADS.replace(heads("kh", "k"), "k4 = Reshape(k, other) kh = Transpose<perm=[0,3,1,2]>(k4) ")
    not_packed(cut + own)


def test_another_permutation() -> None:
    """Sequence and heads change places in K alone."""
    inputs = "float[b,2,48] x"
    own = HEADS.replace(heads("kh", "k"), "kh4 = Reshape(k, apart) kh = Identity(kh4) ")
    body = "q, k, v = Split<axis=2, num_outputs=3>(x)" + own + ATTEND + JOIN
    model, _ = fuse_and_check(parse(body, inputs, "float[b,2,16] y"), {"b": 2}, {"b": 1})
    assert "qkv_layout" not in attributes(nodes(model)[0])


def test_two_projections() -> None:
    cut = """q, unused, v = Split<axis=2, num_outputs=3>(x)
        r = Relu(x) other, k, rest = Split<axis=2, num_outputs=3>(r)"""
    not_packed(cut + HEADS)


def test_values_multiplied() -> None:
    cut = "q, k, v0 = Split<axis=2, num_outputs=3>(x) two = Constant<value_float=2.0>() v = Mul(v0, two)"
    not_packed(cut + HEADS)


def test_queries_multiplied_by_what_is_not_constant() -> None:
    cut = "q0, k, v = Split<axis=2, num_outputs=3>(x) q = Mul(q0, g)"
    not_packed(cut + HEADS, f"{QKV}, float g")


def test_keys_rotated() -> None:
    """A rotary embedding stands between: only what is a copy goes."""
    cut = """q, k0, v = Split<axis=2, num_outputs=3>(x)
        k1, k2 = Split<axis=2, num_outputs=2>(k0) k = Concat<axis=2>(k2, k1)"""
    not_packed(cut + HEADS)


def test_time_and_batch_exchanged_in_one() -> None:
    """Q and V of (s, b, ...) as they are, K of the same taken for (b, s, ...): equal sizes do not help."""
    inputs = "float[4,4,48] x"
    cut = "q, k0, v = Split<axis=2, num_outputs=3>(x) k = Transpose<perm=[1,0,2]>(k0)"
    model, _ = fuse_and_check(parse(cut + HEADS + ATTEND + JOIN, inputs, "float[4,4,16] y"), {})
    assert "qkv_layout" not in attributes(nodes(model)[0])
