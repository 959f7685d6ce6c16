"""Attention problems as data: the same cases drive the kernels, ONNX Runtime, TensorRT and the benchmarks.

Every fault found once is a case here, as its whole kind; ids are readable and name the fault.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flashonnx.reference import Array, attention, prepare

DTYPES = ("float32", "float16", "bfloat16")
INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen", "sinks", "bias")


@dataclass(frozen=True)
class Case:
    """One problem of the operator; `inputs` and `attributes` are what a node gets."""

    id: str
    dtype: str = "float32"
    batch: int = 2
    heads: tuple[int, int] = (2, 2)  # of queries and of keys
    q_length: int = 5
    kv_length: int = 7  # keys in K, without the past
    past: int | None = None
    head_dim: int = 32
    value_dim: int | None = None
    layout: str = "bshd"  # bhsd, bshd, 3hd, h3d, gqa, time_major; 3hd and h3d also with "_flat"
    mask: str = ""  # its dimensions among b h q k and 1, e.g. "b11k"
    mask_dtype: str = "bool"  # "T": the same as Q's
    mask_fill: str = "random"
    mask_keys: int | None = None  # shorter than all keys
    is_causal: int = 0
    lengths: tuple[int, ...] | None = None  # nonpad_kv_seqlen
    sinks: bool = False
    bias: float | None = None  # standard deviation of the projections' bias; None: there is none
    scale: float | None = None
    softcap: float = 0.0
    left: int = -1
    right: int = -1
    empty_row: str = "zero"
    present: bool = False  # asked for
    lse: bool = True  # asked for
    fill: float | None = None  # every element of Q and K; None: normal
    spread: tuple[float, float] = (1.0, 1.0)  # standard deviations of Q and of V
    poison: float | None = None  # stands in K and V wherever no query may look
    nans: int = 0  # so many elements of Q, of K and of V, seen or not, are NaN
    gpu: bool = False  # too much for the CPU tier
    slow: bool = False

    @property
    def keys(self) -> int:
        """Sk, past included."""
        return self.kv_length + (self.past or 0)

    @property
    def too_wide(self) -> bool:
        """No kernel has such head dimensions."""
        return max(self.head_dim, self.value_dim or 0) > 512

    @property
    def attributes(self) -> dict[str, Any]:
        """Of the node, by name; None where it is left out."""
        ranked = self.layout in ("bhsd", "3hd", "h3d")
        return {
            "is_causal": self.is_causal,
            "q_num_heads": None if ranked else self.heads[0],
            "kv_num_heads": None if ranked else self.heads[1],
            "scale": self.scale,
            "softcap": self.softcap,
            "left_window_size": self.left,
            "right_window_size": self.right,
            "empty_row": self.empty_row,
            "qkv_layout": "separate" if self.layout in ("bhsd", "bshd") else self.layout.removesuffix("_flat"),
        }

    def inputs(self) -> dict[str, Array]:
        """Of the node, by name, in the order of INPUTS without the absent ones; the same at every call."""
        random = np.random.default_rng(zlib.crc32(self.id.encode()))
        dtype = numpy_dtype(self.dtype)

        def normal(*shape: int, spread: float = 1.0) -> Array:
            x = random.standard_normal(shape, dtype=np.float32)
            return (x if spread == 1 else x * np.float32(spread)).astype(dtype)

        value_dim = self.head_dim if self.value_dim is None else self.value_dim
        q = normal(self.batch, self.heads[0], self.q_length, self.head_dim, spread=self.spread[0])
        k = normal(self.batch, self.heads[1], self.kv_length, self.head_dim)
        v = normal(self.batch, self.heads[1], self.kv_length, value_dim, spread=self.spread[1])
        if self.fill is not None:
            q[...] = k[...] = self.fill
        mask = self._mask(random) if self.mask else None
        past = None
        if self.past is not None:
            past = (
                normal(self.batch, self.heads[1], self.past, self.head_dim),
                normal(self.batch, self.heads[1], self.past, value_dim, spread=self.spread[1]),
            )
        if self.poison is not None:
            seen = self._seen(mask)
            with np.errstate(over="ignore"):  # 1e6 is infinite in float16
                k[~seen[:, :, self.past or 0 :]] = v[~seen[:, :, self.past or 0 :]] = self.poison
                for x in past or ():
                    x[~seen[:, :, : self.past]] = self.poison
        for x in (q, k, v) if self.nans else ():
            x.reshape(-1)[random.integers(x.size, size=self.nans if x.size else 0)] = np.nan
        inputs = dict(zip(INPUTS, (*pack(q, k, v, self.layout), mask), strict=False))
        if past is not None:
            inputs["past_key"], inputs["past_value"] = past
        if self.lengths is not None:
            inputs["nonpad_kv_seqlen"] = np.array(self.lengths, np.int64)
        if self.sinks:
            inputs["sinks"] = random.standard_normal(self.heads[0], dtype=np.float32)
        if self.bias is not None:
            inputs["bias"] = normal(sum(x.shape[1] * x.shape[3] for x in (q, k, v)), spread=self.bias)
        return {name: x for name, x in inputs.items() if x is not None}

    def reference(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """All four outputs by name."""
        outputs = attention(*(inputs.get(name) for name in INPUTS), **self.attributes)  # type: ignore[arg-type]
        return dict(zip(("Y", "present_key", "present_value", "lse"), outputs, strict=True))

    def heads_view(self, y: Any) -> Any:
        """Y, a NumPy array or torch tensor, as a (B, Hq, Sq, Dv) view."""
        if self.layout == "bhsd":
            return y
        if self.layout == "time_major":
            y = y.swapaxes(0, 1)
        return y.reshape(*y.shape[:2], self.heads[0], y.shape[2] // self.heads[0]).swapaxes(1, 2)

    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all four outputs, by name."""
        value_dim = self.head_dim if self.value_dim is None else self.value_dim
        batch, (heads, kv_heads), length = self.batch, self.heads, self.q_length
        y = (batch, heads, length, value_dim) if self.layout == "bhsd" else (batch, length, heads * value_dim)
        if self.layout == "time_major":
            y = (length, batch, heads * value_dim)
        present = (batch, kv_heads, self.keys)
        return {
            "Y": y,
            "present_key": (*present, self.head_dim),
            "present_value": (*present, value_dim),
            "lse": (batch, heads, length),
        }

    def _mask(self, random: np.random.Generator) -> Array:
        keys = self.keys if self.mask_keys is None else self.mask_keys
        sizes = {"b": self.batch, "h": self.heads[0], "q": self.q_length, "k": keys, "1": 1}
        shape = tuple(sizes[letter] for letter in self.mask)
        attend = random.random(shape) < 0.7
        first_row = attend[..., :1, :] if attend.ndim > 1 else attend
        sentinel = -np.inf
        match self.mask_fill:
            case "bias":  # nothing is masked
                attend[...] = True
            case "first row":  # and no key is left in it
                first_row[...] = False
            case "all":
                attend[...] = False
            case "last batch":
                attend[-1:] = False
            case "second key":
                attend[...] = True
                attend[..., 1] = False
            case "padding":  # as tokenizers and packers leave it, not only at the end
                attend[...] = np.arange(keys) % 3 == 2
            case "finfo.min" | "-1e4":  # finite sentinels: in row 0 everywhere, elsewhere as drawn
                first_row[...] = False
                sentinel = np.finfo(np.float32).min if self.mask_fill == "finfo.min" else -1e4
        if self.mask_dtype in ("int8", "int32"):  # any value but 0 means attend
            return (attend * random.choice((-128, -1, 1, 2, 64, 127), shape)).astype(self.mask_dtype)
        if self.mask_dtype == "bool":
            return attend
        dtype = numpy_dtype(self.dtype if self.mask_dtype == "T" else self.mask_dtype)
        if sentinel == np.finfo(np.float32).min:
            import ml_dtypes

            sentinel = float(ml_dtypes.finfo(dtype).min)
        uniform = self.mask_fill in ("finfo.min", "-1e4")
        bias = np.zeros(shape) if uniform else random.standard_normal(shape)
        return np.where(attend, bias, sentinel).astype(dtype)

    def _seen(self, mask: Array | None) -> Array:
        """(B, Hkv, Sk): whether any query may look at the key."""
        q, k = (np.zeros((self.batch, h, s, 1)) for h, s in zip(self.heads, (self.q_length, self.keys), strict=True))
        lengths = None if self.lengths is None else np.array(self.lengths, np.int64)
        past = np.zeros((self.batch, self.heads[1], self.past or 0, 1))
        new = k[:, :, self.past or 0 :]
        seen = prepare(
            q, new, new, mask, None if self.past is None else past, past, lengths,
            is_causal=self.is_causal, q_num_heads=None, kv_num_heads=None, left_window_size=self.left,
            right_window_size=self.right, qkv_layout="separate",
        ).seen  # fmt: skip
        group = self.heads[0] // self.heads[1]
        return seen.any(axis=2).reshape(self.batch, self.heads[1], group, self.keys).any(axis=2)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's dtype of that name, bfloat16 included."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def pack(q: Array, k: Array, v: Array, layout: str) -> tuple[Array, Array | None, Array | None]:
    """(B, H, S, D) arrays as the operator's inputs in this layout, contiguous."""
    if layout == "bhsd":
        return q, k, v
    q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    batch, length = q.shape[:2]
    flat = (batch, length, (q.shape[2] + k.shape[2] + v.shape[2]) * q.shape[3])
    match layout.removesuffix("_flat"):
        case "bshd":
            flat_heads = [x.reshape(*x.shape[:2], x.shape[2] * x.shape[3]) for x in (q, k, v)]
            return flat_heads[0], flat_heads[1], flat_heads[2]
        case "3hd":
            packed = np.stack((q, k, v), axis=2)
        case "h3d":
            packed = np.stack((q, k, v), axis=3)
        case "gqa":
            packed = np.concatenate((q, k, v), axis=2).reshape(flat)
        case "time_major":
            return np.stack((q, k, v), axis=2).reshape(flat).swapaxes(0, 1).copy(), None, None
        case _:
            raise ValueError(layout)
    return packed.reshape(flat) if layout.endswith("_flat") else packed, None, None


def typed(*cases: Case) -> list[Case]:
    """Each case in every dtype, which its id then names."""
    return [replace(case, id=f"{case.id}-{dtype}", dtype=dtype) for case in cases for dtype in DTYPES]


def square(id: str, length: int, **kwargs: Any) -> Case:
    """Self-attention over one length."""
    return Case(id, q_length=length, kv_length=length, **kwargs)


REGULAR = [
    *typed(*(square(f"d{d}-s{s}", s, head_dim=d) for d in (64, 128) for s in (64, 128))),
    *typed(*(square(f"causal-d{d}", 128, head_dim=d, is_causal=1) for d in (64, 128))),
    *typed(square("bert", 128, batch=2, heads=(4, 4), head_dim=64, mask="b11k", mask_fill="padding")),
    *typed(
        Case("llama-decode", heads=(8, 2), q_length=1, kv_length=1, past=255, head_dim=128, is_causal=1, present=True)
    ),
    *typed(square("vit", 577, batch=1, heads=(2, 2), head_dim=64, layout="3hd")),
    *typed(square("gpt-oss", 128, heads=(8, 1), head_dim=64, is_causal=1, left=31, sinks=True)),
]

ODD = [
    *typed(*(Case(f"d{d}", head_dim=d) for d in (1, 7, 20, 33, 72, 96, 100, 129, 160, 200, 256, 512))),
    *typed(*(Case(f"d{d}-dv{dv}", head_dim=d, value_dim=dv) for d, dv in ((256, 512), (192, 128), (72, 40), (1, 5)))),
    *(
        Case(f"d{d}-dv{d + 3}-bhsd-causal", layout="bhsd", head_dim=d, value_dim=d + 3, is_causal=1)
        for d in (1, 20, 64)
    ),
    *typed(*(square(f"s{s}", s, batch=1, heads=(1, 1), head_dim=64) for s in (1, 63, 65, 577))),
    *(square(f"s{s}-causal", s, batch=1, heads=(2, 1), head_dim=33, is_causal=1) for s in (1, 63, 65, 577, 1023)),
    *(Case(f"q{q}-k{k}", q_length=q, kv_length=k) for q, k in ((1, 1023), (1023, 1), (63, 577), (577, 65))),
    # onnxruntime#28376: only multiples of 8 keys, or only others, failed with a mask.
    *(
        c
        for k in (7, 8, 9, 15, 16, 17, 32)
        for c in typed(Case(f"mask-k{k}", kv_length=k, mask="bhqk", mask_dtype="T"))
    ),
]

LAYOUTS = ("bhsd", "bshd", "3hd", "3hd_flat", "h3d", "h3d_flat", "gqa", "time_major")
_MASKS = ("bhqk", "b1qk", "bh1k", "b11k", "1hqk", "11qk", "1h1k", "111k", "hqk", "1qk", "h1k", "11k", "qk", "1k", "k")

FEATURES = [
    *(c for name in LAYOUTS for c in typed(square(f"layout-{name}", 33, layout=name, head_dim=20))),
    *(square(f"layout-{name}-causal-lengths", 33, layout=name, is_causal=1, lengths=(33, 9)) for name in LAYOUTS),
    *(square(f"layout-{n}-past", 9, layout=n, past=6, is_causal=1, present=True) for n in LAYOUTS),
    square("layout-gqa-8-2", 33, layout="gqa", heads=(8, 2), head_dim=20),
    square("layout-gqa-6-2-mask", 33, layout="gqa", heads=(6, 2), mask="b11k"),
    # Groups: query head h reads key head h // group (onnx 1.18 tiled); any size (flashinfer#996).
    *(Case(f"group-{q}-{k}", heads=(q, k))
      for q, k in ((6, 2), (3, 1), (5, 1), (12, 2), (7, 1), (16, 1), (71, 1), (8, 4))),
    *(Case(f"group-{q}-{k}-bhsd", heads=(q, k), layout="bhsd", dtype="float16") for q, k in ((6, 2), (16, 1), (10, 2))),
    # Masks: every shape and dtype; rank 3 is (heads, queries, keys), not (batch, ...).
    *(Case(f"mask-{m}-{t}", mask=m, mask_dtype=t) for m in _MASKS for t in ("bool", "T")),
    *(Case(f"mask-{m}-{t}", mask=m, mask_dtype="T", dtype=t)
      for m in ("bhqk", "b11k") for t in ("float16", "bfloat16")),
    *(Case(f"mask-float32-{t}", mask="b1qk", mask_dtype="float32", dtype=t) for t in ("float16", "bfloat16")),
    *(Case(f"mask-{m}-causal", mask=m, is_causal=1) for m in ("b11k", "bhqk", "k")),
    Case("mask-causal-square", q_length=65, kv_length=65, mask="b1qk", is_causal=1, mask_dtype="T"),
    *(Case(f"mask-short-{k}-{t}", mask="b1qk", mask_keys=k, mask_dtype=t) for k in (1, 4) for t in ("bool", "T")),
    Case("mask-last-dimension-1", mask="b111", mask_fill="bias", mask_dtype="T"),
    Case("mask-short-with-lengths", mask="b1qk", mask_keys=5, lengths=(3, 5)),
    Case("mask-with-past", mask="b1qk", past=6, mask_dtype="T", present=True),
    *typed(Case("scale", scale=0.3), Case("scale-1", scale=1.0, head_dim=8)),
    *typed(Case("softcap", softcap=2.0),
           Case("softcap-causal-mask", softcap=0.5, is_causal=1, mask="b1qk", mask_dtype="T")),
    # Offsets: top left without a cache, by the past, by the lengths.
    *typed(Case("causal-short-query", is_causal=1), Case("causal-long-query", q_length=9, kv_length=4, is_causal=1)),
    *typed(Case("causal-one-query-no-past", batch=1, q_length=1, kv_length=5, is_causal=1)),
    *typed(Case("causal-past", q_length=4, kv_length=4, past=13, is_causal=1, present=True)),
    *typed(Case("causal-lengths", q_length=3, kv_length=5, lengths=(4, 5), is_causal=1)),
    *(Case(f"past-{layout}-{p}", layout=layout, past=p, present=p != 3)
      for layout in ("bhsd", "bshd") for p in (0, 3, 64)),
    Case("past-dv", past=9, head_dim=20, value_dim=36, layout="bhsd", present=True),
    Case("present-without-past", present=True),
    Case("present-without-past-bhsd", layout="bhsd", present=True, heads=(4, 2)),
    *typed(Case("lengths", kv_length=40, lengths=(17, 40))),
    *(square(f"window-{lt}-{r}", 65, left=lt, right=r)
      for lt, r in ((0, 0), (3, -1), (-1, 3), (5, 2), (0, -1), (100, 100))),
    *(square(f"window-{w}-causal", 65, left=w, is_causal=1) for w in (0, 1, 15, 16, 64)),
    *typed(square("window-long", 577, batch=1, heads=(1, 1), left=100, right=20, head_dim=64)),
    *(Case(f"window-{lt}-{r}-uneven", q_length=q, kv_length=30, left=lt, right=r)
      for q, lt, r in ((9, 3, 4), (40, 2, 0))),
    # A window counts from the absolute position (transformers#39408): W tokens with the query's own is left W - 1.
    *(Case(f"window-past-{q}", q_length=q, kv_length=q, past=21, left=7, is_causal=1, present=True) for q in (1, 5)),
    Case("window-lengths", q_length=1, kv_length=10, lengths=(3, 10), left=3, is_causal=1),
    Case("window-lengths-right", q_length=4, kv_length=12, lengths=(7, 12), left=2, right=1),
    *(square(f"window-huge-{name}", 9, **{name: 2**40}) for name in ("left", "right")),
    *typed(Case("sinks", sinks=True), Case("sinks-causal-gqa", sinks=True, heads=(4, 2), is_causal=1)),
    Case("no-lse", lse=False, is_causal=1),
    Case("everything", q_length=9, kv_length=9, past=12, heads=(6, 2), head_dim=20, value_dim=28,
         mask="b1qk", mask_dtype="T", is_causal=1, sinks=True, scale=0.4, softcap=3.0, left=8, present=True),
]  # fmt: skip

_EMPTY = (
    {"mask": "b1qk", "mask_fill": "first row"},
    {"mask": "b1qk", "mask_fill": "first row", "mask_dtype": "T"},
    {"mask": "b11k", "mask_fill": "last batch"},
    {"lengths": (0, 7)},
    {"lengths": (0, 7), "is_causal": 1},
    {"lengths": (2, 7), "is_causal": 1},  # length 2 < Sq: queries 0 to 2 reach no key
    {"mask": "b1qk", "mask_fill": "all"},
    {"left": 0, "lengths": (2, 7)},
    {"q_length": 12, "left": 2},  # the last queries are past the last key's window
)

CORNER = [
    *(Case(f"empty-row-{i}-{e}", empty_row=e, **kw) for i, kw in enumerate(_EMPTY) for e in ("zero", "mean")),
    *(Case(f"empty-row-{e}-gqa-{t}", dtype=t, empty_row=e, heads=(4, 2), **_EMPTY[0])
      for e in ("zero", "mean") for t in DTYPES),
    *(Case(f"empty-row-sinks-{i}", sinks=True, **kw) for i, kw in enumerate(_EMPTY)),
    Case("empty-row-past", past=4, mask="b1qk", mask_fill="first row", empty_row="mean", present=True),
    # A finite sentinel is a bias (flashinfer#4267): the row is the mean of V, or a plain softmax, never zero.
    *(c for f in ("finfo.min", "-1e4") for c in typed(Case(f"sentinel-{f}", mask="b1qk", mask_fill=f, mask_dtype="T"))),
    *(Case(f"tiles-without-keys-{c}", batch=99, heads=(8, 4), q_length=70, kv_length=200, head_dim=64, is_causal=c,
           lengths=(0, 30, 200) * 33, gpu=True) for c in (0, 1)),  # blocks take many tiles, some without keys
    # few queries and many keys, which kernels share out in unequal parts
    *typed(Case("sentinel-parts", heads=(4, 2), q_length=3, kv_length=2622, mask="b1qk", mask_fill="finfo.min")),
    *(Case(f"sentinel-{f}-float32-{t}", mask="b1qk", mask_fill=f, mask_dtype="float32", dtype=t)
      for f in ("finfo.min", "-1e4") for t in ("float16", "bfloat16")),
    # What stands in masked or padded slots does not matter (flash-attention#1745, onnxruntime PR#28379).
    *(Case(f"poison-lengths-{p}-{t}", dtype=t, heads=(1, 1), q_length=3, kv_length=16, head_dim=64, lengths=(1, 3),
           poison=p)
      for p in (np.nan, np.inf, -np.inf, 1e6) for t in DTYPES),
    *(Case(f"poison-lengths-causal-{p}", q_length=3, kv_length=16, lengths=(0, 4), poison=p, is_causal=1)
      for p in (np.nan, np.inf)),
    *(Case(f"poison-mask-{p}-{m}-{t}-cap{c}", dtype=t, mask="b1qk", mask_dtype=m, mask_fill="second key", softcap=c,
           poison=p)
      for p in (np.nan, np.inf, 1e6) for m in ("bool", "T") for t in DTYPES for c in (0.0, 0.5)),
    *(Case(f"poison-short-mask-{p}", mask="b1qk", mask_keys=4, poison=p) for p in (np.nan, np.inf)),
    *(Case(f"poison-dead-row-{p}", mask="b11k", mask_fill="last batch", poison=p) for p in (np.nan, np.inf)),
    # Lengths outside [0, Sk] are clamped.
    *(Case(f"lengths-clamped-{c}", lengths=(-3, 99), is_causal=c) for c in (0, 1)),
    # Scores beyond float16 (onnxruntime#28195).
    *(square(f"d512-scale-1-s{s}", s, dtype="float16", heads=(8, 8), head_dim=512, is_causal=1, scale=1.0)
      for s in (6, 64)),
    Case("score-overflow", dtype="float16", head_dim=64, fill=40.0, scale=1.0),
    Case("score-overflow-causal", dtype="float16", head_dim=64, fill=40.0, scale=1.0, is_causal=1),
    # Nothing to do.
    *(Case(f"no-{n}-{lay}", layout=lay, present=True, **{f: 0}) for lay in ("bhsd", "bshd")
      for n, f in (("batch", "batch"), ("queries", "q_length"), ("keys", "kv_length"))),
    *(Case(f"no-keys-{e}-mask", kv_length=0, empty_row=e, mask="b1qk") for e in ("zero", "mean")),
    *(Case(f"no-keys-{e}-causal", kv_length=0, empty_row=e, is_causal=1) for e in ("zero", "mean")),
    Case("no-new-keys-but-past", kv_length=0, past=5, present=True),
    square("no-tokens-3hd", 0, layout="3hd_flat"),
    # batch * heads beyond 65535 (flash-attention#1786).
    Case("many-heads-small", batch=7000, heads=(10, 10), q_length=2, kv_length=3, head_dim=4),
    Case("many-heads", dtype="float16", batch=1000, heads=(70, 70), q_length=8, kv_length=8, head_dim=64, gpu=True),
    Case("many-batches", dtype="bfloat16", batch=70000, heads=(1, 1), q_length=3, kv_length=3, head_dim=8),
    # One process, one kernel after the other with different shared memory (onnxruntime#28388).
    *(Case(f"after-one-another-{i}", dtype="float16", head_dim=d, lengths=(3, 7) if d > 256 else None)
      for i, d in enumerate((64, 512, 64))),
]  # fmt: skip

# What stands above in float32 alone, for kernels on tensor cores, which never see float32.
HALF = [
    replace(case, id=f"{case.id}-{dtype}", dtype=dtype, gpu=True)
    for case in (*ODD, *FEATURES, *CORNER)
    if case.dtype == "float32" and not case.id.endswith("-float32") and "-float32-" not in case.id
    for dtype in ("float16", "bfloat16")
]

ALL = [*REGULAR, *ODD, *FEATURES, *CORNER, *HALF]
