"""Masks: as small as they are, as structure where proved, and rows without keys as they were."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from flashonnx.export import fuse
from models import attributes, fuse_and_check, nodes, op_types, parse, random_inputs, run, shape_of

QKV = "float[b,2,s,8] q, float[b,2,t,8] k, float[b,2,t,8] v"
SELF = "float[b,2,s,8] q, float[b,2,s,8] k, float[b,2,s,8] v"
Y = "float[b,2,s,8] y"
SIZES = ({"b": 2, "s": 5, "t": 7}, {"b": 1, "s": 9, "t": 3}, {"b": 3, "s": 1, "t": 4})
MINIMUM = "-340282346638528859811704183484516925440.0"
CONSTANTS = f"""
    zero = Constant<value_float=0.0>() low = Constant<value_float={MINIMUM}>()
    ten = Constant<value_float=-10000.0>() one = Constant<value_float=1.0>()
    i0 = Constant<value_int=0>() i1 = Constant<value_int=1>()
    a1 = Constant<value_ints=[1]>() a12 = Constant<value_ints=[1,2]>()
    ninf = Constant<value_float=-99999.0>()
"""
# arange(s) down the rows and along the columns
POSITIONS = """
    n1 = Shape<start=2,end=3>(q) n = Squeeze(n1) range = Range(i0, n, i1)
    a3 = Constant<value_ints=[0,1,3]>() i = Unsqueeze(range, a3) a4 = Constant<value_ints=[0,1,2]>()
    j = Unsqueeze(range, a4)
"""


def masked(making: str, *, combine: str = "scores = Add(raw, m)") -> str:
    return f"""
        {CONSTANTS} {making}
        kt = Transpose<perm=[0,1,3,2]>(k) raw = MatMul(q, kt) {combine}
        p = Softmax<axis=-1>(scores) y = MatMul(p, v)
    """


def mask_of(model: onnx.ModelProto) -> str:
    """The mask input of the only fused node, "" without one."""
    (node,) = nodes(model)
    return node.input[3] if len(node.input) > 3 else ""


# -- additive masks


@pytest.mark.parametrize("shape", ["b,1,s,t", "b,2,s,t", "b,1,1,t", "1,1,s,t", "1,2,1,t", "1,s,t", "s,t", "1,t", "t"])
def test_additive(shape: str) -> None:
    model, _ = fuse_and_check(parse(masked(""), f"{QKV}, float[{shape}] m", Y), *SIZES)
    assert len(shape_of(model, mask_of(model))) >= 2


def test_either_order_and_minus() -> None:
    inputs = f"{QKV}, float[b,1,1,t] m"
    fuse_and_check(parse(masked("", combine="scores = Add(m, raw)"), inputs, Y), *SIZES)
    fuse_and_check(parse(masked("", combine="scores = Sub(raw, m)"), inputs, Y), *SIZES)
    fuse_and_check(parse(masked("", combine="scores = Sub(m, raw)"), inputs, Y), fused=0, total=1)


def test_last_dimension_of_one() -> None:
    """ONNX pads a mask of one column with -inf, Add broadcasts it: it must be expanded."""
    model, _ = fuse_and_check(parse(masked(""), f"{QKV}, float[b,1,s,1] m", Y), *SIZES)
    assert "Expand" in op_types(model)


@pytest.mark.parametrize("name", ["c", ""])
def test_last_dimension_that_may_be_one(name: str) -> None:
    """Only an axis with the keys' own name is taken to be as long: another may be 1 when the model runs."""
    model = parse(masked(""), f"{QKV}, float[b,1,s,c] m", Y)
    if not name:
        model.graph.input[3].type.tensor_type.shape.dim[3].ClearField("dim_param")
    sizes = {"b": 2, "s": 5, "t": 7}
    for columns in (1, 7):
        mask = np.linspace(-1, 1, 10 * columns, dtype=np.float32).reshape(2, 1, 5, columns)
        fuse_and_check(model, sizes | {name: columns}, m=mask)


def test_mask_that_widens_the_scores() -> None:
    """A mask of two batches over scores of a batch that may be one: the answer would have two."""
    _, report = fuse_and_check(parse(masked(""), f"{QKV}, float[2,1,s,t] m", Y), fused=0, total=1)
    assert "mask 'm' has size 2 where the scores have b" in report.sites[0].reason


@pytest.mark.parametrize(
    "making",
    [
        "nothing = Constant<value = float[2,1,1,1] {0,0}>() scores = Add(raw, nothing)",
        "nothing = Constant<value = bool[2,1,1,1] {0,0}>() scores = Where(nothing, ninf, raw)",
        "nothing = Constant<value = float[4,1] {0,0,0,0}>() scores = Add(raw, nothing)",
    ],
)
def test_mask_that_does_nothing_but_widen_the_scores(making: str) -> None:
    inputs = "float[1,2,s,8] q, float[1,2,t,8] k, float[1,2,t,8] v"
    sizes = {"s": 1, "t": 4}
    _, report = fuse_and_check(parse(masked("", combine=making), inputs, "float[x,2,n,8] y"), sizes, fused=0, total=1)
    assert "the mask 'nothing'" in report.sites[0].reason


def test_two_masks() -> None:
    """T5: a relative position bias and a padding mask, both added, no scale."""
    body = masked("", combine="one_mask = Add(raw, m) scores = Add(one_mask, n)")
    model, _ = fuse_and_check(parse(body, f"{QKV}, float[1,2,s,t] m, float[b,1,1,t] n", Y), *SIZES)
    assert attributes(nodes(model)[0]) == {"scale": 1.0}


def test_mask_before_the_scale() -> None:
    """Falcon, MPT: (scores + bias) * c."""
    body = masked("", combine="c = Constant<value_float=0.35>() wide = Add(raw, m) scores = Mul(wide, c)")
    model, _ = fuse_and_check(parse(body, f"{QKV}, float[1,2,1,t] m", Y), *SIZES)
    assert attributes(nodes(model)[0])["scale"] == pytest.approx(0.35)


def test_zero_mask_goes() -> None:
    sizes = "bs = Shape<start=0,end=3>(q) ts = Shape<start=2,end=3>(k) target = Concat<axis=0>(bs, ts)"
    model, _ = fuse_and_check(parse(masked(f"{sizes} m = Expand(zero, target)"), QKV, Y), *SIZES)
    assert op_types(model) == {"FlashAttention"}


# -- padding


def test_padding_stays_small() -> None:
    """BERT's (1 - mask) * -10000 on an expanded mask: the expansion goes, the bias stays additive."""
    making = """
        wide = Unsqueeze(padding, a12) bs = Shape<start=0,end=1>(q) ss = Shape<start=2,end=3>(q)
        ts = Shape<start=2,end=3>(k) target = Concat<axis=0>(bs, a1, ss, ts) all = Expand(wide, target)
        f = Cast<to=1>(all) off = Sub(one, f) m = Mul(off, ten)
    """
    model, _ = fuse_and_check(parse(masked(making), f"{QKV}, int64[b,t] padding", Y), *SIZES)
    assert shape_of(model, mask_of(model)) == ["b", 1, 1, "t"]
    assert "Expand" not in op_types(model)


@pytest.mark.parametrize("rows", [[[0, 0, 1, 0, 1, 1, 0]], [[0] * 7], [[1] * 7]])
def test_interleaved_and_whole_padding(rows: list[list[int]]) -> None:
    """Never a length; and a sentence of padding alone gives what it gave."""
    making = "wide = Unsqueeze(padding, a12) allowed = Cast<to=9>(wide) m = Where(allowed, zero, low)"
    model = parse(masked(making), f"{QKV}, int64[b,t] padding", Y)
    padding = np.array([*rows, [1, 1, 0, 1, 0, 0, 1]], np.int64)
    fused, _ = fuse_and_check(model, {"b": 2, "s": 5, "t": 7}, padding=padding)
    assert shape_of(fused, mask_of(fused)) == ["b", 1, 1, "t"]


@pytest.mark.parametrize(
    ("making", "combine", "computed"),
    [
        ("allowed = Cast<to=9>(wide) all = Expand(allowed, target) m = Where(all, zero, low)", "Add(raw, m)", "Where"),
        ("bad = Not(flags) m = Expand(bad, target)", "Where(m, ninf, raw)", "Cast"),
        ("f = Cast<to=1>(wide) off = Sub(one, f) m = Mul(off, ten)", "Sub(raw, m)", "Mul"),
    ],
)
def test_shared_by_layers(making: str, combine: str, computed: str) -> None:
    """One mask for twelve layers is made small once."""
    making = f"""
        bs = Shape<start=0,end=1>(q) ss = Shape<start=2,end=3>(q) ts = Shape<start=2,end=3>(k)
        target = Concat<axis=0>(bs, a1, ss, ts) wide = Unsqueeze(padding, a12) flags = Cast<to=9>(wide) {making}
    """
    layers, value = "", "q"
    for layer in range(12):
        name = "y" if layer == 11 else f"y{layer}"
        layers += f"""
            kt{layer} = Transpose<perm=[0,1,3,2]>(k) raw{layer} = MatMul({value}, kt{layer})
            scores{layer} = {combine.replace("raw", f"raw{layer}")} p{layer} = Softmax<axis=-1>(scores{layer})
            {name} = MatMul(p{layer}, v)
        """
        value = name
    model, _ = fuse_and_check(parse(CONSTANTS + making + layers, f"{QKV}, int64[b,t] padding", Y), *SIZES, fused=12)
    assert len({node.input[3] for node in nodes(model)}) == 1
    assert shape_of(model, nodes(model)[0].input[3]) == ["b", 1, 1, "t"]
    assert [node.op_type for node in model.graph.node].count(computed) <= 2


# -- masks that replace scores


def test_filled_with_minus_infinity() -> None:
    body = masked("", combine="scores = Where(bad, ninf, raw)")
    model, report = fuse_and_check(parse(body, f"{QKV}, bool[b,1,s,t] bad", Y), *SIZES)
    assert "NaN before" in report.sites[0].reason
    assert attributes(nodes(model)[0]) == {"scale": 1.0}


def test_bias_of_minus_infinity() -> None:
    body = masked("m = Where(bad, ninf, zero)")
    _, report = fuse_and_check(parse(body, f"{QKV}, bool[b,1,1,t] bad", Y), *SIZES)
    assert "NaN before" in report.sites[0].reason


def test_filled_the_other_way() -> None:
    body = masked("", combine="scores = Where(good, raw, ninf)")
    model, _ = fuse_and_check(parse(body, f"{QKV}, bool[b,1,1,t] good", Y), *SIZES)
    assert "Not" not in op_types(model)


@pytest.mark.parametrize("fill", ["low", "ten"])
def test_filled_with_a_finite_number(fill: str) -> None:
    """A row without keys is the mean of V, before and after."""
    body = masked("", combine=f"scores = Where(bad, {fill}, raw)")
    model = parse(body, f"{QKV}, bool[b,1,s,t] bad", Y)
    bad = np.random.default_rng(0).random((2, 1, 5, 7)) < 0.4
    bad[0, 0, 2] = True
    fused, _ = fuse_and_check(model, {"b": 2, "s": 5, "t": 7}, bad=bad)
    assert attributes(nodes(fused)[0])["empty_row"] == b"mean"


def test_filled_with_too_little() -> None:
    body = masked("", combine="scores = Where(bad, one, raw)")
    _, report = fuse_and_check(parse(body, f"{QKV}, bool[b,1,s,t] bad", Y), fused=0, total=1)
    assert "filled" in report.sites[0].reason


# -- structure


@pytest.mark.parametrize(
    "making",
    [
        # torch's is_causal below opset 23: Where(tril(ones) == 0, min, 0)
        "qs = Shape<start=2,end=3>(q) ks = Shape<start=2,end=3>(k) both = Concat<axis=0>(qs, ks) "
        "ones = Expand(one, both) tri = Trilu<upper=0>(ones) up = Equal(tri, zero) m = Where(up, low, zero)",
        # triu(full(-inf), 1)
        "qs = Shape<start=2,end=3>(q) ks = Shape<start=2,end=3>(k) both = Concat<axis=0>(qs, ks) "
        "full = Expand(ninf, both) m = Trilu<upper=1>(full, i1)",
        # positions: j <= i, not (j > i), i >= j, i < j
        f"{POSITIONS} c = LessOrEqual(j, i) m = Where(c, zero, low)",
        f"{POSITIONS} c = Greater(j, i) nc = Not(c) m = Where(nc, zero, ten)",
        f"{POSITIONS} c = GreaterOrEqual(i, j) m = Where(c, zero, ninf)",
        f"{POSITIONS} c = Less(i, j) m = Where(c, low, zero)",
    ],
)
def test_causal(making: str) -> None:
    inputs = SELF if "range" in making else QKV
    model, report = fuse_and_check(parse(masked(making), inputs, Y), *SIZES)
    assert attributes(nodes(model)[0]) == {"scale": 1.0, "is_causal": 1}
    assert not report.sites[0].reason
    assert op_types(model) == {"FlashAttention"}


def test_causal_and_padding() -> None:
    """Llama: a triangle and a padding mask; left padding makes rows without keys, which are the mean of V."""
    making = f"""
        {POSITIONS} c = LessOrEqual(j, i) wide = Unsqueeze(padding, a12) pad = Cast<to=9>(wide)
        both = And(c, pad) m = Where(both, zero, low)
    """
    model = parse(masked(making), f"{SELF}, int64[b,s] padding", Y)
    padding = np.array([[0, 0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 0, 0]], np.int64)
    fused, _ = fuse_and_check(model, {"b": 2, "s": 7}, padding=padding)
    assert attributes(nodes(fused)[0]) == {"scale": 1.0, "is_causal": 1, "empty_row": b"mean"}
    assert shape_of(fused, mask_of(fused)) == ["b", 1, 1, "s"]


@pytest.mark.parametrize(
    ("shape", "seen", "wanted"),
    [
        ("triangle", "c = LessOrEqual(j, i)", {"is_causal": 1}),
        ("triangle", "near = Sub(i, i1) c = GreaterOrEqual(j, near)", {"left_window_size": 1}),
        (
            "window",
            "near = Sub(i, i1) a = LessOrEqual(j, i) b = GreaterOrEqual(j, near) c = And(a, b)",
            {"is_causal": 1, "left_window_size": 1},
        ),
    ],
)
def test_structure_and_padding_in_half_precision(shape: str, seen: str, wanted: dict[str, int]) -> None:
    """There finfo.min plus a score is not the same for every score, so the mask stays as it is; alone, it goes."""
    making = f"""
        {POSITIONS} {seen} wide = Unsqueeze(padding, a12) pad = Cast<to=9>(wide)
        both = And(c, pad) m32 = Where(both, zero, half_low) m = Cast<to=10>(m32)
    """
    body = masked(making).replace("zero =", "half_low = Constant<value_float=-65504.0>() zero =", 1)
    inputs, output = f"{SELF}, int64[b,s] padding".replace("float[", "float16["), Y.replace("float[", "float16[")
    model = parse(body, inputs, output)
    fused, report = fuse_and_check(model, {"b": 2, "s": 7}, padding=np.array([[1] * 7, [1] * 5 + [0, 0]], np.int64))
    assert not attributes(nodes(fused)[0]).keys() & wanted.keys()
    assert f"a {shape} is left in the mask" in report.sites[0].reason
    assert "-65504 is added to its scores" in report.sites[0].reason
    fused, _ = fuse_and_check(parse(body.replace("And(c, pad)", "And(c, c)"), inputs, output), {"b": 2, "s": 7})
    assert attributes(nodes(fused)[0]) == {"scale": 1.0, **wanted}


def test_window() -> None:
    """Mistral: j <= i and j > i - 3."""
    making = f"""
        {POSITIONS} c = LessOrEqual(j, i) three = Constant<value_int=3>() first = Sub(i, three)
        w = Greater(j, first) both = And(c, w) m = Where(both, zero, low)
    """
    model, _ = fuse_and_check(parse(masked(making), SELF, Y), *SIZES)
    assert attributes(nodes(model)[0]) == {"scale": 1.0, "is_causal": 1, "left_window_size": 2}


@pytest.mark.parametrize(
    "making",
    [
        f"{POSITIONS} c = LessOrEqual(i, j) m = Where(c, zero, low)",  # the other triangle
        f"{POSITIONS} c = Less(j, i) m = Where(c, zero, low)",  # the first row sees nothing
        f"{POSITIONS} c = LessOrEqual(j, i) d = Less(i, j) e = Or(c, d) m = Where(e, zero, low)",
        f"{POSITIONS} five = Constant<value_int=5>() jj = Mul(j, five) c = LessOrEqual(jj, i) m = Where(c, zero, low)",
        f"{POSITIONS} c = LessOrEqual(j, i) m = Where(c, one, low)",
    ],
)
def test_not_causal(making: str) -> None:
    """Near misses keep their mask, or are at most the bounds that they are; the answers are the same."""
    model, _ = fuse_and_check(parse(masked(making), SELF, Y), *SIZES)
    assert "is_causal" not in attributes(nodes(model)[0])


@pytest.mark.parametrize("shape", ["a1, n1", "n1, a1"])
@pytest.mark.parametrize(
    "making",
    [
        "ones = Expand(one, shape) tri = Trilu<upper=0>(ones) c = Equal(tri, zero) m = Where(c, ninf, zero)",
        "full = Expand(ninf, shape) m = Trilu<upper=1>(full, i1)",
    ],
)
def test_triangles_that_broadcast(making: str, shape: str) -> None:
    """A triangle of one row (or column) hides the same keys from every query: that is not causal."""
    start = f"n1 = Shape<start=2,end=3>(q) shape = Concat<axis=0>({shape})"
    model, _ = fuse_and_check(parse(masked(f"{start} {making}"), SELF, Y), *SIZES)
    assert "is_causal" not in attributes(nodes(model)[0])


def test_positions_of_another_length() -> None:
    """Positions of the tokens of something else, which may be a single one: no proof for the keys."""
    making = f"""
        {POSITIONS} x1 = Shape(x) xn = Squeeze(x1) others = Range(i0, xn, i1) jj = Unsqueeze(others, a4)
        c = LessOrEqual(jj, i) m = Where(c, zero, ninf)
    """
    model = parse(masked(making), f"{SELF}, float[x] x", Y)
    model, _ = fuse_and_check(model, *({**sizes, "x": x} for sizes in SIZES for x in (1, sizes["s"])))
    assert "is_causal" not in attributes(nodes(model)[0])


@pytest.mark.parametrize("kind", [3, 9])  # int8, bool
def test_positions_that_wrap_around(kind: int) -> None:
    making = f"""
        {POSITIONS} small = Cast<to={kind}>(range) wide = Cast<to=7>(small)
        i2 = Unsqueeze(wide, a3) j2 = Unsqueeze(wide, a4) c = LessOrEqual(j2, i2) m = Where(c, zero, ninf)
    """
    fuse_and_check(parse(masked(making), SELF, Y), {"b": 1, "s": 3}, {"b": 1, "s": 150})


def test_constant_triangle_sliced() -> None:
    """nanoGPT: a buffer of ones below the diagonal, cut to the length."""
    triangle = ",".join("1" if j <= i else "0" for i in range(12) for j in range(12))
    making = f"""
        tri = Constant<value = float[1,1,12,12] {{{triangle}}}>() o = Constant<value_ints=[0]>()
        n1 = Shape<start=2,end=3>(q) x2 = Constant<value_ints=[2]>() x3 = Constant<value_ints=[3]>()
        rows = Slice(tri, o, n1, x2, a1) cut = Slice(rows, o, n1, x3, a1) bad = Equal(cut, zero)
    """
    body = masked(making, combine="scores = Where(bad, ninf, raw)")
    model, _ = fuse_and_check(parse(body, SELF, Y), *SIZES)
    assert attributes(nodes(model)[0]) == {"scale": 1.0, "is_causal": 1}
    shifted = body.replace("rows = Slice(tri, o,", "rows = Slice(tri, a1,")
    model, _ = fuse(parse(shifted, SELF, Y))
    assert all("is_causal" not in attributes(node) for node in nodes(model))


# -- in the standard operator


def test_attention_mask_true_everywhere() -> None:
    """ViT at opset 23: a mask of the constant true."""
    body = """
        t = Constant<value = bool[1,1,1,1] {1}>() bs = Shape<start=0,end=1>(q) one = Constant<value_ints=[1]>()
        n = Shape<start=2,end=3>(q) target = Concat<axis=0>(bs, one, n, n) m = Expand(t, target)
        y = Attention(q, k, v, m)
    """
    model, _ = fuse_and_check(parse(body, SELF, Y, opset=23), *SIZES)
    assert op_types(model) == {"FlashAttention"}
    assert not mask_of(model)


def test_attention_causal_mask() -> None:
    """The sdpa of transformers at opset 23: And(j <= i, padding) as a bool mask."""
    body = f"""
        i0 = Constant<value_int=0>() i1 = Constant<value_int=1>() a12 = Constant<value_ints=[1,2]>() {POSITIONS}
        c = LessOrEqual(j, i) wide = Unsqueeze(padding, a12) pad = Cast<to=9>(wide) m = And(c, pad)
        y = Attention(q, k, v, m)
    """
    model = parse(body, f"{SELF}, int64[b,s] padding", Y, opset=23)
    fused, _ = fuse(model)
    assert attributes(nodes(fused)[0]) == {"is_causal": 1}
    assert shape_of(fused, mask_of(fused)) == ["b", 1, 1, "s"]
    inputs = random_inputs(model, {"b": 2, "s": 7}) | {"padding": np.array([[1] * 7, [0, 0, 1, 1, 0, 1, 1]], np.int64)}
    np.testing.assert_allclose(run(fused, inputs)[0], run(model, inputs)[0], atol=1e-5)
