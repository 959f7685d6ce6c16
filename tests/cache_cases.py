"""Problems of FlashAttentionKVCache as data, as in `cases.py`: the same cases drive the kernels and ONNX Runtime.

Slots that hold no key, pages that no sequence has and the rest of the block table are never what one could compute
with: NaN, and page numbers that do not exist.
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from cases import numpy_dtype
from flashonnx.reference import Array
from flashonnx.reference_cache import attention_kv_cache

INPUTS = (
    "Q", "K", "V", "key_cache", "value_cache", "cache_lengths", "block_table", "cu_seqlens_q", "cos_cache", "sin_cache",
    "position_ids", "attn_mask", "sinks",
)  # fmt: skip
OUTPUTS = ("Y", "present_key_cache", "present_value_cache", "lse")
POSITIONS = 64  # of the rotary tables


@dataclass(frozen=True)
class CacheCase:
    """One problem; `inputs` and `attributes` are what a node gets."""

    id: str
    dtype: str = "float32"
    heads: tuple[int, int] = (4, 2)
    lengths: tuple[int, ...] = (0, 9)  # cache_lengths
    q_length: int = 3  # new tokens of each sequence
    ragged: tuple[int, ...] | None = None  # instead: of each its own
    slack: tuple[int, int] = (0, 0)  # tokens before the first and after the last sequence of a ragged batch
    capacity: int = 24
    page_size: int = 0  # 0: a contiguous cache
    missing: tuple[tuple[int, int], ...] = ()  # entries (sequence, index) of the block table that name no page
    append: bool = True  # else K and V are absent
    head_dim: int = 32
    value_dim: int | None = None
    ranked: bool = False  # Q with a dimension of heads
    packed: bool = False  # K and V are in Q
    rotary: str = ""  # "half" or "interleaved"
    rotary_dim: int = 0  # 0: all, by the tables' width
    table: str = "T"  # dtype of the rotary tables
    positions: bool = False  # position_ids are given
    mask: str = ""  # its dimensions among b h q k and 1
    mask_dtype: str = "bool"
    mask_keys: int | None = None
    is_causal: int = 1
    left: int = -1
    right: int = -1
    scale: float | None = None
    softcap: float = 0.0
    sinks: bool = False
    lse: bool = True
    lengths_dtype: str = "int32"
    lengths_rank: int = 1
    max_q_length: int = 0
    in_place: bool = True
    poison: float = np.nan
    gpu: bool = False

    @property
    def batch(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Rows of Q."""
        if self.ragged is None:
            return self.batch * self.q_length
        return sum(self.ragged) + sum(self.slack)

    @property
    def width(self) -> int:
        """Dv."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def attributes(self) -> dict[str, Any]:
        """Of the node, by name; None where it is left out."""
        return {
            "q_num_heads": None if self.ranked else self.heads[0],
            "kv_num_heads": None if self.ranked else self.heads[1],
            "scale": self.scale,
            "softcap": self.softcap,
            "is_causal": self.is_causal,
            "left_window_size": self.left,
            "right_window_size": self.right,
            "rotary_interleaved": int(self.rotary == "interleaved"),
            "rotary_dim": self.rotary_dim,
            "max_q_length": self.max_q_length,
            **({"qkv_layout": "gqa"} if self.packed else {}),
        }

    def inputs(self) -> dict[str, Array]:
        """Of the node, by name, in the order of INPUTS without the absent ones; the same at every call."""
        random = np.random.default_rng(zlib.crc32(self.id.encode()))
        dtype = numpy_dtype(self.dtype)

        def normal(*shape: int) -> Array:
            return random.standard_normal(shape, dtype=np.float32).astype(dtype)

        found: dict[str, Array] = {"Q": self._form(normal(self.tokens, self.heads[0], self.head_dim))}
        if self.append:
            found["K"] = self._form(normal(self.tokens, self.heads[1], self.head_dim))
            found["V"] = self._form(normal(self.tokens, self.heads[1], self.width))
        if self.packed:
            found["Q"] = np.concatenate([found.pop(name) for name in "QKV"], -1)
        keys, values = (normal(self.batch, self.heads[1], self.capacity, d) for d in (self.head_dim, self.width))
        for b, length in enumerate(self.lengths):
            for cache in (keys, values):
                cache[b, :, max(length, 0) :] = self.poison
        if self.page_size:
            keys, values, found["block_table"] = self._pages(random, keys, values)
        found["key_cache"], found["value_cache"] = keys, values
        shape = (self.batch,) + (1,) * (self.lengths_rank - 1)
        found["cache_lengths"] = np.array(self.lengths, self.lengths_dtype).reshape(shape)
        if self.ragged is not None:
            found["cu_seqlens_q"] = np.cumsum((self.slack[0], *self.ragged)).astype(np.int32)
        if self.rotary:
            half = (self.rotary_dim or self.head_dim) // 2
            angles = np.arange(POSITIONS)[:, None] * 100.0 ** -(np.arange(half) / half)
            table = numpy_dtype(self.dtype if self.table == "T" else self.table)
            found["cos_cache"], found["sin_cache"] = np.cos(angles).astype(table), np.sin(angles).astype(table)
        if self.positions:  # also some that the tables do not have
            shape = (self.batch, self.q_length) if self.ragged is None else (self.tokens,)
            found["position_ids"] = random.integers(-2, POSITIONS + 5, shape, dtype=np.int64)
        if self.mask:
            found["attn_mask"] = self._mask(random)
        if self.sinks:
            found["sinks"] = random.standard_normal(self.heads[0], dtype=np.float32)
        return {name: found[name] for name in INPUTS if name in found}

    def reference(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """All four outputs by name."""
        outputs = attention_kv_cache(*(inputs.get(name) for name in INPUTS), **self.attributes)  # type: ignore[arg-type]
        return dict(zip(OUTPUTS, outputs, strict=True))

    def output_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all four outputs, by name."""
        inputs, heads = self.inputs(), self.heads[0]
        ragged = self.ragged is not None
        return {
            "Y": self._form(np.empty((self.tokens, heads, self.width), bool)).shape,
            "present_key_cache": inputs["key_cache"].shape,
            "present_value_cache": inputs["value_cache"].shape,
            "lse": (heads, self.tokens) if ragged else (self.batch, heads, self.q_length),
        }

    def parts(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Q, and K and V if there are any: views of one array if they are packed."""
        if not self.packed:
            return {name: arrays[name] for name in "QKV" if name in arrays}
        packed, (heads, kv_heads) = arrays["Q"], self.heads
        k, v = heads * self.head_dim, (heads + kv_heads) * self.head_dim
        return {"Q": packed[..., :k], "K": packed[..., k:v], "V": packed[..., v:]}

    def heads_view(self, x: Any, heads: int) -> Any:
        """Q, K, V or Y as (B, H, S, D), or (T, H, D) if ragged: a view."""
        if self.ranked:
            return x
        split = x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)
        return split if self.ragged is not None else split.swapaxes(1, 2)

    def _form(self, x: Array) -> Array:
        """(tokens, H, D) in the form that the case has."""
        if self.ragged is not None:
            return x if self.ranked else x.reshape(len(x), x.shape[1] * x.shape[2])
        x = x.reshape(self.batch, self.q_length, *x.shape[1:])
        if self.ranked:
            return np.ascontiguousarray(x.swapaxes(1, 2))
        return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])

    def _pages(self, random: np.random.Generator, keys: Array, values: Array) -> tuple[Array, Array, Array]:
        """The same caches in pages that are strewn over memory, and the block table."""
        size, count = self.page_size, self.capacity // self.page_size
        pages = self.batch * count + 3
        table = random.permutation(pages)[: self.batch * count].reshape(self.batch, count).astype(np.int32)
        paged = []
        for cache in (keys, values):
            memory = np.full((pages, size, self.heads[1], cache.shape[3]), self.poison, cache.dtype)
            memory[table] = cache.swapaxes(1, 2).reshape(self.batch, count, size, self.heads[1], cache.shape[3])
            paged.append(memory)
        tokens = self.ragged or (self.q_length,) * self.batch
        for b, length in enumerate(self.lengths):
            last = -(-(max(length, 0) + (tokens[b] if self.append else 0)) // size)
            table[b, last:] = [(-1, pages, 2**31 - 1, -(2**31))[i % 4] for i in range(len(table[b, last:]))]
        for i, (b, index) in enumerate(self.missing):
            table[b, index] = (-1, pages)[i % 2]
        return paged[0], paged[1], table

    def _mask(self, random: np.random.Generator) -> Array:
        keys = self.capacity if self.mask_keys is None else self.mask_keys
        sizes = {"b": self.batch, "h": self.heads[0], "q": self.q_length, "k": keys, "1": 1}
        attend = random.random(tuple(sizes[letter] for letter in self.mask)) < 0.7
        if self.mask_dtype == "bool":
            return attend
        dtype = numpy_dtype(self.dtype if self.mask_dtype == "T" else self.mask_dtype)
        return np.where(attend, random.standard_normal(attend.shape), -np.inf).astype(dtype)


def typed(*cases: Any) -> list[Any]:
    """Each case in every dtype, which its id then names."""
    dtypes = ("float32", "float16", "bfloat16")
    return [replace(case, id=f"{case.id}-{dtype}", dtype=dtype) for case in cases for dtype in dtypes]


# append x paged x rotary x ragged x GQA x window x dtype
MATRIX = [
    CacheCase(
        "-".join(filter(None, (
            "append" if append else "read", f"page{page}" if page else "", rotary, "ragged" if ragged else "",
            f"{heads[0]}of{heads[1]}", f"window{left}" if left >= 0 else "", dtype,
        ))),
        dtype=dtype, heads=heads, append=append, page_size=page, rotary=rotary, left=left,
        lengths=(0, 9, 13) if append else (3, 9, 13), ragged=(3, 1, 7) if ragged else None,
        head_dim=64 if dtype == "float16" else 32,
    )
    for append, page, rotary, ragged, heads, left, dtype in itertools.product(
        (True, False), (0, 4), ("", "half", "interleaved"), (False, True), ((2, 2), (8, 2)), (-1, 5),
        ("float32", "float16", "bfloat16"),
    )
]  # fmt: skip

FEATURES = [
    *typed(*(CacheCase(f"page{p}", capacity=256, page_size=p, lengths=(130, 250), head_dim=64)
             for p in (1, 16, 64, 128))),
    *typed(CacheCase("page256", capacity=512, page_size=256, lengths=(300, 509), head_dim=128, heads=(8, 1))),
    *(CacheCase(f"page{p}-decode", capacity=640, page_size=p, lengths=(639, 0, 77), q_length=1)
      for p in (1, 16, 64, 128)),
    *(CacheCase(f"page{p}-many-rows", capacity=640, page_size=p, lengths=(600, 0), q_length=33)
      for p in (1, 5, 64, 128)),
    *(CacheCase(f"partial-rotary-{r}-{d}", rotary=r, rotary_dim=d, head_dim=40) for r in ("half", "interleaved")
      for d in (2, 6, 16, 32)),
    *typed(*(CacheCase(f"table-float32-{r}", rotary=r, table="float32") for r in ("half", "interleaved"))),
    *(CacheCase(f"positions-{r}{'-ragged' if g else ''}", rotary=r, positions=True, ragged=g)
      for r in ("half", "interleaved") for g in (None, (5, 2))),
    CacheCase("positions-read", rotary="half", positions=True, append=False),
    *(CacheCase(f"d{d}-dv{dv}", head_dim=d, value_dim=dv, rotary=r, page_size=4)
      for d, dv, r in ((7, 5, ""), (20, 28, "half"), (33, 72, ""), (128, 64, "interleaved"), (192, 128, "half"),
                       (512, 512, "half"))),
    *(CacheCase(f"ranked{'-ragged' if g else ''}{'-paged' if p else ''}", ranked=True, ragged=g, page_size=p,
                rotary="half")
      for g in (None, (4, 2)) for p in (0, 8)),
    *(CacheCase(f"lengths-{t}-rank{r}", lengths_dtype=t, lengths_rank=r) for t in ("int32", "int64") for r in (1, 2)),
    *typed(CacheCase("softcap", softcap=2.0), CacheCase("scale", scale=0.3)),
    *typed(CacheCase("sinks", sinks=True, page_size=8)),
    *(CacheCase(f"mask-{m}-{t}-{p}", mask=m, mask_dtype=t, page_size=p)
      for m in ("b1qk", "bh1k", "b11k", "qk", "k") for t in ("bool", "T") for p in (0, 8)),
    CacheCase("mask-short", mask="b1qk", mask_keys=10, mask_dtype="T"),
    CacheCase("not-causal", is_causal=0, lengths=(2, 9)),
    CacheCase("not-causal-windows", is_causal=0, left=3, right=1, page_size=4),
    *(CacheCase(f"window{w}-long", left=w, capacity=400, page_size=p, lengths=(390, 200), q_length=q)
      for w, p, q in itertools.product((0, 4, 129), (0, 16), (1, 9))),
    # onnxruntime PR#27992: each sequence has its own past under the window.
    *typed(CacheCase("window-ragged", lengths=(3, 10), q_length=1, left=3)),
    CacheCase("no-lse", lse=False),
    *(CacheCase(f"elsewhere{'-paged' if p else ''}", in_place=False, page_size=p, rotary="half") for p in (0, 8)),
    CacheCase("prefill-and-decode", ragged=(1, 65, 1, 1), lengths=(100, 30, 0, 127), capacity=128, page_size=16,
              rotary="half", heads=(8, 2), head_dim=64),
    CacheCase("everything", ragged=(3, 0, 9, 1), lengths=(13, 4, 0, 7), capacity=30, page_size=5, heads=(6, 2),
              head_dim=20, value_dim=28, rotary="interleaved", rotary_dim=12, positions=True, left=8, sinks=True,
              softcap=3.0, scale=0.4, table="float32", slack=(2, 3)),
]  # fmt: skip

CORNER = [
    # Nothing in the cache, nothing new, nothing at all.
    *(CacheCase(f"length0{n}", lengths=(0, 0), page_size=p, ragged=g) for n, p, g in
      (("", 0, None), ("-paged", 8, None), ("-ragged", 0, (2, 0)), ("-paged-ragged", 8, (0, 3)))),
    *(CacheCase(f"read-length0-{p}", lengths=(0, 5), append=False, page_size=p) for p in (0, 8)),
    CacheCase("read-beyond-queries", lengths=(1, 2), append=False, q_length=4),  # the first queries see nothing
    CacheCase("no-tokens", q_length=0),
    CacheCase("no-tokens-ragged", ragged=(0, 0)),
    CacheCase("no-batch", lengths=()),
    CacheCase("no-batch-ragged", lengths=(), ragged=(), slack=(0, 3)),
    CacheCase("no-capacity", capacity=0, lengths=(0, 0)),
    CacheCase("no-capacity-paged", capacity=0, lengths=(0, 0), page_size=4),
    *(CacheCase(f"slack-{a}-{z}", ragged=(2, 3), slack=(a, z), page_size=p)
      for a, z, p in ((0, 4, 0), (3, 0, 8), (2, 2, 0))),
    # What does not fit is dropped, and nothing else is written.
    *(CacheCase(f"full-{n}{'-paged' if p else ''}", lengths=(24, 22, n), q_length=4, page_size=p, rotary="half")
      for n in (-5, 99, 23) for p in (0, 8)),
    CacheCase("lengths-outside-read", lengths=(-7, 1000), append=False),
    CacheCase("lengths-outside-int64", lengths=(-(2**40), 2**40), lengths_dtype="int64", append=False),
    *typed(CacheCase("missing-pages", lengths=(17, 9), page_size=4, missing=((0, 1), (0, 2), (1, 0), (1, 2)),
                     q_length=4)),
    CacheCase("missing-pages-all", lengths=(17, 9), page_size=8,
              missing=tuple((b, i) for b in (0, 1) for i in range(3))),
    CacheCase("missing-pages-many-rows", lengths=(17, 9), page_size=8, missing=((0, 0), (1, 1)), q_length=7,
              heads=(8, 1)),
    CacheCase("max-q-length", ragged=(5, 2), max_q_length=3),
    *(CacheCase(f"poison-{p}", poison=p, page_size=8, lengths=(5, 9)) for p in (np.inf, -np.inf, 1e6)),
]  # fmt: skip

# Q, K and V in one tensor.
PACKED = [
    *typed(CacheCase("packed", packed=True), CacheCase("packed-same", packed=True, heads=(3, 3), rotary="half")),
    *typed(CacheCase("packed-step", packed=True, q_length=1, heads=(8, 2), head_dim=64, capacity=300, rotary="half",
                     lengths=(0, 299, 77)),
           CacheCase("packed-pages", packed=True, page_size=16, capacity=320, lengths=(0, 300), q_length=9,
                     rotary="half", head_dim=128)),
    CacheCase("packed-prompt", packed=True, dtype="float16", lengths=(0, 0), q_length=200, capacity=256, head_dim=64,
              heads=(9, 3), rotary="half"),
    CacheCase("packed-odd", packed=True, head_dim=20, value_dim=28, rotary="interleaved", rotary_dim=12, page_size=4),
    CacheCase("packed-one-element", packed=True, head_dim=7, value_dim=5, dtype="float16"),
    CacheCase("packed-ragged", packed=True, ragged=(3, 1), slack=(1, 2), rotary="half", positions=True),
    CacheCase("packed-mask", packed=True, mask="b1qk", left=4, sinks=True, softcap=2.0),
    CacheCase("packed-elsewhere", packed=True, in_place=False),
    CacheCase("packed-no-tokens", packed=True, q_length=0),
]  # fmt: skip

ALL = [*MATRIX, *FEATURES, *CORNER, *PACKED]
