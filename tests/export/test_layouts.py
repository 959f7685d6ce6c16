"""Transposes, reshapes and repeated heads around attention, absorbed where the shapes prove it."""

from __future__ import annotations

import pytest
from flashonnx.export import fuse
from models import attributes, fuse_and_check, nodes, op_types, parse

SIZES = ({"b": 2, "s": 5, "t": 7}, {"b": 1, "s": 9, "t": 3}, {"b": 3, "s": 1, "t": 4})
ATTEND = "scores = MatMul(qh, kt) p = Softmax<axis=-1>(scores) o = MatMul(p, vh)"
FLAT = "float[b,s,16] q, float[b,t,16] k, float[b,t,16] v"
SPLIT = """
    bsd = Constant<value_ints=[0,0,2,8]>() flat = Constant<value_ints=[0,0,16]>()
    q4 = Reshape(q, bsd) qh = Transpose<perm=[0,2,1,3]>(q4)
    k4 = Reshape(k, bsd) v4 = Reshape(v, bsd) vh = Transpose<perm=[0,2,1,3]>(v4)
"""
JOIN = "ot = Transpose<perm=[0,2,1,3]>(o) y = Reshape(ot, flat)"


@pytest.mark.parametrize(
    "keys",
    [
        "kt = Transpose<perm=[0,2,3,1]>(k4)",
        "kh = Transpose<perm=[0,2,1,3]>(k4) kt = Transpose<perm=[0,1,3,2]>(kh)",
        # torch's SDPA: through three dimensions
        """kh = Transpose<perm=[0,2,1,3]>(k4) sh = Shape(kh)
           m1 = Constant<value_ints=[-1]>() i2 = Constant<value_ints=[2]>()
           i0 = Constant<value_ints=[0]>() i3 = Constant<value_ints=[3]>() i4 = Constant<value_ints=[4]>()
           len = Slice(sh, i2, i3) size = Slice(sh, i3, i4) head = Slice(sh, i0, i2)
           three = Concat<axis=0>(m1, len, size) k3 = Reshape(kh, three) k3t = Transpose<perm=[0,2,1]>(k3)
           four = Concat<axis=0>(head, size, len) kt = Reshape(k3t, four)""",
    ],
)
def test_three_dimensions(keys: str) -> None:
    """Projections split into heads become the (batch, sequence, heads * size) form, with no transpose left."""
    model, report = fuse_and_check(parse(SPLIT + keys + ATTEND + JOIN, FLAT, "float[b,s,16] y"), *SIZES)
    assert op_types(model) == {"FlashAttention"}
    assert attributes(nodes(model)[0]) == {"q_num_heads": 2, "kv_num_heads": 2, "scale": 1.0}
    assert "3-D" in report.sites[0].became


def test_output_used_in_another_shape() -> None:
    """GPT-2: the output flows into a matrix of all tokens."""
    join = "ot = Transpose<perm=[0,2,1,3]>(o) all = Constant<value_ints=[-1,16]>() y = Reshape(ot, all)"
    body = SPLIT + "kt = Transpose<perm=[0,2,3,1]>(k4)" + ATTEND + join
    model, _ = fuse_and_check(parse(body, FLAT, "float[n,16] y"), *SIZES)
    assert op_types(model) == {"FlashAttention", "Reshape"}


def test_output_used_twice() -> None:
    """Somebody else needs the output with the heads apart."""
    body = SPLIT + "kt = Transpose<perm=[0,2,3,1]>(k4)" + ATTEND + JOIN + " z = Relu(o)"
    model, _ = fuse_and_check(parse(body, FLAT, "float[b,s,16] y, float[b,2,s,8] z"), *SIZES)
    assert {value.name for value in model.graph.output} == {"y", "z"}


def test_output_is_transposed_otherwise() -> None:
    body = SPLIT + "kt = Transpose<perm=[0,2,3,1]>(k4)" + ATTEND + "y = Transpose<perm=[2,0,1,3]>(o)"
    fuse_and_check(parse(body, FLAT, "float[s,b,2,8] y"), *SIZES)


def test_heads_only_from_a_dynamic_reshape() -> None:
    """The number of heads is read off the graph: 16 elements in heads of 8."""
    split = (
        SPLIT.replace(
            "bsd = Constant<value_ints=[0,0,2,8]>()",
            """
        bs = Shape<start=0,end=1>(q) ss = Shape<start=1,end=2>(q) ts = Shape<start=1,end=2>(k)
        m1 = Constant<value_ints=[-1]>() e = Constant<value_ints=[8]>()
        bsd = Concat<axis=0>(bs, ss, m1, e) btd = Concat<axis=0>(bs, ts, m1, e)
    """,
        )
        .replace("Reshape(k, bsd)", "Reshape(k, btd)")
        .replace("Reshape(v, bsd)", "Reshape(v, btd)")
    )
    body = split + "kt = Transpose<perm=[0,2,3,1]>(k4)" + ATTEND + JOIN
    model, _ = fuse_and_check(parse(body, FLAT, "float[b,s,16] y"), *SIZES)
    assert attributes(nodes(model)[0])["q_num_heads"] == 2


def test_heads_not_known() -> None:
    """Heads and size only at run time: nothing is guessed."""
    body = SPLIT.replace("bsd = Constant<value_ints=[0,0,2,8]>()", "") + "kt = Transpose<perm=[0,2,3,1]>(k4)"
    model = parse(body + ATTEND + JOIN, f"{FLAT}, int64[4] bsd", "float[b,s,16] y")
    result, report = fuse(model)
    assert report.total == 1
    if report.fused:
        fuse_and_check(model, *SIZES)
    else:
        assert result is model


REPEAT = """
    a2 = Constant<value_ints=[2]>() one = Constant<value_ints=[1]>() n = Shape<start=2,end=3>(k)
    bs = Shape<start=0,end=1>(k) two = Constant<value_ints=[2]>() e = Constant<value_ints=[8]>()
    h = Constant<value_ints=[4]>() wide = Concat<axis=0>(bs, two, two, n, e) joined = Concat<axis=0>(bs, h, n, e)
    k5 = Unsqueeze(k, a2) k5w = Expand(k5, wide) kh = Reshape(k5w, joined)
    v5 = Unsqueeze(v, a2) v5w = Expand(v5, wide) vh = Reshape(v5w, joined)
    kt = Transpose<perm=[0,1,3,2]>(kh) qh = Identity(q)
"""


def test_repeated_heads() -> None:
    """repeat_kv: K and V keep their heads."""
    inputs = "float[b,4,s,8] q, float[b,2,t,8] k, float[b,2,t,8] v"
    body = REPEAT + ATTEND.replace("o =", "y =")
    model, _ = fuse_and_check(parse(body, inputs, "float[b,4,s,8] y"), *SIZES)
    assert op_types(model) == {"FlashAttention"}
    assert list(nodes(model)[0].input) == ["q", "k", "v"]


def test_repeated_heads_in_the_standard_operator() -> None:
    inputs = "float[b,4,s,8] q, float[b,2,t,8] k, float[b,2,t,8] v"
    model, _ = fuse_and_check(parse(REPEAT + "y = Attention(q, kh, vh)", inputs, "float[b,4,s,8] y", opset=23), *SIZES)
    assert list(nodes(model)[0].input) == ["q", "k", "v"]


def test_heads_repeated_as_a_whole() -> None:
    """Unsqueeze before the heads: query head h would use key head h % 2, which the operator does not do."""
    body = REPEAT.replace("a2 = Constant<value_ints=[2]>()", "a2 = Constant<value_ints=[1]>()")
    inputs = "float[b,4,s,8] q, float[b,2,t,8] k, float[b,2,t,8] v"
    model, _ = fuse_and_check(parse(body + ATTEND.replace("o =", "y ="), inputs, "float[b,4,s,8] y"), *SIZES)
    assert "Expand" in op_types(model)


def test_one_head_for_all() -> None:
    """Multi-query attention by broadcast."""
    body = "kt = Transpose<perm=[0,1,3,2]>(k) " + ATTEND.replace("qh", "q").replace("vh", "v").replace("o =", "y =")
    inputs = "float[b,4,s,8] q, float[b,1,t,8] k, float[b,1,t,8] v"
    model, _ = fuse_and_check(parse(body, inputs, "float[b,4,s,8] y"), *SIZES)
    assert op_types(model) == {"FlashAttention"}


def test_symbolic_sizes_are_expressions() -> None:
    """A cache: K has p + s keys and V s + p, which is the same."""
    body = """
        kk = Concat<axis=2>(past_k, k) vv = Concat<axis=2>(past_v, v) kt = Transpose<perm=[0,1,3,2]>(kk)
        scores = MatMul(q, kt) masked = Add(scores, m) pr = Softmax<axis=-1>(masked) y = MatMul(pr, vv)
    """
    inputs = """float[b,2,s,8] q, float[b,2,s,8] k, float[b,2,s,8] v, float[b,2,p,8] past_k, float[b,2,p,8] past_v,
        float[b,1,s,t] m"""
    fuse_and_check(parse(body, inputs, "float[b,2,s,8] y"), {"b": 2, "s": 3, "p": 4, "t": 7})


@pytest.mark.parametrize("shape", ["4,s,8", "n,s,8"])
def test_merged_batch_and_heads(shape: str) -> None:
    """The style of bmm: three dimensions, batch and heads in one."""
    body = "kt = Transpose<perm=[0,2,1]>(k) " + ATTEND.replace("qh", "q").replace("vh", "v").replace("o =", "y =")
    inputs = ", ".join(f"float[{shape}] {name}" for name in "qkv")
    fuse_and_check(parse(body, inputs, f"float[{shape}] y"), {"n": 4, "s": 5}, {"n": 1, "s": 3})


def test_merged_with_a_mask_of_batches() -> None:
    """nn.MultiheadAttention: a padding mask repeated over heads and merged as the scores are."""
    body = """
        c = Constant<value_ints=[-1,5,8]>() q3 = Reshape(q, c) k3 = Reshape(k, c) v3 = Reshape(v, c)
        kt = Transpose<perm=[0,2,1]>(k3) raw = MatMul(q3, kt) a = Constant<value_ints=[1,2]>()
        m4 = Unsqueeze(m, a) t = Constant<value_ints=[1,2,1,1]>() mh = Expand(m4, t)
        u = Constant<value_ints=[-1,1,5]>() m3 = Reshape(mh, u) scores = Add(raw, m3)
        p = Softmax<axis=-1>(scores) o = MatMul(p, v3) r = Constant<value_ints=[-1,2,5,8]>() y = Reshape(o, r)
    """
    inputs = "float[b,2,5,8] q, float[b,2,5,8] k, float[b,2,5,8] v, float[b,5] m"
    model, report = fuse_and_check(parse(body, inputs, "float[b,2,5,8] y"), {"b": 2}, {"b": 1})
    assert "(b, 1, 1, 5)" in report.sites[0].became
    assert "Expand" not in op_types(model)


@pytest.mark.parametrize(
    ("first", "second", "shape"),
    [
        ("bhid,bhjd->bhij", "bhij,bhjd->bhid", "b,2,s,8"),
        ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd", "b,s,2,8"),
        ("bid,bjd->bij", "bij,bjd->bid", "b,s,8"),
    ],
)
def test_einsum(first: str, second: str, shape: str) -> None:
    body = f"""
        scores = Einsum<equation="{first}">(q, k) p = Softmax<axis=-1>(scores) y = Einsum<equation="{second}">(p, v)
    """
    inputs = ", ".join(f"float[{shape}] {name}" for name in "qkv")
    fuse_and_check(parse(body, inputs, f"float[{shape}] y"), *SIZES)


def test_einsum_that_is_something_else() -> None:
    """Keys first in the scores: the softmax runs over the queries."""
    body = """
        scores = Einsum<equation="bhid,bhjd->bhji">(q, k) p = Softmax<axis=-1>(scores)
        y = Einsum<equation="bhji,bhjd->bhid">(p, v)
    """
    inputs = ", ".join(f"float[b,2,s,8] {name}" for name in "qkv")
    fuse_and_check(parse(body, inputs, "float[b,2,s,8] y"), fused=0, total=1)


def test_two_dimensions() -> None:
    """A single sentence without a batch."""
    body = "kt = Transpose<perm=[1,0]>(k) " + ATTEND.replace("qh", "q").replace("vh", "v").replace("o =", "y =")
    fuse_and_check(parse(body, "float[s,8] q, float[t,8] k, float[t,8] v", "float[s,8] y"), *SIZES)


def test_heads_too_large() -> None:
    body = "kt = Transpose<perm=[0,1,3,2]>(k) " + ATTEND.replace("qh", "q").replace("vh", "v").replace("o =", "y =")
    inputs = ", ".join(f"float[b,2,s,640] {name}" for name in "qkv")
    _, report = fuse_and_check(parse(body, inputs, "float[b,2,s,640] y"), fused=0, total=1)
    assert "640" in report.sites[0].reason


def test_values_of_another_size() -> None:
    body = "kt = Transpose<perm=[0,1,3,2]>(k) " + ATTEND.replace("qh", "q").replace("vh", "v").replace("o =", "y =")
    inputs = "float[b,2,s,8] q, float[b,2,t,8] k, float[b,2,t,12] v"
    fuse_and_check(parse(body, inputs, "float[b,2,s,12] y"), *SIZES)


def test_one_query() -> None:
    """A pooling head: one learned query over time-major keys, and the output has no place for time."""
    body = """
        two = Constant<value_ints=[2]>() e = Constant<value_ints=[8]>() one = Constant<value_ints=[1]>()
        b1 = Shape<start=1,end=2>(k) t1 = Shape<start=0,end=1>(k) bh = Mul(b1, two) w = Constant<value_ints=[16]>()
        qs = Concat<axis=0>(one, bh, e) ks = Concat<axis=0>(t1, bh, e) ys = Concat<axis=0>(b1, w)
        q3 = Reshape(q, qs) qh = Transpose<perm=[1,0,2]>(q3) k3 = Reshape(k, ks) kt = Transpose<perm=[1,2,0]>(k3)
        v3 = Reshape(v, ks) vh = Transpose<perm=[1,0,2]>(v3)
    """
    join = " ot = Transpose<perm=[1,0,2]>(o) y = Reshape(ot, ys)"
    inputs = "float[1,b,16] q, float[t,b,16] k, float[t,b,16] v"
    model, _ = fuse_and_check(parse(body + ATTEND + join, inputs, "float[b,16] y"), *SIZES)
    assert attributes(nodes(model)[0])["q_num_heads"] == 2


# -- sizes that have to be worked out first

FEATURES = """
    half = MaxPool<kernel_shape=[2,2],strides=[2,2]>(x) c = Conv<kernel_shape=[3,3],pads=[1,1,1,1]>(half, weight)
    n = InstanceNormalization(c, ones, zeros)
"""
MAP = "r = Constant<value_ints=[0,16,-1]>() flat = Reshape(n, r) x3 = Transpose<perm=[0,2,1]>(flat)"
FEATURE_INPUTS = "float[b,3,h,w] x, float[16,3,3,3] weight, float[16] ones, float[16] zeros"
FEATURE_SIZES = ({"b": 2, "h": 6, "w": 4}, {"b": 1, "h": 4, "w": 8})


def with_positions(last: str) -> str:
    """DETR: queries and keys of a feature map to which positions are added, values of the map itself."""
    return f"""
        m1 = Constant<value_ints=[-1]>() a2 = Constant<value_ints=[2]>()
        far = Constant<value_ints=[9223372036854775807]>()
        {FEATURES} eps = Constant<value_float=1.0>() sq = Mul(n, n) last = Slice(sq, m1, far, {last})
        under = Add(last, eps) place = Div(sq, under) pr = Constant<value_ints=[0,16,-1]>() pf = Reshape(place, pr)
        pos = Transpose<perm=[0,2,1]>(pf) {MAP} qk = Add(x3, pos)
        bs = Shape<start=0,end=1>(x3) ss = Shape<start=1,end=2>(x3) e = Constant<value_ints=[8]>()
        heads = Concat<axis=0>(bs, ss, m1, e) q4 = Reshape(qk, heads) qh = Transpose<perm=[0,2,1,3]>(q4)
        kt = Transpose<perm=[0,2,3,1]>(q4) v4 = Reshape(x3, heads) vh = Transpose<perm=[0,2,1,3]>(v4) {ATTEND}
        ot = Transpose<perm=[0,2,1,3]>(o) w3 = Constant<value_ints=[16]>() ys = Concat<axis=0>(bs, ss, w3)
        y = Reshape(ot, ys)
    """


@pytest.mark.parametrize("last", ["a2", "m1"])
def test_feature_maps_and_their_last_rows(last: str) -> None:
    """x[:, :, -1:] has one row, whatever there is, and broadcasts: that leaves the size of x."""
    model, _ = fuse_and_check(parse(with_positions(last), FEATURE_INPUTS, "float[b,n,16] y"), *FEATURE_SIZES)
    assert attributes(nodes(model)[0])["q_num_heads"] == 2


def test_names_that_exporters_make_up() -> None:
    """An intermediate value that is an output has sizes of new names: they are those that its inputs tell."""
    body = f"""
        {FEATURES} {MAP} named = Relu(x3) bs = Shape<start=0,end=1>(named) ss = Shape<start=1,end=2>(named)
        m1 = Constant<value_ints=[-1]>() e = Constant<value_ints=[8]>() heads = Concat<axis=0>(bs, ss, m1, e)
        q4 = Reshape(x3, heads) qh = Transpose<perm=[0,2,1,3]>(q4) kt = Transpose<perm=[0,2,3,1]>(q4)
        v4 = Reshape(named, heads) vh = Transpose<perm=[0,2,1,3]>(v4) {ATTEND} ot = Transpose<perm=[0,2,1,3]>(o)
        w3 = Constant<value_ints=[16]>() ys = Concat<axis=0>(bs, ss, w3) y = Reshape(ot, ys)
    """
    outputs = "float[b,n,16] y, float[b,Relunamed_dim_1,16] named"
    fuse_and_check(parse(body, FEATURE_INPUTS, outputs), *FEATURE_SIZES)


# -- heads repeated otherwise

FEW = "float[b,4,s,8] q, float[b,2,t,8] k, float[b,2,t,8] v"
WIDEN = """
    n = Shape<start=2,end=3>(k) bs = Shape<start=0,end=1>(k) h = Constant<value_ints=[4]>()
    e = Constant<value_ints=[8]>() joined = Concat<axis=0>(bs, h, n, e)
    a2 = Constant<value_ints=[2]>() a1 = Constant<value_ints=[1]>()
"""
REPETITIONS = {
    "Tile": "{x}5 = Unsqueeze({x}, a2) {x}w = Tile({x}5, five) {x}h = Reshape({x}w, joined)",
    "Tile by OneHot": "{x}5 = Unsqueeze({x}, a2) {x}w = Tile({x}5, counts) {x}h = Reshape({x}w, joined)",
    "Concat": "{x}5 = Unsqueeze({x}, a2) {x}w = Concat<axis=2>({x}5, {x}5) {x}h = Reshape({x}w, joined)",
    "Gather": "{x}h = Gather<axis=1>({x}, each)",
    # every head as a whole: query head h would use key head h % 2
    "Tile of all": "{x}h = Tile({x}, four)",
    "Concat of all": "{x}h = Concat<axis=1>({x}, {x})",
    "Gather of all": "{x}h = Gather<axis=1>({x}, all)",
    "Gather in another order": "{x}h = Gather<axis=1>({x}, odd)",
    "Tile of the sequence": "{x}5 = Unsqueeze({x}, a1) {x}w = Tile({x}5, five) {x}h = Reshape({x}w, joined)",
}
INDICES = """
    five = Constant<value_ints=[1,1,2,1,1]>() four = Constant<value_ints=[1,2,1,1]>()
    each = Constant<value_ints=[0,0,1,1]>() all = Constant<value_ints=[0,1,0,1]>()
    odd = Constant<value_ints=[0,0,1,0]>()
    depth = Constant<value_int=5>() pair = Constant<value_ints=[1,2]>() hot = OneHot(a2, depth, pair)
    minus = Constant<value_ints=[-1]>() counts = Reshape(hot, minus)
"""


@pytest.mark.parametrize("name", REPETITIONS)
def test_repetitions(name: str) -> None:
    """Each head in a row is grouped attention; all heads after one another are not, and stay repeated."""
    steps = " ".join(REPETITIONS[name].format(x=x) for x in "kv")
    body = (
        f"{WIDEN} {INDICES} {steps} kt = Transpose<perm=[0,1,3,2]>(kh) qh = Identity(q) {ATTEND.replace('o =', 'y =')}"
    )
    model, _ = fuse_and_check(parse(body, FEW, "float[b,4,s,8] y"), *SIZES)
    is_grouped = name in ("Tile", "Tile by OneHot", "Concat", "Gather")
    assert (list(nodes(model)[0].input) == ["q", "k", "v"]) == is_grouped
    if is_grouped:
        # targets of shapes, which nobody needs
        assert op_types(model) <= {"FlashAttention", "Shape", "Concat", "OneHot", "Reshape"}


@pytest.mark.parametrize(
    ("first", "second", "shapes", "output"),
    [
        # keys before queries; heads last; grouped heads by a label of their own; sequence first
        ("bhjd,bhid->bhij", "bhij,bhjd->bhid", ("b,2,t,8", "b,2,s,8", "b,2,t,8"), "b,2,s,8"),
        ("bihd,bjhd->bhij", "bhij,bjhd->bihd", ("b,s,2,8", "b,t,2,8", "b,t,2,8"), "b,s,2,8"),
        ("ibhd,jbhd->bhij", "bhij,jbhd->ibhd", ("s,b,2,8", "t,b,2,8", "t,b,2,8"), "s,b,2,8"),
        ("bhid,bhdj->bhij", "bhij,bhjd->bihd", ("b,2,s,8", "b,2,8,t", "b,2,t,8"), "b,s,2,8"),
        ("hid,hjd->hij", "hij,hjd->ihd", ("2,s,8", "2,t,8", "2,t,8"), "s,2,8"),
    ],
)
def test_einsum_of_any_order(first: str, second: str, shapes: tuple[str, str, str], output: str) -> None:
    body = f"""c = Constant<value_float=0.4>() raw = Einsum<equation="{first}">(q, k) scores = Mul(raw, c)
        p = Softmax<axis=-1>(scores) y = Einsum<equation="{second}">(p, v)"""
    inputs = ", ".join(f"float[{shape}] {name}" for name, shape in zip("qkv", shapes, strict=True))
    fuse_and_check(parse(body, inputs, f"float[{output}] y"), *SIZES)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("bhid,bhjd->bhij", "bhij,bhid->bhjd"),  # weighs the queries
        ("bhid,bhjd->bhij", "bhij,bhje->bhie"),  # right, with labels of its own: fused
        ("bhid,bhje->bhij", "bhij,bhjd->bhid"),  # sums each alone
        ("bhid,bjhd->bhij", "bhij,bhjd->bhid"),  # heads and keys of K exchanged
    ],
)
def test_einsum_nearly(first: str, second: str) -> None:
    body = f"""raw = Einsum<equation="{first}">(q, k) p = Softmax<axis=-1>(raw) y = Einsum<equation="{second}">(p, v)"""
    inputs = ", ".join(f"float[b,4,4,8] {name}" for name in "qkv")
    before = parse(body, inputs, "float[b,4,4,8] y")
    right = second.endswith("bhie") or first.startswith("bhid,bjhd")
    fuse_and_check(before, {"b": 2}, {"b": 1}, fused=int(right), total=1)


def test_einsum_behind_a_packed_projection() -> None:
    """(batch, sequence, 3, heads, size) cut and contracted as it lies: nothing is moved."""
    cut = "".join(f" i{i} = Constant<value_int={i}>() {x} = Gather<axis=2>(x, i{i})" for i, x in enumerate("qkv"))
    body = f"""{cut} raw = Einsum<equation="bihd,bjhd->bhij">(q, k) p = Softmax<axis=-1>(raw)
        y = Einsum<equation="bhij,bjhd->bihd">(p, v)"""
    model, _ = fuse_and_check(parse(body, "float[b,s,3,2,8] x", "float[b,s,2,8] y"), *SIZES)
    assert op_types(model) == {"FlashAttention", "Reshape"}
    assert attributes(nodes(model)[0])["qkv_layout"] == b"3hd"


@pytest.mark.parametrize("transposed", [False, True])
def test_cache_in_front(transposed: bool) -> None:
    """Past and new keys are put together, also where the cache holds K^T; grouped heads are repeated behind it."""
    keys = (
        "pt = Transpose<perm=[0,1,3,2]>(k) kk = Concat<axis=3>(pk, pt) each = Constant<value_ints=[0,0,1,1]>() "
        "kt = Gather<axis=1>(kk, each)"
        if transposed
        else "kk = Concat<axis=2>(pk, k) each = Constant<value_ints=[0,0,1,1]>() kh = Gather<axis=1>(kk, each) "
        "kt = Transpose<perm=[0,1,3,2]>(kh)"
    )
    values = "vv = Concat<axis=2>(pv, v) vh = Gather<axis=1>(vv, each)"
    body = f"{keys} {values} qh = Identity(q) {ATTEND.replace('o =', 'y =')}"
    past = "float[b,2,8,p] pk" if transposed else "float[b,2,p,8] pk"
    before = parse(body, f"{FEW}, {past}, float[b,2,p,8] pv", "float[b,4,s,8] y")
    model, _ = fuse_and_check(before, *({**size, "p": 6} for size in SIZES))
    assert "Gather" not in op_types(model)
