"""Windows and triangles in the forms that exporters give them, and near misses of each that must not become them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from models import attributes, fuse_and_check, nodes, parse, shape_of
from test_masks import CONSTANTS, QKV, SELF, Y, mask_of, masked

PAST = "float[b,2,s,8] q, float[b,2,p,8] pk, float[b,2,s,8] nk, float[b,2,p,8] pv, float[b,2,s,8] nv"
SIZES = ({"b": 2, "s": 5}, {"b": 1, "s": 9}, {"b": 3, "s": 1})
PASTS = ({"b": 2, "s": 5, "p": 3}, {"b": 1, "s": 1, "p": 6}, {"b": 2, "s": 3, "p": 0}, {"b": 1, "s": 2, "p": 1})
CROSS = ({"b": 2, "s": 5, "t": 7}, {"b": 1, "s": 6, "t": 3}, {"b": 2, "s": 1, "t": 4}, {"b": 1, "s": 4, "t": 4})
# Keys behind those of a past; sizes as numbers (n queries, m keys, past) and as vectors (n1, ...).
BEHIND_PAST = "k = Concat<axis=2>(pk, nk) v = Concat<axis=2>(pv, nv) p1 = Shape<start=2,end=3>(pk) past = Squeeze(p1)"
COUNTS = """
    n1 = Shape<start=2,end=3>(q) m1 = Shape<start=2,end=3>(k) n = Squeeze(n1) m = Squeeze(m1)
    a3 = Constant<value_ints=[0,1,3]>() a4 = Constant<value_ints=[0,1,2]>() three = Constant<value_int=3>()
    o0 = Constant<value_ints=[0]>() o1 = Constant<value_ints=[1]>() end = Constant<value_ints=[9223372036854775807]>()
    in = Range(i0, n, i1) jm = Range(i0, m, i1)
"""
CAUSAL = {"scale": 1.0, "is_causal": 1}
BEHIND = CAUSAL | {"left_window_size": 2}
# Of queries at positions `at`.
TRIANGLE = "i = Unsqueeze(at, a3) j = Unsqueeze(jm, a4) c = LessOrEqual(j, i)"
# What hides with -inf: c says what a query may see.
HIDE = "mask = Where(c, zero, ninf) scores = Add(raw, mask)"


def model_of(making: str, inputs: str = SELF, opset: int = 18, hide: str = HIDE) -> onnx.ModelProto:
    before = BEHIND_PAST if "pk" in inputs else ""
    return parse(masked(f"{before} {COUNTS} {making}", combine=hide), inputs, Y, opset)


def check(model: onnx.ModelProto, *sizes: dict[str, int], **inputs: np.ndarray) -> dict[str, object]:
    """Fuses and compares; the fused node's attributes, and its lengths as `from_last`."""
    fused, _ = fuse_and_check(model, *sizes, **inputs)
    (node,) = nodes(fused)
    return attributes(node) | ({"from_last": True} if len(node.input) > 6 else {})


# -- positions


POSITIONS = {
    "range": ("in", "jm"),
    "cast there and back": (
        "f = Cast<to=1>(in) back = Cast<to=7>(f)",
        "back",
    ),
    "a table, cut": (
        "table = Constant<value = int64[12] {0,1,2,3,4,5,6,7,8,9,10,11}>() cut = Slice(table, o0, n1, o0)",
        "cut",
    ),
    "a table, looked up": ("fifty = Constant<value_int=50>() r = Range(i0, fifty, i1) got = Gather(r, in)", "got"),
    "cumulative sum": ("ones = Expand(i1, n1) sums = CumSum(ones, i0) at = Sub(sums, i1)", "at"),
    "cumulative sum, exclusive": ("ones = Expand(i1, n1) at = CumSum<exclusive=1>(ones, i0)", "at"),
    "from one on": ("up = Add(n, i1) r = Range(i1, up, i1) at = Sub(r, i1)", "at"),
    "joined": ("first = Constant<value_ints=[0]>() r = Range(i1, n, i1) at = Concat<axis=0>(first, r)", "at"),
    "differences": (
        """minus = Sub(i0, i1) long = Range(minus, n, i1) a = Slice(long, o1, end, o0) b = Slice(long, o0, n1, o0)
        ones = Sub(a, b) sums = CumSum(ones, i0) at = Sub(sums, i1)""",
        "at",
    ),
    "chosen": ("is_low = Less(in, i0) up = Add(in, n) at = Where(is_low, up, in)", "at"),
    "tiled": (
        """row = Unsqueeze(in, o0) copies = Constant<value_ints=[3,1]>() rows = Tile(row, copies)
        z = Constant<value_int=2>() at = Gather(rows, z)""",
        "at",
    ),
    "negated twice": ("m_in = Neg(in) at = Neg(m_in)", "at"),
    "row of a table of pairs": (
        """r = Unsqueeze(in, o0) both = Concat<axis=0>(r, r) z = Constant<value_int=1>()
        at = Gather<axis=0>(both, z)""",
        "at",
    ),
    "batch and position": (
        """bs = Shape<start=0,end=1>(q) bn = Squeeze(bs) rows = Range(i0, bn, i1) row = Unsqueeze(in, o0)
        target = Concat<axis=0>(bs, n1) ids = Expand(row, target) two = Constant<value_ints=[2]>()
        rr = Unsqueeze(rows, o1) ww = Expand(rr, target) w = Unsqueeze(ww, two) x = Unsqueeze(ids, two)
        pairs = Concat<axis=-1>(w, x) got = GatherND(ids, pairs) z = Constant<value_int=0>()
        at = Gather<axis=0>(got, z)""",
        "at",
    ),
}


@pytest.mark.parametrize("name", [name for name in POSITIONS if name != "range"])
def test_ways_to_count(name: str) -> None:
    making, at = POSITIONS[name]
    model = model_of(f"{making} i = Unsqueeze({at}, a3) j = Unsqueeze(jm, a4) c = LessOrEqual(j, i)")
    assert check(model, *SIZES) == CAUSAL


@pytest.mark.parametrize(
    "making",
    [
        "at = Mul(in, in)",
        "at = CumSum<reverse=1>(in, i0)",
        "ones = Expand(i1, n1) at = CumSum<reverse=1>(ones, i0)",
        "back = Sub(in, n) at = Gather(in, back)",  # negative ones count from the end: right, but not proved
        "zero_one = Constant<value_ints=[0,2]>() r = Range(i1, n, i1) at = Concat<axis=0>(o0, r, o1)",
        "two = Constant<value_int=2>() at = Div(in, two)",
        "steps = Slice(jm, o0, end, o0, o1) at = Mul(steps, steps)",
        "last = Sub(n, i1) at = Sub(last, in)",
        "twice = Constant<value_ints=[2]>() long = Tile(in, twice) at = Slice(long, n1, end, o0)",
    ],
)
def test_not_positions(making: str) -> None:
    """Or not proved to be: the mask stays a mask, and the answers."""
    if "o1)" in making and "Concat" in making:  # one more than there are keys
        making = f"{making.replace('at =', 'more =')} at = Slice(more, o0, n1, o0)"
    model = model_of(f"{making} i = Unsqueeze(at, a3) j = Unsqueeze(jm, a4) c = LessOrEqual(j, i)")
    assert "is_causal" not in check(model, *SIZES)


# -- tests of positions


ROWS = "i = Unsqueeze(in, a3) j = Unsqueeze(jm, a4)"


@pytest.mark.parametrize(
    ("making", "expected"),
    [
        ("d = Sub(i, j) c = GreaterOrEqual(d, i0)", CAUSAL),
        ("d = Sub(j, i) c = Less(d, i1)", CAUSAL),
        ("c0 = LessOrEqual(j, i) f = Cast<to=1>(c0) c = Equal(f, one)", CAUSAL),
        ("c0 = Greater(j, i) f = Cast<to=6>(c0) c = Equal(f, z32)", CAUSAL),
        ("c0 = LessOrEqual(j, i) f = Cast<to=1>(c0) g = Sub(one, f) c = Less(g, one)", CAUSAL),
        ("c0 = LessOrEqual(j, i) c1 = GreaterOrEqual(j, i0) c = And(c1, c0)", CAUSAL),
        ("c0 = LessOrEqual(j, i) c1 = Less(j, i0) c = Or(c1, c0)", CAUSAL),
        ("c0 = LessOrEqual(j, i) mm = Add(m, i0) c1 = Less(j, mm) c = And(c0, c1)", CAUSAL),
        ("c0 = LessOrEqual(j, i) c1 = Equal(j, j) c = And(c0, c1)", CAUSAL),
        ("a = Greater(j, i) b = Sub(i, three) d = LessOrEqual(j, b) e = Or(a, d) c = Not(e)", BEHIND),
        ("d = Sub(i, j) a = Abs(d) c = LessOrEqual(a, three)", {"left_window_size": 3, "right_window_size": 3}),
        ("d = Sub(j, i) a = Abs(d) c = Less(a, three)", {"left_window_size": 2, "right_window_size": 2}),
        ("d = Sub(i, j) a = Abs(d) e = Greater(a, three) c = Not(e)", {"left_window_size": 3, "right_window_size": 3}),
        ("d = Sub(i, j) a = Abs(d) c = GreaterOrEqual(three, a)", {"left_window_size": 3, "right_window_size": 3}),
        ("e = Add(i, three) c = LessOrEqual(j, e)", {"right_window_size": 3}),
        ("c = GreaterOrEqual(j, i)", {"left_window_size": 0}),
        ("a = LessOrEqual(j, i) b = GreaterOrEqual(j, i) c = And(a, b)", CAUSAL | {"left_window_size": 0}),
    ],
)  # fmt: skip
def test_windows(making: str, expected: dict[str, object]) -> None:
    making = f"z32 = Constant<value = int32 {{0}}>() {ROWS} {making}"
    assert check(model_of(making), *SIZES) == {"scale": 1.0} | expected


@pytest.mark.parametrize(
    "making",
    [
        "c = Less(j, i)",  # the first query sees nothing, and a window of -1 is none
        "b = Sub(i, three) c = LessOrEqual(j, b)",
        "d = Sub(i, j) a = Abs(d) c = GreaterOrEqual(a, three)",  # outside a window
        "two = Constant<value_int=2>() ii = Div(i, two) jj = Div(j, two) c = Equal(ii, jj)",  # blocks
        "two = Constant<value_int=2>() jj = Mul(j, two) c = LessOrEqual(jj, i)",
        "e = Sub(n, i) c = LessOrEqual(j, e)",
        "a = LessOrEqual(j, i) b = Less(j, three) c = Or(a, b)",  # a prefix that all see
        "c = Less(j, three)",
        "less = Sub(jm, i1) jj = Gather(jm, less) before = Unsqueeze(jj, a4) c = LessOrEqual(before, i)",  # last first
        "s = Add(i, j) c = LessOrEqual(s, n)",
        "f = Cast<to=1>(i) h = Constant<value_float=0.5>() g = Mul(f, h) jj = Cast<to=1>(j) c = LessOrEqual(jj, g)",
    ],
)
def test_not_windows(making: str) -> None:
    assert check(model_of(f"{ROWS} {making}"), *SIZES) == {"scale": 1.0}


def test_part_of_a_mask() -> None:
    """The window goes, what else there is stays as small as it is."""
    making = f"""{ROWS} a = LessOrEqual(j, i) b = Less(j, three) wide = Unsqueeze(padding, a12) pad = Cast<to=9>(wide)
        e = And(a, pad) c = And(e, b)"""
    model = model_of(making, f"{SELF}, int64[b,s] padding")
    fused, _ = fuse_and_check(model, {"b": 2, "s": 5}, padding=np.array([[1, 1, 0, 1, 1], [0, 1, 1, 1, 1]]))
    assert attributes(nodes(fused)[0]) == CAUSAL
    assert shape_of(fused, mask_of(fused)) == ["b", 1, 1, "s"]


# -- a past


@pytest.mark.parametrize(
    "making",
    [
        "at = Add(in, past)",
        "up = Add(n, past) at = Range(past, up, i1)",
        "at = Slice(jm, p1, end, o0)",
        "at = Gather(jm, shifted)",
        "d = Sub(m, n) at = Add(in, d)",
    ],
)
@pytest.mark.parametrize("width", [0, 3])
def test_behind_a_past(making: str, width: int) -> None:
    """The last query is beside the last key: lengths of all keys say so."""
    window = "b = Sub(i, three) e = Greater(j, b) c = And(a, e)" if width else "c = And(a, a)"
    making = (
        f"shifted = Add(in, past) {making} i = Unsqueeze(at, a3) j = Unsqueeze(jm, a4) a = LessOrEqual(j, i) {window}"
    )
    expected = CAUSAL | {"from_last": True} | ({"left_window_size": width - 1} if width else {})
    assert check(model_of(making, PAST), *PASTS) == expected


@pytest.mark.parametrize("other", ["Add(past, i1)", "Sub(past, i1)", "Mul(past, three)", "Identity(x)"])
def test_behind_another_past(other: str) -> None:
    """One key more is a window on the right, one less is none, and any other number neither."""
    making = f"pp = {other} at = Add(in, pp) {TRIANGLE}"
    got = check(model_of(making, f"{PAST}, int64 x"), *PASTS, x=np.array(2))
    expected = {"from_last": True, "right_window_size": 1} if "Add" in other else {}
    assert got == {"scale": 1.0} | expected


def test_cache_of_a_window() -> None:
    """Three keys of the past at most, as a mask of s + 3 columns says: the model runs only where there are three."""
    making = """last = Constant<value_ints=[-3]>() x2 = Constant<value_ints=[2]>() old = Slice(pk, last, end, x2)
        oldv = Slice(pv, last, end, x2) kk = Concat<axis=2>(old, nk) vv = Concat<axis=2>(oldv, nv) more = Add(n, three)
        at = Add(in, three) jw = Range(i0, more, i1) i = Unsqueeze(at, a3) j = Unsqueeze(jw, a4) a = LessOrEqual(j, i)
        b = Sub(i, three) d = GreaterOrEqual(j, b) c = And(a, d)"""
    body = masked(f"{BEHIND_PAST} {COUNTS} {making}", combine=HIDE)
    body = body.replace("Transpose<perm=[0,1,3,2]>(k)", "Transpose<perm=[0,1,3,2]>(kk)").replace("(p, v)", "(p, vv)")
    expected = {"scale": 1.0, "left_window_size": 0, "right_window_size": 3}
    assert check(parse(body, PAST, Y), {"b": 2, "s": 5, "p": 3}, {"b": 1, "s": 1, "p": 8}) == expected


def test_columns_that_may_be_one() -> None:
    """As many as something else has: one of them is repeated for every key."""
    making = (
        "x1 = Shape(x) xn = Squeeze(x1) jx = Range(i0, xn, i1)" + ROWS.replace("jm", "jx") + "c = LessOrEqual(j, i)"
    )
    model = model_of(making, f"{QKV}, float[x] x")
    assert check(model, *({**sizes, "x": x} for sizes in CROSS for x in (1, sizes["t"]))) == {"scale": 1.0}


def test_queries_that_start_at_zero_before_a_past() -> None:
    """Off by the whole past, but what the model says: the operator counts so by itself."""
    assert check(model_of(f"{ROWS} c = LessOrEqual(j, i)", PAST), *PASTS) == CAUSAL


@pytest.mark.parametrize("shift", ["m, n", "n, m"])
def test_last_query_beside_last_key(shift: str) -> None:
    """Also where there are fewer keys than queries, of which the first then see none; not the other way round."""
    making = f"d = Sub({shift}) at = Add(in, d) {TRIANGLE}"
    expected = CAUSAL | {"from_last": True} if shift == "m, n" else {"scale": 1.0}
    assert check(model_of(making, QKV), *CROSS) == expected


def test_fewer_keys_than_queries_and_the_lowest_number() -> None:
    """There the first queries lose every key, and each key gets the same number: the mean of V."""
    making = f"d = Sub(m, n) at = Add(in, d) {TRIANGLE}"
    hide = "mask = Where(c, zero, low) scores = Add(raw, mask)"
    expected = CAUSAL | {"from_last": True, "empty_row": b"mean"}
    assert check(model_of(making, QKV, hide=hide), *CROSS) == expected
    got = check(model_of(making, QKV, hide=hide.replace("low)", "ten)")), *CROSS[:1])
    assert got == {"scale": 1.0}  # -1e4 leaves them what the scores say


@pytest.mark.parametrize(("fill", "expected"), [("low", {"left_window_size": 3, "empty_row": b"mean"}), ("ten", {})])
def test_queries_behind_the_last_key(fill: str, expected: dict[str, object]) -> None:
    """A window leaves them no key where there are fewer keys than queries."""
    making = f"{ROWS} d = Sub(i, j) c = LessOrEqual(d, three)"
    hide = f"mask = Where(c, zero, {fill}) scores = Add(raw, mask)"
    assert check(model_of(making, QKV, hide=hide), {"b": 2, "s": 9, "t": 3}) == {"scale": 1.0} | expected
    assert check(model_of(making, SELF, hide=hide), {"b": 2, "s": 9}) == {"scale": 1.0, "left_window_size": 3}


def test_attention_behind_a_past() -> None:
    """The standard operator with the past outside, as exporters write it; and inside, where it counts itself."""
    making = f"{BEHIND_PAST} {COUNTS} at = Add(in, past) {TRIANGLE}"
    model = parse(f"{CONSTANTS} {making} y = Attention(q, k, v, c)", PAST, Y, opset=23)
    assert check(model, *PASTS) == {"is_causal": 1, "from_last": True}
    inside = "y, pko, pvo = Attention(q, nk, nv, c, pk, pv)"
    outputs = f"{Y}, float[b,2,u,8] pko, float[b,2,u,8] pvo"
    model = parse(f"{CONSTANTS} {making} {inside}", PAST, outputs, opset=23)
    fused, _ = fuse_and_check(model, *PASTS)
    (node,) = nodes(fused)
    assert attributes(node) == {"is_causal": 1}
    assert not any(node.input[6:])
    wrong = making.replace("Add(in, past)", "Identity(in)")
    fused, _ = fuse_and_check(parse(f"{CONSTANTS} {wrong} {inside}", PAST, outputs, opset=23), *PASTS)
    assert not attributes(nodes(fused)[0])


def test_attention_that_is_causal_already() -> None:
    """Its queries stand where it puts them, whatever the mask counts from."""
    making = f"d = Sub(m, n) at = Add(in, d) {TRIANGLE}"
    model = parse(f"{CONSTANTS} {COUNTS} {making} y = Attention<is_causal=1>(q, k, v, c)", QKV, Y, opset=23)
    assert check(model, *CROSS[:1], *CROSS[3:]) == {"is_causal": 1}


# -- triangles


@pytest.mark.parametrize("k", [-2, -1, 0, 1, 3])
@pytest.mark.parametrize("upper", [0, 1])
def test_triangles(k: int, upper: int) -> None:
    """Triangles with any diagonal, of a tensor of ones; only what the operator can say is a window."""
    making = f"""square = Concat<axis=0>(n1, m1) ones = Expand(one, square) kk = Constant<value_int={k}>()
        tri = Trilu<upper={upper}>(ones, kk) c = Cast<to=9>(tri)"""
    size = -k if upper else k
    side = "left_window_size" if upper else "right_window_size"
    window = {} if size < 0 else {"is_causal": 1} if not upper and not k else {side: size}
    assert check(model_of(making, QKV), *CROSS) == {"scale": 1.0} | window


def constant(array: np.ndarray) -> str:
    kind = {"b": "bool", "f": "float"}[array.dtype.kind]
    numbers = ",".join(str(int(x)) for x in array.reshape(-1))
    return f"Constant<value = {kind}[{','.join(map(str, array.shape))}] {{{numbers}}}>()"


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.tri(12, dtype=bool), CAUSAL),
        (np.tri(12, k=1, dtype=bool), {"right_window_size": 1}),
        (np.tri(12, dtype=bool) & ~np.tri(12, k=-3, dtype=bool), CAUSAL | {"left_window_size": 2}),
        (~np.tri(12, k=-1, dtype=bool), {"left_window_size": 0}),
        (np.tri(12, k=-1, dtype=bool), {}),  # the first query sees nothing
        (np.tri(12, dtype=bool) & (np.add.outer(range(12), range(12)) != 21), {}),  # one key is missing
        (np.tri(12, dtype=bool) | (np.add.outer(range(12), range(12)) == 1), {}),  # or too many, at the very start
        (np.eye(12, dtype=bool) | np.eye(12, k=-2, dtype=bool), {}),
    ],
)
def test_constant_bands(array: np.ndarray, expected: dict[str, object]) -> None:
    """A buffer of a model, cut to the length."""
    making = f"""tri = {constant(array)} x1 = Constant<value_ints=[1]>() rows = Slice(tri, o0, n1, o0)
        c = Slice(rows, o0, m1, x1)"""
    assert check(model_of(making), *SIZES) == {"scale": 1.0} | expected


@pytest.mark.parametrize("keys", [5, 7])
def test_triangle_of_the_example(keys: int) -> None:
    """A constant of the example's own size, in a model of fixed sizes: it is what it is there, no more."""
    array = np.tri(5, keys, k=keys - 5, dtype=bool)
    inputs = f"float[b,2,5,8] q, float[b,2,{keys},8] k, float[b,2,{keys},8] v"
    model = parse(masked(f"c = {constant(array)}", combine=HIDE), inputs, "float[b,2,5,8] y")
    expected = CAUSAL if keys == 5 else {"scale": 1.0, "right_window_size": 2}
    assert check(model, {"b": 2}) == expected
    almost = array.copy()
    almost[3, 1] = False
    model = parse(masked(f"c = {constant(almost)}", combine=HIDE), inputs, "float[b,2,5,8] y")
    assert check(model, {"b": 2}) == {"scale": 1.0}


# -- masks that are biases, and biases beside masks


@pytest.mark.parametrize(
    "making",
    [
        "f = Cast<to=1>(c) o = Sub(one, f) mask = Mul(o, low)",
        "f = Cast<to=1>(c) o = Sub(f, one) big = Neg(low) mask = Mul(o, big)",
        "nc = Not(c) f = Cast<to=1>(nc) mask = Mul(f, low)",
        "w = Where(c, zero, low) mask = Cast<to=1>(w)",
        "w = Where(c, one, zero) b = Cast<to=9>(w) mask = Where(b, zero, low)",
        "w = Where(c, zero, low) x = Less(w, zero) mask = Where(x, low, zero)",
        "true = Equal(one, one) w = Where(true, zero, low) mask = Where(c, w, low)",
    ],
)
def test_numbers_of_masks(making: str) -> None:
    model = model_of(f"{ROWS} c = LessOrEqual(j, i) {making}", hide="scores = Add(raw, mask)")
    assert check(model, *SIZES) == CAUSAL
    wrong = making.replace("low)", "one)").replace("zero, low", "one, low")
    model = model_of(f"{ROWS} c = LessOrEqual(j, i) {wrong}", hide="scores = Add(raw, mask)")
    assert check(model, *SIZES) != CAUSAL


ALIBI = """slopes = Constant<value = float[2,1,1] {0.5, 0.25}>() f = Cast<to=1>(j) alibi = Mul(f, slopes)"""


@pytest.mark.parametrize(
    "hide",
    [
        "biased = Add(raw, alibi) mask = Where(c, zero, low) scores = Add(biased, mask)",
        "mask = Where(c, alibi, low) scores = Add(raw, mask)",
        "biased = Add(raw, alibi) scores = Where(c, biased, low)",
        "hidden = Where(c, zero, low) mask = Add(hidden, alibi) scores = Add(raw, mask)",
    ],
)
def test_alibi_stays_a_row_a_head(hide: str) -> None:
    """Causal goes, padding and bias remain (batch, heads, 1, keys); a bias of any number may hide keys itself."""
    making = f"{ROWS} a = LessOrEqual(j, i) {ALIBI}"
    model = model_of(f"{making} c = And(a, a)", hide=hide)
    fused, _ = fuse_and_check(model, *SIZES)
    assert attributes(nodes(fused)[0]) == CAUSAL
    assert shape_of(fused, mask_of(fused))[-3:] == [2, 1, "s"]
    padded = "wide = Unsqueeze(padding, a12) pad = Cast<to=9>(wide) c = And(a, pad)"
    model = model_of(f"{making} {padded}", f"{SELF}, int64[b,s] padding", hide=hide)
    fused, _ = fuse_and_check(model, {"b": 2, "s": 4}, padding=np.array([[0, 0, 1, 1], [0, 0, 0, 0]]))
    assert attributes(nodes(fused)[0]) == CAUSAL | {"empty_row": b"mean"}
    assert shape_of(fused, mask_of(fused))[-3:] == [2, 1, "s"]
    given = hide.replace("alibi", "bias")
    model = model_of(f"{ROWS} c = LessOrEqual(j, i)", f"{SELF}, float[1,2,1,s] bias", hide=given)
    low = np.full((1, 2, 1, 4), np.finfo(np.float32).min, np.float32)
    low[..., 2:] = 0
    fused, report = fuse_and_check(model, {"b": 2, "s": 4}, bias=low)
    assert "is_causal" not in attributes(nodes(fused)[0])
    assert "a triangle is left in the mask" in report.sites[0].reason
