"""Problems of generation: few queries and many keys, in every dtype; see cases.py."""

from __future__ import annotations

import numpy as np
from cases import Case, typed

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

DECODE = typed(*_FLOAT32)
