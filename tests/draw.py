"""Random attention problems, from whatever draws numbers: a seeded generator (fuzz.py) or hypothesis, which shrinks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np
from arranged import BROKEN, Arrangement, Place
from cases import DTYPES, Case

T = TypeVar("T")
# Multiplications of one problem; a few problems get many, to cross more tiles and splits.
LITTLE_WORK, MUCH_WORK = 1 << 21, 1 << 25
# Around the tiles of all kernels: powers of two, and one less or more.
EDGES = tuple(edge + d for edge in (8, 16, 32, 64, 96, 128, 192, 256, 512) for d in (-1, 0, 1))
DIMS = (8, 16, 31, 32, 33, 40, 48, 63, 64, 65, 72, 80, 95, 96, 97, 100, 112, 127, 128, 129, 160, 191, 192, 193, 200,
        224, 255, 256, 257, 320, 384, 500, 511, 512)  # fmt: skip
GROUPS = (1, 1, 1, 2, 3, 4, 5, 7, 8, 16, 71)
PACKED = ("gqa", "gqa", "3hd", "3hd_flat", "h3d", "h3d_flat", "time_major")
MASKS = ("bhqk", "b1qk", "bh1k", "b11k", "1hqk", "11qk", "1h1k", "111k", "hqk", "1qk", "h1k", "11k", "qk", "1k", "k")
FILLS = ("random", "bias", "first row", "all", "last batch", "padding", "finfo.min", "-1e4")


class Draw(Protocol):
    """Where numbers come from; hypothesis shrinks towards low integers and first options."""

    def integer(self, low: int, high: int) -> int:
        """Both ends included."""

    def choice(self, options: Sequence[T]) -> T:
        """One of these."""

    def real(self, low: float, high: float) -> float:
        """A float32."""


class Seeded:
    """Numbers of a NumPy generator."""

    def __init__(self, *seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def integer(self, low: int, high: int) -> int:
        """Both ends included."""
        return int(self._random.integers(low, high + 1))

    def choice(self, options: Sequence[T]) -> T:
        """One of these."""
        return options[self.integer(0, len(options) - 1)]

    def real(self, low: float, high: float) -> float:
        """A float32."""
        return float(np.float32(self._random.uniform(low, high)))


def sometimes(draw: Draw, value: Callable[[], T], otherwise: T, one_in: int = 4) -> T:
    """The value in one of so many draws."""
    return value() if draw.integer(0, one_in - 1) == one_in - 1 else otherwise


def problem(draw: Draw, id: str, *, node: bool = False, work: int | None = None) -> Case:
    """A valid problem of the operator, or one whose head dimensions no kernel has.

    Args:
        draw: where its numbers come from.
        id: of the case, and with it what its arrays hold.
        node: only what a node takes: no integer masks.
        work: multiplications, about; default: LITTLE_WORK, rarely MUCH_WORK.
    """
    decode = draw.integer(0, 15) == 15  # few queries, so many keys that they are split
    if work is None:
        work = MUCH_WORK if decode else sometimes(draw, lambda: MUCH_WORK, LITTLE_WORK, 32)
    packed = not decode and draw.integer(0, 2) == 2
    layout = draw.choice(PACKED if packed else ("bhsd", "bshd"))
    head_dim = _dim(draw)
    value_dim = None if packed else sometimes(draw, lambda: _dim(draw), None)
    q_length, kv_length = _length(draw), _length(draw)
    if decode:
        q_length, kv_length = draw.integer(1, 8), draw.integer(256, 6000)
    past = sometimes(draw, lambda: sometimes(draw, lambda: _length(draw), draw.integer(0, 70), 3), None)
    dims = head_dim + (head_dim if value_dim is None else value_dim)
    if packed:
        kv_length = q_length

    def work_of_head() -> int:
        # Even without keys there are rows to fill and to compare.
        return max(q_length, 16) * max(kv_length + (past or 0), 16) * dims

    while work_of_head() > work:
        if q_length > kv_length + (past or 0):
            q_length //= 2
        else:
            kv_length, past = kv_length // 2, None if past is None else past // 2
    if packed:
        kv_length = q_length
    room = work // work_of_head()
    kv_heads = draw.integer(1, max(min(room, 3), 1))
    groups = [group for group in GROUPS if group * kv_heads <= room] if layout in ("bhsd", "bshd", "gqa") else []
    heads = kv_heads * draw.choice(groups or [1])
    most = 2 if decode else sometimes(draw, lambda: 200, 4, 20)
    batch = sometimes(draw, lambda: 0, draw.integer(1, max(min(room // heads, most), 1)), 40)
    keys = kv_length + (past or 0)
    return _features(
        draw,
        Case(
            id,
            dtype=draw.choice(DTYPES),
            batch=batch,
            heads=(heads, kv_heads),
            q_length=q_length,
            kv_length=kv_length,
            past=past,
            head_dim=head_dim,
            value_dim=value_dim,
            layout=layout,
            mask=sometimes(draw, lambda: draw.choice(MASKS), "", 2),
            mask_dtype=draw.choice(("bool", "T", "float32") if node else ("bool", "T", "float32", "int8", "int32")),
            mask_fill=draw.choice(FILLS),
            mask_keys=sometimes(draw, lambda: draw.integer(0, keys), None),
        ),
    )


def _features(draw: Draw, case: Case) -> Case:
    """The case with everything that is not its shapes or mask."""
    lengths = None
    if case.past is None and draw.integer(0, 3) == 3:
        lengths = tuple(draw.integer(-1, case.kv_length + 1) for _ in range(case.batch))
    sinks = sometimes(draw, lambda: True, False)
    scale = sometimes(draw, lambda: draw.real(0.015625, 2), None)
    return replace(
        case,
        is_causal=draw.integer(0, 1),
        lengths=lengths,
        sinks=sinks,
        scale=scale,
        softcap=sometimes(draw, lambda: draw.real(0.5, 30), 0.0),
        left=sometimes(draw, lambda: _window(draw), -1),
        right=sometimes(draw, lambda: _window(draw), -1),
        empty_row="zero" if sinks else draw.choice(("zero", "mean")),
        present=bool(draw.integer(0, 1)),
        lse=bool(draw.integer(0, 1)),
        # Large scores only where no scale makes them larger: beyond, float32 itself is not exact enough to judge.
        spread=(
            1.0 if scale is not None else draw.choice((1.0, 1.0, 1.0, 1e-3, 10.0, 60.0)),
            draw.choice((1.0, 1.0, 1.0, 2.0**-10, 128.0)),
        ),
        poison=sometimes(draw, lambda: draw.choice((np.nan, np.inf, -np.inf, 3e4)), None),
        nans=sometimes(draw, lambda: draw.integer(1, 3), 0, 8),
    )


def arrange(draw: Draw, case: Case) -> Arrangement:
    """How the case's tensors lie in memory, and what else the seam can say."""
    packed = case.layout not in ("bhsd", "bshd")
    # Inf that one batch may not look at could be what another looks at, if they shared memory.
    repeatable = ("Q", "K", "V", "past_key", "past_value") if not packed and case.poison is None else ()
    return Arrangement(
        places={
            name: _place(
                draw,
                rank,
                dense=name not in ("attn_mask", "lse", "nonpad_kv_seqlen", "sinks"),
                ordered=packed and name == "Q",
                repeatable=name in repeatable,
            )
            for name, rank in _ranks(case).items()
        },
        out_dtype=sometimes(draw, lambda: draw.choice(DTYPES), case.dtype, 6),
        int32_lengths=case.lengths is not None and bool(draw.integer(0, 1)),
        fixed_split=sometimes(draw, lambda: True, False, 6),
        joined=case.past is not None and not packed and not case.present and draw.integer(0, 2) == 2,
        in_place=case.past is not None and case.present and draw.integer(0, 2) == 2,
        threads=(draw.integer(1, 5), draw.integer(1, 5)),
        broken=sometimes(draw, lambda: draw.choice(tuple(BROKEN)), "", 24),
        growth=tuple(draw.integer(0, 300) for _ in range(6)),
    )


def _ranks(case: Case) -> dict[str, int]:
    """Of every tensor at the seam, by name."""
    ranks = {"Y": 4} | dict.fromkeys("QKV", 4)
    if case.layout not in ("bhsd", "bshd"):
        ranks = {"Y": 4, "Q": 5 if case.layout in ("3hd", "h3d") else 3}
    if case.past is not None:
        ranks |= {"past_key": 4, "past_value": 4}
    if case.present:
        ranks |= {"present_key": 4, "present_value": 4}
    optional = {
        "attn_mask": len(case.mask),
        "nonpad_kv_seqlen": int(case.lengths is not None),
        "sinks": int(case.sinks),
        "lse": 3 * case.lse,
    }
    return ranks | {name: rank for name, rank in optional.items() if rank}


def _place(draw: Draw, rank: int, *, dense: bool, ordered: bool, repeatable: bool) -> Place:
    """`dense`: the last dimension is contiguous; `ordered`: only the first two may be followed by gaps."""
    free = list(range(rank - 1 if dense else rank))
    if ordered:
        order = tuple(range(rank))
        gaps = tuple(_gap(draw) if axis in (0, 1) and draw.integer(0, 1) else 0 for axis in order)
        return Place(order, gaps, shift=_shift(draw))
    if draw.integer(0, 1) == 0:  # plain
        return Place(tuple(range(rank)), (0,) * rank, shift=_shift(draw))
    order = ()
    while free:
        order += (free.pop(draw.integer(0, len(free) - 1)),)
    if dense:
        order += (rank - 1,)
    gaps = tuple(_gap(draw) for _ in range(rank))
    repeated = sometimes(draw, lambda: draw.choice((0, 1)), None) if repeatable and rank == 4 else None
    return Place(order, gaps, step=1 if dense else draw.choice((1, 1, 2, 3)), shift=_shift(draw), repeated=repeated)


def _gap(draw: Draw) -> int:
    return draw.choice((0, 0, 8, 1, 3, 4, 16, 64))


def _shift(draw: Draw) -> int:
    return draw.choice((0, 0, 0, 8, 1, 2, 3, 4))


def _length(draw: Draw) -> int:
    match draw.integer(0, 11):
        case 0 | 1 | 2 | 3 | 4:
            return draw.integer(1, 40)
        case 11:
            return draw.choice((0, 1, 1))
        case 10:
            return draw.integer(200, 4000)
        case _:
            return draw.choice(EDGES)


def _dim(draw: Draw) -> int:
    if draw.integer(0, 60) == 60:
        return draw.integer(513, 600)  # refused
    return draw.choice(DIMS) if draw.integer(0, 2) else draw.integer(1, 24)


def _window(draw: Draw) -> int:
    return draw.choice((0, 1, 2, draw.integer(0, 80), draw.integer(0, 300), 1 << 40))
