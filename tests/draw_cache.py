"""Random problems of FlashAttentionKVCache and FlashAttentionVarlen, as `draw.py` draws those of FlashAttention."""

from __future__ import annotations

from cache_cases import CacheCase
from cases import DTYPES
from draw import Draw, sometimes
from varlen_cases import VarlenCase

DIMS = (1, 8, 16, 20, 32, 33, 64, 64, 64, 80, 96, 128, 128, 128, 192, 256, 320, 512)
GROUPS = (1, 1, 2, 3, 4, 7, 8, 16)
PAGES = (1, 2, 5, 8, 16, 16, 64, 128, 256)
LONGEST = 300  # keys of a sequence


def problem(draw: Draw, id: str) -> CacheCase | VarlenCase:
    """A valid problem, in which lengths, tables and sequences may be anything."""
    return varlen_problem(draw, id) if draw.integer(0, 3) == 3 else cache_problem(draw, id)


def cache_problem(draw: Draw, id: str) -> CacheCase:
    """A cache, with or without new keys, pages, rotary embeddings, ragged tokens."""
    batch = draw.integer(0, 4)
    page = sometimes(draw, lambda: draw.choice(PAGES), 0, 2)
    capacity = draw.integer(0, LONGEST)
    if page:
        capacity = capacity // page * page
    lengths = tuple(_length(draw, capacity) for _ in range(batch))
    decode = draw.integer(0, 1) == 1
    ragged = sometimes(draw, lambda: tuple(_tokens(draw, decode) for _ in range(batch)), None, 2)
    if ragged and draw.integer(0, 9) == 9:  # out of order
        ragged = (*ragged[:-1], -ragged[-1] // 2)
    slack = sometimes(draw, lambda: (draw.integer(0, 3), draw.integer(0, 3)), (0, 0)) if ragged else (0, 0)
    if ragged and sum(ragged) + sum(slack) < 0:
        ragged = (0,) * batch
    head_dim = draw.choice(DIMS)
    rotary = draw.choice(("", "half", "interleaved")) if head_dim > 1 else ""
    rotary_dim = 0
    if rotary and (head_dim % 2 or draw.integer(0, 2) == 2):
        rotary_dim = 2 * draw.integer(1, head_dim // 2)
    group, kv_heads = draw.choice(GROUPS), draw.integer(1, 3)
    mask = "" if ragged is not None else sometimes(draw, lambda: draw.choice(("b1qk", "b11k", "qk", "k")), "", 5)
    missing = ()
    if page and batch and capacity and draw.integer(0, 4) == 4:
        missing = tuple(
            (draw.integer(0, batch - 1), draw.integer(0, capacity // page - 1)) for _ in range(draw.integer(1, 3))
        )
    return CacheCase(
        id,
        dtype=draw.choice(DTYPES),
        heads=(kv_heads * group, kv_heads),
        lengths=lengths,
        q_length=_tokens(draw, decode),
        ragged=ragged,
        slack=slack,
        capacity=capacity,
        page_size=page,
        missing=missing,
        append=draw.integer(0, 4) > 0,
        head_dim=head_dim,
        value_dim=sometimes(draw, lambda: draw.choice(DIMS), None),
        ranked=draw.integer(0, 2) == 2,
        rotary=rotary,
        rotary_dim=rotary_dim,
        table=draw.choice(("T", "float32")),
        positions=rotary != "" and draw.integer(0, 3) == 3,
        mask=mask,
        mask_dtype=draw.choice(("bool", "T", "float32")),
        mask_keys=sometimes(draw, lambda: draw.integer(0, capacity), None) if mask else None,
        is_causal=draw.integer(0, 3) > 0,
        left=_window(draw),
        right=_window(draw),
        scale=sometimes(draw, lambda: draw.real(0.3, 1.5) * head_dim**-0.5, None),
        softcap=sometimes(draw, lambda: draw.real(0.5, 20.0), 0.0),
        sinks=draw.integer(0, 3) == 3,
        lse=draw.integer(0, 2) > 0,
        lengths_dtype=draw.choice(("int32", "int64")),
        max_q_length=sometimes(draw, lambda: draw.integer(1, 20), 0, 8) if ragged is not None else 0,
        in_place=draw.integer(0, 3) > 0,
    )


def varlen_problem(draw: Draw, id: str) -> VarlenCase:
    """Sequences in and out of order, with more or fewer keys than queries."""
    batch = draw.integer(0, 5)
    decode = draw.integer(0, 2) == 2
    q_ends, k_ends = _ends(draw, batch, decode), sometimes(draw, lambda: _ends(draw, batch, False), None, 2)
    q_tokens = max(0, max(q_ends) + draw.integer(-2, 2))
    k_tokens = q_tokens if k_ends is None else max(0, max(k_ends) + draw.integer(-2, 2))
    group, kv_heads, head_dim = draw.choice(GROUPS), draw.integer(1, 3), draw.choice(DIMS)
    return VarlenCase(
        id,
        dtype=draw.choice(DTYPES),
        heads=(kv_heads * group, kv_heads),
        q_ends=q_ends,
        k_ends=k_ends,
        q_tokens=q_tokens,
        k_tokens=k_tokens,
        head_dim=head_dim,
        value_dim=sometimes(draw, lambda: draw.choice(DIMS), None),
        ranked=draw.integer(0, 2) == 2,
        is_causal=draw.integer(0, 1),
        left=_window(draw),
        right=_window(draw),
        scale=sometimes(draw, lambda: draw.real(0.3, 1.5) * head_dim**-0.5, None),
        softcap=sometimes(draw, lambda: draw.real(0.5, 20.0), 0.0),
        sinks=draw.integer(0, 3) == 3,
        lse=draw.integer(0, 2) > 0,
        max_q_length=sometimes(draw, lambda: draw.integer(1, 40), 0, 5),
        max_kv_length=sometimes(draw, lambda: draw.integer(1, 40), 0, 5),
        poison=True,
    )


def _length(draw: Draw, capacity: int) -> int:
    """Keys in a cache: often none or all, rarely what cannot be."""
    return draw.choice(
        (0, capacity, draw.integer(0, capacity), draw.integer(0, capacity), draw.integer(-5, capacity + 9))
    )


def _tokens(draw: Draw, decode: bool) -> int:
    """New tokens of a sequence."""
    return draw.choice((0, 1, 1, 1, 1)) if decode else draw.choice((0, 1, 3, draw.integer(1, 20), draw.integer(1, 140)))


def _ends(draw: Draw, batch: int, decode: bool) -> tuple[int, ...]:
    ends = [draw.choice((0, 0, 0, 3))]
    for _ in range(batch):
        ends.append(ends[-1] + _tokens(draw, decode))
    if draw.integer(0, 9) == 9:
        ends[draw.integer(0, batch)] = draw.integer(-9, 200)
    return tuple(ends)


def _window(draw: Draw) -> int:
    return sometimes(draw, lambda: draw.choice((0, 1, 7, 64, 200)), -1, 5)
