"""Problems of generation: few queries and many keys, in every dtype; see cases.py."""

from __future__ import annotations

import numpy as np
from cache_cases import CacheCase
from cache_cases import typed as typed_caches
from cases import Case, typed
from varlen_cases import VarlenCase

_UNEVEN = (900, 0, 1, 17, 500, 899, 64, 3, 720, 256)
# Few queries and many keys: heads that share keys are packed, and the keys are spread over blocks.
_FLOAT32 = [
    *(Case(f"decode-group-{g}-d{d}", heads=(2 * g, 2), q_length=1, kv_length=700, head_dim=d)
      for g, d in ((1, 64), (3, 128), (4, 128), (7, 64), (8, 128), (16, 64), (16, 128), (9, 256), (71, 32))),
    *(Case(f"decode-q{q}", heads=(8, 2), q_length=q, kv_length=300, head_dim=128, lengths=(299, 77), is_causal=1)
      for q in range(1, 9)),
    *(Case(f"decode-d{d}-dv{dv}", heads=(8, 2), q_length=1, kv_length=257, head_dim=d, value_dim=dv)
      for d, dv in ((33, 33), (80, 80), (96, 64), (64, 128), (128, 20), (192, 128), (256, 256), (20, 250))),
    Case("decode-uneven", batch=5, heads=(8, 2), q_length=1, kv_length=5000, head_dim=64,
         lengths=(0, 5000, 1, 17, 2600), is_causal=1),
    Case("decode-uneven-alone", batch=1, heads=(4, 1), q_length=2, kv_length=9000, head_dim=128, lengths=(8111,)),
    Case("decode-many", batch=40, heads=(16, 8), q_length=1, kv_length=200, head_dim=64, lengths=(200, 3) * 20),
    # More queries, as long as that is faster than not to split keys.
    Case("decode-q48", heads=(16, 4), q_length=48, kv_length=400, head_dim=128, lengths=(400, 131), is_causal=1),
    Case("decode-q33-window", heads=(8, 2), q_length=33, kv_length=300, head_dim=64, left=40, is_causal=1, sinks=True),
    Case("decode-q64-poison", heads=(4, 2), q_length=64, kv_length=600, head_dim=64, poison=np.nan, lengths=(150, 64)),
    # Many units of uneven length.
    Case("decode-96-units", batch=12, heads=(16, 8), q_length=1, kv_length=640, head_dim=64),
    Case("decode-uneven-units-lengths", batch=10, heads=(16, 8), q_length=2, kv_length=900, head_dim=64, is_causal=1,
         sinks=True, lengths=_UNEVEN),
    Case("decode-uneven-units-window", batch=10, heads=(12, 6), q_length=3, kv_length=900, head_dim=128, left=333,
         is_causal=1, lengths=_UNEVEN),
    Case("decode-uneven-units-rows", batch=10, heads=(32, 4), q_length=3, kv_length=900, head_dim=64, mask="b11k",
         lengths=_UNEVEN),
    Case("decode-bhsd", layout="bhsd", heads=(8, 2), q_length=3, kv_length=900, head_dim=128, lengths=(800, 9)),
    Case("decode-past", layout="bhsd", heads=(8, 2), q_length=2, kv_length=2, past=510, head_dim=64, is_causal=1,
         present=True),
    *(Case(f"decode-window-{lt}-{r}-q{q}", heads=(4, 2), q_length=q, kv_length=600, head_dim=64, left=lt, right=r,
           lengths=(500, 33)) for lt, r, q in ((100, -1, 1), (100, 0, 4), (0, 0, 2), (31, 8, 5), (-1, 3, 4))),
    *(Case(f"decode-mask-{m}-{t}", heads=(8, 2), q_length=q, kv_length=500, head_dim=128, mask=m, mask_dtype=t)
      for m, q in (("b11k", 1), ("b11k", 3), ("bh1k", 1), ("bhqk", 3), ("1hqk", 2)) for t in ("bool", "T", "float32")),
    Case("decode-mask-short", heads=(8, 2), q_length=2, kv_length=500, head_dim=64, mask="b1qk", mask_keys=100),
    Case("decode-mask-causal", heads=(8, 2), q_length=4, kv_length=500, head_dim=64, mask="b1qk", mask_dtype="T",
         lengths=(400, 500), is_causal=1),
    *(Case(f"decode-mask-{f}", heads=(8, 2), q_length=2, kv_length=300, head_dim=64, mask="b1qk", mask_fill=f,
           mask_dtype="T") for f in ("first row", "finfo.min", "-1e4", "padding", "last batch")),
    Case("decode-softcap-sinks", heads=(8, 1), q_length=2, kv_length=400, head_dim=128, softcap=3.0, sinks=True,
         lengths=(0, 400)),
    Case("decode-everything", heads=(6, 2), q_length=3, kv_length=400, head_dim=80, value_dim=72, mask="bhqk",
         mask_dtype="T", is_causal=1, sinks=True, scale=0.4, softcap=3.0, left=300, lengths=(390, 150)),
    *(Case(f"decode-poison-{p}-{i}", heads=(8, 2), q_length=3, kv_length=300, head_dim=64, poison=p, **kw)
      for p in (np.nan, np.inf)
      for i, kw in enumerate(({"lengths": (150, 7)}, {"mask": "b11k"}, {"mask": "b1qk", "mask_fill": "second key"},
                              {"lengths": (100, 300), "left": 20}))),
    # A key that one query sees and another does not holds a NaN: it stays where it belongs.
    Case("decode-nans", heads=(8, 2), q_length=4, kv_length=300, head_dim=64, is_causal=1, lengths=(300, 200), nans=3),
    Case("decode-score-overflow", heads=(4, 1), q_length=1, kv_length=300, head_dim=64, fill=40.0, scale=1.0),
]  # fmt: skip

# Numbers of units that clusters leave idle multiprocessors with: single blocks and the second kernel.
_UNITS = [
    Case(f"decode-units-{8 * b}-{dtype}", dtype=dtype, batch=b, heads=(16, 8), q_length=1, kv_length=3600, head_dim=128,
         is_causal=1, lengths=(3600, 0, 5, 17, 3599, 1000, 64, 3400, 16, 2000, *(3600,) * (b - 10)), gpu=True)
    for b, dtype in ((10, "float16"), (12, "bfloat16"), (18, "float16"))
]  # fmt: skip
# Of uneven length, in equal shares: a warp's run of tiles goes on from one unit to the next.
_LONG_UNEVEN = (3590, 0, 1, 17, 2900, 3599, 64, 3, 720, 256, 40, 3000)
_SHARES = [
    Case("decode-shares-nans", dtype="float16", batch=12, heads=(16, 8), q_length=4, kv_length=3600, head_dim=128,
         is_causal=1, sinks=True, lengths=_LONG_UNEVEN, nans=3, gpu=True),
    Case("decode-shares-poison", dtype="bfloat16", batch=12, heads=(16, 8), q_length=1, kv_length=3600, head_dim=96,
         value_dim=80, is_causal=1, left=1000, softcap=3.0, poison=np.nan, lengths=_LONG_UNEVEN, gpu=True),
    Case("decode-shares-mask", dtype="bfloat16", batch=6, heads=(8, 8), q_length=2, kv_length=3600, head_dim=256,
         mask="b11k", mask_dtype="T", lengths=_LONG_UNEVEN[:6], gpu=True),
]  # fmt: skip
DECODE = [*typed(*_FLOAT32), *_UNITS, *_SHARES]

_PAGED = {"heads": (8, 2), "lengths": (299, 0, 130, 17), "q_length": 1, "capacity": 512, "head_dim": 64}
_CACHES = typed_caches(
    *(CacheCase(f"decode-pages-{n}", page_size=n, **_PAGED) for n in (0, 1, 16, 64, 128, 256)),
    *(CacheCase(f"decode-pages-{n}-d128", page_size=n, **(_PAGED | {"head_dim": 128, "capacity": n * (300 // n + 1)}))
      for n in (3, 24, 48)),
    *(CacheCase(f"decode-missing-{n}", page_size=n, missing=((0, 1), (2, 0)), **_PAGED) for n in (8, 16, 128)),
    *(CacheCase(f"decode-ragged-{n}", page_size=n, ragged=(1, 4, 0, 2), slack=(1, 2), **_PAGED) for n in (0, 16, 4)),
    CacheCase("decode-ragged-cut", page_size=16, ragged=(9, 1, 3, 2), max_q_length=4, **_PAGED),
    # So many tiles a warp that pages are looked up a turn of its ring ahead.
    *(CacheCase(f"decode-pages-{n}-long-d{d}", page_size=n, **(_PAGED | {"heads": (4, 1), "lengths": (7777, 3000),
                "capacity": 8016, "head_dim": d, "missing": missing}))
      for n, d, missing in ((1, 64, ()), (16, 128, ((0, 77), (1, 150))), (48, 256, ()), (1, 128, ((0, 7000),)))),
    CacheCase("decode-pages-1-window", page_size=1, left=500, missing=((0, 7500),), **(_PAGED | {"heads": (4, 1),
              "lengths": (7777, 3000), "capacity": 8016, "head_dim": 128})),
    CacheCase("decode-pages-q5", page_size=16, **(_PAGED | {"q_length": 5, "heads": (7, 1), "head_dim": 128})),
    CacheCase("decode-pages-q8", page_size=16, is_causal=0, **(_PAGED | {"q_length": 8, "heads": (16, 2)})),
    CacheCase("decode-pages-window", page_size=16, left=40, sinks=True, softcap=5.0, **(_PAGED | {"q_length": 3})),
    CacheCase("decode-pages-mask", page_size=24, mask="b1qk", mask_dtype="T", **(_PAGED | {"q_length": 2,
              "capacity": 504})),
    CacheCase("decode-pages-rotary", page_size=16, rotary="half", **_PAGED),
    CacheCase("decode-pages-odd", page_size=16, **(_PAGED | {"head_dim": 36, "value_dim": 20})),
    *(CacheCase(f"decode-uneven-units-pages-{n}", page_size=n, rotary=r, q_length=q, heads=(16, 8), head_dim=64,
                capacity=1024, lengths=_UNEVEN) for n, r, q in ((0, "", 1), (16, "half", 1), (1, "interleaved", 4))),
    CacheCase("decode-uneven-units-ragged", page_size=16, heads=(16, 8), head_dim=64, capacity=1024, lengths=_UNEVEN,
              ragged=(1, 2, 4, 0, 1, 3, 1, 1, 9, 1), max_q_length=4),
    CacheCase("decode-new-keys-in-two-tiles", rotary="half",
              **(_PAGED | {"q_length": 5, "lengths": (299, 13, 510, 31)})),
    CacheCase("decode-new-keys-hidden", left=2, **(_PAGED | {"q_length": 8, "head_dim": 128})),
    CacheCase("decode-new-keys-masked", mask="b1qk", mask_keys=100, page_size=16, **(_PAGED | {"q_length": 2})),
    CacheCase("decode-nothing-new", page_size=16, append=False, **_PAGED),
)  # fmt: skip
CACHES = [
    *_CACHES,
    *(CacheCase(f"decode-shares-pages-{n}", dtype="float16", page_size=n, rotary=r, q_length=q, heads=(16, 8),
                head_dim=128, capacity=3600, lengths=_LONG_UNEVEN, missing=missing, gpu=True)
      for n, r, q, missing in ((0, "half", 1, ()), (16, "", 2, ((0, 5), (4, 1)))))
]  # fmt: skip

_ENDS = {"q_ends": (0, 1, 3, 3, 4), "k_ends": (2, 302, 400, 500, 501), "k_tokens": 510, "heads": (8, 2)}
VARLEN = [
    VarlenCase(f"decode-varlen-{i}-{dtype}", dtype=dtype, poison=True, **(_ENDS | more))
    for dtype in ("float32", "float16", "bfloat16")
    for i, more in enumerate(({}, {"is_causal": 1}, {"is_causal": 1, "left": 50, "sinks": True},
                              {"head_dim": 128, "value_dim": 64, "heads": (3, 1)}))
]  # fmt: skip
