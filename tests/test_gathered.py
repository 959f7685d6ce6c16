"""Ragged batches and pages at the sizes of the CUDA kernels' tiles, through the C seam; the CPU has the same cases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from cache_cases import CacheCase
from cache_seam import CacheProblem, check_cache_outputs
from flashonnx._capi import CUDA, Library, Params
from varlen_cases import VarlenCase

HALVES = ("float16", "bfloat16")
AROUND_TILES = (127, 1, 128, 0, 0, 129, 64, 3, 65, 33)  # a tile has 32, 64 or 128 queries


def ends(lengths: Sequence[int], first: int = 0) -> tuple[int, ...]:
    """cu_seqlens of sequences of these lengths."""
    return tuple(accumulate(lengths, initial=first))


def on_devices(chosen: Sequence[Any]) -> Any:
    """Parametrises a test by (device, case)."""
    return pytest.mark.parametrize(
        ("device", "case"),
        [
            pytest.param(device, case, id=f"{device}-{case.id}", marks=[] if device == "cpu" else pytest.mark.gpu)
            for device in ("cpu", "cuda")
            for case in chosen
        ],
    )


def varlen(id: str, queries: Sequence[int], keys: Sequence[int] | None = None, **more: Any) -> VarlenCase:
    """A case by lengths, with tokens in no sequence before and after all; NaN where they are keys."""
    k_ends = ends(keys or queries, 3)
    return VarlenCase(
        id,
        q_ends=ends(queries, 5),
        q_tokens=sum(queries) + 9,
        k_ends=k_ends,
        k_tokens=k_ends[-1] + 70,
        poison=True,
        **more,
    )


def pages(id: str, **more: Any) -> CacheCase:
    """A case whose sequences end within pages, with enough rows that no kernel for few takes it."""
    given = {"capacity": 600, "lengths": (430, 77), "q_length": 70, "head_dim": 64} | more
    size = max(given.get("page_size", 0), 1)
    return CacheCase(id, **(given | {"capacity": -(-given["capacity"] // size) * size}))


class NoPages(CacheCase):
    """Of a pool without a page: whatever lengths say, nobody sees a key."""

    def inputs(self) -> dict[str, Any]:
        found = super().inputs()
        empty = {name: found[name][:0] for name in ("key_cache", "value_cache")}
        return found | empty | {"block_table": np.full_like(found["block_table"], -1)}


VARLEN = [
    *(varlen(f"tiles-d{d}-{t}{'-causal' if c else ''}", AROUND_TILES, head_dim=d, dtype=t, is_causal=c, heads=(2, 1))
      for d, t in ((32, "float16"), (64, "bfloat16"), (64, "float32"), (96, "float16"), (128, "float16"),
                   (128, "float32"), (192, "bfloat16"), (256, "float16"), (256, "float32"), (320, "bfloat16"))
      for c in (0, 1)),
    *(varlen(f"odd-{d}-{dv}-{t}", (130, 5, 70), head_dim=d, value_dim=dv, dtype=t, is_causal=1)
      for d, dv, t in ((20, 28, "float16"), (33, 7, "bfloat16"), (72, 80, "float16"), (33, 7, "float32"))),
    # Keys beyond queries and queries beyond keys, which see nothing.
    *(varlen(f"uneven-{c}-{lt}-{r}-{t}", (40, 1, 200, 0, 130), (300, 129, 64, 17, 0), dtype=t, head_dim=64, is_causal=c,
             left=lt, right=r)
      for c, lt, r in ((0, -1, -1), (1, -1, -1), (1, 50, -1), (0, 3, 20), (0, -1, 0)) for t in ("float32", "float16")),
    *(varlen(f"features-{t}", (140, 30, 2), (150, 10, 90), dtype=t, heads=(6, 2), is_causal=1, left=70, softcap=3.0,
             sinks=True, scale=0.2) for t in ("float32", *HALVES)),
    *(varlen(f"sequences-{n}-{t}", tuple(i * 7 % 6 for i in range(n)), is_causal=1, dtype=t, heads=(1, 1))
      for n in (1, 32, 33, 1025, 1100) for t in ("float32", "float16")),
    *(varlen(f"few-queries-many-keys-{t}", (1, 3, 0, 1), (1500, 900, 40, 2), dtype=t, heads=(4, 1), head_dim=64,
             is_causal=1) for t in ("float32", "float16")),
    *(varlen(f"max-q-length-{t}", (200, 3, 150), (250, 3, 90), is_causal=1, max_q_length=130, dtype=t)
      for t in ("float32", "float16")),
    *(varlen(f"max-kv-length-{t}", (20, 3, 150), (250, 3, 90), is_causal=1, max_kv_length=80, dtype=t)
      for t in ("float32", "float16")),
    # Windows, caps and sinks over tiles that end in the next sequence.
    *(varlen(f"wide-{d}-{n}-{t}", (200, 17, 130), (310, 17, 90), dtype=t, head_dim=d, heads=(2, 1), **more)
      for d, t in ((64, "float16"), (96, "bfloat16"), (128, "bfloat16"), (192, "float16"), (256, "bfloat16"))
      for n, more in (
          ("window", {"left": 90, "right": 20}), ("softcap", {"is_causal": 1, "softcap": 2.0}),
          ("sinks", {"is_causal": 1, "sinks": True}), ("no-lse", {"lse": False}),
      )),
    VarlenCase("order", q_ends=(0, 150, 9, 180), k_ends=(90, 1, 200, 150), k_tokens=200, dtype="float16", is_causal=1),
]  # fmt: skip

CACHES = [
    *(pages(f"page{p}-d{d}-{t}", page_size=p, head_dim=d, dtype=t)
      for p, d, t in ((1, 64, "float16"), (3, 96, "bfloat16"), (16, 128, "float16"), (16, 64, "float32"),
                      (50, 64, "float16"), (60, 32, "bfloat16"), (100, 192, "float16"), (100, 128, "float32"),
                      (300, 256, "bfloat16"), (20, 320, "float16"))),
    *(pages(f"page{p}-aligned-{t}", page_size=p, capacity=1024, lengths=(900, 256, 0), dtype=t, head_dim=128,
            heads=(8, 2)) for p in (64, 128, 256) for t in HALVES),
    *(pages(f"page{p}-many-d{d}-{t}", page_size=p, capacity=1280, lengths=(1100, 300, 9), q_length=150, dtype=t,
            head_dim=d, heads=(2, 1), missing=((0, 2),) if missing else ())
      for p, d, t, missing in (
          (16, 64, "bfloat16", True), (16, 96, "float16", False), (16, 192, "bfloat16", True),
          (8, 128, "bfloat16", True), (8, 256, "float16", True), (16, 112, "bfloat16", True),
          (16, 256, "float16", True), (32, 192, "float16", False), (48, 128, "float16", True),
          (64, 64, "float16", False),
          (64, 256, "bfloat16", False), (80, 256, "float16", True), (128, 128, "bfloat16", True),
          (256, 192, "float16", False), (256, 256, "bfloat16", True),
      )),
    *(pages(f"odd-{d}-{dv}-{t}", head_dim=d, value_dim=dv, dtype=t, page_size=8)
      for d, dv, t in ((20, 28, "float16"), (33, 7, "bfloat16"), (72, 80, "float16"), (33, 7, "float32"))),
    *(pages(f"missing-{n}-{t}", page_size=8, dtype=t, missing=((0, 0), (0, 17), (0, 18), (1, 5)), **more)
      for t in ("float32", *HALVES)
      for n, more in (
          ("plain", {}), ("softcap", {"softcap": 2.0}), ("window", {"left": 60}), ("sinks", {"sinks": True}),
          ("mask-keys", {"mask": "b11k", "mask_dtype": "T"}), ("mask-queries", {"mask": "b1qk", "mask_dtype": "T"}),
          ("mask-bool", {"mask": "bhqk", "mask_keys": 450}),
      )),
    *(pages(f"missing-all-{t}", page_size=100, dtype=t, missing=tuple((b, i) for b in (0, 1) for i in range(6)))
      for t in ("float32", "float16")),
    *(pages(f"chunks-{p}-{t}", page_size=p, dtype=t, lengths=(430, 77, 599, 0, 0, 300), ragged=(1, 130, 1, 129, 0, 64),
            slack=(4, 150), heads=(4, 2), head_dim=d)
      for p, t, d in ((0, "float16", 64), (0, "float32", 64), (16, "float16", 128), (16, "float32", 64),
                      (20, "bfloat16", 64), (1, "float16", 32), (200, "bfloat16", 256))),
    *(pages(f"chunks-features-{t}", page_size=25, dtype=t, lengths=(430, 77, 599), ragged=(1, 130, 1), heads=(4, 1),
            left=100, softcap=3.0, sinks=True, missing=((0, 10), (2, 23))) for t in ("float32", *HALVES)),
    *(pages(f"decode-{p}-{t}", page_size=p, dtype=t, capacity=2048, lengths=(2000, 5, 1024), q_length=1, heads=(4, 2))
      for p in (16, 256) for t in ("float32", "float16")),
    *(pages(f"decode-ragged-{t}", page_size=16, dtype=t, capacity=2048, lengths=(2000, 5, 1024), ragged=(2, 0, 1),
            slack=(1, 2), heads=(4, 2)) for t in ("float32", "float16")),
    *(pages(f"read-{t}", page_size=16, dtype=t, append=False, heads=(4, 2)) for t in ("float32", "float16")),
]  # fmt: skip


@on_devices(VARLEN)
def test_varlen(library: Library, device: str, case: VarlenCase) -> None:
    inputs = case.inputs()
    case.check(inputs, case.run_seam(library, device, inputs))


@on_devices(CACHES)
def test_cache(library: Library, device: str, case: CacheCase) -> None:
    CacheProblem(library, case, device).check()


@on_devices(
    [
        NoPages(f"no-pages-d{d}-{q}", dtype="float16", page_size=16, append=False, head_dim=d, capacity=608, q_length=q)
        for d in (64, 128, 256)
        for q in (1, 70)
    ]
)
def test_pool_without_pages(library: Library, device: str, case: CacheCase) -> None:
    outputs = CacheProblem(library, case, device).run()
    assert (outputs["Y"] == 0).all() and (outputs["lse"] == -np.inf).all()


@on_devices([case for case in CACHES if case.id.startswith(("page16", "odd", "chunks-16"))])
def test_unaligned_cache(library: Library, device: str, case: CacheCase) -> None:
    """Every tensor begins one element after an aligned address."""
    CacheProblem(library, case, device, shift=1).check()


@on_devices([varlen(f"neighbours-{d}-{c}-{t}", (100, 60, 129), dtype=t, head_dim=d, is_causal=c, lse=True)
             for t, d in (("float32", 64), ("float16", 64), ("bfloat16", 128), ("float16", 192), ("bfloat16", 256))
             for c in (0, 1)])  # fmt: skip
def test_nan_stays_in_its_sequence(library: Library, device: str, case: VarlenCase) -> None:
    """What stands in one sequence changes no bit of the others, whose tiles end in it."""
    inputs = case.inputs()
    expected = case.run_seam(library, device, inputs)
    q, k = (ends((100, 60, 129), first) for first in (5, 3))
    inputs["Q"][q[1] : q[2]] = inputs["K"][k[1] : k[2]] = inputs["V"][k[1] : k[2]] = np.nan
    found = case.run_seam(library, device, inputs)
    case.check(inputs, found)
    others = np.r_[: q[1], q[2] : len(inputs["Q"])]
    assert found["Y"][others].tobytes() == expected["Y"][others].tobytes()
    assert found["lse"][:, others].tobytes() == expected["lse"][:, others].tobytes()


@on_devices([varlen(f"nan-{t}", (140, 5, 30), is_causal=1, dtype=t, head_dim=64) for t in ("float32", *HALVES)])
def test_nan_reaches_who_sees_it(library: Library, device: str, case: VarlenCase) -> None:
    """A NaN in a key or value spoils the queries from its own on, and no other sequence."""
    inputs = case.inputs()
    first = case.k_ends[0] if case.k_ends else 0
    inputs["V"][first + 100, 0] = inputs["K"][first + 130, -1] = inputs["V"][first + 142, 1] = np.nan
    case.check(inputs, case.run_seam(library, device, inputs))


@on_devices([pages(f"nan-{t}", page_size=16, dtype=t, missing=((0, 3),)) for t in ("float32", *HALVES)])
def test_nan_in_a_page(library: Library, device: str, case: CacheCase) -> None:
    """As well in new tokens, which the last queries alone see."""
    inputs = case.inputs()
    inputs["V"][0, -3, 0] = inputs["V"][1, -2, 40] = inputs["K"][1, -1, 3] = np.nan
    problem = CacheProblem(library, case, device, inputs=inputs)
    outputs = problem.run()
    check_cache_outputs(case, inputs, {name: outputs[name] for name in ("Y", "lse")})
    for b, wrong in enumerate(np.isnan(outputs["Y"]).any(axis=-1)):
        assert wrong[-3 + b :].all() and not wrong[: -3 + b].any()


@pytest.mark.parametrize("page_size", [0, 8, 16, 48, 256])
@pytest.mark.parametrize("ragged", [(70, 33), None])
def test_hopper_takes_gathered_problems(library: Library, page_size: int, ragged: tuple[int, ...] | None) -> None:
    """What is chosen for Hopper, whether there is one or not."""
    case = pages("hopper", page_size=page_size, capacity=768, dtype="float16", ragged=ragged)
    assert _chosen_on_hopper(library, CacheProblem(library, case).params) == _hopper_kernel(library)


def test_hopper_leaves_odd_pages(library: Library) -> None:
    case = pages("odd", page_size=20, dtype="float16")
    assert _chosen_on_hopper(library, CacheProblem(library, case).params) == "sm80"


def test_hopper_leaves_pages_between_rows(library: Library) -> None:
    params = CacheProblem(library, pages("between", page_size=16, dtype="float16")).params
    params.cache_k.stride[0] += 8
    assert _chosen_on_hopper(library, params) == "sm80"


@pytest.mark.parametrize("longest", [16, 64, 1000])
def test_hopper_takes_ragged_batches_of_any_length(library: Library, longest: int) -> None:
    """So that, with fixed_split, the kernel of a sequence does not depend on the longest of its mates."""
    case = varlen("any", (20, 3, 9), dtype="float16", head_dim=64, max_q_length=longest, max_kv_length=longest)
    buffers = {n: np.asarray(x) for n, x in case.inputs().items()}
    buffers |= {n: np.empty(shape, np.float16 if n == "Y" else np.float32) for n, shape in case.output_shapes().items()}
    params = case.params(library, "cpu", buffers)
    params.fixed_split = 1
    assert _chosen_on_hopper(library, params) == _hopper_kernel(library)


def _chosen_on_hopper(library: Library, params: Params) -> str:
    """The kernel for a device that need not be here."""
    params.device.kind, params.device.arch, params.device.sm_count = CUDA, 90, 132
    params.device.shared_memory = 227 * 1024
    try:
        return library.supported(params)
    except NotImplementedError as error:
        pytest.skip(str(error))


def _hopper_kernel(library: Library) -> str:
    """sm90, unless the library was built without it."""
    params = CacheProblem(library, pages("dense", dtype="float16")).params
    return _chosen_on_hopper(library, params)


@on_devices(
    [
        pages(f"alone-{t}", page_size=16, dtype=t, lengths=(430, 77, 5), ragged=(1, 130, 8))
        for t in ("float32", "float16")
    ]
)
def test_fixed_split_ignores_batch_mates(library: Library, device: str, case: CacheCase) -> None:
    """With fixed_split a sequence alone and in a batch give the same bits (flash-attention#1897)."""
    together = CacheProblem(library, case, device)
    together.params.fixed_split = 1
    outputs = together.run()
    assert case.ragged
    first = 0
    for b, tokens in enumerate(case.ragged):
        rows = slice(first, first + tokens)
        first += tokens
        inputs = {
            name: x[rows] if name in "QKV" else x[b : b + 1] if name in ("cache_lengths", "block_table") else x
            for name, x in together.given.items()
        }
        inputs["cu_seqlens_q"] = np.array([0, tokens], np.int32)
        one = replace(case, lengths=case.lengths[b : b + 1], ragged=(tokens,), max_q_length=max(case.ragged))
        alone = CacheProblem(library, one, device, inputs=inputs)
        alone.params.fixed_split = 1
        assert alone.run()["Y"].tobytes() == outputs["Y"][rows].tobytes()
