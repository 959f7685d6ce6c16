"""FlashAttentionKVCache and FlashAttentionVarlen as problems, for `_attention`."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_int64
from typing import Any

from flashonnx._capi import DTYPES, Params, Tensor
from flashonnx._inputs import names_in

Dim = int | str | None
_PAGE_SIZE, _PAGES = 64, 16  # of a model that leaves them open
INPUTS = {
    "FlashAttentionKVCache": (
        "Q", "K", "V", "key_cache", "value_cache", "cache_lengths", "block_table", "cu_seqlens_q", "cos_cache",
        "sin_cache", "position_ids", "attn_mask", "sinks",
    ),
    "FlashAttentionVarlen": ("Q", "K", "V", "cu_seqlens_q", "cu_seqlens_k", "sinks"),
}  # fmt: skip
OUTPUTS = {
    "FlashAttentionKVCache": ("Y", "present_key_cache", "present_value_cache", "lse"),
    "FlashAttentionVarlen": ("Y", "lse"),
}


def sizes(op: str, attributes: Mapping[str, Any], shapes: Mapping[str, tuple[Dim, ...]]) -> dict[str, Dim]:
    """The sizes of `Attention`, and tokens, kv_tokens, page_size and pages where they are packed or paged."""
    q, k, v = (shapes.get(name, ()) for name in "QKV")
    heads, kv_heads = attributes.get("q_num_heads"), attributes.get("kv_num_heads")
    found: dict[str, Dim] = dict.fromkeys(
        ("batch", "q_heads", "kv_heads", "queries", "keys", "past", "head_dim", "value_dim")
    )
    found |= {"q_heads": heads, "kv_heads": kv_heads or heads, "past": 0}
    packed = "cu_seqlens_q" in shapes
    if packed:
        ends = shapes["cu_seqlens_q"]
        found["batch"] = _less_one(ends[0]) if ends else None
        found["tokens"] = q[0] if q else None
        found["queries"] = attributes.get("max_q_length") or found["tokens"]
    elif len(q) in (3, 4):
        found |= {"batch": q[0], "queries": q[-2]}
    if len(q) == (3 if packed else 4):
        found["q_heads"] = q[1]
    if op == "FlashAttentionVarlen":
        found["kv_tokens"] = k[0] if k else None
        found["keys"] = attributes.get("max_kv_length") or found["kv_tokens"]
        found |= {"kv_heads": k[1]} if len(k) == 3 else {}
        found["head_dim"] = k[2] if len(k) == 3 else _part(k[1], found["kv_heads"]) if len(k) == 2 else None
        found["value_dim"] = v[2] if len(v) == 3 else _part(v[1], found["kv_heads"]) if len(v) == 2 else None
        return found
    cache, values, table = (shapes.get(name, ()) for name in ("key_cache", "value_cache", "block_table"))
    if len(cache) == 4:
        found["head_dim"] = cache[3]
        if "block_table" in shapes:
            found |= {"pages": cache[0], "page_size": cache[1], "kv_heads": cache[2]}
            found["keys"] = _product(table[1], cache[1]) if len(table) == 2 else None
        else:
            found |= {"kv_heads": cache[1], "keys": cache[2]}
    found["value_dim"] = values[3] if len(values) == 4 else None
    if cosines := shapes.get("cos_cache"):
        found["rotary"] = attributes.get("rotary_dim") or _product(cosines[-1], 2)
    if found["q_heads"] is None and q:
        found["q_heads"] = _part(q[-1], found["head_dim"])
    return found


def example(sizes: Mapping[str, Dim], name: str) -> int | None:
    """For the size of a page, how many a sequence has, and the ends of one packed sequence; None for anything else."""
    if sizes["batch"] == _less_one(name):
        return 2
    if name == sizes.get("page_size"):
        return _PAGE_SIZE
    keys = sizes.get("keys")
    return _PAGES if "page_size" in sizes and isinstance(keys, str) and name in names_in(keys) else None


def features(op: str, has: frozenset[str]) -> list[str]:
    """What the operator asks for by itself."""
    words = ["a cache"] if op == "FlashAttentionKVCache" else []
    words += ["pages"] if "block_table" in has else []
    words += ["packed sequences"] if "cu_seqlens_q" in has else []
    return words + (["rotary"] if "cos_cache" in has else [])


def fill(
    p: Params, op: str, n: Mapping[str, int], kind: int, has: frozenset[str], attributes: Mapping[str, Any]
) -> None:
    """Everything that is not as in FlashAttention, from sizes in numbers."""
    packed, is_cache = "cu_seqlens_q" in has, op == "FlashAttentionKVCache"
    if packed:
        p.q_tokens, p.cu_seqlens_q = n["tokens"], _list("int32")
        p.q = _view(kind, 0, n["head_dim"], n["q_heads"] * n["head_dim"])
        p.o = _view(kind, 0, n["value_dim"], n["q_heads"] * n["value_dim"])
    if not is_cache:
        p.kv_tokens, p.cu_seqlens_k, p.offset_from_lengths = n["kv_tokens"], _list("int32"), 1
        p.k = _view(kind, 0, n["head_dim"], n["kv_heads"] * n["head_dim"])
        p.v = _view(kind, 0, n["value_dim"], n["kv_heads"] * n["value_dim"])
        return
    one = attributes.get("qkv_layout", "separate") != "separate"  # Q, K and V are one tensor
    p.kv_length = n["queries"] if one or "K" in has else 0
    rows = 0 if packed else n["queries"]
    whole_row = n["q_heads"] * n["head_dim"] + n["kv_heads"] * (n["head_dim"] + n["value_dim"])
    if one:
        p.q = _view(kind, rows * whole_row, n["head_dim"], whole_row)
    for name, dim in (("k", n["head_dim"]), ("v", n["value_dim"])):
        width = n["kv_heads"] * dim
        row = whole_row if one else width
        setattr(p, name, _view(kind, rows * row, dim, row) if one or name.upper() in has else Tensor())
        whole = "key" if name == "k" else "value"
        if "block_table" in has:
            cache = _view(kind, n["page_size"] * width, dim, width)
        else:
            cache = _view(kind, n["kv_heads"] * n["keys"] * dim, n["keys"] * dim, dim)
        setattr(p, f"cache_{name}", cache)
        if f"present_{whole}_cache" in has:
            setattr(p, f"present_{name}", cache)
    p.cache_capacity, p.cache_lengths = n["keys"], _list("int64")
    if "block_table" in has:
        p.num_pages, p.page_size = n["pages"], n["page_size"]
        columns = n["keys"] // max(n["page_size"], 1)
        p.block_table = Tensor(None, (c_int64 * 4)(columns, 1, 0, 0), DTYPES["int32"])
    if "cos_cache" in has:
        width = n["rotary"]
        p.rotary_cos = p.rotary_sin = Tensor(None, (c_int64 * 4)(width // 2, 1, 0, 0), kind)
        p.rotary_length, p.rotary_dim = n["keys"], width
        p.rotary_interleaved = attributes.get("rotary_interleaved", 0)


def _list(dtype: str) -> Tensor:
    return Tensor(None, (c_int64 * 4)(1, 0, 0, 0), DTYPES[dtype])


def _view(kind: int, batch: int, head: int, row: int) -> Tensor:
    return Tensor(None, (c_int64 * 4)(batch, head, row, 1), kind)


def _part(whole: Dim, count: Dim) -> Dim:
    return whole // count if isinstance(whole, int) and isinstance(count, int) and count else None


def _product(a: Dim, b: Dim) -> Dim:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    return None if a is None or b is None else f"{a} * {b}"


def _less_one(dim: Dim) -> Dim:
    return dim - 1 if isinstance(dim, int) else None if dim is None else f"{dim} - 1"
